"""Decide who may call the server: route prefix, Host header, CORS, API keys. On the event loop."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.request import cache_scope
from paceline.server.api_errors import ApiError, clean_message
from paceline.server.key_accounts import key_digest
from paceline.server.request_context import HttpMiddleware, RequestContext, SpelledHeader
from paceline.server.routes import error_response, facts_of
from paceline.server.service import Server
from paceline.server.settings import ApiKey, has_tenants

ANY, LOCALHOST = "*", "localhost"


class RoutePrefix(HttpMiddleware):
    """Serve all routes under `prefix`, which begins with a slash and ends without one; 404 for other paths.

    It sets the scope's root_path, which routes and links follow.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        super().__init__(app)
        self._prefix = prefix

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, prefix = scope["path"], self._prefix
        if path != prefix and not path.startswith(prefix + "/"):
            api_error = ApiError(404, "not_found_error", "not_found", "Not Found")
            await error_response(api_error, scope)(scope, receive, send)
            return
        if path == prefix and scope["method"] in ("GET", "HEAD"):  # the links of the web page are relative
            await RedirectResponse(f"{prefix}/", 308)(scope, receive, send)
            return
        scope["root_path"] = prefix
        await self._app(scope, receive, send)


_LOCAL_PATTERNS = ("localhost", "*.localhost")
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")


class AllowedHosts(HttpMiddleware):
    """Reject requests (403) if the Host header is neither localhost, nor an IP address, nor among `names`.

    This guards against DNS rebinding: a web page can let its own name resolve to this machine, and browsers then take the
    server for the page's own origin and let the page read the responses. The Host header still holds the page's name.
    A request without a Host header does not come from a browser. names: `*.name`: all names below it; `*`: any.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        super().__init__(app)
        given = [_normalized(name) for name in (*_LOCAL_PATTERNS, *names)]
        self._allows_any = ANY in given
        self._names = frozenset(name for name in given if not name.startswith("*"))
        self._suffixes = tuple(name[1:] for name in given if name.startswith("*."))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._allows_any:
            for name, value in scope["headers"]:
                if name == b"host" and not self._allows(host := _host_name(value.decode("latin-1"))):
                    response = error_response(_host_not_allowed(host), scope, {"connection": "close"})
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        return host in self._names or host.endswith(self._suffixes) or not host or _is_address(host)


def _host_name(header: str) -> str:
    """Return a Host header's name or address without its port; a malformed header unchanged."""
    parts = _HOST.fullmatch(header.strip())
    return _normalized((parts[1] or parts[2] or "") if parts else header)


