"""JSON bodies: requests decoded strictly, responses encoded and described. Large bodies are handled off the event loop.

Strictly: no NaN, no lone surrogates, no deep nesting, a limited number of fields. FastAPI checks the decoded value.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paceline.server.api_errors import invalid_request

_SMALL = 1 << 16  # bytes that are decoded within a fraction of a millisecond
_MAX_FIELDS = 1000
_MAX_PARTS = 250_000
_MAX_VALUES = 1 << 20  # token ids of the longest prompt that a model takes
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class JsonRequest(Request):
    """A request whose `json` decodes strictly, large bodies in a thread."""

    async def json(self) -> Any:
        """Return the decoded body. Raises `JSONDecodeError`, which FastAPI handles."""
        if not hasattr(self, "_decoded"):
            body = await self.body()
            self._decoded = decode_json(body) if len(body) <= _SMALL else await asyncio.to_thread(decode_json, body)
        return self._decoded


def decode_json(body: bytes) -> Any:
    """Decode a JSON text. Raises `JSONDecodeError`, and `ApiException` for too many fields or values."""
    if len(body) > _SMALL:
        _check_parts(body)
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError(f"not UTF-8 at byte {error.start}", "", 0) from None
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise invalid_request(f"the body has {len(value)} fields, more than the limit of {_MAX_FIELDS}; send less")
    return value


def _check_parts(body: bytes) -> None:
    """Refuse a body that would take long to decode, and block other threads. Parts within strings count as well."""
    count = body.count(b"[") + body.count(b"{") + body.count(b'":')
    if count > _MAX_PARTS:
        raise invalid_request(
            f"the body has {count} lists, objects and fields, more than the limit of {_MAX_PARTS}; send less"
        )
    if body.count(b",") >= _MAX_VALUES and _has_many_commas(body):
        raise invalid_request(f"the body has more than {_MAX_VALUES} values, which is the limit; send less, or text")


def _has_many_commas(body: bytes) -> bool:
    """Return whether there are `_MAX_VALUES` commas outside of strings; a long string may have many."""
    count = end = 0
    for number, text in enumerate(_TEXT.finditer(body)):
        count += body.count(b",", end, text.start())
        end = text.end()
        if count >= _MAX_VALUES or number >= 3 * _MAX_VALUES:  # so many texts are no JSON, or values of their own
            return True
    return count + body.count(b",", end) >= _MAX_VALUES


_PART = 1024  # values that are written together
_MANY_MEMBERS = 32  # of an object: more are written in parts of several
_CONTAINERS = (list, tuple, dict, msgspec.Struct)
_encode = msgspec.json.Encoder().encode


def encode_in_parts(content: Any) -> bytes:
    """Encode a value in parts of about `_PART` values each.

    For threads: no other thread runs during one call of the encoder.
    """
    return b"".join(_parts(content))


def _parts(content: Any) -> Iterator[bytes]:
    if _num_values(content) <= _PART:
        yield _encode(content)
    elif isinstance(content, (list, tuple)):
        yield from _joined(b"[", _slices(content), b"]")
    else:
        members = _members(content)
        if len(members) > _MANY_MEMBERS:  # tokens by their ids
            yield from _joined(b"{", map(dict, _slices(tuple(members.items()))), b"}")
            return
        opening = b"{"
        for name, value in members.items():
            yield opening + _encode(name) + b":"
            yield from _parts(value)
            opening = b","
        yield b"}" if members else b"{}"


def _joined(opening: bytes, slices: Iterable[Any], closing: bytes) -> Iterator[bytes]:
    for items in slices:
        yield opening
        if len(items) == 1 and isinstance(items, (list, tuple)):
            yield from _parts(items[0])
        else:
            yield _encode(items)[1:-1]
        opening = b","
    yield closing


def _slices(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the items in slices of at most `_PART` values, or of one item."""
    if not any(isinstance(item, _CONTAINERS) for item in items[:2]):  # numbers
        yield from (items[start : start + _PART] for start in range(0, len(items), _PART))
        return
    start = size = 0
    for at, item in enumerate(items):
        num_values = _num_values(item)
        if size and size + num_values > _PART:
            yield items[start:at]
            start, size = at, 0
        size += num_values
    yield items[start:]


def _num_values(content: Any) -> int:
    """Return the number of values within a value; a number above `_PART` may be too low."""
    if isinstance(content, msgspec.Struct):
        content = [getattr(content, name) for name in content.__struct_fields__]
    elif isinstance(content, dict):
        content = content.values()
    elif not isinstance(content, (list, tuple)):
        return 1
    count = len(content) + 1
    for item in content if count <= _PART else ():
        if isinstance(item, _CONTAINERS):
            count += _num_values(item)
            if count > _PART:
                break
    return count


def _members(content: Any) -> dict[str, Any]:
    if isinstance(content, dict):
        return content
    members = ((name, getattr(content, name)) for name in content.__struct_fields__)
    return {name: value for name, value in members if value is not msgspec.UNSET}


def json_response(content: Any) -> Response:
    """Return a 200 with this content."""
    return Response(msgspec.json.encode(content), media_type="application/json")


async def large_json_response(content: Any) -> Response:
    """Return a 200 with this content, encoded in a thread."""
    return Response(await asyncio.to_thread(encode_in_parts, content), media_type="application/json")


# ---- descriptions of responses, for the OpenAPI pages

Responses = dict[int | str, dict[str, Any]]


def _error_response(description: str, members: dict[str, Any]) -> Responses:
    error = {"type": "object", "required": list(members), "properties": members}
    schema = {"type": "object", "required": ["error"], "properties": {"error": error}}
    return {"default": {"description": description, "content": {"application/json": {"schema": schema}}}}


_STRING, _STRING_OR_NULL = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}

LLAMA_ERRORS: Final = _error_response(
    "An error in llama-server's shape", {"code": {"type": "integer"}, "message": _STRING, "type": _STRING}
)
"""Default of all routes."""

OPENAI_ERRORS: Final = _error_response(
    "An error in OpenAI's shape",
    {"message": _STRING, "type": _STRING, "param": _STRING_OR_NULL, "code": _STRING_OR_NULL},
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
