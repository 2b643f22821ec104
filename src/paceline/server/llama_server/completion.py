"""POST /completion, /completions and /infill. On the event loop; prompts are read in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.completion import Completion
from paceline.server.documents import STREAMS
from paceline.server.generating import Generation, Readable, begin, check_number, collected, most_prompts
from paceline.server.json_bodies import JsonRoute
from paceline.server.llama_server.answers import Answers, Setup, Telling
from paceline.server.llama_server.asking import API_DEFAULTS, Setting
from paceline.server.llama_server.bodies import CompletionBody, InfillBody
from paceline.server.llama_server.completion_request import CompletionRequest, read_request, truncated
from paceline.server.llama_server.infill import Room
from paceline.server.llama_server.limited import LimitedGeneration
from paceline.server.llama_server.progress import ProgressingGeneration
from paceline.server.llama_server.settings_shown import brief_settings
from paceline.server.llama_server.state import LlamaState
from paceline.server.llama_server.virtual_slots import Held
from paceline.server.llama_server.writing import failure_event, json_answer, large_json_answer
from paceline.server.options import merged
from paceline.server.service import Service
from paceline.server.sse import event_stream

_LARGE = 1 << 14  # prompt tokens, beyond which an answer that repeats them takes a while to write
_MANY = 8  # answers


def routes(service: Service, state: LlamaState) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["llama-server"], route_class=JsonRoute)

    @router.post("/completion", summary="Complete a text, as llama-server does", responses=STREAMS)
    @router.post("/completions", include_in_schema=False)
    async def complete(body: CompletionBody, request: Request) -> Response:
        """One answer, a list of answers where there are several prompts or choices, or their events with `stream`."""
        return await _answer(service, state, request, body)

    @router.post("/infill", summary="Fill the gap between two texts", responses=STREAMS)
    async def infill(body: InfillBody, request: Request) -> Response:
        """As POST /completion; the prompt is made of `input_prefix`, `input_suffix`, `input_extra` and `prompt`."""
        return await _answer(service, state, request, body)

    return router


async def _answer(service: Service, state: LlamaState, http: Request, body: CompletionBody) -> Response:
    engine = service.engine()
    setting = Setting(
        base=service.sampling(API_DEFAULTS),
        tokenizer=engine.tokenizer,
        adapters=state.adapters.names,
        spm_infill=service.settings.spm_infill,
    )
    limits = engine.limits
    room = Room(n_ctx=limits.max_positions, n_batch=limits.n_batch, max_prompts=most_prompts(engine))
    request = await asyncio.to_thread(read_request, body, setting, room)
    check_number(engine, len(request.prompts), request.params.n)
    options = merged(service.options(http), request.options)
    running = _Running(service, state, request, options)
    try:
        generation = await begin(service, http, request.prompts, request.params, options, streaming=request.is_watched)
        if not request.stream:
            return await running.whole(generation)
        try:
            answers, watched = await running.start(generation)
        except BaseException:
            async with generation:  # nobody else ends it
                raise
        return _Released(event_stream(watched, answers.events, failure=failure_event, done=b""), running)
    finally:
        if not running.is_streaming:
            running.release()


class _Running:
    """A request on its way, and the slots that it has until `release`."""

    def __init__(
        self, service: Service, state: LlamaState, request: CompletionRequest, options: Mapping[str, Any]
    ) -> None:
        self._service, self._state, self._request = service, state, request
        self._lora: Mapping[str, float] = options.get("lora", {})
        self._tenant: str = options.get("tenant", "")
        self._id: str = options.get("request_id") or ""
        self.is_streaming = False
        self._answers: Answers | None = None
        self._slots = state.begin_slots(self._tenant, request.id_slot, len(request.prompts), request.params.n)
        self._shown = brief_settings(request.params, stream=request.stream, told=request.settings)
        state.running[self._id] = self._shown

    async def start(self, generation: Generation) -> tuple[Answers, Readable]:
        """What tells the answers, and the generation to be read, which is watched where lines may end its answers."""
        watched: Readable = generation
        request, engine = self._request, self._service.engine()
        if "truncate" in request.options:
            request = await asyncio.to_thread(truncated, request, generation.prompts, engine.tokenizer)
        setup = Setup(
            model=self._service.names[0],
            tokenizer=engine.tokenizer,
            max_positions=engine.limits.max_positions,
            clock=time.monotonic,
        )
        self._request, self._answers = request, Answers(request, setup, self._slots)
        if request.line_limits.has_any:
            watched = LimitedGeneration(watched, request.line_limits, setup.clock, request.params)
        if request.return_progress:  # outermost: what it tells is no line
            watched = ProgressingGeneration(watched, lambda: asyncio.wrap_future(engine.ask_slots()), self._id)
        return self._answers, watched

    async def whole(self, generation: Generation) -> Response:
        """The answer at its end."""
        async with generation:
            answers, watched = await self.start(generation)
            completions = await collected(watched, self._request.params)
        if self._is_large(completions):
            return await large_json_answer(await asyncio.to_thread(answers.whole, completions))
        return json_answer(answers.whole(completions))

    def _is_large(self, completions: Sequence[Completion]) -> bool:
        params, prompts = self._request.params, self._request.prompts
        if params.logprobs is not None or sum(map(len, prompts)) > _LARGE:
            return True
        return len(completions) * params.n > _MANY

    def release(self) -> None:
        """Leaves to its slots what they have come to."""
        if self._state.running.get(self._id) is self._shown:  # ids are the clients', and another may have this one
            del self._state.running[self._id]
        left: list[Held | None] = [None] * len(self._slots)
        if self._answers is not None:
            left = [self._left(one) for one in self._answers.sequences]
        self._state.end_slots(self._tenant, self._slots, left)

    def _left(self, one: Telling) -> Held | None:
        if one.finish_reason is None and not one.token_ids:
            return None
        return Held((*self._request.prompts[one.prompt], *one.token_ids), self._lora)


class _Released(Response):
    """A stream that releases its slots when it ends, in whatever way."""

    def __init__(self, events: Response, running: _Running) -> None:
        super().__init__()
        self._events, self._running = events, running
        self.raw_headers = events.raw_headers
        running.is_streaming = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the stream."""
        try:
            await self._events(scope, receive, send)
        finally:
            self._running.release()
