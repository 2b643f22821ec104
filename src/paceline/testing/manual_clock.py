"""A clock that goes when it is told."""

from __future__ import annotations

from paceline import validation


class ManualClock:
    """Time for tests without sleeps; a `Clock` of the engine's."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds, as far as `advance` has come."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Lets so much time pass."""
        self._now_s += validation.number("seconds", seconds, 0)
