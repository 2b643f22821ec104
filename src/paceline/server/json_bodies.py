"""Routes whose JSON bodies are decoded fast, strictly, and off the event loop where they are large.

Strictly: no NaN, no lone surrogates, nothing nested too deep, no more fields than a body can mean. FastAPI then checks what
was decoded.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.problems import Problem, Refused

_SMALL = 1 << 16  # bytes that are decoded within a fraction of a millisecond
_MOST_FIELDS = 1000
_MOST_PARTS = 250_000
_MOST_VALUES = 1 << 20  # token ids of the longest prompt that a model takes
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class JsonRequest(Request):
    """A request whose `json` is as this module says."""

    async def json(self) -> Any:
        """The body. Raises `JSONDecodeError`, which FastAPI knows."""
        if not hasattr(self, "_decoded"):
            body = await self.body()
            self._decoded = decoded(body) if len(body) <= _SMALL else await asyncio.to_thread(decoded, body)
        return self._decoded


class JsonRoute(APIRoute):
    """A route that reads such requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's, given a `JsonRequest`."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def decoded(body: bytes) -> Any:
    """The value of a JSON text. Raises `JSONDecodeError`, and `Refused` where it has more fields than any body."""
    if len(body) > _SMALL:
        _check_parts(body)
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"no UTF-8 at byte {error.start}", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deep", "", 0) from None
    if isinstance(value, dict) and len(value) > _MOST_FIELDS:
        raise _refused(f"the body has {len(value)} fields, and at most {_MOST_FIELDS} are read")
    return value


def _check_parts(body: bytes) -> None:
    """Refuses what would take long to take apart, while no other thread runs. Such parts within texts count as well."""
    count = body.count(b"[") + body.count(b"{") + body.count(b'":')
    if count > _MOST_PARTS:
        raise _refused(f"the body has {count} lists, objects and fields, and at most {_MOST_PARTS} are read")
    if body.count(b",") >= _MOST_VALUES and _has_many_commas(body):
        raise _refused(f"the body has more than {_MOST_VALUES} values, and no more are read; send less, or text")


def _has_many_commas(body: bytes) -> bool:
    """Whether as many as that are outside of texts, of which a long one may have any number."""
    count = end = 0
    for number, text in enumerate(_TEXT.finditer(body)):
        count += body.count(b",", end, text.start())
        end = text.end()
        if count >= _MOST_VALUES or number >= 3 * _MOST_VALUES:  # so many texts are no JSON, or values of their own
            return True
    return count + body.count(b",", end) >= _MOST_VALUES


def _refused(message: str) -> Refused:
    return Refused(Problem(400, "invalid_request_error", "invalid_params", message))
