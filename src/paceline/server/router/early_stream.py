"""Keeps a stream open while its model is loaded: the response begins early, with heartbeats until the model replies.

Once it has begun, an error can no longer be a status: it becomes the stream's error event, in the shape of its API.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.types import Message, Scope, Send

from paceline.server.api_errors import ApiError
from paceline.server.request_context import EarlyResponse, RequestContext
from paceline.server.routes import EarlyStream, error_response
from paceline.server.sse import stream_start


class BegunStream:
    """The `send` of one request. Its response may begin before its model is loaded. model: the model's name."""

    def __init__(self, send: Send, scope: Scope, style: EarlyStream, model: str) -> None:
        self._send, self._scope, self._style, self._model = send, scope, style, model
        self._is_open = self._has_begun = False
        self._response: EarlyResponse | None = None
        self._status = 200
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
        await self._send({"type": "http.response.body", "body": self._heartbeat(), "more_body": True})

    def _heartbeat(self) -> bytes:
        if self._style.begin is None:
            return self._style.framing.ping
        if self._response is not None:
            return self._response.heartbeat()
        self._response = RequestContext.of(self._scope).early_response = self._style.begin(self._model)
        return self._response.opening()

    async def fail(self, api_error: ApiError) -> None:
        """End the stream with an error."""
        response = error_response(api_error, self._scope)
        await self._end(response.status_code, bytes(response.body))

    async def __call__(self, message: Message) -> None:
        """Send a message of the model's own response."""
        if not self._is_open:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._has_begun = True
            self._status = message["status"]
            self._error_body = None if self._status == 200 else bytearray()
        elif self._error_body is None:
            await self._send(message)
        else:
            self._error_body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._end(self._status, bytes(self._error_body))

    async def _end(self, status: int, error_body: bytes) -> None:
        if self._response is not None:
            data = self._response.failure(_api_error(status, error_body))
        else:
            frame = self._style.framing.frame
            last = [self._style.error_event(error_body), *([self._style.done] if self._style.done else [])]
            data = b"".join(map(frame, last))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def _api_error(status: int, error_body: bytes) -> ApiError:
    """Return the error of a body in OpenAI's shape."""
    error: Mapping[str, str | None] = msgspec.json.decode(error_body)["error"]
    return ApiError(status, error["type"] or "", error["code"], error["message"] or "", param=error["param"])
