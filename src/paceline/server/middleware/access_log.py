"""One line a request, as JSON, on the logger "paceline.server.access": who asked for what, and what it took. No contents."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.exchange import Exchange

ACCESS_LOGGER = "paceline.server.access"
_log = logging.getLogger(ACCESS_LOGGER)
_MOST_CHARS = 200  # of a path that no route has


class AccessLog:
    """Writes when the answer has been handed over whole, or its client has gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http" or not _log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            line = _line(scope, Exchange.of(scope), time.monotonic() - began)
            _log.info("%s", msgspec.json.encode(line).decode())


def _line(scope: Scope, exchange: Exchange, duration_s: float) -> dict[str, Any]:
    client = scope.get("client")
    line: dict[str, Any] = {
        "time": round(time.time(), 3),
        "request_id": exchange.request_id,
        "client": client[0] if client else None,
        "method": scope["method"][:_MOST_CHARS],
        "route": _route(scope),
        "status": exchange.status,
        "duration_s": round(duration_s, 6),
    }
    if exchange.tenant:
        line["tenant"] = exchange.tenant
    return line | _generated(exchange)


def _route(scope: Scope) -> str:
    """Its pattern, so that lines can be grouped; where there is none, the path, without what it asks."""
    pattern = getattr(scope.get("route"), "path", None)
    path: str = scope["path"] if pattern is None else pattern
    return path[:_MOST_CHARS].encode("utf-8", "replace").decode()


def _generated(exchange: Exchange) -> dict[str, Any]:
    """Tokens of all answers together; of their times the longest."""
    if not exchange.endings:
        return {}
    reasons = dict.fromkeys(reason.value for reason, _ in exchange.endings)
    usages = [usage for _, usage in exchange.endings]
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "cached_tokens": sum(usage.cached_tokens for usage in usages),
        "completion_tokens": sum(usage.completion_tokens for usage in usages),
        "queue_s": round(max(usage.queue_s for usage in usages), 6),
        "prefill_s": round(max(usage.prefill_s for usage in usages), 6),
        "decode_s": round(max(usage.decode_s for usage in usages), 6),
        "finish_reason": ",".join(reasons),
    }
