"""POST /completion, /completions and /infill. On the event loop; prompts are read in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.completion import Completion
from paceline.kv_cache import MediaItem
from paceline.server.dialects.llama_server.chunk_sources import LineLimitedSource
from paceline.server.dialects.llama_server.completion_renderer import ChoiceState, CompletionRenderer, RenderContext
from paceline.server.dialects.llama_server.completion_request import (
    API_DEFAULTS,
    CompletionRequest,
    ParseContext,
    PromptLimits,
    brief_settings,
    parse_request,
    with_composed_prompts,
    with_truncated_prompts,
)
from paceline.server.dialects.llama_server.llama_bodies import CompletionBody, InfillBody
from paceline.server.dialects.llama_server.slots import LlamaServerState, SlotContent
from paceline.server.dialects.request_fields import MarkedImages, merge_options
from paceline.server.flags.setters import spec_type_names
from paceline.server.json_bodies import LLAMA_STREAMS, json_response, large_json_response
from paceline.server.prefill_progress import ProgressSource
from paceline.server.request_context import DisconnectWatcher, RequestContext
from paceline.server.resumable_streams import conversation_id_of
from paceline.server.routes import EVENTS, RouteFacts, Routes
from paceline.server.running_request import (
    ChunkSource,
    RunningRequest,
    check_num_prompts,
    check_repeated_chars,
    collect,
    run_in_turn,
    start_request,
    timeouts_of,
)
from paceline.server.service import Service
from paceline.server.sse import EventStream
from paceline.streaming import StreamChunk

_MANY_TOKENS = 1 << 14  # of prompts: a response that repeats more of them takes a while to encode
_MANY_CHOICES = 8  # in one response


def routes() -> Routes:
    """Return the routes."""
    router = Routes(RouteFacts(model="required"), tags=["llama-server"])

    @router.post("/completion", early=EVENTS, summary="Complete a text, as llama-server does", responses=LLAMA_STREAMS)
    @router.post("/completions", early=EVENTS, include_in_schema=False)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Complete a prompt: one result, a list for several prompts or choices, or their events with `stream`."""
        service = Service.of(request.scope)
        state = service.part(LlamaServerState)
        return await _complete(service, state, request, body)

    @router.post("/infill", early=EVENTS, summary="Fill the gap between two texts", responses=LLAMA_STREAMS)
    async def infill(body: InfillBody, request: Request) -> Response:
        """Fill a gap: the prompt is made of `input_prefix`, `input_suffix`, `input_extra` and `prompt`."""
        service = Service.of(request.scope)
        state = service.part(LlamaServerState)
        return await _complete(service, state, request, body)

    return router


async def _complete(service: Service, state: LlamaServerState, http: Request, body: CompletionBody) -> Response:
    engine = service.engine()
    parse_context = ParseContext(
        base=service.sampling(API_DEFAULTS),
        tokenizer=engine.tokenizer,
        images=MarkedImages(service.media_marker, await service.request_media()),
        adapters=state.adapters.names,
        spm_infill=service.settings.spm_infill,
        spec_types=spec_type_names(engine.config.speculation),
        strict=service.settings.strict_fields,
    )
    limits, tenant = engine.limits, RequestContext.of(http.scope).tenant
    prompt_limits = PromptLimits(
        n_ctx=limits.max_positions, n_batch=limits.n_batch, max_prompts=engine.most_requests(tenant)
    )
    options = service.options(http, body.model)
    outlives_client = body.stream and conversation_id_of(http) is not None
    request = await run_in_turn(
        service,
        http,
        partial(parse_request, body, parse_context, prompt_limits),
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
            streaming=request.is_watched,
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
        self._slots = state.begin_slots(self._tenant, request.id_slot, len(request.prompts), request.params.n)
        self._settings = brief_settings(request.params, stream=request.stream, others=request.settings)
        state.running[self._tenant, self._id] = self._settings

    async def start(self, running_request: RunningRequest) -> tuple[CompletionRenderer, ChunkSource[StreamChunk]]:
        """Return the renderer and the source to read.

        That is the running request, wrapped if lines may end it or progress is reported.
        """
        source: ChunkSource[StreamChunk] = running_request
        request, engine = self._request, self._service.engine()
        if "truncate" in request.options:
            request = await asyncio.to_thread(
                with_truncated_prompts, request, running_request.prompts, engine.tokenizer
            )
        elif request.has_images:
            request = with_composed_prompts(request, running_request.prompts)
            self._media = running_request.media
        context = RenderContext(
            model=self._service.names[0],
            tokenizer=engine.tokenizer,
            max_positions=engine.limits.max_positions,
            clock=time.monotonic,
            special=self._special,
        )
        self._request, self._renderer = request, CompletionRenderer(request, context, self._slots)
        if request.line_limits.has_any:
            source = LineLimitedSource(source, request.line_limits, context.clock, request.params)
        if request.reads_slots:  # outermost: progress is no line
            source = ProgressSource(source, self._service.read_slots, self._tenant, self._id, context.clock)
        return self._renderer, source

    async def whole(self, running_request: RunningRequest) -> Response:
        """Return the response that is not streamed."""
        async with running_request:
            renderer, source = await self.start(running_request)
            completions = await collect(source, self._request.params)
        if self._is_large(completions):
            return await large_json_response(await asyncio.to_thread(renderer.whole, completions))
        return json_response(renderer.whole(completions))

    def _is_large(self, completions: Sequence[Completion]) -> bool:
        params, prompts = self._request.params, self._request.prompts
        if params.logprobs is not None or sum(map(len, prompts)) > _MANY_TOKENS:
            return True
        return len(completions) * params.n > _MANY_CHOICES

    def release(self) -> None:
        """Release the slots, each with the tokens of its sequence."""
        own = (self._tenant, self._id)
        if self._state.running.get(own) is self._settings:  # clients choose ids: another request may have this one
            del self._state.running[own]
        contents: list[SlotContent | None] = [None] * len(self._slots)
        if self._renderer is not None:
            contents = [self._content_of(one) for one in self._renderer.sequences]
        self._state.end_slots(self._tenant, self._slots, contents)

    def _content_of(self, one: ChoiceState) -> SlotContent | None:
        if one.finish_reason is None and not one.token_ids:
            return None
        token_ids = (*self._request.prompts[one.prompt], *one.token_ids)
        return SlotContent(token_ids, self._lora, self._media[one.prompt])


class _ReleasingStream(EventStream):
    """A stream that releases its slots when it ends for any reason."""

    def __init__(
        self, source: ChunkSource[StreamChunk], writer: CompletionRenderer, completion: _RunningCompletion
    ) -> None:
        super().__init__(source, writer)
        self._completion = completion
        completion.is_streaming = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.release()
