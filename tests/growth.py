"""How a function's time grows with the size of its input: a ratio, which no machine's speed changes."""

from __future__ import annotations

import time
from collections.abc import Callable

LINEAR = 9.0  # fourfold input takes about 4 times as long in linear time, and 16 times in quadratic time


def growth(act: Callable[[int], object], size: int) -> float:
    """Return how many times as long `act` takes for `size` as for a quarter of it, by the shortest of three calls each."""
    quarter_s, whole_s = (min(_thread_seconds(act, number) for _ in range(3)) for number in (size // 4, size))
    return whole_s / quarter_s


def _thread_seconds(act: Callable[[int], object], size: int) -> float:
    begin_s = time.thread_time()
    act(size)
    return time.thread_time() - begin_s
