"""Limits of requests: size of headers, number in flight, and size, time and total of bodies, which are decoded if compressed."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.api_errors import ApiError, ApiException, ClientDisconnected, ServerDraining
from paceline.server.in_flight import ByteBudget, ByteReservation
from paceline.server.key_accounts import KeyAccount
from paceline.server.request_context import HttpMiddleware, RequestContext
from paceline.server.routes import RouteFacts, error_response, facts_of
from paceline.server.service import Server

_CLOSE = {"connection": "close"}
_SHARE = 3  # requests in flight that a tenant may have for each free place
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})


class HeaderLimit(HttpMiddleware):
    """Respond with 431 if path, query and headers together have more than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        super().__init__(app)
        self._max_bytes = max_bytes

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("raw_path") or scope["path"].encode()
        size = (
            len(path) + len(scope["query_string"]) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        )
        if size > self._max_bytes:
            message = f"path and headers have {size} bytes, more than the limit of {self._max_bytes}; send less"
            api_error = ApiError(431, "invalid_request_error", "headers_too_large", message)
            await error_response(api_error, scope, _CLOSE)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class RequestLimit(HttpMiddleware):
    """Count requests in flight: 429 beyond `max_requests`, 503 while the server drains.

    While it drains, running requests can still be cancelled. If there are several tenants, a tenant may have three requests for
    each free place.
    """

    def __init__(self, app: ASGIApp, service: Server, max_requests: int) -> None:
        super().__init__(app)
        self._service, self._max_requests = service, max_requests

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        facts = facts_of(scope)
        if facts is not None and not facts.is_counted:
            await self._app(scope, receive, send)
            return
        tenant = RequestContext.of(scope).tenant
        api_error = self._rejection(scope["method"], facts, tenant)
        if api_error is not None:
            await error_response(api_error, scope, _CLOSE)(scope, receive, send)
            return
        with self._service.in_flight.counting(tenant):
            await self._app(scope, receive, send)

    def _rejection(self, method: str, facts: RouteFacts | None, tenant: str) -> ApiError | None:
        if self._service.is_draining and method == "POST" and not (facts is not None and facts.while_draining):
            return ServerDraining().api_error
        count, num_own = self._service.in_flight.count, self._service.in_flight.count_of(tenant)
        num_free = self._max_requests - count
        if num_free > 0 and not (self._service.body_budget.is_shared and num_own >= _SHARE * num_free):
            return None
        wait_s = self._service.retry_after_s()
        message = f"{count} requests are in flight, which is this server's limit; try again later"
        if num_free > 0:
            message = (
                f"{num_own} requests of this key's tenant are in flight, which is its share of this server's "
                f"{self._max_requests}; try again later"
            )
        return ApiError(429, "rate_limit_error", "too_many_requests", message, retry_after_s=wait_s)


class KeyLimits(HttpMiddleware):
    """Hold requests for a model to the limits of their API key (429), tell clients the limits, and count the usage.

    POST requests of routes that compute with a model are limited. A refused request costs nothing. Requests of batches leave
    one of several places to interactive requests.
    """

    def __init__(self, app: ASGIApp, service: Server) -> None:
        super().__init__(app)
        self._accounts = service.kept.key_accounts

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, facts = RequestContext.of(scope), facts_of(scope)
        account = context.account
        is_limited = scope["method"] == "POST" and facts is not None and facts.model == "required" and facts.is_limited
        if account is None or not is_limited:
            await self._app(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *account.headers()]
            await send(message)

        try:
            account.check()
            if context.is_internal:
                _leave_place(account)
        except ApiException as refused:
            await error_response(refused.api_error, scope, _CLOSE)(scope, receive, send_with_limits)
            return
        account.num_in_flight += 1
        self._accounts.save_soon()
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            account.num_in_flight -= 1
            context.settle()
            self._accounts.save_soon()


def _leave_place(account: KeyAccount) -> None:
    """Raise `ApiException` (429) if a batch's request would take the last of several places of its key."""
    most = account.key.max_requests
    if most is not None and account.num_in_flight >= max(1, most - 1):
        text = "requests of batches leave a place to other requests of their API key"
        raise ApiException(ApiError(429, "rate_limit_error", "too_many_requests", text, retry_after_s=1))


