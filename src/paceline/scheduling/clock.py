"""Where time comes from: the only clock that scheduling and the engine's core know."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Seconds since some moment."""
