"""POST /completion, /completions and /infill in llama-server's shapes: whole, or as the events of a stream.

A line limit (`n_indent`, `t_max_predict_ms`) may end a completion. Each request has slots, which keep the token ids of its
sequences. On the event loop; prompts are read in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.engine.prompts import has_media
from paceline.kv_cache import MediaItem
from paceline.params import SamplingParams
from paceline.runtime import Tokenizer
from paceline.sampling_table import API_DEFAULTS
from paceline.server.api_errors import LLAMA_FORM
from paceline.server.dialects.llama_server.completion_request import (
    CompletionRequest,
    LineLimits,
    ParseContext,
    brief_settings,
    parse_request,
)
from paceline.server.dialects.llama_server.llama_bodies import CompletionBody, InfillBody
from paceline.server.dialects.llama_server.slots import LlamaServerState, SlotContent
from paceline.server.dialects.request_body import MarkedImages, merge_options, warned
from paceline.server.dialects.token_reports import LlamaLogprobs, RunningTimings, TokenSplitter, final_timings
from paceline.server.flags.setters import spec_type_names
from paceline.server.json_bodies import LLAMA_STREAMS, json_response, large_json_response
from paceline.server.request_context import DisconnectWatcher, RequestContext
from paceline.server.resumable_streams import conversation_id_of
from paceline.server.routes import EVENTS, RouteFacts, Routes
from paceline.server.running_request import (
    ChunkBatch,
    ChunkSource,
    ChunkSourceWrapper,
    ProgressChunk,
    ProgressSource,
    RunningRequest,
    check_num_prompts,
    check_repeated_chars,
    collect,
    run_in_turn,
    start_request,
    timeouts_of,
)
from paceline.server.service import Service
from paceline.server.sse import EventStream, EventWriter
from paceline.streaming import FinishReason, StreamChunk, Usage
from paceline.streaming.chunk import CUT_REASONS, Completion


class LineLimiter:
    """Applies the limits to one choice. clock: seconds from any point on."""

    def __init__(self, limits: LineLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._first_s: float | None = None
        self._indent: int | None = None  # blanks of the line that has begun; None within a line's text
        self.is_over = False

    def take(self, text: str) -> str:
        """Return the part of the next text before the limit; "" after `is_over`."""
        if self.is_over:
            return ""
        now = self._clock()
        self._first_s = now if self._first_s is None else self._first_s
        kept = self._indented(text)
        limit = self._limits.max_predict_s
        if limit is not None and "\n" in kept and now - self._first_s > limit:
            self.is_over = True
        return kept

    def _indented(self, text: str) -> str:
        if self._limits.min_indent == 0:
            return text
        for position, letter in enumerate(text):
            if self._indent is not None:
                if letter in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._limits.min_indent:
                    self.is_over = True
                    return text[:position]
            self._indent = 0 if letter == "\n" else None
        return text


class LineLimitedSource(ChunkSourceWrapper):
    """Cuts choices at their line limits, and cancels the wrapped source when the last of them is over."""

    def __init__(
        self, source: ChunkSource[StreamChunk], limits: LineLimits, clock: Callable[[], float], params: SamplingParams
    ) -> None:
        super().__init__(source)
        self._limits, self._clock = limits, clock
        self._watches: dict[tuple[int, int], LineLimiter] = {}
        self._num_open = len(source.prompts) * params.n

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Yield chunks; a choice that was cut ends with LENGTH."""
        async for batch in self._source.batches():
            yield [(index, self._limited(index, chunk)) for index, chunk in batch]

    def _limited(self, index: int, chunk: StreamChunk) -> StreamChunk:
        watch = self._watches.get((index, chunk.choice))
        if watch is None:
            watch = self._watches[index, chunk.choice] = LineLimiter(self._limits, self._clock)
        if watch.is_over:
            reason = None if chunk.finish_reason is None else FinishReason.LENGTH
            return StreamChunk(index=chunk.index, choice=chunk.choice, finish_reason=reason, usage=chunk.usage)
        kept = watch.take(chunk.text)
        if chunk.finish_reason is not None or watch.is_over:
            self._num_open -= 1
            if self._num_open == 0:
                self._source.cancel()
        return chunk if kept == chunk.text else msgspec.structs.replace(chunk, text=kept)


_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """State of one choice. index: in the response; prompt: index of its prompt; slot: number that it runs under."""

    index: int
    prompt: int
    slot: int
    timings: RunningTimings
    splitter: TokenSplitter | None = None
    token_ids: list[int] = field(default_factory=list)
    num_stop_tokens: int = 0
    has_new_line: bool = False
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def num_predicted(self) -> int:
        """Number of drawn tokens, including the tokens of its stop."""
        return len(self.token_ids) + self.num_stop_tokens

    def end(self, reason: FinishReason, stop: str | int | None, stop_token_ids: Sequence[int]) -> None:
        """Note the end of the choice."""
        self.finish_reason, self.stop, self.num_stop_tokens = reason, stop, len(stop_token_ids)