class BodyReader(HttpMiddleware):
    """Read request bodies whole before the application runs; their bytes stay reserved until the response is complete.

    The body of a request without a route is not read, as its response does not depend on it. A compressed body is decoded; its
    decoded bytes count against both limits before the next ones are decoded. A body that is not declared as JSON is read as
    JSON, as `curl -d` sends it; but not from a web page of another origin: browsers send it to any server without a preflight.

    max_bytes: of one body. timeout_s: until it has arrived. budget: the bytes of the bodies of all requests in flight.
    retry_after_s: called when the budget is exhausted.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout_s: float, budget: ByteBudget, retry_after_s: Callable[[], int]
    ) -> None:
        super().__init__(app)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._budget, self._retry_after_s = budget, retry_after_s

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in _WITHOUT_BODY or (facts := facts_of(scope)) is None:
            await self._app(scope, receive, send)
            return
        with self._budget.reserve(RequestContext.of(scope).tenant) as reservation:
            try:
                self._check_length(scope, reservation)
                encoding = content_encoding(scope["headers"])
                _declare_json(scope, takes_forms=facts.takes_forms)
                body = await self._read(receive, reservation)
                if encoding is not None and body:
                    body = await self._decode(encoding, body, reservation)
                    encoded = (b"content-encoding", b"content-length")
                    others = [pair for pair in scope["headers"] if pair[0] not in encoded]
                    scope["headers"] = [*others, (b"content-length", b"%d" % len(body))]
                whole = BufferedReceive(body, receive)
                del body  # the application releases it
            except ApiException as error:
                rejected = error
            else:
                await self._app(scope, whole, send)
                return
        headers = {**_CLOSE, **(rejected.headers or {})}
        await error_response(rejected.api_error, scope, headers)(scope, receive, send)

    def _check_length(self, scope: Scope, reservation: ByteReservation) -> None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                if int(value) > self._max_bytes:
                    raise self._too_large(int(value))
                if not reservation.has_room(int(value)):
                    raise self._budget_exhausted()

    async def _read(self, receive: Receive, reservation: ByteReservation) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnected
                    part = message.get("body", b"")
                    if len(body) + len(part) > self._max_bytes:
                        raise self._too_large(len(body) + len(part))
                    if not reservation.grow(len(part)):
                        raise self._budget_exhausted()
                    body += part
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            text = f"the body did not arrive within {self._timeout_s:g} s; send it faster"
            raise ApiException(ApiError(408, "timeout_error", "body_timeout", text)) from None

    async def _decode(self, encoding: str, body: bytes, reservation: ByteReservation) -> bytes:
        parts, decoded = decoded_parts(encoding, body), bytearray()
        while part := await asyncio.to_thread(next, parts, b""):
            if len(decoded) + len(part) > self._max_bytes:
                raise self._too_large(len(decoded) + len(part), "decoded body")
            if not reservation.grow(len(part)):
                raise self._budget_exhausted()
            decoded += part
        reservation.release()
        reservation.grow(len(decoded))
        return bytes(decoded)

    def _too_large(self, size: int, subject: str = "body") -> ApiException:
        text = f"the {subject} has {size} bytes or more, and the limit is {self._max_bytes}; send less"
        return ApiException(ApiError(413, "invalid_request_error", "body_too_large", text))

    def _budget_exhausted(self) -> ApiException:
        most = self._budget.max_bytes
        text = f"with this body all requests in flight would have more than {most} bytes"
        if self._budget.is_shared:
            text += ", or those of this key's tenant more than its share"
        text += "; try again later"
        return ApiException(
            ApiError(429, "rate_limit_error", "too_many_bytes", text, retry_after_s=self._retry_after_s())
        )


class BufferedReceive:
    """A `receive` that returns the body once, then the messages after it, for example a disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        """Return the next message."""
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _declare_json(scope: Scope, *, takes_forms: bool) -> None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    kind = _first_header(headers, b"content-type")
    plain = kind.partition(b";")[0].strip().lower()
    if plain.endswith((b"/json", b"+json")):
        return
    if _is_cross_origin(headers):
        shown = repr(kind.decode("latin-1"))[:80] if kind else "missing"
        text = f"the content type of a cross-origin request must be application/json, and it is {shown}"
        raise ApiException(ApiError(415, "invalid_request_error", "unsupported_media_type", text))
    if plain == b"multipart/form-data" and takes_forms:
        return
    others = [pair for pair in headers if pair[0] != b"content-type"]
    scope["headers"] = [*others, (b"content-type", b"application/json")]


