"""Requests whose line and headers are too long are refused with 431."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.exchange import route_path
from paceline.server.problems import Problem, response_of


class HeaderLimit:
    """max_bytes: of path, query and headers together."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] == "http" and (size := _size(scope)) > self._max_bytes:
            message = f"path and headers have {size} bytes, and {self._max_bytes} are taken; send less"
            problem = Problem(431, "invalid_request_error", "headers_too_large", message)
            await response_of(problem, route_path(scope), {"connection": "close"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _size(scope: Scope) -> int:
    path = scope.get("raw_path") or scope["path"].encode()
    return len(path) + len(scope["query_string"]) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
