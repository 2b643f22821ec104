"""What the OpenAPI pages say of answers: errors in one shape, and streams. Pure."""

from __future__ import annotations

from typing import Any

_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _TEXT_OR_NULL,
                "code": _TEXT_OR_NULL,
            },
        }
    },
}

Responses = dict[int | str, dict[str, Any]]

ERRORS: Responses = {
    "default": {"description": "An error, as OpenAI tells it", "content": {"application/json": {"schema": _ERROR}}}
}
"""Of any route here."""

STREAMS: Responses = {
    200: {
        "description": "The answer; with stream its events",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **ERRORS,
}
"""Of a route that streams where it is asked to."""
