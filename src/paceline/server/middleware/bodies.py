"""Reads the bodies of requests: whole, within a size and a time, and all of them together within a size, before anything else.

A body that is not declared as JSON is taken for it all the same, as `curl -d` sends it; but not from a web page of
elsewhere, since a browser sends such requests, also those without a body, to any server without asking it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.budget import Budget, Share
from paceline.server.exchange import route_path
from paceline.server.problems import ClientGone, Problem, Refused, response_of

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
_CLOSE = {"connection": "close"}


class Bodies:
    """max_bytes: of a body. timeout_s: for all of it to arrive. budget: of the bodies of all requests that are being answered.

    retry_after_s: asked when the budget does not reach.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, timeout_s: float, budget: Budget, retry_after_s: Callable[[], int]
    ) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s
        self._budget, self._retry_after_s = budget, retry_after_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on. Its share of the budget is its own until it has been answered."""
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY:
            await self._app(scope, receive, send)
            return
        with self._budget.share() as share:
            try:
                self._check_length(scope)
                _declare_json(scope)
                whole = _Replayed(await self._read(receive, share), receive)
            except Refused as refused:
                problem = refused.problem
            else:
                await self._app(scope, whole, send)
                return
        await response_of(problem, route_path(scope), _CLOSE)(scope, receive, send)

    def _check_length(self, scope: Scope) -> None:
        """What is said to be too long is refused before it is sent."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                if int(value) > self._max_bytes:
                    raise self._too_large(int(value))
                if int(value) > self._budget.free_bytes:
                    raise self._no_room()

    async def _read(self, receive: Receive, share: Share) -> bytes:
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    if len(body) + len(part) > self._max_bytes:
                        raise self._too_large(len(body) + len(part))
                    if not share.grow(len(part)):
                        raise self._no_room()
                    body += part
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            text = f"the body did not arrive within {self._timeout_s:g} s; send it faster"
            raise Refused(Problem(408, "timeout_error", "body_timeout", text)) from None

    def _too_large(self, size: int) -> Refused:
        text = f"the body has {size} bytes or more, and {self._max_bytes} are taken; send less"
        return Refused(Problem(413, "invalid_request_error", "body_too_large", text))

    def _no_room(self) -> Refused:
        most = self._budget.max_bytes
        text = f"with this body all requests that are being answered would have more than {most} bytes; try again later"
        return Refused(Problem(429, "rate_limit_error", "too_many_bytes", text, retry_after_s=self._retry_after_s()))


class _Replayed:
    """Hands out the body once, then whatever else comes, such as the end of the client."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _declare_json(scope: Scope) -> None:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    kind = _first(headers, b"content-type")
    if kind.partition(b";")[0].strip().lower().endswith((b"/json", b"+json")):
        return
    if _is_from_elsewhere(headers):
        shown = repr(kind.decode("latin-1"))[:80] if kind else "missing"
        text = f"the content type must be application/json where a web page asks, and it is {shown}"
        raise Refused(Problem(415, "invalid_request_error", "unsupported_media_type", text))
    others = [pair for pair in headers if pair[0] != b"content-type"]
    scope["headers"] = [*others, (b"content-type", b"application/json")]


def _is_from_elsewhere(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a web page sends it that is not this server's own; browsers name the page's origin with every POST."""
    origin = _first(headers, b"origin")
    return bool(origin) and origin.partition(b"://")[2] != _first(headers, b"host")


def _first(headers: list[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name == wanted), b"")
