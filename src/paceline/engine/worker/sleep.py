"""When a worker that no request needs is let go, and that another one is to be started for the next request. Pure."""

from __future__ import annotations

import math
from typing import Final

LEAVE_S: Final = 10.0  # for a worker to leave by itself, before it is killed


class Sleep:
    """idle_s: how long nothing may need the worker before it is let go; None: for ever. Times are of one clock."""

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = math.inf if idle_s is None else idle_s
        self._used_s = math.inf  # nothing is idle before it has been used
        self._leave_by_s = math.inf
        self.is_asleep = False

    def used(self, now_s: float) -> None:
        """Note that the worker became ready, or that something needs it."""
        self._used_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether an idle worker is to be let go."""
        return not self.is_asleep and now_s >= self._used_s + self._idle_s

    def is_late(self, now_s: float) -> bool:
        """Whether a worker that was let go takes too long to leave."""
        return now_s >= self._leave_by_s

    def next_s(self) -> float:
        """When one of the two comes true, if nothing happens before."""
        return self._leave_by_s if self.is_asleep else self._used_s + self._idle_s

    def begin(self, now_s: float) -> None:
        """Note that the worker was told to leave."""
        self.is_asleep, self._leave_by_s = True, now_s + LEAVE_S

    def left(self) -> None:
        """Note that the worker is gone, or was killed."""
        self._leave_by_s = math.inf

    def end(self) -> None:
        """Another worker is started."""
        self.is_asleep, self._used_s, self._leave_by_s = False, math.inf, math.inf
