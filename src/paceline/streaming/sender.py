"""The engine's end of a channel, and the state that both ends share.

    NEW --attach--> ATTACHED --finish--> FINISHED          `cancelled` is a flag beside them

push, finish and release are called on the engine's thread and never wait for a reader: chunks that it has not taken are
coalesced into one per choice. The engine holds a sender and not its channel, so that a channel which its reader drops is
collected, which cancels the request.

Cancelling takes no lock: it happens in finalizers, which the garbage collector runs in the middle of anything, and in
signal handlers. Callbacks are called without the lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Final

from paceline import validation
from paceline.errors import EngineStopped, InvalidParams
from paceline.request import MAX_INTERVAL
from paceline.streaming.backlog import Backlog, whole
from paceline.streaming.chunk import StreamChunk
from paceline.streaming.waiting import Condition, Waiters, wake


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
