"""A clock that advances only by calls."""

from __future__ import annotations

from paceline import validation


class ManualClock:
    """A `Clock` for tests without sleeps."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the current time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self._now_s += validation.number("seconds", seconds, 0)
