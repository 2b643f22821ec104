"""What middleware and routes share of one HTTP request: context, route, names of headers. On the event loop."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from paceline.streaming import FinishReason, Usage

_KEY = "paceline.request_context"


@dataclass(slots=True)
class RequestContext:
    """State of one HTTP request. tenant: owner of its API key; finished: finish reason and usage of each generation."""

    request_id: str
    tenant: str = ""
    status: int = 0
    finished: list[tuple[FinishReason, Usage]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope | MutableMapping[str, Any]) -> RequestContext:
        """Return the context of a scope; create it if no middleware has."""
        found = scope.get(_KEY)
        if isinstance(found, RequestContext):
            return found
        made = scope[_KEY] = RequestContext(request_id="")
        return made

    def attach(self, scope: Scope) -> None:
        """Make this the context of a scope."""
        scope[_KEY] = self


def route_path(scope: Scope) -> str:
    """Return the path without the server's prefix."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :] or "/"
    return path


class HeaderName(bytes):
    """A header name that is sent as spelled. HTTP ignores its case; uvicorn sends all others in lower case."""

    __slots__ = ()

    def lower(self) -> HeaderName:
        """Return itself: uvicorn calls this before it writes a name."""
        return self
