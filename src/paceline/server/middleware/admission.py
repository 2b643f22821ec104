"""Counts the requests that are being answered; refuses them: 429 where there are too many, 503 before the server ends."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.exchange import route_path
from paceline.server.problems import Draining, Problem, response_of
from paceline.server.service import Service

_UNCOUNTED = frozenset({"/health", "/v1/health", "/health/live", "/health/ready"})


class Admission:
    """max_requests: answered at the same time. While the server drains, what already runs can still be cancelled."""

    def __init__(self, app: ASGIApp, service: Service, max_requests: int) -> None:
        self._app, self._service, self._max_requests = app, service, max_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http" or (path := route_path(scope)) in _UNCOUNTED:
            await self._app(scope, receive, send)
            return
        problem = self._refusal(scope["method"], path)
        if problem is not None:
            await response_of(problem, path, {"connection": "close"})(scope, receive, send)
            return
        with self._service.traffic:
            await self._app(scope, receive, send)

    def _refusal(self, method: str, path: str) -> Problem | None:
        if self._service.is_draining and method == "POST" and not path.startswith("/v1/requests/"):
            return Draining().problem
        count = self._service.traffic.count
        if count < self._max_requests:
            return None
        wait_s = self._service.retry_after_s()
        message = f"{count} requests are being answered, and this server takes no more at once; try again later"
        return Problem(429, "rate_limit_error", "too_many_requests", message, retry_after_s=wait_s)