def _normalized(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_not_allowed(host: str) -> ApiError:
    message = (
        f"the host name {host[:200]!r} is not allowed; start the server with --allowed-hosts NAME or with an API key, "
        "or use its IP address or localhost"
    )
    return ApiError(403, "permission_error", "host_not_allowed", clean_message(message))


_LOCAL_ORIGINS = frozenset(("localhost", "127.0.0.1", "::1"))
_LIMITS = [f"x-ratelimit-{name}-{kind}" for kind in ("requests", "tokens") for name in ("limit", "remaining", "reset")]
_EXPOSED_HEADERS = ", ".join(["x-request-id", "retry-after", *_LIMITS])
_SPELLED = {
    f"access-control-{name.lower()}".encode(): SpelledHeader(f"Access-Control-{name}".encode())
    for name in ("Allow-Origin", "Allow-Credentials", "Allow-Methods", "Allow-Headers", "Expose-Headers", "Max-Age")
}
_MAX_AGE_S = "600"  # how long a browser may cache a preflight response


class Cors(HttpMiddleware):
    """Let browsers call the server from pages of other origins; respond to preflight requests without a key.

    An origin is echoed only if it is allowed; `Vary: Origin` keeps caches from mixing responses up.

    origins: `*`: any; `localhost`: every port of this machine. methods, headers: for preflights; `*`: all headers that a page
    requests. credentials: whether pages may send cookies and read the response.
    """

    def __init__(
        self, app: ASGIApp, origins: Sequence[str], methods: Sequence[str], headers: Sequence[str], *, credentials: bool
    ) -> None:
        super().__init__(app)
        self._allows_any, self._allows_local = ANY in origins, LOCALHOST in origins
        self._origins = frozenset(origin.lower() for origin in origins) - {ANY, LOCALHOST}
        self._methods, self._headers, self._credentials = ", ".join(methods), headers, credentials

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        requested = dict(scope["headers"])
        origin = requested.get(b"origin", b"").decode("latin-1")
        if scope["method"] == "OPTIONS":
            requested_headers = requested.get(b"access-control-request-headers", b"").decode("latin-1")
            await self._send_preflight(send, origin, requested_headers)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add_origin(MutableHeaders(scope=message), origin)
                message["headers"] = _spelled(message["headers"])
            await send(message)

        await self._app(scope, receive, send_with_headers)

    async def _send_preflight(self, send: Send, origin: str, requested: str) -> None:
        message: Message = {"type": "http.response.start", "status": 200, "headers": []}
        headers = MutableHeaders(scope=message)
        self._add_origin(headers, origin)
        headers["access-control-allow-credentials"] = "true" if self._credentials else "false"
        headers["access-control-allow-methods"] = self._methods
        # A wildcard covers neither Authorization nor requests with credentials, so requested headers are named.
        headers["access-control-allow-headers"] = (
            requested if ANY in self._headers and requested else ", ".join(self._headers)
        )
        headers.add_vary_header("Access-Control-Request-Headers")
        headers["access-control-max-age"] = _MAX_AGE_S
        headers["content-length"] = "0"
        message["headers"] = _spelled(message["headers"])
        await send(message)
        await send({"type": "http.response.body", "body": b""})

    def _add_origin(self, headers: MutableHeaders, origin: str) -> None:
        if self._allows_any and not self._credentials:
            headers["access-control-allow-origin"] = ANY
        else:
            headers.add_vary_header("Origin")
            if not self._allows(origin):
                return
            headers["access-control-allow-origin"] = origin
        if self._credentials:
            headers["access-control-allow-credentials"] = "true"
        headers["access-control-expose-headers"] = _EXPOSED_HEADERS

    def _allows(self, origin: str) -> bool:
        is_local = self._allows_local and _is_local_origin(origin)
        return bool(origin) and (self._allows_any or origin.lower() in self._origins or is_local)


def _spelled(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(_SPELLED.get(name, name), value) for name, value in headers]


def _is_local_origin(origin: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.hostname in _LOCAL_ORIGINS


def may_be_forged(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a web page of another origin may have made a browser send this GET request.

    Any page can: the address of an image is enough, and the page's script needs no right to read the response. A GET that may
    be forged therefore changes nothing in the server. A request is not forged in three cases:

    - It has a header that a browser sends to another origin only after a preflight: X-Requested-With, X-Api-Key, a bearer token.
    - It comes from this server's own page, by Sec-Fetch-Site, Origin or Referer, which no page can set. Browsers leave
      Sec-Fetch-Site out over plain HTTP, except to this machine.
    - It comes from a program: all browsers begin their User-Agent with Mozilla, which a page can change only after a preflight.
    """
    values = dict(headers)
    if b"x-requested-with" in values or b"x-api-key" in values:
        return False
    if values.get(b"authorization", b"")[:7].lower() == b"bearer ":  # browsers add Basic credentials by themselves
        return False
    site, pages = values.get(b"sec-fetch-site"), [values[name] for name in (b"origin", b"referer") if name in values]
    if site is not None:
        return site != b"same-origin"
    if pages:
        return not all(_host_of_page(page) == values.get(b"host") for page in pages)
    return values.get(b"user-agent", b"").startswith(b"Mozilla/")


def _host_of_page(address: bytes) -> bytes:
    return address.partition(b"://")[2].partition(b"/")[0]


_INVALID_KEY = ApiError(
    401,
    "authentication_error",
    "invalid_api_key",
    "an API key is missing or not one of this server's; send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
)


class ApiKeys(HttpMiddleware):
    """Require a key (401), except for public routes, and note the key's tenant. If there are no keys, all requests pass.

    A key without a tenant is an operator's key, as is each key of a server with a single tenant. Without keys every request is
    an operator's. The keys are those of the server's settings at the time of a request. Requests of batches need no
    key, only an account: they fail (401) after their tenant's last key was removed and the server restarted.
    """

    def __init__(self, app: ASGIApp, server: Server) -> None:
        super().__init__(app)
        self._server = server
        self._read(server.settings.api_keys)

    def _read(self, keys: tuple[ApiKey, ...]) -> None:
        self._given = keys
        self._keys = [(key_digest(key.secret), key.tenant) for key in keys]
        self._has_tenants = has_tenants(keys)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        if self._server.settings.api_keys is not self._given:
            self._read(self._server.settings.api_keys)
        if context.is_internal and (context.account is not None or not self._keys):
            with cache_scope(context.tenant):
                await self._app(scope, receive, send)
            return
        if not self._keys:
            context.is_operator = True
        elif (key := self._find(dict(scope["headers"]))) is not None:
            context.key_digest, context.tenant = key
            context.account = self._server.kept.key_accounts.of(context.key_digest)
            context.is_operator = not (self._has_tenants and context.tenant)
            with cache_scope(context.tenant):
                await self._app(scope, receive, send)
            return
        elif (facts := facts_of(scope)) is None or not facts.public:
            await error_response(_INVALID_KEY, scope, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _find(self, headers: dict[bytes, bytes]) -> tuple[bytes, str] | None:
        """Return a key's digest and tenant in constant time: compares all keys, as digests, so that lengths do not leak."""
        given = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
        scheme, _, rest = given.partition(b" ")
        secret = rest.strip() if scheme.lower() == b"bearer" else given
        if not secret:
            return None
        digest = hashlib.sha256(secret).digest()
        matches = [(known, tenant) for known, tenant in self._keys if hmac.compare_digest(known, digest)]
        return matches[-1] if matches else None
