"""JSON answers, written fast."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.responses import Response

from paceline.server.large_json import encoded_in_parts
from paceline.server.problems import Problem, Refused, llama_body


def json_answer(content: Any) -> Response:
    """A 200 with this content."""
    return Response(msgspec.json.encode(content), media_type="application/json")


async def large_json_answer(content: Any) -> Response:
    """As `json_answer`; written in a thread, since it takes a while."""
    return Response(await asyncio.to_thread(encoded_in_parts, content), media_type="application/json")


def failure_event(problem: Problem) -> bytes:
    """The JSON of the event that tells what went wrong after a stream had begun."""
    return msgspec.json.encode(llama_body(problem))


def not_enabled(message: str) -> Refused:
    """What this server was not started with."""
    return Refused(Problem(501, "not_supported_error", "unsupported", message))


def bad_request(message: str, param: str | None = None) -> Refused:
    """What is wrong with a request, in llama-server's words for it."""
    return Refused(Problem(400, "invalid_request_error", "invalid_params", message, param=param))
