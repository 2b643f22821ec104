"""How a function's time grows with the size of its input: a ratio, which no machine's speed changes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LINEAR = 9.0  # fourfold input takes about 4 times as long in linear time, and 16 times in quadratic time


def growth(act: Callable[[int], object], size: int) -> float:
    """Return how many times as long `act` takes for `size` as for a quarter of it, by the shortest calls of each.

    There are three calls each, and up to twelve while the ratio is not that of linear time: the shortest of more calls is nearer
    to the time without others' work.
    """
    quarter_s = whole_s = math.inf
    for number in range(12):
        quarter_s = min(quarter_s, _thread_seconds(act, size // 4))
        whole_s = min(whole_s, _thread_seconds(act, size))
        if number >= 2 and whole_s < LINEAR * quarter_s:
            break
    return whole_s / quarter_s


def _thread_seconds(act: Callable[[int], object], size: int) -> float:
    begin_s = time.thread_time()
    act(size)
    return time.thread_time() - begin_s
