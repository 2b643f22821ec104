"""How threads and event loops wait for a channel without costing the engine anything while nobody does.

Who waits leaves a waker in a list that the channel's lock guards; who changes something takes the list and calls the
wakers after letting the lock go. A waker never blocks, never raises, and may be called when nobody waits any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

Waker = Callable[[], None]


class Waiters:
    """Those who wait for one thing to become true of a channel; each has a waker."""

    __slots__ = ("_lock", "wakers")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.wakers: list[Waker] = []

    def take(self) -> list[Waker]:
        """Everybody who waits; the caller holds the lock, and calls `wake` without it."""
        wakers, self.wakers = self.wakers, []
        return wakers

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Blocks the thread until `is_ready`, asked under the lock, or until the time is over; answers which."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            bell = threading.Lock()
            bell.acquire()
            if self._join(is_ready, bell.release):
                return True
            left = -1 if deadline is None else min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
            if not bell.acquire(timeout=left):
                return self._leave(is_ready, bell.release)

    async def wait_async(self, is_ready: Callable[[], bool]) -> None:
        """As `wait`, for an event loop and without a limit."""
        bell = _bell_of_this_loop()
        while True:
            future, waker = bell.expect()
            if self._join(is_ready, waker):
                return
            try:
                await future
            except (
                asyncio.CancelledError
            ):  # not GeneratorExit: that may be the garbage collector, which must take no lock
                self._leave(is_ready, waker)
                raise

    def _join(self, is_ready: Callable[[], bool], waker: Waker) -> bool:
        with self._lock:
            if is_ready():
                return True
            self.wakers.append(waker)
            return False

    def _leave(self, is_ready: Callable[[], bool], waker: Waker) -> bool:
        with self._lock:
            if waker in self.wakers:
                self.wakers.remove(waker)
            return is_ready()


def wake(wakers: Iterable[Waker]) -> None:
    """Calls each."""
    for waker in wakers:
        waker()


class LoopBell:
    """Wakes the coroutines of one event loop, from any thread.

    Calling a loop from another thread costs a write to its pipe. All that is due when the loop comes to answer is answered
    at once, so the streams of a tick cost one write together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._due: deque[asyncio.Future[None]] = deque()
        self._has_rung = False

    def belongs_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether it wakes this loop's coroutines."""
        return self._loop() is loop

    def expect(self) -> tuple[asyncio.Future[None], Waker]:
        """Something to await, and what ends the waiting. On the loop's thread."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return future, partial(self._ring, future)

    def _ring(self, future: asyncio.Future[None]) -> None:
        self._due.append(future)
        if self._has_rung:  # read after the append: the answer to that ring will find the future
            return
        self._has_rung = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop is closed: there is no reader any more
            self._due.clear()
            self._has_rung = False

    def _answer(self) -> None:
        self._has_rung = False
        while self._due:
            future = self._due.popleft()
            if not future.done():
                future.set_result(None)


_bells = threading.local()


def _bell_of_this_loop() -> LoopBell:
    loop = asyncio.get_running_loop()
    bell: LoopBell | None = getattr(_bells, "bell", None)
    if bell is None or not bell.belongs_to(loop):
        bell = _bells.bell = LoopBell(loop)
    return bell
