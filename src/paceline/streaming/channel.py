"""The queue between the engine and the one reader of a request: the reader's end.

Nobody but the engine pushes, into the feed that `attach` answers (feed.py). The reader may be any one thread or any one
event loop; cancel() and the properties are for everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paceline import validation
from paceline.streaming.chunk import FinishReason, StreamChunk, Usage
from paceline.streaming.feed import TIMEOUT, Nothing, StreamFeed, StreamState
from paceline.streaming.iterators import AsyncChunkIterator, ChunkIterator

_LONGEST_S = 1e9


class StreamChannel:
    """One request's channel; serves one request and one reader in its life. Make it with `StreamChannel.create()`.

    A channel that is collected before its stream has ended cancels the request.
    """

    def __init__(self) -> None:
        self._feed = StreamFeed()
        self._interval = 1
        self._request_index = -1

    @classmethod
    def create(cls) -> StreamChannel:
        """A new channel."""
        return cls()

    def attach(
        self,
        *,
        request_index: int = 0,
        interval: int = 1,
        max_buffered_tokens: int | None = None,
        on_cancel: Callable[[], None] | None = None,
        on_backlog: Callable[[], None] | None = None,
    ) -> StreamFeed:
        """Begins to serve a request, and answers the engine's end. Hold that and not the channel, see feed.py.

        interval: tokens that a chunk needs before the reader sees it, the last one aside. max_buffered_tokens: of those
        that the reader could take, how many may gather before `StreamFeed.is_behind` becomes true; false again at half.

        on_cancel is called once, on the thread that cancels; from here if that has happened already. on_backlog is called
        whenever `is_behind` has changed: to true on the thread that pushes, to false on the one that reads. Two such calls
        may overtake each other, so they carry nothing: look at `is_behind`, which is kept under the lock, when the engine
        gets to it. Neither may block. on_cancel may come out of a garbage collection, on any thread and in the middle of
        anything, so that it must take no lock which that thread could hold: `queue.SimpleQueue.put` is made for this, an
        `Event` is not. Both are forgotten at the end.
        Raises `InvalidParams` where the channel has served before, or a value is out of its range.
        """
        self._feed.attach(interval, max_buffered_tokens, on_cancel, on_backlog)
        self._interval = interval
        self._request_index = request_index
        return self._feed

    # ---- the reader

    def get(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """The next chunk; `TIMEOUT` where none came in time (None waits for ever), `END` after the terminal one.

        Raises `EngineStopped` in a forked child, where nothing more can come; so does whatever else waits.
        """
        timeout_s = _seconds(timeout_s)
        taken = self._feed.take()
        while taken is TIMEOUT and timeout_s != 0 and self._feed.wait(timeout_s):
            taken = self._feed.take()
        return taken

    async def get_async(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """As `get`, for an event loop. Cancelling the task that waits takes nothing out of the channel."""
        timeout_s = _seconds(timeout_s)
        taken = self._feed.take()
        if taken is not TIMEOUT or timeout_s == 0:
            return taken
        try:
            async with asyncio.timeout(timeout_s):
                while taken is TIMEOUT:
                    await self._feed.wait_async()
                    taken = self._feed.take()
        except TimeoutError:
            pass  # nothing was taken: that is done last
        return taken

    def __iter__(self) -> ChunkIterator:
        """Every chunk to the terminal one. Leaving the loop before cancels the request."""
        return ChunkIterator(self.get, self.cancel)

    def __aiter__(self) -> AsyncChunkIterator:
        """As `__iter__`, for an event loop; cancelling the task that reads cancels the request too."""
        return AsyncChunkIterator(self.get_async, self.cancel)

    def consume(self, handler: Callable[[StreamChunk], object]) -> FinishReason:
        """Calls the handler with every chunk and answers the `finish_reason`. Not for the engine's own thread.

        An exception of the handler cancels the request and is raised here.
        """
        for chunk in self:
            try:
                handler(chunk)
            except BaseException:
                self.cancel()
                raise
        reason = self.finish_reason
        if reason is None:
            raise AssertionError("iteration ends with the terminal chunk, which has a reason")
        return reason

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """Waits for the terminal chunk, asleep all the while, and takes nothing; answers whether it is there."""
        return self._feed.wait_finished(_seconds(timeout_s))

    async def finished(self) -> None:
        """As `wait_finished`, for an event loop, without a limit."""
        await self._feed.wait_finished_async()

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Waits until the slot is free and its memory reclaimable; answers whether that is so."""
        return self._feed.wait_released(_seconds(timeout_s))

    async def released(self) -> None:
        """As `wait_released`, for an event loop, without a limit."""
        await self._feed.wait_released_async()

    # ---- anybody

    def cancel(self) -> None:
        """Asks the engine to end the request. Idempotent, never blocks, drops nothing; after the end it does nothing."""
        self._feed.cancel()

    def __del__(self) -> None:
        self._feed.cancel()

    @property
    def state(self) -> StreamState:
        """Where the channel is in its life."""
        return self._feed.state

    @property
    def is_finished(self) -> bool:
        """Whether the terminal chunk is there, or was taken."""
        return self._feed.is_finished

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody cancelled before the end."""
        return self._feed.is_cancelled

    @property
    def is_released(self) -> bool:
        """Whether the request's slot is free and its memory reclaimable."""
        return self._feed.is_released

    @property
    def finish_reason(self) -> FinishReason | None:
        """The terminal chunk's, of the choice that ended last; None before the end."""
        terminal = self._feed.terminal
        return None if terminal is None else terminal.finish_reason

    @property
    def usage(self) -> Usage | None:
        """What the request took; None before the end."""
        terminal = self._feed.terminal
        return None if terminal is None else terminal.usage

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
        return self._feed.num_buffered


def _seconds(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else validation.number("timeout_s", timeout_s, 0, _LONGEST_S)
