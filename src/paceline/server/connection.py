"""A client's connection: uvicorn's, with limits on the size of a request's head and on the time that clients take.

    head not complete after body_timeout_s: 408   head too long: 431      no request after keep_alive_s: closed
    more connections than max_connections: 503    nothing read of a response for body_timeout_s: cut off
    HTTP/1.0: responses without chunks            responded before the body has arrived: closed
    trailers of a chunked body: dropped           request for another protocol: served as HTTP/1.1

On the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from paceline.server.api_errors import DEFAULT_RETRY_S, ApiError, llama_error_body
from paceline.server.settings import ServerSettings

_MAX_PIPELINED = 8  # requests after the current one; with fewer, reading goes on, which notices disconnects
_MAX_REFUSED = 64  # connections that are refused at the same time; further ones are not accepted meanwhile
_LINGER_S = (
    5.0  # for the next bytes of a client that still sends its body; it could lose the response by an early close
)

_TOO_MANY = ApiError(
    503,
    "unavailable_error",
    "too_many_connections",
    "too many connections are open; try again later",
    retry_after_s=DEFAULT_RETRY_S,
)
_SLOW = ApiError(408, "timeout_error", "header_timeout", "the request's headers did not arrive in time")
_LONG = ApiError(
    431,
    "invalid_request_error",
    "headers_too_large",
    "the request's headers, trailers or chunk extensions are too long",
)
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


def _framing(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the headers with the length of a request's body; empty for a request without a body."""
    named = (b"content-length", b"transfer-encoding")
    return b"".join(b"%b: %b\r\n" % pair for pair in headers if pair[0] in named and pair[1].strip(b"0"))


