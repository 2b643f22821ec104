"""Every request has an id: its X-Request-Id where it has a good one, else a new one; it is in every answer."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.server.exchange import Exchange

_GOOD = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """The outermost: it makes the `Exchange`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given(scope) or secrets.token_hex(12)
        exchange = Exchange(request_id)
        exchange.enter(scope)
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _given(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _GOOD.fullmatch(value):
            return str(value.decode())
    return None
