"""Identify, rewrite, count and log requests; contain uncaught errors. On the event loop."""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.api_errors import CLIENT_CLOSED, ApiException, api_error_of
from paceline.server.exposition import OTHER, HttpMetrics
from paceline.server.request_context import RequestContext
from paceline.server.resumable_streams import ResumableStreams, conversation_id_of
from paceline.server.routes import error_form_of, error_response, route_path
from paceline.server.settings import ACCESS_LOGGER
from paceline.server.web_page import WebPage

_access_log = logging.getLogger(ACCESS_LOGGER)
_log = logging.getLogger("paceline.server")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
_MAX_LOGGED_CHARS = 200  # of a path that matches no route


class RequestIds:
    """Take a valid X-Request-Id or make one, and send it with every response. Outermost: creates the `RequestContext`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application with an `RequestContext` in its scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_request_id(scope) or secrets.token_hex(12)
        context = RequestContext(request_id)
        context.attach(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                names = (b"x-request-id", error_form_of(scope).id_header)
                headers = [(name, request_id.encode()) for name in names if name]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _given_request_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return None


class HttpCounts:
    """Count requests by route and status, and bytes of event streams. Inside `RequestIds`, which notes the status."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and record its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, counted = time.monotonic(), _StreamCounter(send, self._metrics)
        try:
            await self._app(scope, receive, counted)
        finally:
            counted.close()
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            status = RequestContext.of(scope).status or CLIENT_CLOSED  # no response: the client had gone
            route = _route_pattern(scope) or OTHER  # never the path: clients choose it
            self._metrics.observe(route, status, time.monotonic() - began, method=method)


class _StreamCounter:
    """A `send` that counts the bytes of a stream of events or lines."""

    def __init__(self, send: Send, metrics: HttpMetrics) -> None:
        self._send, self._metrics = send, metrics
        self._is_open = False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if self._is_open and message["type"] == "http.response.body":
            self._metrics.sent(len(message.get("body", b"")))
        elif message["type"] == "http.response.start" and _is_stream(message):
            self._is_open = True
            self._metrics.stream_opened()

    def close(self) -> None:
        """Count the stream as closed, if there was one."""
        if self._is_open:
            self._is_open = False
            self._metrics.stream_closed()


def _is_stream(message: Message) -> bool:
    headers = message.get("headers", ())
    return any(name == b"content-type" and value.startswith(_STREAM_TYPES) for name, value in headers)


class AccessLog:
    """Log one line of JSON per request when its response is complete or its client has gone. No contents."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application and log the request."""
        if scope["type"] != "http" or not _access_log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            line = _access_line(scope, RequestContext.of(scope), time.monotonic() - began)
            _access_log.info("%s", msgspec.json.encode(line).decode())


def _access_line(scope: Scope, context: RequestContext, duration_s: float) -> dict[str, Any]:
    client = scope.get("client")
    route = (_route_pattern(scope) or scope["path"])[:_MAX_LOGGED_CHARS]
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "request_id": context.request_id,
        "client": client[0] if client else None,
        "method": scope["method"][:_MAX_LOGGED_CHARS],
        "route": route.encode("utf-8", "replace").decode(),
        "status": context.status,
        "duration_s": round(duration_s, 6),
    }
    if context.tenant:
        line["tenant"] = context.tenant
    return line | _usage_fields(context)


def _usage_fields(context: RequestContext) -> dict[str, Any]:
    """Return the sum of the choices' tokens and the maximum of their times."""
    if not context.finished:
        return {}
    reasons = dict.fromkeys(reason for reason, _ in context.finished)
    usages = [usage for _, usage in context.finished]
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "queue_s": round(max(usage.queue_s for usage in usages), 6),
        "prefill_s": round(max(usage.prefill_s for usage in usages), 6),
        "decode_s": round(max(usage.decode_s for usage in usages), 6),
        "finish_reason": ",".join(reasons),
    }


def _route_pattern(scope: Scope) -> str | None:
    """Return the matched route's pattern, for example /v1/models/{id}; None if no route matched."""
    found = getattr(scope.get("route"), "path", None)
    return found if isinstance(found, str) else None


class ErrorBoundary:
    """Turn an uncaught error into a 500 and a log entry with its traceback. Innermost.

    A response that has begun is cut off, so that its client notices. A resumable request whose stream was never sent is
    cancelled: its client's leaving would not do that.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            context = RequestContext.of(scope)
            _log.exception("request %s: internal server error", context.request_id)
            if context.status:
                raise
            await error_response(api_error_of(error), scope)(scope, receive, send)
        finally:
            stream = RequestContext.of(scope).resumable_stream if scope["type"] == "http" else None
            if stream is not None and not stream.is_done:
                stream.cancel()
                stream.finish()


class HeadAsGet:
    """Run HEAD requests as GET, and send the response's status and headers without its body.

    A stream ends with its headers: the application sees a disconnect after the response is complete.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        as_get = {**scope, "method": "GET"}  # a copy: uvicorn frames the response by the method of its own scope
        try:
            await self._app(as_get, receive, send_head)
        finally:
            if "route" in as_get:
                scope["route"] = as_get["route"]  # for the access log and the metrics


class TrailingSlashes:
    """Serve `/v1/models/` as `/v1/models`, without a redirect, which a POST would not follow with its body.

    A path of the web page keeps its slash, which stands for the index of a folder.
    """

    def __init__(self, app: ASGIApp, page: WebPage) -> None:
        self._app, self._page = app, page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] == "http" and self._has_slash(scope):
            raw_path = _raw_path(scope)
            scope["raw_path"] = raw_path.rstrip(b"/")
            scope["path"] = scope["path"][
                : len(scope["raw_path"]) - len(raw_path)
            ]  # a slash that was sent as %2F stays
        await self._app(scope, receive, send)

    def _has_slash(self, scope: Scope) -> bool:
        path = route_path(scope)
        if not _raw_path(scope).endswith(b"/") or not path.strip("/"):  # %2F is part of a name
            return False
        return self._page.files is None or not self._page.files.has(path)


def _raw_path(scope: Scope) -> bytes:
    """Return the path as the client sent it, which not every ASGI server passes on."""
    raw_path: bytes | None = scope.get("raw_path")
    return scope["path"].encode() if raw_path is None else raw_path


class AwaitedStreams:
    """Register requests with X-Conversation-Id from their headers on: a client that ends such a stream ends the request.

    However long its body, its images or its prompt take until the stream is there.
    """

    def __init__(self, app: ASGIApp, streams: ResumableStreams) -> None:
        self._app, self._streams = app, streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        with ExitStack() as waiting:
            if scope["type"] == "http" and scope["method"] == "POST":
                self._begin(scope, waiting)
            await self._app(scope, receive, send)

    def _begin(self, scope: Scope, waiting: ExitStack) -> None:
        try:
            conversation_id = conversation_id_of(Request(scope))
        except ApiException:
            return  # its route says what is wrong
        if conversation_id is not None:
            context = RequestContext.of(scope)
            waiting.enter_context(self._streams.waiting(context.key_digest, conversation_id, context.discard))
            context.stop_waiting = waiting.close
