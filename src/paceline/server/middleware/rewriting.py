"""Rewrite requests: HEAD becomes GET, and a path loses its trailing slash. On the event loop."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.routes import route_path
from paceline.server.web_page import WebPage


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