class OpenConnections:
    """The connections of a server. Some wait for their client: for a handshake, or for a whole request.

    Attributes:
        max_number: The connections that are served at once.
        on_room: Called when a connection was closed.
    """

    def __init__(self, max_number: int) -> None:
        self.max_number = max_number
        self.on_room: Callable[[], None] = lambda: None
        self._all: set[object] = set()
        self._waiting: dict[object, Callable[[], bool]] = {}

    @property
    def is_over(self) -> bool:
        """Whether connections are open that are not served."""
        return len(self._all) > self.max_number

    @property
    def is_full(self) -> bool:
        """Whether no connection can be accepted, not even to refuse it."""
        return len(self._all) >= self.max_number + min(_MAX_REFUSED, self.max_number // 8 + 1)

    def wait(self, connection: object, evict: Callable[[], bool]) -> None:
        """Note that a new or a known connection waits for its client.

        evict: closes the connection; returns False if the rest of a response is sent before.
        """
        self._all.add(connection)
        self._waiting.pop(connection, None)
        self._waiting[connection] = evict

    def work(self, connection: object) -> None:
        """Note that a connection does not wait any more."""
        self._waiting.pop(connection, None)

    def remove(self, connection: object) -> None:
        """Forget a connection that was closed. Idempotent."""
        self._waiting.pop(connection, None)
        if connection in self._all:
            self._all.remove(connection)
            self.on_room()

    def make_room(self) -> None:
        """Close waiting connections while there are too many, the longest waiting first. The newest connection stays."""
        while self.is_over and len(self._waiting) > 1:
            connection = next(iter(self._waiting))
            if self._waiting.pop(connection)():
                self._all.discard(connection)


class _ResponseTransport:
    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class Connection(HttpToolsProtocol):
    """A client's connection. all_open: the open connections of the server."""

    def __init__(self, settings: ServerSettings, all_open: OpenConnections, **rest: Any) -> None:
        super().__init__(**rest)
        self._settings, self._all_open = settings, all_open
        self.timeout_keep_alive = settings.keep_alive_s  # type: ignore[assignment]  # between requests; whole or not
        self._is_in_head = self._is_lingering = self._skips_message = False
        self._keeps_alive = True
        self._linger_until_s = 0.0
        self._num_unread = 0  # bytes since the beginning of the head, or since the last bytes of the body
        self._num_new = 0  # bytes that came at once, 0 once they have ended a part of a body or a request
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._current: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request, or close the connection beyond the limit."""
        super().connection_made(transport)
        if self._all_open.is_over:
            self._all_open.work(self)
            self._reject(_TOO_MANY)
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers, and tell the application."""
        self._all_open.remove(self)
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
        """Parse the bytes. Counts the bytes of an incomplete head, and between the parts of a body."""
        if self._is_lingering:
            self._linger()
            return
        self._unset_keepalive_if_required()
        self._num_unread += len(data)
        self._num_new = len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._reject(_BAD)
            return
        cycle: RequestResponseCycle | None = self.cycle
        is_arriving = self._is_in_head or (cycle is not None and cycle.more_body)
        if is_arriving and self._num_unread > self._settings.max_header_bytes:
            self._reject(_LONG)

    def _feed(self, data: bytes) -> None:
        """Parse the bytes. httptools ends at a request for another protocol; a new parser takes its body and the rest."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                if self.cycle.more_body:
                    self._skips_message = True
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n" + _framing(self.headers) + b"\r\n")
                    self._skips_message = False
            else:
                return

    def on_message_begin(self) -> None:
        """Start the deadline for a request's head."""
        if self._skips_message:
            return
        super().on_message_begin()
        self._is_in_head, self._num_unread = True, self._num_new
        if self._is_idle():
            self._all_open.wait(self, self._evict)
        self._expect_within(self._settings.body_timeout_s)

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        if not self._skips_message:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Trailers are dropped: they follow the body, when the headers were read."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the deadline. Keep reading while few requests are pipelined, so that a disconnect is noticed."""
        if self._skips_message:
            return
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise ValueError("a request has one Host header")  # httptools makes it an error of parsing
        self._is_in_head = False
        self._all_open.work(self)
        self._expect_within(None)
        super().on_headers_complete()
        self._keeps_alive, self.cycle.keep_alive = self.cycle.keep_alive, False  # until the body has arrived
        if 0 < len(self.pipeline) <= _MAX_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._num_unread = self._num_new = 0
        super().on_body(body)
        if self._current is self.cycle:  # else an earlier request is in progress
            self._all_open.wait(self, self._evict)

    def on_message_complete(self) -> None:
        """Note that the body has arrived, so that the connection may serve another request."""
        if self._skips_message or (self.parser.should_upgrade() and _framing(self.headers)):
            return
        self._num_unread = self._num_new = 0
        self._all_open.work(self)
        if not self.cycle.response_started:  # else its headers say that the connection closes
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or wait for a request. Bytes that begin no request do not prolong the wait."""
        super().on_response_complete()
        if self._is_idle() and not self._is_lingering and not self.transport.is_closing():
            self._wait()

    def _is_idle(self) -> bool:
        return not self.pipeline and (self._current is None or self._current.response_complete)

    def _wait(self) -> None:
        self._all_open.wait(self, self._evict)
        if not self._is_in_head:
            self._expect_within(self._settings.keep_alive_s)

    def _evict(self) -> bool:
        """Close the connection for another one; return False if the rest of a response has to be sent before."""
        if self.transport.get_write_buffer_size():
            self._close_in_time()
            return False
        self.transport.abort()
        return True

    def shutdown(self) -> None:
        """Close the connection, after the response if there is a request."""
        self._keeps_alive = False
        super().shutdown()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        if cycle.more_body:
            self._all_open.wait(self, self._evict)
        cycle.transport = _ResponseTransport(self.transport, self._close)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _without_chunks(cycle, app))

    def _close(self) -> None:
        """Close the connection, at once unless the response is complete and the client still sends its body.

        That body is discarded while it arrives, so that the client reads the response and not an error of its connection.
        """
        current = self._current
        if current is None or not (current.response_complete and current.more_body) or self.transport.is_closing():
            self.transport.close()
            return
        self._is_lingering = True
        self._all_open.wait(self, self._evict)
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._linger_until_s = self.loop.time() + self._settings.body_timeout_s
        self._linger()

    def _linger(self) -> None:
        """Wait for more of a body that is discarded, no longer in all than a body may take."""
        self._expect_within(min(_LINGER_S, max(0.0, self._linger_until_s - self.loop.time())))

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
            self._close_in_time()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection when no request came."""
        self._close_in_time()

    def _close_in_time(self) -> None:
        """Close the connection after the rest of its bytes. A client that does not read them, or does not close, is cut off."""
        self.transport.close()
        if self._stall is None:
            self._stall = self.loop.call_later(min(_LINGER_S, self._settings.body_timeout_s), self.transport.abort)

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
        self._close_in_time()

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
