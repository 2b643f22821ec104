"""Identify, rewrite, count and log requests; contain uncaught errors. On the event loop."""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.observability.tracing import TRACE_ID, RequestSpan, opentelemetry_api, trace_id_of
from paceline.server.api_errors import CLIENT_CLOSED, ApiException, api_error_of
from paceline.server.exposition import OTHER, HttpMetrics
from paceline.server.request_context import SERVICE, HttpMiddleware, RequestContext
from paceline.server.resumable_streams import ResumableStreams, conversation_id_of
from paceline.server.routes import error_form_of, error_response, facts_of, route_path
from paceline.server.settings import ACCESS_LOGGER
from paceline.server.web_page import WebPage

_access_log = logging.getLogger(ACCESS_LOGGER)
_log = logging.getLogger("paceline.server")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STREAM_TYPES = (b"text/event-stream", b"application/x-ndjson")
_MAX_LOGGED_CHARS = 200  # of a path that matches no route


class RequestIds(HttpMiddleware):
    """Take a valid X-Request-Id or make one, and send it with every response. Outermost: creates the `RequestContext`."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = (value for name, value in scope["headers"] if name == b"x-request-id" and _REQUEST_ID.fullmatch(value))
        request_id = next(given, b"").decode() or secrets.token_hex(12)
        context = RequestContext.of(scope)
        context.request_id = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                names = (b"x-request-id", error_form_of(scope).id_header)
                headers = [(name, request_id.encode()) for name in names if name]
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        await self._app(scope, receive, send_with_id)


class HttpCounts(HttpMiddleware):
    """Count requests by route and status, and bytes of event streams. Inside `RequestIds`, which notes the status."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        super().__init__(app)
        self._metrics = metrics

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, metrics, is_stream = time.monotonic(), self._metrics, False

        async def send_counted(message: Message) -> None:
            nonlocal is_stream
            await send(message)
            if is_stream and message["type"] == "http.response.body":
                metrics.sent(len(message.get("body", b"")))
            elif message["type"] == "http.response.start" and _is_stream(message):
                is_stream = True
                metrics.stream_opened()

        try:
            await self._app(scope, receive, send_counted)
        finally:
            if is_stream:
                metrics.stream_closed()
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            status = RequestContext.of(scope).status or CLIENT_CLOSED  # no response: the client had gone
            route = _route_pattern(scope) or OTHER  # never the path: clients choose it
            metrics.observe(route, status, time.monotonic() - began, method=method)


def _is_stream(message: Message) -> bool:
    headers = message.get("headers", ())
    return any(name == b"content-type" and value.startswith(_STREAM_TYPES) for name, value in headers)


class AccessLog(HttpMiddleware):
    """Log one line of JSON per request when its response is complete or its client has gone. No contents."""

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            if _access_log.isEnabledFor(logging.INFO):
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
    if context.traceparent is not None:
        line["trace_id"] = trace_id_of(context.traceparent)
    if context.finished:  # the sum of the choices' tokens and the maximum of their times
        usages = [usage for _, usage in context.finished]
        for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            line[name] = sum(getattr(usage, name) for usage in usages)
        for name in ("queue_s", "prefill_s", "decode_s"):
            line[name] = round(max(getattr(usage, name) for usage in usages), 6)
        line["finish_reason"] = ",".join(dict.fromkeys(reason for reason, _ in context.finished))
    return line


def _route_pattern(scope: Scope) -> str | None:
    """Return the matched route's pattern, for example /v1/models/{id}; None if no route matched."""
    pattern = getattr(scope.get("route"), "path", None)
    return pattern if isinstance(pattern, str) else None


