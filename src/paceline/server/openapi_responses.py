"""Descriptions of responses for the OpenAPI pages: errors in the shape of each API, and streams. Pure."""

from __future__ import annotations

from typing import Any, Final

Responses = dict[int | str, dict[str, Any]]


def _error_response(description: str, members: dict[str, Any]) -> Responses:
    error = {"type": "object", "required": list(members), "properties": members}
    schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {"default": {"description": description, "content": {"application/json": {"schema": schema}}}}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}

LLAMA_ERRORS: Final = _error_response(
    "An error in llama-server's shape", {"code": {"type": "integer"}, "message": _TEXT, "type": _TEXT}
)
"""Default of all routes."""

OPENAI_ERRORS: Final = _error_response(
    "An error in OpenAI's shape", {"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
)
"""Of OpenAI's routes."""

LLAMA_STREAMS: Final[Responses] = {
    200: {
        "description": "The whole response; with `stream` its events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
"""Of llama-server's routes that can stream."""

OPENAI_STREAMS: Final[Responses] = {**LLAMA_STREAMS, **OPENAI_ERRORS}
"""Of OpenAI's routes that can stream."""

PLAIN_TEXT: Final[Responses] = {200: {"description": "The metrics", "content": {"text/plain": {}}}}
"""Of the route for Prometheus."""
