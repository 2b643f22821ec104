"""The sequences of one HTTP request: prepared, submitted, read, and cancelled when the client disconnects.

On the event loop; prompts are tokenised and grammars compiled in threads. `ProgressSource` adds the progress of the prompt to
the chunks, for llama-server's `return_progress`.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest

from paceline.engine.prompts import Prompt, has_media
from paceline.errors import Cancelled, DeadlineExceeded, InvalidParams, PacelineError, WorkerUnresponsive
from paceline.params import SamplingParams
from paceline.request import TIMEOUTS, RequestOptions
from paceline.scheduling.records import SlotsSnapshot, SlotView
from paceline.sequence import Request
from paceline.server.api_errors import FAILED_FINISH_REASONS, ApiException, ClientDisconnected, api_error_of_finish
from paceline.server.in_flight import CHECK_WANTED, ByteReservation, PendingCall, TurnQueue, while_wanted
from paceline.server.request_context import DisconnectWatcher, RequestContext
from paceline.server.resumable_streams import conversation_id_of
from paceline.streaming import FinishReason, StreamChannel, StreamChunk
from paceline.streaming.chunk import Completion, completion_of

if TYPE_CHECKING:
    from paceline.engine import EngineClient
    from paceline.server.service import Service


ChunkBatch = list[tuple[int, StreamChunk]]
"""Chunks that were available at one time, each with the index of its prompt."""

_WHOLE_RESPONSE = 1_000_000  # tokens: more than any completion has, and the most that RequestOptions accepts
MAX_BUFFERED_TOKENS = 4096
"""Tokens that a client may fall behind, beyond what the sockets hold, before its stream ends with SLOW_READER."""
MAX_LOGPROBS = 1 << 18
"""Log-probabilities of one response, or that wait for the client of one stream. Each takes about 300 bytes."""
MAX_REPEATED_CHARS = 32 << 20
"""Characters of prompts in one response, which has them once for each choice."""
_MIN_BUFFERED = 16  # tokens of each choice


async def start_request(  # noqa: PLR0913 - one request and how it is read
    service: Service,
    request: HttpRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    options: Mapping[str, Any],
    *,
    streaming: bool,
    resumable: bool = True,
    keeps_stream: bool = False,
) -> RunningRequest:
    """Prepare all prompts in a thread, then submit all of them or none.

    The request's body must have been read. Use the `RunningRequest` as a context manager. Raises errors of params or options,
    `QueueFull`, `EngineStopped`, `ApiException`; then nothing runs.

    options: keywords of `RequestOptions`. streaming: whether chunks are read as they come. resumable: whether they are sent as an
    `EventStream`, which outlives its client with the header X-Conversation-Id. keeps_stream: whether it keeps streamed chunks,
    for the end of the response.
    """
    context = RequestContext.of(request.scope)

    def prepare(engine: EngineClient) -> list[Request]:
        check_num_prompts(engine, options.get("tenant", ""), len(prompts), params.n)
        request_options = streamed_or_whole(
            options, params, streaming=streaming, waited_s=context.waited_s, priority=context.fixed_priority
        )
        limited = params if streaming and not keeps_stream else with_logprobs_limit(params, engine, len(prompts))
        return [engine.prepare(prompt, limited, request_options) for prompt in while_wanted(prompts)]

    has_text = any(isinstance(prompt, str) or has_media(prompt) for prompt in prompts)
    num_bytes = None if has_text or "suffix" in options else 0
    return await start_prepared(
        service,
        request,
        prepare,
        options,
        streaming=streaming,
        resumable=resumable,
        num_bytes=num_bytes,
        keeps_stream=keeps_stream,
    )


async def start_prepared(  # noqa: PLR0913 - as `start_request`
    service: Service,
    request: HttpRequest,
    prepare: Callable[[EngineClient], list[Request]],
    options: Mapping[str, Any],
    *,
    streaming: bool,
    resumable: bool = True,
    num_bytes: int | None = None,
    keeps_stream: bool = False,
) -> RunningRequest:
    """Submit the requests that `prepare` returns, which `run_in_turn` calls with `num_bytes`; otherwise as `start_request`."""
    service.check_accepting()
    engine = service.engine()
    context = RequestContext.of(request.scope)
    conversation_id = conversation_id_of(request) if streaming and resumable else None
    watcher = DisconnectWatcher(request.receive if conversation_id is None else None)
    if conversation_id is None:
        context.stop_waiting()
    try:
        prepared = await run_in_turn(
            service, request, lambda: prepare(engine), options, num_bytes=num_bytes, watcher=watcher
        )
        check_response_size(prepared, engine.limits.max_positions, streaming=streaming and not keeps_stream)
        watcher.raise_if_disconnected()
        context.raise_if_discarded()
        num_prompt = sum(len(ready.prompt) for ready in prepared)
        context.reserve(num_prompt)
        channels = _accept(engine, prepared)
        context.num_parts += len(channels)
        context.submitted_ns, context.operation = time.time_ns(), context.operation or "text_completion"
        context.params = prepared[0].params if prepared else None
    except BaseException:
        watcher.close()
        raise
    running_request = RunningRequest(service, context, prepared, channels, watcher)
    if conversation_id is not None:
        streams = service.resumable_streams
        context.resumable_stream = streams.open(
            context.key_digest, conversation_id, running_request.cancel, context.discard
        )
        context.stop_waiting()
    return running_request


T = TypeVar("T")


async def run_in_turn(
    service: Service,
    request: HttpRequest,
    function: Callable[[], T],
    options: Mapping[str, Any],
    *,
    num_bytes: int | None = None,
    watcher: DisconnectWatcher | None = None,
) -> T:
    """Call a function that renders or tokenises a request's texts, in a thread, when it is the request's turn.

    The request's body must have been read. Raises `DeadlineExceeded`, `Cancelled` or `ClientDisconnected` if the request ends
    before its turn, or between two texts by `while_wanted`. If the caller's task is cancelled, the function ends there, too.

    options: keywords of `RequestOptions`; their timeouts count from now. num_bytes: of the texts; None: of the request's body.
    watcher: the watcher of the request's client; None if none is active.
    """
    reservation, context = ByteReservation.current.get(), RequestContext.of(request.scope)
    own = DisconnectWatcher(request.receive) if watcher is None else watcher
    size = num_bytes if num_bytes is not None else 0 if reservation is None else reservation.num_bytes
    queue = None if reservation is None else reservation.budget.texts_queue(size)
    try:
        if queue is not None:
            await _wait_for_turn(service, context, queue, size, own, options)
        is_left = threading.Event()

        def check() -> None:
            own.raise_if_disconnected()
            if is_left.is_set():
                raise ClientDisconnected

        scope = contextvars.copy_context()
        scope.run(CHECK_WANTED.set, check)
        work = asyncio.get_running_loop().run_in_executor(None, scope.run, _unless_left, function)
        work.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # otherwise unread if the task is cancelled
        if queue is not None:
            work.add_done_callback(lambda _: queue.leave(context.tenant, size))
        try:
            return await asyncio.shield(work)  # a thread, and with it the turn, goes on when its task is cancelled
        except asyncio.CancelledError:
            is_left.set()
            raise
    finally:
        if watcher is None:
            own.close()


async def _wait_for_turn(
    service: Service,
    context: RequestContext,
    queue: TurnQueue,
    num_bytes: int,
    watcher: DisconnectWatcher,
    options: Mapping[str, Any],
) -> None:
    turn = queue.enter(context.tenant, num_bytes)
    if turn.done():
        return
    since = time.monotonic()
    call = PendingCall(context.request_id, context.tenant, turn)
    watcher.on_disconnect(turn.cancel)
    service.request_registry.add(call)
    try:
        async with asyncio.timeout(min(timeouts_of(options).values(), default=None)):
            await turn
        context.raise_if_discarded()
    except BaseException as error:
        if not turn.cancel() and not turn.cancelled():  # it began just now
            queue.leave(context.tenant, num_bytes)
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded("the request ran out of time before its prompt was tokenised") from None
        if isinstance(error, asyncio.CancelledError):
            watcher.raise_if_disconnected()
            if call.is_cancelled:
                raise Cancelled("the request was cancelled") from None
        raise
    finally:
        context.waited_s += time.monotonic() - since
        service.request_registry.remove(call)


def _unless_left(function: Callable[[], T]) -> T:
    CHECK_WANTED.get()()
    return function()


def timeouts_of(options: object) -> dict[str, float]:
    """Return the valid timeouts of `RequestOptions`, its keywords or a body; `RequestOptions` refuses the others."""
    given = options if isinstance(options, Mapping) else {name: getattr(options, name) for name in TIMEOUTS}
    numbers = {name: given.get(name) for name in TIMEOUTS}
    return {name: value for name, value in numbers.items() if isinstance(value, (int, float)) and value > 0}


def less_waited(options: Mapping[str, Any], waited_s: float) -> dict[str, Any]:
    """Return options with the rest of their timeouts after a wait: at least 1 ms, so that the engine ends the request."""
    rest = {name: max(value - waited_s, 0.001) for name, value in timeouts_of(options).items()} if waited_s else {}
    return {**options, **rest}


def streamed_or_whole(
    options: Mapping[str, Any],
    params: SamplingParams,
    *,
    streaming: bool,
    waited_s: float = 0.0,
    priority: int | None = None,
) -> RequestOptions:
    """Return the options of a request, from keywords.

    waited_s: seconds of its timeouts that have passed. priority: in place of the priority in the keywords; None: keep that.
    """
    options = less_waited(options, waited_s)
    if priority is not None:
        options = {**options, "priority": priority}
    if streaming:
        num_tokens = MAX_BUFFERED_TOKENS
        if params.logprobs is not None:
            num_tokens = min(num_tokens, max(_MIN_BUFFERED * params.n, MAX_LOGPROBS // (1 + params.logprobs)))
        return RequestOptions(**{"max_buffered_tokens": num_tokens, "slow_reader": "cancel", **options})
    return RequestOptions(**{**options, "interval": _WHOLE_RESPONSE})


def with_logprobs_limit(params: SamplingParams, engine: EngineClient, num_prompts: int = 1) -> SamplingParams:
    """Return params with a max_tokens by which log-probabilities fit a response, unless they have a max_tokens.

    Longer choices end with the finish reason LENGTH, as at the end of the context. Half of a response is left to the
    log-probabilities of prompts, if there are any.
    """
    if params.logprobs is None or params.max_tokens is not None:
        return params
    room = MAX_LOGPROBS if params.prompt_logprobs is None else MAX_LOGPROBS // 2
    most = room // ((1 + params.logprobs) * params.n * max(1, num_prompts))
    if most >= engine.limits.max_positions or most < max(1, params.min_tokens):
        return params
    return params.replace(max_tokens=most)


def check_response_size(requests: Sequence[Request], max_positions: int, *, streaming: bool) -> None:
    """Raise `InvalidParams` if a response could have more log-probabilities or repeated text than the server returns.

    max_positions: of a sequence. streaming: whether only the tokens count that may wait for the client.
    """
    check_repeated_chars("echo", sum(len(request.echo) * request.params.n for request in requests))
    num_scored = num_generated = 0
    for request in requests:
        params, num_prompt = request.params, len(request.prompt)
        if params.prompt_logprobs is not None:
            num_scored += (num_prompt - 1) * (1 + params.prompt_logprobs)
        if params.logprobs is not None:
            num_tokens = max(0, max_positions - num_prompt)
            num_tokens = params.n * (num_tokens if params.max_tokens is None else min(num_tokens, params.max_tokens))
            if streaming and request.options.max_buffered_tokens is not None:
                num_tokens = min(num_tokens, request.options.max_buffered_tokens)
            num_generated += num_tokens * (1 + params.logprobs)
    if num_scored + num_generated <= MAX_LOGPROBS:
        return
    params = requests[0].params
    if num_scored > num_generated:
        raise InvalidParams(
            f"prompt_logprobs {params.prompt_logprobs} (with echo: logprobs) of "
            f"{sum(len(request.prompt) for request in requests)} tokens are {num_scored} log-probabilities, more than the "
            f"{MAX_LOGPROBS} of a response; ask for fewer alternatives, or send the prompts in parts"
        )
    raise InvalidParams(
        f"logprobs {params.logprobs} (n_probs, top_logprobs) of up to {num_generated // (1 + (params.logprobs or 0))} tokens are "
        f"{num_generated} log-probabilities, more than the {MAX_LOGPROBS} of a response or that may wait for the client of a "
        "stream; set a smaller max_tokens, ask for fewer alternatives or choices, or stream"
    )


def check_repeated_chars(field: str, num_chars: int) -> None:
    """Raise `InvalidParams` if a response would repeat too many characters of prompts. field: the field that asks for it."""
    if num_chars > MAX_REPEATED_CHARS:
        raise InvalidParams(
            f"{field}: the response would have {num_chars} characters of prompts, once for each choice, and may have "
            f"{MAX_REPEATED_CHARS}; ask for fewer choices, or leave the prompt out of the response"
        )


def check_num_prompts(engine: EngineClient, tenant: str, num_prompts: int, num_choices: int) -> None:
    """Raise `InvalidParams` if a tenant may not have so many open prompts, or the queue too few places for all choices."""
    most = engine.config.num_slots + engine.config.max_queue
    if num_prompts > engine.most_requests(tenant):
        most, num_choices = engine.most_requests(tenant), 1
    if num_prompts * num_choices > most:
        given = f"prompt: {num_prompts} prompts are" if num_choices == 1 else f"n: {num_prompts} times {num_choices} is"
        raise InvalidParams(f"{given} more than the {most} that this server takes at once; ask in parts")


def _accept(engine: EngineClient, prepared: Sequence[Request]) -> list[StreamChannel]:
    channels: list[StreamChannel] = []
    try:
        for index, request in enumerate(prepared):
            channels.append(engine.accept(request, index))
    except PacelineError:
        for channel in channels:
            channel.cancel()
        raise
    return channels


class RunningRequest:
    """The engine's requests of one HTTP request.

    prompts, media: the token ids and media items of each. num_parts: their number. heartbeat_s: between comments of a stream.
    """

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        requests: Sequence[Request],
        channels: Sequence[StreamChannel],
        watcher: DisconnectWatcher,
    ) -> None:
        self.request_id, self.tenant = context.request_id, context.tenant
        self.prompts = tuple(tuple(request.prompt) for request in requests)
        self.media = tuple(request.media for request in requests)
        self._service, self._context, self._watcher = service, context, watcher
        self._params = requests[0].params if requests else SamplingParams()
        self._channels = tuple(channels)
        self.num_parts = len(channels)
        self.heartbeat_s = service.settings.heartbeat_s
        service.request_registry.add(self)
        watcher.on_disconnect(self.close)

    @property
    def is_disconnected(self) -> bool:
        """True after the client disconnected."""
        return self._watcher.is_disconnected

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Yield all chunks that are available, whenever there are any, up to every prompt's terminal chunk."""
        if len(self._channels) == 1:
            async for batch in _read_one(self._channels[0]):
                yield self._noted(batch)
            return
        async for batch in _read_all(self._channels):
            yield self._noted(batch)

    async def collect(self) -> list[Completion]:
        """Wait for the completions, in the order of the prompts. Raises the first failure, or `ClientDisconnected`."""
        return await collect(self, self._params)

    def cancel(self) -> None:
        """Cancel the unfinished requests, which end with the finish reason CANCELLED."""
        for channel in self._channels:
            channel.cancel()

    def close(self) -> None:
        """Cancel the unfinished requests and unregister the HTTP request."""
        self.cancel()
        self._service.request_registry.remove(self)
        if self._context.resumable_stream is not None:
            self._context.resumable_stream.finish()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._watcher.close()
        self.close()

    def _noted(self, batch: ChunkBatch) -> ChunkBatch:
        """Note finished sequences; add the service's reason to endings by the engine's shutdown."""
        if self._context.account is not None:
            self._context.charge(sum(len(chunk.token_ids) for _, chunk in batch))
        for _, chunk in batch:
            if chunk.usage is not None and chunk.finish_reason is not None:
                self._context.finished.append((chunk.finish_reason, chunk.usage))
        why = self._service.closing_error
        if why is None:
            return batch
        return [
            (
                index,
                msgspec.structs.replace(chunk, error=why) if chunk.finish_reason is FinishReason.SHUTDOWN else chunk,
            )
            for index, chunk in batch
        ]