class Traces(HttpMiddleware):
    """Take up the trace of `traceparent`, and make a span of each POST request that needs a model, by GenAI's conventions.

    The span has a child for each phase of an engine's request, and for the parsing of tool calls.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app)
        opentelemetry_api()  # imported before the first request

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, facts = RequestContext.of(scope), facts_of(scope)
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        is_on = scope["method"] == "POST" and facts is not None and facts.model == "required"
        span = RequestSpan("request", headers, is_on=is_on)
        context.traceparent = span.traceparent
        token = TRACE_ID.set(trace_id_of(context.traceparent))
        try:
            with span.current():
                await self._app(scope, receive, send)
        finally:
            TRACE_ID.reset(token)
            for _, usage in context.finished:
                if context.submitted_ns:
                    span.add_phases(context.submitted_ns, usage)
            if context.parsed_ns is not None:
                span.add_child("parse_tool_calls", *context.parsed_ns)
            model = scope[SERVICE].names[0] if SERVICE in scope else ""
            status = context.status or CLIENT_CLOSED
            name = f"{context.operation} {model}" if context.operation else f"{scope['method']} {_route_pattern(scope)}"
            error = f"HTTP status {status}" if status >= 500 else None
            span.end(name, _span_attributes(scope, context, model, status), error=error)


def _span_attributes(scope: Scope, context: RequestContext, model: str, status: int) -> dict[str, Any]:
    """Return the attributes of a request's span, by OpenTelemetry's conventions of HTTP and GenAI. No contents."""
    attributes: dict[str, Any] = {
        "http.request.method": scope["method"],
        "http.route": _route_pattern(scope),
        "http.response.status_code": status,
        "error.type": str(status) if status >= 400 else None,
        "paceline.request.id": context.request_id,
    }
    if not context.operation:
        return attributes
    attributes |= {
        "gen_ai.operation.name": context.operation,
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }
    if (params := context.params) is not None:
        attributes |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        }
    if context.finished:
        usages = [usage for _, usage in context.finished]
        attributes |= {
            "gen_ai.response.finish_reasons": tuple(reason.value for reason, _ in context.finished),
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in usages),
            "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            "gen_ai.usage.cache_read.input_tokens": sum(usage.cached_tokens for usage in usages),
        }
    return attributes


class ErrorBoundary(HttpMiddleware):
    """Turn an uncaught error into a 500 and a log entry with its traceback. Innermost.

    A response that has begun is cut off, so that its client notices. A resumable request is cancelled if its stream was never
    sent, since the client's leaving does not cancel it.
    """

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            _log.exception("request %s: internal server error", context.request_id)
            if context.status:
                raise
            await error_response(api_error_of(error), scope)(scope, receive, send)
        finally:
            stream = context.resumable_stream
            if stream is not None and not stream.is_done:
                stream.cancel()
                stream.finish()


class HeadAsGet(HttpMiddleware):
    """Run HEAD requests as GET, and send the response's status and headers without its body.

    A stream ends with its headers: the application sees a disconnect after the response is complete.
    """

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "HEAD":
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


class TrailingSlashes(HttpMiddleware):
    """Serve `/v1/models/` as `/v1/models`, without a redirect, which a POST would not follow with its body.

    A path of the web page keeps its slash, which stands for the index of a folder.
    """

    def __init__(self, app: ASGIApp, page: WebPage) -> None:
        super().__init__(app)
        self._page = page

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw_path: bytes | None = scope.get("raw_path")  # as the client sent it, which not every ASGI server passes on
        raw_path = scope["path"].encode() if raw_path is None else raw_path
        path, files = route_path(scope), self._page.files
        has_slash = raw_path.endswith(b"/") and path.strip("/")  # a slash that was sent as %2F is part of a name
        if has_slash and (files is None or not files.has(path)):
            scope["raw_path"] = raw_path.rstrip(b"/")
            scope["path"] = scope["path"][: len(scope["raw_path"]) - len(raw_path)]
        await self._app(scope, receive, send)


class AwaitedStreams(HttpMiddleware):
    """Register requests with X-Conversation-Id from their headers on: a client that ends its stream ends the request.

    This holds however long the body, its images or its prompt take until there is a stream.
    """

    def __init__(self, app: ASGIApp, streams: ResumableStreams) -> None:
        super().__init__(app)
        self._streams = streams

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as waiting:
            if scope["method"] == "POST":
                with suppress(ApiException):  # its route reports a malformed id
                    conversation_id = conversation_id_of(Request(scope))
                    if conversation_id is not None:
                        context = RequestContext.of(scope)
                        waiting.enter_context(
                            self._streams.waiting(context.key_digest, conversation_id, context.discard)
                        )
                        context.stop_waiting = waiting.close
            await self._app(scope, receive, send)
