"""Counts requests by route and status, and what goes out in streams of events. On the event loop."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.exchange import Exchange
from paceline.server.http_metrics import OTHER, HttpMetrics
from paceline.server.problems import CLIENT_CLOSED

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STREAM = b"text/event-stream"


class HttpCounts:
    """Knows the status from the `Exchange`, so it stands behind whoever makes that."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, streamed = time.monotonic(), _Streamed(send, self._metrics)
        try:
            await self._app(scope, receive, streamed)
        finally:
            streamed.close()
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            status = Exchange.of(scope).status or CLIENT_CLOSED  # nothing was sent: nobody was there to take it
            self._metrics.observe(_route(scope), status, time.monotonic() - began, method=method)


class _Streamed:
    """Where an answer goes; counts where it is a stream of events."""

    def __init__(self, send: Send, metrics: HttpMetrics) -> None:
        self._send, self._metrics = send, metrics
        self._is_open = False

    async def __call__(self, message: Message) -> None:
        """Passes a message on."""
        await self._send(message)
        if self._is_open and message["type"] == "http.response.body":
            self._metrics.sent(len(message.get("body", b"")))
        elif message["type"] == "http.response.start" and _is_stream(message):
            self._is_open = True
            self._metrics.stream_opened()

    def close(self) -> None:
        """The answer is over."""
        if self._is_open:
            self._is_open = False
            self._metrics.stream_closed()


def _is_stream(message: Message) -> bool:
    return any(name == b"content-type" and value.startswith(_STREAM) for name, value in message.get("headers", ()))


def _route(scope: Scope) -> str:
    """The pattern, never the path: strangers choose that."""
    found = getattr(scope.get("route"), "path", None)
    return found if isinstance(found, str) else OTHER