C = TypeVar("C")


class ChunkSource(Protocol[C]):
    """A source of chunks for a response: a `RunningRequest`, or a wrapper that alters its chunks."""

    prompts: tuple[tuple[int, ...], ...]
    heartbeat_s: float

    @property
    def is_disconnected(self) -> bool:
        """True after the client disconnected."""

    def batches(self) -> AsyncIterator[list[tuple[int, C]]]:
        """Yield chunks, see `RunningRequest.batches`."""

    def cancel(self) -> None:
        """Cancel the unfinished requests."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> None: ...


async def collect(source: ChunkSource[StreamChunk], params: SamplingParams) -> list[Completion]:
    """Read a source to its end and return the completions as `RunningRequest.collect` does."""
    parts: list[list[StreamChunk]] = [[] for _ in source.prompts]
    async for batch in source.batches():
        for index, chunk in batch:
            parts[index].append(chunk)
    if source.is_disconnected:
        raise ClientDisconnected
    return [_completion_of(source.prompts[index], chunks, params, index) for index, chunks in enumerate(parts)]


def _completion_of(
    prompt: Sequence[int], chunks: Sequence[StreamChunk], params: SamplingParams, index: int
) -> Completion:
    for chunk in chunks:
        if chunk.finish_reason in FAILED_FINISH_REASONS:
            raise chunk.error if chunk.error is not None else ApiException(api_error_of_finish(chunk.finish_reason))
    return completion_of(
        chunks,
        prompt=prompt,
        wants_logprobs=params.logprobs is not None,
        wants_prompt_logprobs=params.prompt_logprobs is not None,
        index=index,
    )


async def _read_one(channel: StreamChannel) -> AsyncIterator[ChunkBatch]:
    while isinstance(chunk := await channel.get_async(), StreamChunk):
        batch: ChunkBatch = [(0, chunk)]
        while isinstance(more := channel.get(0), StreamChunk):  # other choices of the same tick
            batch.append((0, more))
        yield batch


async def _read_all(channels: Sequence[StreamChannel]) -> AsyncIterator[ChunkBatch]:
    """Read each channel in a task that waits until its chunk is taken, so that channels notice a slow reader."""
    ready: asyncio.Queue[tuple[int, StreamChunk] | None] = asyncio.Queue(maxsize=len(channels))

    async def read(index: int, channel: StreamChannel) -> None:
        async for chunk in channel:
            await ready.put((index, chunk))
        await ready.put(None)

    tasks = [asyncio.create_task(read(index, channel)) for index, channel in enumerate(channels)]
    num_open = len(channels)
    try:
        while num_open:
            items = [await ready.get()]
            while not ready.empty():
                items.append(ready.get_nowait())
            num_open -= items.count(None)
            if batch := [item for item in items if item is not None]:
                yield batch
    finally:
        for task in tasks:
            task.cancel()


class ChunkSourceWrapper:
    """Base of sources that alter the chunks of a source, by a method `batches`."""

    def __init__(self, source: ChunkSource[StreamChunk]) -> None:
        self._source, self.prompts, self.heartbeat_s = source, source.prompts, source.heartbeat_s

    @property
    def is_disconnected(self) -> bool:
        """True after the client disconnected."""
        return self._source.is_disconnected

    def cancel(self) -> None:
        """Cancel the unfinished requests."""
        self._source.cancel()

    async def __aenter__(self) -> Self:
        await self._source.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._source.__aexit__(*error)


INTERVAL_S = 0.25
"""Seconds between two reads of the slots."""

ReadSlots = Callable[[], Awaitable[SlotsSnapshot]]


class ProgressChunk(StreamChunk, frozen=True, kw_only=True):
    """The numbers of cached prompt tokens and of prompt tokens in memory, and the time since the request got its slot."""

    cache: int
    processed: int
    elapsed_s: float

    def body(self, num_prompt: int) -> dict[str, int]:
        """Return llama-server's `prompt_progress`. num_prompt: tokens of the prompt."""
        return {
            "total": num_prompt,
            "cache": self.cache,
            "processed": self.processed,
            "time_ms": round(1000 * self.elapsed_s),
        }


