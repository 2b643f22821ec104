"""What the events of an engine add up to: the state that `paceline top` shows. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

_MOST_COLUMNS: Final = 1024

Members = Mapping[str, Any]


@dataclass(slots=True)
class TopState:
    """The members of the latest snapshot with all updates since. columns: the last ticks; is_over: the stream has ended."""

    members: dict[str, Any] = field(default_factory=dict)
    columns: deque[Members] = field(default_factory=lambda: deque(maxlen=_MOST_COLUMNS))
    is_over: bool = False

    def take(self, name: str, members: Members) -> None:
        """Take in an event."""
        if name == "end":
            self.is_over = True
            return
        if name == "snapshot":
            self.members = {}
            self.columns.clear()
        rest = dict(members)
        self.columns.extend(rest.pop("ticks", ()))
        rest.pop("marks", None)
        self.members |= rest

    def get(self, name: str) -> Any:
        """Return a member that is an object; an empty one before it came."""
        found = self.members.get(name)
        return {} if found is None else found