def _is_cross_origin(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a page of another origin sent a POST request: browsers send the page's origin with each."""
    if _first_header(headers, b"sec-fetch-site") in (b"cross-site", b"same-site"):
        return True
    origin = _first_header(headers, b"origin")
    return bool(origin) and origin.partition(b"://")[2] != _first_header(headers, b"host")


def _first_header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for other, value in headers if other == name), b"")


ENCODINGS: Final = ("gzip", "deflate", "zstd")
"""The encodings that are decoded, as the Accept-Encoding header lists them."""

PART_BYTES: Final = 1 << 18
"""Most bytes of a decoded part."""

_SLICE_BYTES: Final = 1 << 16  # fed at once: decompressors copy input that they have not used yet
_MAX_MEMBERS: Final = 1000  # gzip members or zstd frames of a body, since each costs a new decompressor
_MAX_WINDOW_LOG: Final = 23  # 8 MiB, the largest window that RFC 9659 allows for zstd over HTTP
_ZLIB_FORMAT, _RAW_DEFLATE, _GZIP_FORMAT = 15, -15, 31  # zlib's wbits


def content_encoding(headers: Sequence[tuple[bytes, bytes]]) -> str | None:
    """Return the encoding that a body has to be decoded from, or None if the body is not encoded.

    Raises `ApiException` with status 415 for an unknown encoding, and for several encodings on top of each other.
    """
    values = b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1")
    encodings = [name for name in (part.strip().lower() for part in values.split(",")) if name not in ("", "identity")]
    if not encodings:
        return None
    encoding = "gzip" if encodings[0] == "x-gzip" else encodings[0]
    if len(encodings) == 1 and encoding in ENCODINGS:
        return encoding
    message = (
        f"content-encoding is {values[:80]!r}; send one of {', '.join(ENCODINGS)}, or the body without an encoding"
    )
    refused = ApiException(ApiError(415, "invalid_request_error", "unsupported_content_encoding", message))
    refused.headers = {"accept-encoding": ", ".join(ENCODINGS)}
    raise refused


def decoded_parts(encoding: str, body: bytes) -> Iterator[bytes]:
    """Yield the decoded content of a body, of all gzip members or zstd frames, in parts of at most `PART_BYTES`.

    Memory beside the parts is bounded by the decompressor's window. Raises `ApiException` with status 400 for a body that is
    damaged, incomplete, or followed by other data.
    """
    decompressors, error_type = _decompressors(encoding, body)
    position, max_members = 0, 1 if encoding == "deflate" else _MAX_MEMBERS
    for _ in range(max_members):
        decompressor = decompressors()
        while not decompressor.eof:
            data = body[position : position + _SLICE_BYTES] if decompressor.needs_input else b""
            position += len(data)
            try:
                part = decompressor.decompress(data, PART_BYTES)
            except error_type as error:
                raise _broken(encoding, str(error)) from None
            if part:
                yield part
            elif position == len(body) and not data and decompressor.needs_input and not decompressor.eof:
                raise _broken(encoding, "it ends too early")
        position -= len(decompressor.unused_data)
        if position == len(body):
            return
    raise _broken(encoding, f"other data follow after {max_members} parts" if max_members > 1 else "other data follow")


def _decompressors(encoding: str, body: bytes) -> tuple[Callable[[], Any], type[Exception]]:
    """Return a factory of decompressors, which have the interface of zstd's, and the type of their errors."""
    if encoding == "zstd":  # imported late, since few clients send it
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _MAX_WINDOW_LOG}
        return lambda: zstd.ZstdDecompressor(options=options), zstd.ZstdError
    # HTTP's deflate is zlib's format, but some clients send raw deflate data.
    is_zlib = len(body) >= 2 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
    wbits = _GZIP_FORMAT if encoding == "gzip" else _ZLIB_FORMAT if is_zlib else _RAW_DEFLATE
    return lambda: _ZlibDecompressor(wbits), zlib.error


class _ZlibDecompressor:
    def __init__(self, wbits: int) -> None:
        self._zlib = zlib.decompressobj(wbits)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)


def _broken(encoding: str, reason: str) -> ApiException:
    message = f"the body is not valid {encoding}, the encoding that its content-encoding header names: {reason}"
    return ApiException(ApiError(400, "invalid_request_error", "invalid_content_encoding", message))