class ProgressSource(ChunkSourceWrapper):
    """Adds `ProgressChunk`s before the first chunk of the only prompt: from its cached tokens to the whole prompt.

    read_slots: called every `interval_s` seconds. tenant, request_id: of the request. clock: monotonic.
    """

    def __init__(
        self,
        source: ChunkSource[StreamChunk],
        read_slots: ReadSlots,
        tenant: str,
        request_id: str,
        clock: Callable[[], float],
        interval_s: float = INTERVAL_S,
    ) -> None:
        super().__init__(source)
        self._read_slots, self._interval_s = read_slots, interval_s
        self._num_prompt, self._clock = len(source.prompts[0]), clock
        self._mine = (tenant, request_id, self._num_prompt)
        self._began_s: float | None = None
        self._num_cached = self._num_processed = 0

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Yield progress until the first token, then the chunks of the wrapped source."""
        inner = self._source.batches()
        coming: asyncio.Future[ChunkBatch | None] = asyncio.ensure_future(_next(inner))
        try:
            while not coming.done():
                if (slot := await self._slot()) is not None and (chunks := self._of_slot(slot)):
                    yield chunks
                await asyncio.wait({coming}, timeout=self._interval_s)
            first = coming.result()
        finally:
            if not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError):
                    await coming  # it has released its source then
        if first is None:
            return
        yield [*await self._last_steps(first, inner), *first]
        async for batch in inner:
            yield batch

    async def _last_steps(self, first: ChunkBatch, inner: AsyncIterator[ChunkBatch]) -> ChunkBatch:
        """Return the progress up to the whole prompt. Chunks that come before its cached tokens are known go to `first`."""
        while self._began_s is None:
            usage = next((chunk.usage for _, chunk in first if chunk.usage is not None), None)
            if usage is not None:  # it ended before its slot was read
                return self._progress(self._num_prompt, usage.cached_tokens, usage.prefill_s)
            if (slot := await self._slot()) is not None:
                return [*self._of_slot(slot), *self._progress(self._num_prompt)]
            if (more := await _next(inner)) is None:  # the slot is free, so this has the end; or the worker is replaced
                return []
            first += more
        return self._progress(self._num_prompt)

    async def _slot(self) -> SlotView | None:
        """Return the request's slot, if it has one. Clients choose ids, so another request may have the same id."""
        try:
            slots = await self._read_slots()
        except WorkerUnresponsive:  # the stream goes on with it, or with the next worker
            return None
        mine = (slot for slot in slots if (slot.tenant, slot.request_id, slot.num_prompt_tokens) == self._mine)
        return next(mine, None)

    def _of_slot(self, slot: SlotView) -> ChunkBatch:
        return self._progress(min(slot.num_computed_tokens, self._num_prompt), slot.num_cached, slot.running_s)

    def _progress(self, num_processed: int, num_cached: int = 0, running_s: float = 0.0) -> ChunkBatch:
        """Return the progress since the last call. num_cached, running_s: for the first call."""
        chunks = []
        if self._began_s is None:
            self._began_s = self._clock() - running_s
            self._num_cached = self._num_processed = num_cached
            chunks.append(self._chunk(0.0))
        if num_processed > self._num_processed:
            self._num_processed = num_processed
            chunks.append(self._chunk(self._clock() - self._began_s))
        return [(0, chunk) for chunk in chunks]

    def _chunk(self, elapsed_s: float) -> ProgressChunk:
        return ProgressChunk(index=0, cache=self._num_cached, processed=self._num_processed, elapsed_s=elapsed_s)


async def _next(batches: AsyncIterator[ChunkBatch]) -> ChunkBatch | None:
    return await anext(batches, None)
