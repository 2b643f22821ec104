"""Iterators over the chunks of a stream that cancel when the loop is left: the loop drops them, and `__del__` runs.

They are objects and not generators: a generator that was never started is dropped without running its `finally`, and an
async one is closed only when the event loop comes to it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from paceline.streaming.chunk import StreamChunk
from paceline.streaming.sender import Nothing


class ChunkIterator:
    """Iterates over the chunks that `get` returns; calls `cancel` when the loop is left, which has no effect after the end."""

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
    """As `ChunkIterator`, for an event loop; cancelling the task that waits in it also cancels the request."""

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
