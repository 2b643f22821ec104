"""How fast requests come to their end, and from that, how long to wait until there is room again. On the event loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

LEAST_S, MOST_S = 1, 60
"""What clients are told to wait is between these; some take no more for an answer."""

_WINDOW_S = 60.0
_MOST_ENDS = 1024  # that are remembered


class Turnover:
    """Told of every request that begins and ends. Remembers a minute, and nothing of before it was last idle."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._busy_since = 0.0
        self._ends: deque[float] = deque(maxlen=_MOST_ENDS)

    def began(self, number: int) -> None:
        """So many requests more are to be answered."""
        if not self._num_open:
            self._busy_since = self._clock()
            self._ends.clear()
        self._num_open += number

    def ended(self, number: int) -> None:
        """So many of them are over, however that was."""
        self._num_open -= number
        self._ends.extend([self._clock()] * min(number, _MOST_ENDS))

    def wait_s(self, number: int) -> int:
        """How long it takes until so many more have ended, by what ended lately; whole seconds from 1 to 60.

        Where nothing has, as long as that has been so already.
        """
        now = self._clock()
        if not self._num_open:
            return LEAST_S
        since = max(self._busy_since, now - _WINDOW_S)
        if len(self._ends) == _MOST_ENDS:
            since = max(since, self._ends[0])
        num_ended = sum(end > since for end in self._ends)
        return _told((now - since) * (number / num_ended if num_ended else 1))


def rest_s(share: float, elapsed_s: float) -> int:
    """How long work of which a share (0 to 1) is done after `elapsed_s` will go on; whole seconds from 1 to 60."""
    return _told(elapsed_s * (1 - share) / share) if share > 0 else _told(elapsed_s)


def _told(seconds: float) -> int:
    return math.ceil(min(max(seconds, LEAST_S), MOST_S))
