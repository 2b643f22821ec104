"""Opens the server to those that have one of its keys. Keys are compared in constant time, every one of them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.exchange import Exchange, route_path
from paceline.server.problems import Problem, response_of
from paceline.server.settings import ApiKey

PUBLIC = frozenset({"/", "/health", "/v1/health", "/health/live", "/health/ready", "/docs", "/openapi.json"})
"""Routes that ask for no key: they say nothing of anybody's requests."""

_MISSING = Problem(
    401,
    "authentication_error",
    "invalid_api_key",
    "an API key is missing or not one of this server's; send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
)


class ApiKeys:
    """keys: none means that everybody may."""

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey]) -> None:
        self._app = app
        self._keys = [(_digest(key.secret.encode()), key.tenant) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http" or not self._keys:
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        tenant = self._tenant(_given(scope))
        if tenant is not None:
            Exchange.of(scope).tenant = tenant
        elif path not in PUBLIC:
            await response_of(_MISSING, path, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _tenant(self, given: bytes) -> str | None:
        """Of the key that this is; looks at all of them whichever it is. Digests, so that lengths tell nothing either."""
        digest, found = _digest(given), None
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def _given(scope: Scope) -> bytes:
    """What was sent as a key; empty where nothing was, which is no key."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    given = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
    scheme, _, rest = given.partition(b" ")
    return rest.strip() if scheme.lower() == b"bearer" else given


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()
