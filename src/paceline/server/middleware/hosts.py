"""Refuses requests that were sent to another name than the server's.

A web page can have its own name lead to this machine, and a browser then takes the server for the page's own: it sends what
the page asks, and lets it read the answers. The name is still the page's, and stands in the Host header. Addresses do not
change what they lead to, so they are fine, and so is localhost, which browsers never ask anybody about.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.exchange import route_path
from paceline.server.problems import Problem, clean, response_of

ANY = "*"
_LOCAL = ("localhost", "*.localhost")
_HOST = re.compile(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")


class Hosts:
    """names: those that are taken beside localhost and addresses; `*.name` stands for all below it, `*` for any."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        given = [_bare(name) for name in (*_LOCAL, *names)]
        self._takes_any = ANY in given
        self._names = frozenset(name for name in given if not name.startswith("*"))
        self._ends = tuple(name[1:] for name in given if name.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on; one without a name comes from no browser."""
        if scope["type"] == "http" and not self._takes_any:
            for name, value in scope["headers"]:
                if name == b"host" and not self._takes(host := _host(value.decode("latin-1"))):
                    path = route_path(scope)
                    await response_of(_problem(host), path, {"connection": "close"})(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _takes(self, host: str) -> bool:
        return host in self._names or host.endswith(self._ends) or not host or _is_address(host)


def _host(header: str) -> str:
    """The name or address in a Host header, without its port; the whole of it where it is no such thing."""
    found = _HOST.fullmatch(header.strip())
    return _bare((found[1] or found[2] or "") if found else header)


def _bare(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _problem(host: str) -> Problem:
    message = (
        f"this server does not answer to the name {host[:200]!r}; start it with --allowed-hosts NAME, or with an API key, "
        "or ask it by its IP address or as localhost"
    )
    return Problem(403, "permission_error", "host_not_allowed", clean(message))
