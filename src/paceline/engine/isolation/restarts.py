"""How often a worker may be started anew. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """At most max_restarts within window_s seconds; each waits, the first one first_wait_s, every further one twice that."""

    max_restarts: int = 5
    window_s: float = 60.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0


class Restarts:
    """Counts them. num_all: since the beginning."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self.num_all = 0
        self._times: deque[float] = deque()

    def next_at(self, now_s: float) -> float | None:
        """The worker has died: when the next one may be started, which counts; None where there were too many."""
        limits = self.limits
        while self._times and self._times[0] <= now_s - limits.window_s:
            self._times.popleft()
        if len(self._times) >= limits.max_restarts:
            return None
        wait_s = min(limits.longest_wait_s, limits.first_wait_s * 2.0 ** len(self._times))
        self._times.append(now_s)
        self.num_all += 1
        return now_s + wait_s
