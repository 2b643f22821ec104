"""A reader's loop over chunks. Leaving it in any way cancels: the loop drops its iterator, and that is noticed.

Objects and not generators: a generator that was never started ends without a word, and one of an event loop is closed only
when the loop comes to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from paceline.streaming.chunk import StreamChunk
from paceline.streaming.feed import Nothing


class ChunkIterator:
    """Every chunk that `get` answers. `cancel` is called where the loop is left, which after the end changes nothing."""

    def __init__(self, get: Callable[[], StreamChunk | Nothing], cancel: Callable[[], None]) -> None:
        self._get = get
        self._cancel = cancel

    def __iter__(self) -> ChunkIterator:
        return self

    def __next__(self) -> StreamChunk:
        try:
            taken = self._get()
        except BaseException:
            self._cancel()
            raise
        if isinstance(taken, StreamChunk):
            return taken
        raise StopIteration

    def __del__(self) -> None:
        self._cancel()


class AsyncChunkIterator:
    """As `ChunkIterator`, for an event loop; cancelling the task that waits in it is leaving too."""

    def __init__(self, get: Callable[[], Awaitable[StreamChunk | Nothing]], cancel: Callable[[], None]) -> None:
        self._get = get
        self._cancel = cancel

    def __aiter__(self) -> AsyncChunkIterator:
        return self

    async def __anext__(self) -> StreamChunk:
        try:
            taken = await self._get()
        except BaseException:
            self._cancel()
            raise
        if isinstance(taken, StreamChunk):
            return taken
        raise StopAsyncIteration

    def __del__(self) -> None:
        self._cancel()
