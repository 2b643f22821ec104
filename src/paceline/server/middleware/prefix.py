"""The prefix of all routes: what asks for something outside of it finds nothing."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.problems import Problem, response_of


class Prefix:
    """prefix: begins with a slash, ends without one; empty: none."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on; routes and links follow the scope's root_path."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, prefix = scope["path"], self._prefix
        if path != prefix and not path.startswith(prefix + "/"):
            problem = Problem(404, "not_found_error", "not_found", "Not Found")
            await response_of(problem, path)(scope, receive, send)
            return
        scope["root_path"] = prefix
        await self._app(scope, receive, send)
