"""Which request do replicas die of? Requests that were on several in a row are tried alone, and the one that is at fault ends.

    routed ──died──> suspected ──died again, without tokens in between──> alone ──died once more──> at fault
      ^                  │                                                  │
      └──── tokens in `PROBATION_TICKS` bursts on the next replica ─────────┘

A replica dies for many reasons, and of most of them its requests know nothing: so the first time all go on elsewhere at once.
What a request brought since it came to a replica shows that it is beyond the place at which the one before died. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from paceline.engine.worker.blame import PROBATION_TICKS

MAX_DEATHS: Final = 3
"""Replicas that a request may have been on when they died, one after the other, before it ends. At the last it was alone."""


class Suspects:
    """Requests by key; those that are not known here are not suspected."""

    def __init__(self) -> None:
        self._num_deaths: dict[int, int] = {}
        self._num_good: dict[int, int] = {}
        self._alone: int | None = None
        self._waiting: deque[int] = deque()

    def may_go(self, key: int) -> bool:
        """Return whether a request may be sent to a replica now; if not, `next` returns it later."""
        if self._num_deaths.get(key, 0) < MAX_DEATHS - 1 or self._alone == key:
            return True
        if self._alone is None:
            self._alone = key
            return True
        if key not in self._waiting:
            self._waiting.append(key)
        return False

    def brought(self, key: int) -> None:
        """Note that a request has brought tokens."""
        if key in self._num_deaths:
            self._num_good[key] = self._num_good.get(key, 0) + 1
            if self._num_good[key] >= PROBATION_TICKS:
                self.forget(key)

    def died(self, keys: Iterable[int]) -> int | None:
        """Suspect the requests that a dead replica had begun, and return the one that is at fault, if there is one."""
        guilty = None
        for key in keys:
            self._num_good.pop(key, None)
            self._num_deaths[key] = self._num_deaths.get(key, 0) + 1
            if self._alone == key and self._num_deaths[key] >= MAX_DEATHS:
                guilty = key
        return guilty

    def forget(self, key: int) -> None:
        """Suspect a request no longer: it brought tokens, waits for its reader, or has ended."""
        self._num_deaths.pop(key, None)
        self._num_good.pop(key, None)
        if self._alone == key:
            self._alone = None
        if key in self._waiting:
            self._waiting.remove(key)

    def next(self) -> int | None:
        """Return a request that may be sent to a replica now, of those that waited."""
        return self._waiting.popleft() if self._alone is None and self._waiting else None
