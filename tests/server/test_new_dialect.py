"""A dialect costs one folder and a line in `application.DIALECTS`: here is a whole one, with chats, streams and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.chat import ChatChunk, ChatCompletion, ChatOptions, next_turn
from paceline.params import SamplingParams
from paceline.server import application
from paceline.server.api_errors import ErrorForm
from paceline.server.dialects.dialect import ChatGeneration, DialectReply, serve
from paceline.server.dialects.request_body import RequestBody
from paceline.server.routes import RouteFacts, Routes
from paceline.server.service import Service
from paceline.server.settings import ServerSettings
from paceline.server.sse import JSON_LINES, EventWriter

FORM = ErrorForm(lambda error: {"wrong": error.message}, lambda error: error.status, ("/plain",))


class PlainBody(RequestBody):
    ask: str
    stream: bool | None = None


class PlainLines(EventWriter):
    errors, framing, done = FORM, JSON_LINES, b""

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:
        return [msgspec.json.encode({"more": delta.content}) for delta in chunk.deltas]


class PlainReply(DialectReply):
    def events(self) -> PlainLines:
        return PlainLines()

    def whole(self, completion: ChatCompletion) -> bytes:
        return msgspec.json.encode({"answer": completion.choices[0].message.content})


ROUTES = Routes(RouteFacts(errors=FORM, model="required"), tags=["Plain"])


@ROUTES.post("/plain", summary="Ask")
async def ask(body: PlainBody, request: Request) -> Response:
    return await serve(request, parse(body, request))


async def parse(body: PlainBody, request: Request) -> ChatGeneration:
    service = Service.of(request.scope)
    await asyncio.to_thread(body.field_warnings, strict=True)
    return ChatGeneration(
        params=SamplingParams(temperature=0.0, max_tokens=24),
        options=service.options(request),
        streaming=body.stream is True,
        reply=lambda running: PlainReply(),
        make_turn=lambda: next_turn([{"role": "user", "content": body.ask}]),
        chat=ChatOptions(kwargs=service.template_variables({})),
    )


def test_a_dialect_is_one_folder_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream has the text of its whole answer; its errors have its form, also for paths that there are not."""
    monkeypatch.setattr(application, "DIALECTS", (*application.DIALECTS, ROUTES))
    with RunningServer(ServerSettings(engine_options=DEMO_ENGINE)) as server, server.client() as client:
        question: dict[str, Any] = {"ask": "Tell me a story about a fox."}
        whole = client.post("/plain", json=question).json()["answer"]
        lines = client.post("/plain", json=question | {"stream": True})
        assert lines.headers["content-type"] == "application/x-ndjson"
        assert "".join(msgspec.json.decode(line)["more"] for line in lines.content.splitlines()) == whole != ""
        refused = client.post("/plain", json=question | {"asl": 1})
        assert (refused.status_code, list(refused.json())) == (400, ["wrong"])
        assert client.get("/plain/nothing").json() == {"wrong": "Not Found"}
