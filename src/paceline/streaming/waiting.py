"""Waiting for a channel, by threads and event loops, at no cost to the engine while no reader waits.

A reader that waits adds a waker to a list that the channel's lock guards. The engine takes the list when it changes
something, and calls the wakers after releasing the lock. A waker never blocks, and may be called after its reader has left.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

_log = logging.getLogger("paceline.streaming")

Waker = Callable[[], None]


class Waiters:
    """The wakers of all readers that wait for one condition of a channel."""

    __slots__ = ("_lock", "wakers")

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.wakers: list[Waker] = []

    def take(self) -> list[Waker]:
        """Remove and return all wakers. The caller holds the lock, and calls `wake` after releasing it."""
        wakers, self.wakers = self.wakers, []
        return wakers

    def wake_all(self) -> None:
        """Wake each of them, even if waking another one fails; one that was not woken stays for the next call.

        The caller does not hold the lock. Does not raise: a failure is logged after the others were woken.
        """
        with self._lock:
            wakers = self.take()
        failure: Exception | None = None
        for waker in wakers:
            try:
                waker()
            except Exception as error:  # noqa: BLE001 - what fails is one reader's; memory is short, for instance
                failure = error
                with self._lock:
                    self.wakers.append(waker)
        if failure is not None:
            _log.error("a reader could not be woken", exc_info=failure)

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None) -> bool:
        """Block the thread until `is_ready`, called under the lock, or the timeout; return whether it is ready."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            bell = threading.Lock()
            bell.acquire()
            if self.join(is_ready, bell.release):
                return True
            left = -1 if deadline is None else min(max(deadline - time.monotonic(), 0), threading.TIMEOUT_MAX)
            if not bell.acquire(timeout=left):
                return self.leave(is_ready, bell.release)

    async def wait_async(self, is_ready: Callable[[], bool]) -> None:
        """Wait until `is_ready`, on an event loop, without a timeout."""
        bell = _bell_of_this_loop()
        while True:
            future, waker = bell.expect()
            if self.join(is_ready, waker):
                return
            try:
                await future
            except (
                asyncio.CancelledError
            ):  # not GeneratorExit: that may be the garbage collector, which must take no lock
                self.leave(is_ready, waker)
                raise

    def join(self, is_ready: Callable[[], bool], waker: Waker) -> bool:
        """Add a waker unless `is_ready`, called under the lock; return whether it is."""
        with self._lock:
            if is_ready():
                return True
            self.wakers.append(waker)
            return False

    def leave(self, is_ready: Callable[[], bool], waker: Waker) -> bool:
        """Remove a waker; return whether it `is_ready`."""
        with self._lock:
            if waker in self.wakers:
                self.wakers.remove(waker)
            return is_ready()


Condition = tuple[Waiters, Callable[[], bool]]
"""The wakers to join, and a function, called under their lock, that returns whether the condition holds."""


def wait_any(conditions: Sequence[Condition], timeout_s: float | None) -> bool:
    """Block the thread until a condition is ready; return False after the timeout."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        bell: SimpleQueue[None] = SimpleQueue()  # that several conditions may ring
        waker = partial(bell.put, None)
        is_late = False
        if not _join_all(conditions, waker):
            try:
                bell.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
            except Empty:
                is_late = True
        is_ready_now = _leave_all(conditions, waker)
        if is_ready_now or is_late:
            return is_ready_now


async def wait_any_async(conditions: Sequence[Condition]) -> None:
    """Wait until a condition is ready, on an event loop, without a timeout."""
    bell = _bell_of_this_loop()
    while True:
        future, waker = bell.expect()
        is_waiting = not _join_all(conditions, waker)
        try:
            if is_waiting:
                await future
        except asyncio.CancelledError:  # see `Waiters.wait_async`
            _leave_all(conditions, waker)
            raise
        if _leave_all(conditions, waker):
            return


def _join_all(conditions: Sequence[Condition], waker: Waker) -> bool:
    return True in [waiters.join(is_ready, waker) for waiters, is_ready in conditions]


def _leave_all(conditions: Sequence[Condition], waker: Waker) -> bool:
    return True in [waiters.leave(is_ready, waker) for waiters, is_ready in conditions]


def wake(wakers: Iterable[Waker]) -> None:
    """Call each waker."""
    for waker in wakers:
        waker()


class LoopBell:
    """Wakes coroutines of one event loop from any thread.

    `call_soon_threadsafe` costs a write to the loop's pipe. One call wakes every coroutine that is due by the time it runs,
    so that all streams of a tick cost one write.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._due: deque[asyncio.Future[None]] = deque()
        self._has_rung = False

    def belongs_to(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether it wakes this loop's coroutines."""
        return self._loop() is loop

    def expect(self) -> tuple[asyncio.Future[None], Waker]:
        """Return a future to await, and the waker that resolves it. On the loop's thread."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return future, partial(self._ring, future)

    def _ring(self, future: asyncio.Future[None]) -> None:
        self._due.append(future)
        if self._has_rung:  # read after the append: the pending call will find the future
            return
        self._has_rung = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._resolve_due)
        except RuntimeError:  # the loop is closed: there is no reader any more
            self._due.clear()
            self._has_rung = False
        except BaseException:  # out of memory: the next ring tries again, for all that are due
            self._has_rung = False
            raise

    def _resolve_due(self) -> None:
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
