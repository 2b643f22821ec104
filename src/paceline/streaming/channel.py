"""The queue between the engine and the one reader of a request.

    NEW --attach--> ATTACHED --finish--> FINISHED          `cancelled` is a flag beside them

The engine's side (attach, push, finish, release) runs on the engine's thread and never waits: what the reader has not
taken yet is joined into one chunk a choice, so a channel holds at most what its request may generate. The reader's side
may be any one thread or any one event loop; cancel() and the properties are for everybody.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from enum import Enum
from typing import Final

from paceline import validation
from paceline.errors import InvalidParams
from paceline.streaming.chunk import FinishReason, StreamChunk


class StreamState(Enum):
    """Where a channel is in its life."""

    NEW = "new"
    ATTACHED = "attached"
    FINISHED = "finished"


class Nothing(Enum):
    """What `get` answers instead of a chunk."""

    TIMEOUT = "timeout"
    END = "end"


TIMEOUT: Final = Nothing.TIMEOUT
"""Nothing came in time; ask again."""
END: Final = Nothing.END
"""The terminal chunk was taken; nothing will ever come."""


class StreamChannel:
    """One request's channel; serves one request and one reader in its life. Make it with `StreamChannel.create()`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = StreamState.NEW
        self._waiting: dict[int, StreamChunk] = {}  # by choice, in the order of their first token
        self._unripe: dict[int, StreamChunk] = {}  # fewer tokens than the interval
        self._terminal: StreamChunk | None = None
        self._terminal_taken = False
        self._cancelled = False
        self._released = False
        self._interval = 1
        self._request_index = -1
        self._wakers: list[Callable[[], None]] = []
        self._on_cancel: Callable[[], None] | None = None

    @classmethod
    def create(cls) -> StreamChannel:
        """A new channel."""
        return cls()

    # ---- the engine's side

    def attach(self, *, request_index: int = 0, interval: int = 1, on_cancel: Callable[[], None] | None = None) -> None:
        """Begins to serve a request. `interval`: tokens that a chunk needs before the reader sees it, the last one aside.

        on_cancel is called once, on the thread that cancels, and must not block; at once if that has happened already.
        Raises `InvalidParams` where the channel has served before.
        """
        validation.integer("interval", interval, 1)
        with self._changed:
            if self._state is not StreamState.NEW:
                raise InvalidParams(
                    f"this channel is {self._state.value}: it serves one request in its life, make a new one"
                )
            self._state = StreamState.ATTACHED
            self._interval = interval
            self._request_index = request_index
            self._on_cancel = on_cancel
            cancelled = self._cancelled
        if cancelled and on_cancel is not None:
            on_cancel()

    def push(self, chunk: StreamChunk) -> None:
        """Adds what a tick brought to one choice; after the end it is ignored."""
        with self._changed:
            if self._state is not StreamState.ATTACHED:
                return
            unripe = self._unripe.pop(chunk.choice, None)
            whole = chunk if unripe is None else unripe.joined(chunk)
            if whole.finish_reason is None and len(whole.token_ids) < self._interval:
                self._unripe[chunk.choice] = whole
                return
            self._put(whole)
            self._changed.notify_all()
            wakers = self._take_wakers()
        _wake(wakers)

    def finish(self, chunk: StreamChunk) -> bool:
        """Ends the stream with its terminal chunk. The first call wins; answers whether it was this one. Never raises."""
        with self._changed:
            if self._state is StreamState.FINISHED:
                return False
            unripe = self._unripe.pop(chunk.choice, None)
            for rest in self._unripe.values():  # choices that nobody ended: what they had is not lost
                self._put(rest)
            self._unripe.clear()
            self._terminal = chunk if unripe is None else unripe.joined(chunk)
            self._state = StreamState.FINISHED
            self._changed.notify_all()
            wakers = self._take_wakers()
        _wake(wakers)
        return True

    def release(self) -> None:
        """Tells that the request's slot is free and its memory reclaimable."""
        with self._changed:
            self._released = True
            self._changed.notify_all()
            wakers = self._take_wakers()
        _wake(wakers)

    def _put(self, chunk: StreamChunk) -> None:
        waiting = self._waiting.get(chunk.choice)
        self._waiting[chunk.choice] = chunk if waiting is None else waiting.joined(chunk)

    # ---- the reader's side

    def get(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """The next chunk; `TIMEOUT` where none came in time (None waits for ever), `END` after the terminal one."""
        with self._changed:
            self._changed.wait_for(self._has_something, timeout_s)
            return self._take()

    async def get_async(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """As `get`, for an event loop."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(self._has_something)
        except TimeoutError:
            pass
        with self._changed:
            return self._take()

    def __iter__(self) -> Iterator[StreamChunk]:
        """Every chunk to the terminal one. Leaving the loop before cancels the request."""
        try:
            while isinstance(chunk := self.get(), StreamChunk):
                yield chunk
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """As `__iter__`, for an event loop; cancelling the task that reads cancels the request too."""
        try:
            while isinstance(chunk := await self.get_async(), StreamChunk):
                yield chunk
        finally:
            self.cancel()

    def consume(self, handler: Callable[[StreamChunk], object]) -> FinishReason:
        """Calls the handler with every chunk and answers why the stream ended. Not for the engine's own thread."""
        for chunk in self:
            handler(chunk)
        reason = self.finish_reason
        if reason is None:
            raise AssertionError("iteration ends with the terminal chunk, which has a reason")
        return reason

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Waits until the slot is free and its memory reclaimable; answers whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._released, timeout_s)

    async def released(self) -> None:
        """As `wait_released`, for an event loop, without a limit."""
        await self._until(lambda: self._released)

    def _has_something(self) -> bool:
        return bool(self._waiting) or self._state is StreamState.FINISHED

    def _take(self) -> StreamChunk | Nothing:
        if self._waiting:
            choice = next(iter(self._waiting))
            return self._waiting.pop(choice)
        if self._terminal is not None and not self._terminal_taken:
            self._terminal_taken = True
            return self._terminal
        return END if self._state is StreamState.FINISHED else TIMEOUT

    async def _until(self, condition: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            woken = asyncio.Event()

            def wake(woken: asyncio.Event = woken) -> None:
                loop.call_soon_threadsafe(woken.set)

            with self._changed:
                if condition():
                    return
                self._wakers.append(wake)
            try:
                await woken.wait()
            finally:
                with self._changed:
                    if wake in self._wakers:
                        self._wakers.remove(wake)

    def _take_wakers(self) -> list[Callable[[], None]]:
        wakers, self._wakers = self._wakers, []
        return wakers

    # ---- anybody

    def cancel(self) -> None:
        """Asks the engine to end the request. Idempotent, never blocks, drops nothing; after the end it does nothing."""
        with self._changed:
            if self._cancelled or self._state is StreamState.FINISHED:
                return
            self._cancelled = True
            on_cancel = self._on_cancel
        if on_cancel is not None:
            on_cancel()

    @property
    def state(self) -> StreamState:
        """Where the channel is in its life."""
        return self._state

    @property
    def is_finished(self) -> bool:
        """Whether the terminal chunk is there, or was taken."""
        return self._state is StreamState.FINISHED

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody cancelled before the end."""
        return self._cancelled

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the stream ended; None before."""
        terminal = self._terminal
        return None if terminal is None else terminal.finish_reason

    @property
    def interval(self) -> int:
        """Tokens that a chunk needs before the reader sees it."""
        return self._interval

    @property
    def request_index(self) -> int:
        """The request's place in its caller's batch; -1 before it was attached."""
        return self._request_index

    @property
    def num_buffered(self) -> int:
        """Tokens that the reader has not taken yet."""
        with self._changed:
            chunks = [*self._waiting.values(), *self._unripe.values()]
            if self._terminal is not None and not self._terminal_taken:
                chunks.append(self._terminal)
            return sum(len(chunk.token_ids) for chunk in chunks)


def _wake(wakers: list[Callable[[], None]]) -> None:
    for waker in wakers:
        try:
            waker()
        except RuntimeError:  # the reader's event loop is closed: there is no reader any more
            continue
