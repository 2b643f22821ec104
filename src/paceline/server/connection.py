"""A client's connection: uvicorn's, with limits on the size of a request's head and on the time that clients take.

    head not complete after body_timeout_s: 408   head too long: 431      no request after keep_alive_s: closed
    more connections than max_connections: 429    nothing read of a response for body_timeout_s: cut off
    HTTP/1.0: responses without chunks

On the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from paceline.server.api_errors import DEFAULT_RETRY_S, ApiError, llama_error_body
from paceline.server.settings import ServerSettings

_MAX_PIPELINED = 8  # requests behind the current one; with fewer, reading goes on, which notices disconnects

_TOO_MANY = ApiError(
    429,
    "rate_limit_error",
    "too_many_connections",
    "too many connections are open; try again later",
    retry_after_s=DEFAULT_RETRY_S,
)
_SLOW = ApiError(408, "timeout_error", "header_timeout", "the request's headers did not arrive in time")
_LONG = ApiError(431, "invalid_request_error", "headers_too_large", "the request's headers are too long")
_BAD = ApiError(400, "invalid_request_error", "invalid_http", "malformed HTTP/1.1 request")


def _without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """Wrap the application for a request of HTTP/1.0, which has no chunked transfer encoding.

    The end of the connection, which uvicorn closes after each such request, ends a body without a Content-Length.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_unframed(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unframed)

    return run


class Connection(HttpToolsProtocol):
    """One connection; uvicorn creates it."""

    def __init__(self, settings: ServerSettings, **rest: Any) -> None:
        super().__init__(**rest)
        self._settings = settings
        self.timeout_keep_alive = settings.keep_alive_s  # type: ignore[assignment]  # between requests; whole or not
        self._is_in_head = False
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._current: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or close the connection beyond the limit."""
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._reject(_TOO_MANY)
        else:
            self._expect_within(self._settings.keep_alive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and tell the application."""
        self._expect_within(None)
        self._stop_stall()
        current = self._current
        if current is not None and not current.response_complete:  # uvicorn notifies only the last request
            current.disconnected = True
            current.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves the timer running, which keeps the request alive

    # ---- reading

    def data_received(self, data: bytes) -> None:
        """Count the bytes of an incomplete head."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._settings.max_header_bytes:
                self._reject(_LONG)

    def on_message_begin(self) -> None:
        """Start the deadline for a request's head."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_within(self._settings.body_timeout_s)

    def on_headers_complete(self) -> None:
        """End the deadline. Keep reading while few requests are pipelined, so that a disconnect is noticed."""
        self._is_in_head = False
        self._expect_within(None)
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MAX_PIPELINED:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _without_chunks(cycle, app))

    def _unsupported_upgrade_warning(self) -> None:
        """Do not warn: clients request other protocols, and installing packages would not help."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's text
        """Reject a request that could not be parsed."""
        self._reject(_BAD)

    # ---- writing

    def pause_writing(self) -> None:
        """Start the deadline for a client that does not read."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._settings.body_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancel the deadline."""
        self._stop_stall()
        super().resume_writing()

    # ---- time

    def _expect_within(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        if self._is_in_head:
            self._reject(_SLOW)
        else:
            self.transport.close()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _reject(self, api_error: ApiError) -> None:
        """Send an error without the application, unless it is responding; then close."""
        self._expect_within(None)
        if self.transport.is_closing():
            return
        if self._may_respond():
            body = msgspec.json.encode(llama_error_body(api_error))
            retry = b"" if api_error.retry_after_s is None else b"retry-after: %d\r\n" % api_error.retry_after_s
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[api_error.status] + retry + head + body)
        self.transport.close()

    def _may_respond(self) -> bool:
        """Return whether no response is under way; a request whose own body is at fault is disconnected first."""
        current = self._current
        if current is None or current.response_complete:
            return True
        if self._is_in_head or current is not self.cycle or current.response_started:
            return False
        current.disconnected = True  # the application sees a disconnect
        current.message_event.set()
        return True
