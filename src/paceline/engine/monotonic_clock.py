"""The clock of a running engine."""

from __future__ import annotations

import time


class MonotonicClock:
    """`time.perf_counter`: never goes back, and is fine enough for a tick."""

    now = staticmethod(time.perf_counter)
