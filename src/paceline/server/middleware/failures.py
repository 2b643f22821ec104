"""The innermost: what no route foresaw becomes an answer without a traceback, and a log entry with one."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.exchange import Exchange, route_path
from paceline.server.problems import problem_of, response_of

_log = logging.getLogger("paceline.server")


class Failures:
    """Answers 500 where nothing was answered yet; an answer that had begun is cut off, so that its client sees it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            exchange = Exchange.of(scope)
            _log.exception("request %s failed in a way that nobody foresaw", exchange.request_id)
            if exchange.status:
                raise
            await response_of(problem_of(error), route_path(scope))(scope, receive, send)
