"""Wait for a condition of another thread, process or task by looking again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONG_S = 60.0  # no wait of a test that passes takes so long


def wait_until(condition: Callable[[], bool], seconds: float = LONG_S) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.005)


async def async_wait_until(condition: Callable[[], bool], seconds: float = LONG_S) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)  # 0 would leave other threads little of Python
