"""The innermost: what no route foresaw becomes an answer without a traceback, and a log entry with one."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.exchange import Exchange, route_path
from paceline.server.problems import problem_of, response_of

_log = logging.getLogger("paceline.server")


class Failures:
    """Answers 500 where nothing was answered yet; an answer that had begun is cut off, so that its client sees it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            _log.exception("request %s failed in a way that nobody foresaw", Exchange.of(scope).request_id)
            if has_begun:
                raise
            await response_of(problem_of(error), route_path(scope))(scope, receive, send)