class CompletionRenderer(EventWriter):
    """Renders the response to one request, whole or as the events of a stream."""

    errors, done = LLAMA_FORM, b""

    def __init__(  # noqa: PLR0913 - facts of the request, the model and the moment
        self,
        request: CompletionRequest,
        slots: Sequence[int],
        *,
        model: str,
        tokenizer: Tokenizer,
        max_positions: int,
        clock: Callable[[], float],
        special: bool = False,
    ) -> None:
        """Begin a response. slots: the number of each sequence's slot, by prompt, then choice."""
        self._request, self._model, self._max_positions = request, model, max_positions
        self._num_choices, self._eog_ids = request.params.n, tokenizer.eog_ids
        self._logprobs: LlamaLogprobs | None = None
        pieces: Sequence[bytes] = ()
        if request.params.logprobs is not None:
            of_drawn = request.params.logprobs_mode == "sampled"
            pieces, self._logprobs = tokenizer.pieces(special), LlamaLogprobs(tokenizer, of_drawn, special)
        started_s, prompts = clock(), [index // self._num_choices for index in range(len(slots))]
        self.sequences = [
            ChoiceState(
                index=index,
                prompt=prompt,
                slot=slots[index],
                timings=RunningTimings(clock, len(request.prompts[prompt]), started_s),
                splitter=TokenSplitter(pieces) if pieces else None,
            )
            for index, prompt in enumerate(prompts)
        ]

    # ---- whole

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return one result, or a list if there are several."""
        results = [body for completion in completions for body in self._of_completion(completion)]
        return results[0] if len(results) == 1 else results

    def _of_completion(self, completion: Completion) -> Iterator[dict[str, Any]]:
        for choice in completion.choices:
            sequence = self._sequence(completion.index, choice.index)
            sequence.token_ids = list(choice.token_ids)
            sequence.has_new_line = "\n" in choice.text
            sequence.end(choice.finish_reason, choice.stop, choice.stop_token_ids)
            tokens = sequence.token_ids if self._request.return_tokens else []
            probabilities = None
            if self._logprobs is not None and choice.logprobs:
                probabilities = self._logprobs.entries(choice.token_ids, choice.logprobs)
            yield self._final(sequence, completion.usage, choice.text, tokens, probabilities)

    # ---- streamed

    def __call__(self, prompt: int, chunk: StreamChunk) -> Iterator[bytes]:
        """Yield the JSON of a chunk's events; final events come when all choices of a prompt have ended."""
        sequence = self._sequence(prompt, chunk.choice)
        if isinstance(chunk, ProgressChunk):
            yield from self._progress(sequence, chunk)
            return
        if chunk.token_ids or chunk.text:
            parts = (chunk,) if sequence.splitter is None else sequence.splitter.split(chunk)
            yield from (_encode(self._partial(sequence, part)) for part in parts)
        if chunk.finish_reason is not None:
            sequence.end(chunk.finish_reason, chunk.stop, chunk.stop_token_ids)
        if chunk.usage is not None and chunk.finish_reason is not None:
            for choice in range(self._num_choices):  # one that failed has no reason; the stream's error follows
                yield _encode(self._final(self._sequence(prompt, choice), chunk.usage, "", [], None))

    def _partial(self, sequence: ChoiceState, chunk: StreamChunk) -> dict[str, Any]:
        sequence.token_ids += chunk.token_ids
        sequence.has_new_line = sequence.has_new_line or "\n" in chunk.text
        event = self._event(sequence, chunk)
        if self._request.timings_per_token:
            event["timings"] = sequence.timings.during_decode(len(sequence.token_ids))
        if self._logprobs is not None:
            event["completion_probabilities"] = self._logprobs.entries(chunk.token_ids, chunk.logprobs)
        return event

    def _progress(self, sequence: ChoiceState, chunk: ProgressChunk) -> Iterator[bytes]:
        """Yield the event of prefill progress; none if only timings were requested."""
        timings = [  # of each sequence: all of them have this prompt
            state.timings.during_prefill(chunk.processed, chunk.cache, chunk.elapsed_s) for state in self.sequences
        ]
        if not self._request.return_progress:
            return
        progress = chunk.body(len(self._request.prompts[0]))
        shown_timings = {"timings": timings[0]} if self._request.timings_per_token else {}
        yield _encode(self._event(sequence, chunk) | shown_timings | {"prompt_progress": progress})

    def _event(self, sequence: ChoiceState, chunk: StreamChunk) -> dict[str, Any]:
        return {
            "index": sequence.index,
            "content": chunk.text,
            "tokens": chunk.token_ids,
            "stop": False,
            "id_slot": sequence.slot,
            "tokens_predicted": len(sequence.token_ids),
            "tokens_evaluated": len(self._request.prompts[sequence.prompt]),
        }

    # ---- both

    def _sequence(self, prompt: int, choice: int) -> ChoiceState:
        return self.sequences[prompt * self._num_choices + choice]

    def _final(
        self,
        sequence: ChoiceState,
        usage: Usage,
        content: str,
        tokens: Sequence[int],
        probabilities: list[dict[str, Any]] | None,
    ) -> dict[str, Any]:
        request, reason = self._request, sequence.finish_reason
        num_prompt, num_predicted = len(request.prompts[sequence.prompt]), sequence.num_predicted
        is_full = num_prompt + num_predicted >= self._max_positions
        body: dict[str, Any] = {
            "index": sequence.index,
            "content": content,
            "tokens": tokens,
            "id_slot": sequence.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": num_predicted,
            "tokens_evaluated": num_prompt,
            "generation_settings": request.settings,
            "prompt": request.texts[sequence.prompt],
            "has_new_line": sequence.has_new_line,
            "truncated": reason is FinishReason.LENGTH and is_full,
            "stop_type": self._stop_type(reason, sequence.stop),
            "stopping_word": sequence.stop if isinstance(sequence.stop, str) else "",
            "tokens_cached": num_prompt + max(0, num_predicted - 1),
            "timings": final_timings(usage, num_predicted),
        }
        if probabilities is not None:
            body["completion_probabilities"] = probabilities
        if request.response_fields:
            body = select_fields(body, request.response_fields)
        return body | warned(request.warnings)

    def _stop_type(self, reason: FinishReason | None, stop: str | int | None) -> str:
        """Return llama-server's name of an end. A complete grammar counts as the model's own end, as in llama-server."""
        if reason in CUT_REASONS:
            return "limit"
        if reason is not FinishReason.STOP:
            return "none"
        if stop is None:
            return "eos"
        return "eos" if stop in self._eog_ids and not self._request.params.ignore_eos else "word"


def select_fields(body: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return the fields that exist, by their paths; a path with slashes leads into objects."""
    result: dict[str, Any] = {}
    for path in fields:
        value: Any = body
        for name in path.split("/"):
            if not isinstance(value, Mapping) or name not in value:
                break
            value = value[name]
        else:
            result[path] = value
    return result


_MANY_TOKENS = 1 << 14  # of prompts: a response that repeats more of them takes a while to encode
_MANY_CHOICES = 8  # in one response


ROUTES = Routes(RouteFacts(model="required"), tags=["llama-server"])


@ROUTES.post("/completion", early=EVENTS, summary="Complete a text, as llama-server does", responses=LLAMA_STREAMS)
@ROUTES.post("/completions", early=EVENTS, include_in_schema=False)
async def complete(body: CompletionBody, request: Request) -> Response:
    """Complete a prompt: one result, a list for several prompts or choices, or their events with `stream`."""
    service = Service.of(request.scope)
    state = service.part(LlamaServerState)
    return await _complete(service, state, request, body)


@ROUTES.post("/infill", early=EVENTS, summary="Fill the gap between two texts", responses=LLAMA_STREAMS)
async def infill(body: InfillBody, request: Request) -> Response:
    """Fill a gap: the prompt is made of `input_prefix`, `input_suffix`, `input_extra` and `prompt`."""
    service = Service.of(request.scope)
    state = service.part(LlamaServerState)
    return await _complete(service, state, request, body)


async def _complete(service: Service, state: LlamaServerState, http: Request, body: CompletionBody) -> Response:
    engine = service.engine()
    limits, tenant = engine.limits, RequestContext.of(http.scope).tenant
    context = ParseContext(
        base=service.sampling(API_DEFAULTS["llama_server"]),
        tokenizer=engine.tokenizer,
        images=MarkedImages(service.media_marker, await service.request_media()),
        n_ctx=limits.max_positions,
        n_batch=limits.n_batch,
        max_prompts=engine.most_requests(tenant),
        adapters=tuple(state.adapters),
        spm_infill=service.settings.spm_infill,
        spec_types=spec_type_names(engine.config.speculation),
        strict=service.settings.strict_fields,
    )
    options = service.options(http, body.model)
    outlives_client = body.stream and conversation_id_of(http) is not None
    request = await run_in_turn(
        service,
        http,
        partial(parse_request, body, context),
        merge_options(timeouts_of(options), timeouts_of(body)),
        watcher=DisconnectWatcher(None) if outlives_client else None,
    )
    check_num_prompts(engine, tenant, len(request.prompts), request.params.n)
    check_repeated_chars("prompt", sum(map(len, request.texts)) * request.params.n)
    options = merge_options(options, request.options)
    completion = _RunningCompletion(service, state, request, options)
    try:
        running_request = await start_request(
            service,
            http,
            request.prompts,
            request.params,
            options,
            streaming=request.stream or request.line_limits.has_any,
            resumable=request.stream,
            keeps_stream=not request.stream,
        )
        if not request.stream:
            return await completion.whole(running_request)
        try:
            renderer, source = await completion.start(running_request)
        except BaseException:
            async with running_request:  # nothing else closes it
                raise
        return _ReleasingStream(source, renderer, completion)
    finally:
        if not completion.is_streaming:
            completion.release()


class _RunningCompletion:
    """A completion in progress, and the slots that it holds until `release`."""

    def __init__(
        self, service: Service, state: LlamaServerState, request: CompletionRequest, options: Mapping[str, Any]
    ) -> None:
        self._service, self._state, self._request = service, state, request
        self._special: bool = options.get("special", False)
        self._lora: Mapping[str, float] = options.get("lora", {})
        self._media: Sequence[tuple[MediaItem, ...]] = ((),) * len(request.prompts)
        self._tenant: str = options.get("tenant", "")
        self._id: str = options.get("request_id") or ""
        self.is_streaming = False
        self._renderer: CompletionRenderer | None = None
        # The first choice of each prompt gets the requested slot.
        asked = [request.id_slot if choice == 0 else -1 for _ in request.prompts for choice in range(request.params.n)]
        self._slots = [state.slots.begin(self._tenant, number) for number in asked]
        self._settings = brief_settings(request.params, stream=request.stream, others=request.settings)
        state.running[self._tenant, self._id] = self._settings

    async def start(self, running_request: RunningRequest) -> tuple[CompletionRenderer, ChunkSource[StreamChunk]]:
        """Return the renderer and the source to read.

        That is the running request, wrapped if lines may end it or progress is reported.
        """
        source: ChunkSource[StreamChunk] = running_request
        request, engine = self._request, self._service.engine()
        truncates = "truncate" in request.options
        if truncates or any(map(has_media, request.prompts)):
            request = replace(request, prompts=tuple(map(list, running_request.prompts)))
        if truncates:
            decode = partial(engine.tokenizer.decode, special=True)
            texts = await asyncio.to_thread(lambda: tuple(map(decode, running_request.prompts)))
            request = replace(request, texts=texts)
        else:
            self._media = running_request.media
        self._request = request
        self._renderer = CompletionRenderer(
            request,
            self._slots,
            model=self._service.names[0],
            tokenizer=engine.tokenizer,
            max_positions=engine.limits.max_positions,
            clock=time.monotonic,
            special=self._special,
        )
        if request.line_limits.has_any:
            source = LineLimitedSource(source, request.line_limits, time.monotonic, request.params)
        reports_cached = request.timings_per_token and request.stream and len(request.prompts) == 1
        if request.return_progress or reports_cached:  # outermost: progress is no line
            source = ProgressSource(source, self._service.read_slots, self._tenant, self._id, time.monotonic)
        return self._renderer, source

    async def whole(self, running_request: RunningRequest) -> Response:
        """Return the response that is not streamed."""
        async with running_request:
            renderer, source = await self.start(running_request)
            completions = await collect(source, self._request.params)
        params, prompts = self._request.params, self._request.prompts
        is_large = sum(map(len, prompts)) > _MANY_TOKENS or len(completions) * params.n > _MANY_CHOICES
        if is_large or params.logprobs is not None:
            return await large_json_response(await asyncio.to_thread(renderer.whole, completions))
        return json_response(renderer.whole(completions))

    def release(self) -> None:
        """Release the slots, each with the tokens of its sequence."""
        own = (self._tenant, self._id)
        if self._state.running.get(own) is self._settings:  # clients choose ids: another request may have this one
            del self._state.running[own]
        for index, number in enumerate(self._slots):
            content = None if self._renderer is None else self._content_of(self._renderer.sequences[index])
            self._state.slots.end(self._tenant, number, content)

    def _content_of(self, sequence: ChoiceState) -> SlotContent | None:
        if sequence.finish_reason is None and not sequence.token_ids:
            return None
        token_ids = (*self._request.prompts[sequence.prompt], *sequence.token_ids)
        return SlotContent(token_ids, self._lora, self._media[sequence.prompt])


class _ReleasingStream(EventStream):
    """A stream that releases its slots when it ends for any reason."""

    def __init__(
        self, source: ChunkSource[StreamChunk], writer: CompletionRenderer, completion: _RunningCompletion
    ) -> None:
        super().__init__(source, writer)
        self._completion = completion
        completion.is_streaming = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.release()
