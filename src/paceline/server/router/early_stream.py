"""Keeps a stream open while its model is loaded: the response begins early, with heartbeats until the model's own begins.

Once it has begun, an error can no longer be a status: it becomes the stream's error event, in the shape of its API.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.types import Message, Send

from paceline.server.anthropic.message_events import MESSAGE_FRAMING
from paceline.server.api_errors import ApiError, error_response
from paceline.server.sse import NAMED_SSE, SSE, Framing, named_event, stream_start


@dataclass(frozen=True, slots=True)
class StreamStyle:
    """How an API's streams look. error_event: makes an event of the body of an error; done: the last event."""

    framing: Framing
    error_event: Callable[[bytes], bytes]
    done: bytes = b""


def _response_error(body: bytes) -> bytes:
    """Return the error event of /v1/responses for OpenAI's error object."""
    error: Mapping[str, object] = msgspec.json.decode(body)["error"]
    members = {name: error.get(name) for name in ("code", "message", "param")}
    return named_event(b"error", msgspec.json.encode({"type": "error", "sequence_number": 0, **members}))


_PLAIN: Final = StreamStyle(SSE, lambda body: body, b"[DONE]")
_MESSAGES: Final = StreamStyle(MESSAGE_FRAMING, lambda body: named_event(b"error", body))
_RESPONSES: Final = StreamStyle(NAMED_SSE, _response_error)

STYLES: Final[Mapping[str, StreamStyle]] = {
    **dict.fromkeys(("/v1/chat/completions", "/chat/completions", "/v1/completions"), _PLAIN),
    **dict.fromkeys(("/completion", "/completions", "/infill"), _PLAIN),
    **dict.fromkeys(("/v1/responses", "/responses"), _RESPONSES),
    "/v1/messages": _MESSAGES,
}
"""The routes whose streams have heartbeats; lines of JSON, as Ollama's, have none."""


class EarlyStream:
    """The `send` of one request whose response may have begun before its model was loaded."""

    def __init__(self, send: Send, path: str, style: StreamStyle) -> None:
        self._send, self._path, self._style = send, path, style
        self._is_open = self._has_begun = False
        self._error_body: bytearray | None = None  # of a response that is no stream

    @property
    def waits(self) -> bool:
        """Whether the response has begun, and the model's own has not."""
        return self._is_open and not self._has_begun

    async def beat(self) -> None:
        """Begin the response unless it has begun, and send a heartbeat."""
        if not self._is_open:
            self._is_open = True
            await self._send(stream_start(self._style.framing))
        await self._send({"type": "http.response.body", "body": self._style.framing.ping, "more_body": True})

    async def fail(self, api_error: ApiError) -> None:
        """End the stream with an error."""
        await self._end(bytes(error_response(api_error, self._path).body))

    async def __call__(self, message: Message) -> None:
        """Send a message of the model's own response."""
        if not self._is_open:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._has_begun = True
            self._error_body = None if message["status"] == 200 else bytearray()
        elif self._error_body is None:
            await self._send(message)
        else:
            self._error_body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(bytes(self._error_body))

    async def _end(self, error_body: bytes) -> None:
        frame = self._style.framing.frame
        events = [frame(self._style.error_event(error_body)), *([frame(self._style.done)] if self._style.done else [])]
        await self._send({"type": "http.response.body", "body": b"".join(events), "more_body": False})
