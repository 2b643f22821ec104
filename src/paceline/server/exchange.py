"""One HTTP request and its answer, as middleware and routes see it together. On the event loop."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

from paceline.streaming import FinishReason, Usage

_KEY = "paceline.exchange"


@dataclass(slots=True)
class Exchange:
    """What is known of it so far. tenant: of the key that opened the server; endings: of the answers that it asked for."""

    request_id: str
    tenant: str = ""
    status: int = 0
    endings: list[tuple[FinishReason, Usage]] = field(default_factory=list)

    @classmethod
    def of(cls, scope: Scope | MutableMapping[str, Any]) -> Exchange:
        """The one of this scope; made where no middleware did."""
        found = scope.get(_KEY)
        if isinstance(found, Exchange):
            return found
        made = scope[_KEY] = Exchange(request_id="")
        return made

    def enter(self, scope: Scope) -> None:
        """From now on it is the scope's."""
        scope[_KEY] = self


def route_path(scope: Scope) -> str:
    """The path without the prefix that the server has."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    if root and (path == root or path.startswith(root + "/")):
        return path[len(root) :] or "/"
    return path
