"""One client's connection: uvicorn's, with limits on what it may send before a request is whole, and on how long it may take.

    head not whole after body_timeout_s: 408      head too long: 431      no request after keep_alive_s: closed
    more connections than max_connections: 429    nothing read of an answer for body_timeout_s: cut off

On the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from paceline.server.problems import RETRY_S, Problem, llama_body
from paceline.server.settings import ServerSettings

_MOST_PIPELINED = (
    8  # requests that wait behind one; as long as there are fewer, reading goes on and tells when a client goes
)

_CROWDED = Problem(
    429,
    "rate_limit_error",
    "too_many_connections",
    "too many connections are open; try again later",
    retry_after_s=RETRY_S,
)
_SLOW = Problem(408, "timeout_error", "header_timeout", "the request's headers did not arrive in time")
_LONG = Problem(431, "invalid_request_error", "headers_too_large", "the request's headers are too long")
_BAD = Problem(400, "invalid_request_error", "invalid_http", "this is not HTTP/1.1 as this server understands it")


class Connection(HttpToolsProtocol):
    """Made by uvicorn for every connection."""

    def __init__(self, settings: ServerSettings, **rest: Any) -> None:
        super().__init__(**rest)
        self._settings = settings
        self.timeout_keep_alive = settings.keep_alive_s  # type: ignore[assignment]  # between requests; whole or not
        self._is_in_head = False
        self._num_head_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request; beyond the limit there is none."""
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._refuse(_CROWDED)
        else:
            self._expect_within(self._settings.keep_alive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._expect_within(None)
        self._stop_stall()
        answered = self._answered
        if answered is not None and not answered.response_complete:  # uvicorn tells only the request that came last
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn lets it run on after a reset, and what it holds is all of the request

    # ---- what comes in

    def data_received(self, data: bytes) -> None:
        """Counts what belongs to a head that is not whole."""
        super().data_received(data)
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self._settings.max_header_bytes:
                self._refuse(_LONG)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_within(self._settings.body_timeout_s)

    def on_headers_complete(self) -> None:
        """The head is whole; of those that wait behind an answer a few do not keep us from hearing the client go."""
        self._is_in_head = False
        self._expect_within(None)
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _unsupported_upgrade_warning(self) -> None:
        """Strangers ask for other protocols; that is nothing to warn of, and nothing that installing something would mend."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        """What could not be parsed."""
        self._refuse(_BAD)

    # ---- what goes out

    def pause_writing(self) -> None:
        """The client does not read; that may be so for a while."""
        super().pause_writing()
        self._stall = self.loop.call_later(self._settings.body_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        self._stop_stall()
        super().resume_writing()

    # ---- time

    def _expect_within(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._time_is_up)

    def _time_is_up(self) -> None:
        if self._is_in_head:
            self._refuse(_SLOW)
        else:
            self.transport.close()

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _refuse(self, problem: Problem) -> None:
        """Answers without the application, unless it is answering; then closes."""
        self._expect_within(None)
        if self.transport.is_closing():
            return
        if self._may_answer():
            body = msgspec.json.encode(llama_body(problem))
            retry = b"" if problem.retry_after_s is None else b"retry-after: %d\r\n" % problem.retry_after_s
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[problem.status] + retry + head + body)
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether nothing is being answered, or only what is at fault itself: its body, and no word of an answer yet."""
        answered = self._answered
        if answered is None or answered.response_complete:
            return True
        if self._is_in_head or answered is not self.cycle or answered.response_started:
            return False
        answered.disconnected = True  # the application hears that its client is gone
        answered.message_event.set()
        return True
