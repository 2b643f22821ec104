"""The sequences of one HTTP request: prepared, accepted, read, and cancelled where its client goes away.

On the event loop; prompts are tokenised and grammars compiled in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from starlette.requests import Request as HttpRequest

from paceline.completion import Completion, completion_of
from paceline.engine.prompts import Prompt
from paceline.errors import InvalidParams, PacelineError
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.sequence import Request
from paceline.server.exchange import Exchange
from paceline.server.hang_up import HangUp
from paceline.server.problems import FAILED_ENDINGS, ClientGone, Refused, problem_of_ending
from paceline.streaming import StreamChannel, StreamChunk

if TYPE_CHECKING:
    from paceline.engine.any_engine import AnyEngine
    from paceline.server.service import Service

Batch = list[tuple[int, StreamChunk]]
"""What there was to read at one time: chunks, each with the index of its prompt."""

_WHOLE = 1_000_000  # tokens: more than any answer has; RequestOptions takes no more
MAX_BUFFERED_TOKENS = 4096
"""How far the reader of a stream may fall behind, beyond what the sockets hold, before the stream ends with SLOW_READER."""


async def begin(
    service: Service,
    request: HttpRequest,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    options: Mapping[str, Any],
    *,
    streaming: bool,
) -> Generation:
    """Prepares all prompts in a thread and accepts all of them, or none.

    options: keywords of `RequestOptions`. Raises what is wrong with them, `QueueFull`, `EngineStopped`, `Refused`; then
    nothing runs. The request's body must have been read. Leave the `Generation` as a context manager.
    """
    service.check_accepting()
    engine = service.engine()
    check_number(engine, len(prompts), params.n)
    reading = _streamed(options) if streaming else {**options, "interval": _WHOLE}
    wanted = RequestOptions(**reading)
    exchange = Exchange.of(request.scope)
    hang_up = HangUp(request)
    try:
        prepared = await asyncio.to_thread(_prepared, engine, prompts, params, wanted)
        hang_up.check()
        channels = _accepted(engine, prepared)
    except BaseException:
        hang_up.close()
        raise
    return Generation(service, exchange, prepared, channels, hang_up)


def check_number(engine: AnyEngine, num_prompts: int, num_choices: int) -> None:
    """Raises `InvalidParams` where all choices together are more than the server takes at once; a queue cannot help then."""
    most = most_prompts(engine)
    if num_prompts * num_choices > most:
        asked = f"prompt: {num_prompts} prompts are" if num_choices == 1 else f"n: {num_prompts} times {num_choices} is"
        raise InvalidParams(f"{asked} more than the {most} that this server takes at once; ask in parts")


def most_prompts(engine: AnyEngine) -> int:
    """How many prompts one HTTP request may have."""
    return engine.config.num_slots + engine.config.max_queue


def _streamed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_buffered_tokens": MAX_BUFFERED_TOKENS, "slow_reader": "cancel", **options}


def _prepared(
    engine: AnyEngine, prompts: Sequence[Prompt], params: SamplingParams, options: RequestOptions
) -> list[Request]:
    return [engine.prepare(prompt, params, options) for prompt in prompts]


def _accepted(engine: AnyEngine, prepared: Sequence[Request]) -> list[StreamChannel]:
    channels: list[StreamChannel] = []
    try:
        for index, one in enumerate(prepared):
            channels.append(engine.accept(one, index))
    except PacelineError:
        for channel in channels:
            channel.cancel()
        raise
    return channels


class Generation:
    """What runs for one HTTP request. prompts: the token ids of each; num_parts: how many requests it is to the engine."""

    def __init__(
        self,
        service: Service,
        exchange: Exchange,
        requests: Sequence[Request],
        channels: Sequence[StreamChannel],
        hang_up: HangUp,
    ) -> None:
        self.request_id, self.tenant = exchange.request_id, exchange.tenant
        self.prompts = tuple(tuple(one.prompt) for one in requests)
        self._service, self._exchange, self._hang_up = service, exchange, hang_up
        self._params = requests[0].params if requests else SamplingParams()
        self._channels = tuple(channels)
        self.num_parts = len(channels)
        service.open_requests.add(self)
        hang_up.tell(self.close)

    @property
    def heartbeat_s(self) -> float:
        """Between signs of life while the stream waits."""
        return self._service.settings.heartbeat_s

    @property
    def is_abandoned(self) -> bool:
        """Whether the client hung up: nobody reads what is written."""
        return self._hang_up.has_happened

    async def batches(self) -> AsyncIterator[Batch]:
        """All that there is to read, whenever there is something, to every prompt's terminal chunk."""
        if len(self._channels) == 1:
            async for batch in _of_one(self._channels[0]):
                self._note(batch)
                yield batch
            return
        async for batch in _of_many(self._channels):
            self._note(batch)
            yield batch

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Prompt index and chunk of all prompts as they come. Does not raise what a chunk's error says."""
        async for batch in self.batches():
            for item in batch:
                yield item

    async def collected(self) -> list[Completion]:
        """The answers, in the order of the prompts. Raises the error of one that failed, `ClientGone` after a hang-up."""
        return await collected(self, self._params)

    def cancel(self) -> None:
        """Ends what has not ended, with the reason CANCELLED."""
        for channel in self._channels:
            channel.cancel()

    def close(self) -> None:
        """Cancels what has not ended, and is no longer among the open requests."""
        self.cancel()
        self._service.open_requests.remove(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up.close()
        self.close()

    def _note(self, batch: Batch) -> None:
        for _, chunk in batch:
            if chunk.usage is not None and chunk.finish_reason is not None:
                self._exchange.endings.append((chunk.finish_reason, chunk.usage))


class Readable(Protocol):
    """What a generation is to those who read it."""

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """See `Generation`."""

    @property
    def heartbeat_s(self) -> float:
        """See `Generation`."""

    @property
    def is_abandoned(self) -> bool:
        """See `Generation`."""

    def batches(self) -> AsyncIterator[Batch]:
        """See `Generation`."""

    def cancel(self) -> None:
        """See `Generation`."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


async def collected(generation: Readable, params: SamplingParams) -> list[Completion]:
    """A generation's answers at their end; see `Generation.collected`. params: as they were asked for."""
    parts: list[list[StreamChunk]] = [[] for _ in generation.prompts]
    async for batch in generation.batches():
        for index, chunk in batch:
            parts[index].append(chunk)
    if generation.is_abandoned:
        raise ClientGone
    return [_completion(generation.prompts[index], chunks, params, index) for index, chunks in enumerate(parts)]


def _completion(prompt: Sequence[int], chunks: Sequence[StreamChunk], params: SamplingParams, index: int) -> Completion:
    for chunk in chunks:
        if chunk.finish_reason in FAILED_ENDINGS:
            raise chunk.error if chunk.error is not None else Refused(problem_of_ending(chunk.finish_reason))
    return completion_of(
        chunks,
        prompt=prompt,
        wants_logprobs=params.logprobs is not None,
        wants_prompt_logprobs=params.prompt_logprobs is not None,
        index=index,
    )


async def _of_one(channel: StreamChannel) -> AsyncIterator[Batch]:
    while isinstance(chunk := await channel.get_async(), StreamChunk):
        batch: Batch = [(0, chunk)]
        while isinstance(more := channel.get(0), StreamChunk):  # other choices of the same tick
            batch.append((0, more))
        yield batch


async def _of_many(channels: Sequence[StreamChannel]) -> AsyncIterator[Batch]:
    """Each channel is read by a task that goes on only when its chunk was taken, so that channels notice a slow reader."""
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
