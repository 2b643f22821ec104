"""Time: the protocol that scheduling and the engine's core read it through, and the clock of a running engine."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock; tests use `ManualClock`."""

    def now(self) -> float:
        """Return the seconds since some fixed moment."""


class MonotonicClock:
    """`time.perf_counter`: its resolution is far below the length of a tick."""

    now = staticmethod(time.perf_counter)
