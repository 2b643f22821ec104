"""The engine's end of a channel, and the state that both ends share.

    NEW --attach--> ATTACHED --finish--> FINISHED          `cancelled` is a flag beside them

push, finish and release are called on the engine's thread and never wait for a reader: chunks that it has not taken are
coalesced into one per choice. The engine holds a sender and not its channel, so that a channel which its reader drops is
collected, which cancels the request.

Cancelling takes no lock: it happens in finalizers, which the garbage collector runs in the middle of anything, and in
signal handlers. Callbacks are called without the lock.

A reader that waits adds a waker to a list that the channel's lock guards. The engine takes the list when it changes something,
and calls the wakers after it releases the lock. A waker never blocks, and may be called after its reader has left. While no
reader waits, the engine pays nothing.

A backlog coalesces chunks and counts their tokens for backpressure; the channel's lock guards it. Coalescing takes time linear
in the joined chunks, and a backlog that is never read holds few objects.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

from paceline import validation
from paceline.errors import EngineStopped, InvalidParams
from paceline.request import MAX_INTERVAL
from paceline.streaming.chunk import StreamChunk

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


_FAN = 64  # chunks that become one


class Pieces:
    """Chunks of one choice that become one chunk.

    Every 64 chunks are joined into one, and 64 of these into one again, as carrying works in base 64. So each token is copied
    once per level, and 100,000 chunks are held as fewer than 200.
    """

    __slots__ = ("_chunks", "_num_added", "num_tokens")

    def __init__(self, *chunks: StreamChunk) -> None:
        self._chunks = list(chunks)
        self._num_added = len(chunks)
        self.num_tokens = sum([len(chunk.token_ids) for chunk in chunks])

    def add(self, chunk: StreamChunk) -> None:
        """Append the next chunk."""
        self._chunks.append(chunk)
        self._num_added += 1
        self.num_tokens += len(chunk.token_ids)
        if not self._num_added % _FAN:
            self._compact()

    def joined(self) -> StreamChunk:
        """Join all chunks into one."""
        return StreamChunk.joined_all(self._chunks)

    def _compact(self) -> None:
        count = self._num_added
        while count and not count % _FAN:
            self._chunks[-_FAN:] = [StreamChunk.joined_all(self._chunks[-_FAN:])]
            count //= _FAN


class Backlog:
    """Unread chunks by choice. A choice is ripe, and can be taken, with `interval` tokens or its last chunk.

    Once the backlog is closed everything can be taken, ripe or not.

    Attributes:
        interval: Tokens that make a choice ripe.
        ripe: Ripe choices, in the order in which they became so.
        num_tokens: All unread tokens.
        num_ripe: Unread tokens that can be taken.
        is_behind: Whether more than `limit` tokens could be taken, and they have not fallen to half of it since.
        num_times_behind: How often `is_behind` became true.
    """

    __slots__ = (
        "_held", "_is_closed", "_limit", "interval", "is_behind", "num_ripe", "num_times_behind", "num_tokens", "ripe",
    )  # fmt: skip

    def __init__(self, interval: int = 1, limit: int | None = None) -> None:
        self.interval = interval
        self._limit = limit
        self._is_closed = False
        self._held: dict[int, StreamChunk | Pieces] = {}
        self.ripe: dict[int, None] = {}
        self.num_tokens = 0
        self.num_ripe = 0
        self.is_behind = False
        self.num_times_behind = 0

    def add(self, chunk: StreamChunk) -> bool:
        """Add a chunk and return whether the reader has fallen behind by it."""
        choice = chunk.choice
        num_new = len(chunk.token_ids)
        held = self._held.get(choice)
        if held is None:
            self._held[choice] = chunk
        elif isinstance(held, Pieces):
            held.add(chunk)
        else:
            self._held[choice] = Pieces(held, chunk)
        self.num_tokens += num_new
        if choice in self.ripe:
            self.num_ripe += num_new
        elif held is None and num_new >= self.interval:  # the common case: the reader has taken what was there
            self.ripe[choice] = None
            self.num_ripe += num_new
        elif chunk.finish_reason is not None or _count(self._held[choice]) >= self.interval:
            self._ripen(choice)
        return self._limit is not None and self._falls_behind(self._limit)

    def set_interval(self, interval: int) -> bool:
        """Change the interval and return whether the reader has fallen behind by it. A ripe chunk stays ripe."""
        self.interval = interval
        for choice, held in self._held.items():
            if choice not in self.ripe and _count(held) >= interval:
                self._ripen(choice)
        return self._limit is not None and self._falls_behind(self._limit)

    @property
    def has_rest(self) -> bool:
        """Whether the backlog is closed and something still waits."""
        return self._is_closed and bool(self._held)

    def take(self) -> StreamChunk | Pieces:
        """Remove and return all chunks of the choice that became ripe first; there must be one. See `whole`."""
        choice = next(iter(self.ripe or self._held))
        held = self._held.pop(choice)
        num_taken = _count(held)
        self.num_tokens -= num_taken
        if choice in self.ripe:
            del self.ripe[choice]
            self.num_ripe -= num_taken
        if self.is_behind and self._limit is not None and self.num_ripe <= self._limit // 2:
            self.is_behind = False
        return held

    def close(self, last: StreamChunk) -> StreamChunk:
        """Close the backlog and return the stream's last chunk, joined to the unripe chunk of its choice.

        The backlog is closed and complete even if the join raises, as it does when memory is short.
        """
        self._is_closed = True
        choice = last.choice
        if choice in self._held and choice not in self.ripe:
            held = self._held[choice]
            last = whole(held).joined(last)
            del self._held[choice]
            self.num_tokens -= _count(held)
        return last

    def _ripen(self, choice: int) -> None:
        self.ripe[choice] = None
        self.num_ripe += _count(self._held[choice])

    def _falls_behind(self, limit: int) -> bool:
        if self.is_behind or self.num_ripe <= limit:
            return False
        self.is_behind = True
        self.num_times_behind += 1
        return True


def _count(held: StreamChunk | Pieces) -> int:
    return held.num_tokens if isinstance(held, Pieces) else len(held.token_ids)


def whole(held: StreamChunk | Pieces) -> StreamChunk:
    """Return the chunks of `take` as one chunk. Takes time linear in its length, so call it without the lock."""
    return held.joined() if isinstance(held, Pieces) else held


class StreamState(StrEnum):
    """The life of a channel."""

    NEW = "new"
    ATTACHED = "attached"
    FINISHED = "finished"


class Nothing(StrEnum):
    """The result of `get` that is no chunk."""

    TIMEOUT = "timeout"
    END = "end"


TIMEOUT: Final = Nothing.TIMEOUT
"""No chunk came in time; call again."""
END: Final = Nothing.END
"""The terminal chunk was taken; nothing more will come."""

_num_forks = 0  # of this process's line: a sender of before has no engine here


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603 - a fact about the process
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)

_ATTACHED, _FINISHED = StreamState.ATTACHED, StreamState.FINISHED  # found faster, several times a token


class StreamSender:
    """The result of `StreamChannel.attach`: the engine pushes chunks into it, finishes it, and releases the slot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = Waiters(self._lock)
        self._end_waiters = Waiters(self._lock)
        self._release_waiters = Waiters(self._lock)
        self._backlog = Backlog()
        self._on_backlog: Callable[[], None] | None = None
        self._on_interval: Callable[[], None] | None = None
        self._has_own_interval = False
        self._on_cancel: list[Callable[[], None]] = []  # none or one; the thread that pops it calls it
        self._state = StreamState.NEW
        self._terminal: StreamChunk | None = None
        self._is_terminal_taken = False
        self._is_cancelled = False
        self._is_released = False
        self._num_forks = _num_forks

    def attach(
        self,
        interval: int,
        max_buffered_tokens: int | None,
        on_cancel: Callable[[], None] | None,
        on_backlog: Callable[[], None] | None,
        on_interval: Callable[[], None] | None,
    ) -> None:
        """See `StreamChannel.attach`."""
        validation.integer("interval", interval, 1)
        if max_buffered_tokens is not None:
            validation.integer("max_buffered_tokens", max_buffered_tokens, 1)
        with self._lock:
            self.check_new()
            self._backlog = Backlog(self._backlog.interval if self._has_own_interval else interval, max_buffered_tokens)
            self._on_backlog, self._on_interval = on_backlog, on_interval
            self._state = _ATTACHED
            self._num_forks = _num_forks
        if on_cancel is not None:
            self._on_cancel.append(on_cancel)
        if self._is_cancelled:  # before; one that comes now pops the callback itself, or leaves it to us
            self._call_on_cancel()

    def detach(self) -> None:
        """Undo `attach` after the engine refused the request: the channel is new again."""
        with self._lock:
            if self._state is _ATTACHED:
                self._state = StreamState.NEW
                self._on_backlog = self._on_interval = None
                self._on_cancel.clear()

    def check_new(self) -> None:
        """Raise `InvalidParams` if the channel is attached to a request, or was."""
        if self._state is not StreamState.NEW:
            raise InvalidParams(
                f"this channel is {self._state}: it serves one request in its life, make a new one with "
                "StreamChannel.create()"
            )

    # ---- the engine's thread

    def push(self, chunk: StreamChunk) -> None:
        """Add the tokens that a tick generated for one choice; ignored after the end."""
        with self._lock:
            backlog = self._backlog
            if self._state is not _ATTACHED:
                return
            has_fallen_behind = backlog.add(chunk)
            wakers = self._readers.take() if self._readers.wakers and backlog.ripe else None
        if wakers is not None:
            wake(wakers)
        if has_fallen_behind and self._on_backlog is not None:
            self._on_backlog()

    def finish(self, chunk: StreamChunk) -> bool:
        """End the stream with its terminal chunk. Return whether this was the first call, which wins. Never raises."""
        with self._lock:
            if self._state is not _ATTACHED:
                return False
            try:
                self._terminal = self._backlog.close(chunk)
            except Exception:  # noqa: BLE001 - out of memory: what was held back comes in a chunk of its own
                self._terminal = chunk
            self._state = _FINISHED
            self._on_backlog = self._on_interval = None
            self._on_cancel.clear()  # a channel that is kept does not keep the engine
        self._readers.wake_all()
        self._end_waiters.wake_all()
        return True

    def release(self) -> None:
        """Report that the request's slot is free and its KV cells can be reused. Never raises."""
        self._is_released = True
        self._release_waiters.wake_all()
        if self.is_finished:  # for those that `finish` could not wake
            self._readers.wake_all()
            self._end_waiters.wake_all()

    # ---- the reader's side, through its channel

    def take(self) -> StreamChunk | Nothing:
        """Return the next chunk, `TIMEOUT` or `END` without waiting; see `StreamChannel.get`."""
        self._check_process(is_over=self._state is _FINISHED)
        with self._lock:
            backlog = self._backlog
            if not backlog.ripe and not backlog.has_rest:
                return self._take_ending()
            was_behind = backlog.is_behind
            held = backlog.take()
            on_backlog = self._on_backlog if was_behind and not backlog.is_behind else None
        if on_backlog is not None:
            on_backlog()
        return whole(held)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until `take` returns something else than `TIMEOUT`; return whether it does."""
        return self._readers.wait(self._has_something, timeout_s)

    async def wait_async(self) -> None:
        """Wait as `wait` does, on an event loop."""
        await self._readers.wait_async(self._has_something)

    @property
    def readable(self) -> Condition:
        """The condition that `take` returns something else than `TIMEOUT`."""
        return self._readers, self._has_something

    def wait_finished(self, timeout_s: float | None) -> bool:
        """See `StreamChannel.wait_finished`."""
        self._check_process(is_over=self.is_finished)
        return self._end_waiters.wait(lambda: self.is_finished, timeout_s)

    async def wait_finished_async(self) -> None:
        """Wait as `wait_finished` does, on an event loop."""
        self._check_process(is_over=self.is_finished)
        await self._end_waiters.wait_async(lambda: self.is_finished)

    def wait_released(self, timeout_s: float | None) -> bool:
        """See `StreamChannel.wait_released`."""
        self._check_process(is_over=self._is_released)
        return self._release_waiters.wait(lambda: self._is_released, timeout_s)

    async def wait_released_async(self) -> None:
        """Wait as `wait_released` does, on an event loop."""
        self._check_process(is_over=self._is_released)
        await self._release_waiters.wait_async(lambda: self._is_released)

    def _check_process(self, *, is_over: bool) -> None:
        if self._num_forks != _num_forks and not is_over:
            raise EngineStopped("this process was forked from the stream's, and its engine is not here; make one here")

    def _has_something(self) -> bool:
        return bool(self._backlog.ripe) or self.is_finished

    def _take_ending(self) -> StreamChunk | Nothing:
        if self._terminal is not None and not self._is_terminal_taken:
            self._is_terminal_taken = True
            return self._terminal
        return END if self._state is _FINISHED else TIMEOUT

    def set_interval(self, interval: int) -> None:
        """See `StreamChannel.interval`."""
        interval = validation.integer("interval", interval, 1, MAX_INTERVAL)
        with self._lock:
            backlog = self._backlog
            self._has_own_interval = True
            has_fallen_behind = backlog.set_interval(interval)
            on_backlog = self._on_backlog if has_fallen_behind else None
            on_interval = self._on_interval
            wakers = self._readers.take() if backlog.ripe else ()
        wake(wakers)
        if on_backlog is not None:
            on_backlog()
        if on_interval is not None:
            on_interval()

    # ---- any thread, without the lock

    def cancel(self) -> None:
        """See `StreamChannel.cancel`."""
        if self._is_cancelled or self.is_finished:
            return
        self._is_cancelled = True
        self._call_on_cancel()

    def _call_on_cancel(self) -> None:
        try:
            on_cancel = self._on_cancel.pop()  # one of several threads gets it
        except IndexError:
            return
        on_cancel()

    @property
    def state(self) -> StreamState:
        """The state of the channel's life."""
        return self._state

    @property
    def is_finished(self) -> bool:
        """Whether the terminal chunk has come."""
        return self._state is _FINISHED

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled before its end."""
        return self._is_cancelled

    @property
    def is_released(self) -> bool:
        """Whether the slot is free."""
        return self._is_released

    @property
    def interval(self) -> int:
        """Tokens per chunk, the last chunk aside."""
        return self._backlog.interval

    @property
    def own_interval(self) -> int | None:
        """The interval that was set on the channel; None if none was."""
        return self._backlog.interval if self._has_own_interval else None

    @property
    def is_behind(self) -> bool:
        """Whether more than `max_buffered_tokens` were unread, and have not fallen to half of that since."""
        return self._backlog.is_behind

    @property
    def num_times_behind(self) -> int:
        """How often `is_behind` became true."""
        return self._backlog.num_times_behind

    @property
    def num_buffered(self) -> int:
        """Tokens that were generated and not read yet."""
        terminal = None if self._is_terminal_taken else self._terminal
        return self._backlog.num_tokens + (0 if terminal is None else len(terminal.token_ids))

    @property
    def terminal(self) -> StreamChunk | None:
        """The terminal chunk, once the stream is finished."""
        return self._terminal
