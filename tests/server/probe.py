"""Minimal routes over `start_request` and `EventStream`, to test the base of every API."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.api_errors import ApiError, openai_error_body
from paceline.server.running_request import start_request
from paceline.server.service import Service
from paceline.server.sse import EventStream, EventWriter
from paceline.streaming import StreamChunk

GREEDY = {"temperature": 0.0, "max_tokens": 8}
ENDLESS = {"temperature": 0.0, "max_tokens": None, "ignore_eos": True}


class ProbeWriter(EventWriter):
    """One event a chunk."""

    def __init__(self, opening: str, *, is_broken: bool) -> None:
        self._opening, self._is_broken = opening.encode(), is_broken

    def opening(self) -> bytes:
        return self._opening

    def __call__(self, prompt: int, chunk: StreamChunk) -> Iterable[bytes]:
        if self._is_broken:
            raise RuntimeError(f"no event for {prompt} {chunk.index}")
        reason = None if chunk.finish_reason is None else chunk.finish_reason.value
        yield msgspec.json.encode(
            {"prompt": prompt, "choice": chunk.choice, "text": chunk.text, "ids": chunk.token_ids, "reason": reason}
        )

    def failure(self, api_error: ApiError) -> bytes:
        return msgspec.json.encode(openai_error_body(api_error))


def routes(service: Service) -> APIRouter:
    """POST /v1/probe {"prompts": [...], "stream": bool, "sampling": {...}, "options": {...}}."""
    router = APIRouter()

    @router.post("/v1/probe")
    async def probe(body: dict[str, Any], request: Request) -> Response:
        params = service.sampling({**GREEDY, **body.get("sampling", {})})
        options = {**service.options(request), **body.get("options", {})}
        streaming = bool(body.get("stream"))
        generation = await start_request(service, request, body["prompts"], params, options, streaming=streaming)
        if streaming:
            return EventStream(generation, ProbeWriter(body.get("opening", ""), is_broken=bool(body.get("broken"))))
        async with generation:
            completions = await generation.collect()
        return JSONResponse({"texts": [completion.text for completion in completions]})

    @router.post("/v1/left")
    async def leave(body: dict[str, Any], request: Request) -> Response:
        options = service.options(request)
        await start_request(
            service, request, body["prompts"], service.sampling({"max_tokens": None}), options, streaming=True
        )
        raise RuntimeError("the route fails before the body is read")

    @router.post("/v1/broken")
    async def fail() -> Response:
        raise RuntimeError("/home/user/secret is broken")

    return router
