"""What the OpenAPI pages say of answers outside of OpenAI's routes: errors in llama-server's shape, and streams. Pure."""

from __future__ import annotations

from typing import Any, Final

_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {"code": {"type": "integer"}, "message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}

Responses = dict[int | str, dict[str, Any]]

ERRORS: Final[Responses] = {
    "default": {
        "description": "An error, as llama-server tells it",
        "content": {"application/json": {"schema": _ERROR}},
    }
}
"""Of any route that does not say otherwise."""

STREAMS: Final[Responses] = {
    200: {
        "description": "The answer; with stream its events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
"""Of a route that streams where it is asked to."""

TEXT: Final[Responses] = {200: {"description": "The numbers", "content": {"text/plain": {}}}}
"""Of the route for Prometheus."""
