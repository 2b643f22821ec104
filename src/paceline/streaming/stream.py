"""What a caller holds while a request runs: a channel to read, the error it may end with, and whatever must live meanwhile.

Knows nothing of engines: the front door hands in a channel that is attached, or a way to get one. One reader; `cancel` and
the properties are for any thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from paceline.errors import Closed, PacelineError
from paceline.streaming.channel import StreamChannel
from paceline.streaming.chunk import FinishReason, StreamChunk, Usage
from paceline.streaming.feed import END, Nothing
from paceline.streaming.iterators import AsyncChunkIterator, ChunkIterator

Opener = Callable[[], Awaitable[StreamChannel]]


class _Reader:
    """What both kinds of stream know about their channel."""

    def __init__(self, channel: StreamChannel | None, keep_alive: object) -> None:
        self._channel = channel
        self._keep_alive = keep_alive
        self._error: PacelineError | None = None
        self._is_cancelled = False
        self._is_closed = False

    def cancel(self) -> None:
        """Asks the engine to end the request. Any thread; never blocks. What was generated can still be read."""
        self._is_cancelled = True
        if self._channel is not None:  # else whoever sets it looks at the flag afterwards
            self._channel.cancel()

    @property
    def is_finished(self) -> bool:
        """Whether the last chunk is there, or was read."""
        return self._channel is not None and self._channel.is_finished

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled before its end."""
        return self._is_cancelled if self._channel is None else self._channel.is_cancelled

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice that ended last did; None before. Where n > 1, each choice's last chunk has its own reason."""
        return None if self._channel is None else self._channel.finish_reason

    @property
    def usage(self) -> Usage | None:
        """What the request took; None before the end."""
        return None if self._channel is None else self._channel.usage

    @property
    def error(self) -> PacelineError | None:
        """The first error among the chunks read so far."""
        return self._error

    @property
    def num_buffered(self) -> int:
        """Tokens that wait to be read."""
        return 0 if self._channel is None else self._channel.num_buffered

    def _close(self) -> None:
        self.cancel()
        self._is_closed = True
        self._keep_alive = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this stream was closed: read it inside its `with` block, or before close()")

    def _read(self, taken: StreamChunk | Nothing) -> StreamChunk | Nothing:
        if isinstance(taken, StreamChunk) and self._error is None:
            self._error = taken.error
        return taken

    def _read_in_loop(self, taken: StreamChunk | Nothing) -> StreamChunk | Nothing:
        if taken is END and self._error is not None:
            raise self._error
        return self._read(taken)


class Stream(_Reader):
    """The chunks of one request, as they come: `for chunk in stream`.

    Leaving the loop in any way cancels the request, and so does leaving a `with` block, `close()`, or forgetting the stream.
    A loop yields every chunk to the last one, which has the finish reason; where a chunk had an error, the loop raises the
    first such error after the last chunk. To take single chunks use `get`.
    """

    def __init__(self, channel: StreamChannel, *, keep_alive: object = None) -> None:
        """channel: attached. keep_alive: held until the stream is closed or collected."""
        super().__init__(channel, keep_alive)
        self._attached = channel

    def get(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """The next chunk; `TIMEOUT` where none came in time (None waits for ever), `END` after the last one.

        Raises `Closed` after `close()`, and no error of the request's: see `error`.
        """
        self._check_open()
        return self._read(self._attached.get(timeout_s))

    def __iter__(self) -> ChunkIterator:
        return ChunkIterator(lambda: self._read_in_loop(self.get()), self.cancel)

    def consume(self, handler: Callable[[StreamChunk], object]) -> FinishReason | None:
        """Calls the handler with every chunk, then answers the `finish_reason`, or raises the first error of a chunk.

        An exception of the handler cancels the request and is raised here.
        """
        for chunk in self:
            try:
                handler(chunk)
            except BaseException:
                self.cancel()
                raise
        return self.finish_reason

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Waits until the request's slot is free and its memory reclaimable; answers whether that is so."""
        return self._attached.wait_released(timeout_s)

    def close(self) -> None:
        """Cancels what has not ended, and reads no more. Does not wait; see `wait_released`."""
        self._close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


class AsyncStream(_Reader):
    """The chunks of one request, for an event loop: `async with ... as stream: async for chunk in stream`.

    The request is submitted when the block is entered, or where there is none by the first chunk that is asked for; a
    refusal (`QueueFull`, `PromptTooLong`) is raised there. Otherwise as `Stream`. Cancelling the task that reads cancels
    the request, also while it is being submitted.
    """

    def __init__(self, opener: Opener, *, keep_alive: object = None) -> None:
        """opener: called once, submits the request and answers its channel. keep_alive: as for `Stream`."""
        super().__init__(None, keep_alive)
        self._opener: Opener | None = opener

    async def get(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """As `Stream.get`. The time begins when the request is submitted."""
        channel = await self._open()
        return self._read(await channel.get_async(timeout_s))

    def __aiter__(self) -> AsyncChunkIterator:
        async def get() -> StreamChunk | Nothing:
            return self._read_in_loop(await self.get())

        return AsyncChunkIterator(get, self.cancel)

    async def released(self) -> None:
        """Waits until the request's slot is free and its memory reclaimable; not at all where it was never submitted."""
        if self._channel is not None:
            await self._channel.released()

    async def aclose(self) -> None:
        """Cancels what has not ended, and reads no more. Does not wait; see `released`."""
        self._close()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _open(self) -> StreamChannel:
        self._check_open()
        if self._channel is None:
            self._channel = await self._submit()
            if self._is_cancelled:  # meanwhile, by another task or thread
                self._channel.cancel()
            self._check_open()
        return self._channel

    async def _submit(self) -> StreamChannel:
        opener, self._opener = self._opener, None
        if opener is None:
            raise Closed("this stream's request is being submitted elsewhere, or was not accepted: make a new stream")
        submitting = asyncio.ensure_future(opener())
        try:
            await asyncio.wait((submitting,))  # which leaves the submitting alone when we are cancelled
        except asyncio.CancelledError:
            _abandon(submitting)
            raise
        return submitting.result()


_abandoned: set[asyncio.Future[StreamChannel]] = set()  # an event loop alone does not keep its tasks


def _abandon(submitting: asyncio.Future[StreamChannel]) -> None:
    """Cancels the request that comes of it, if one does."""
    _abandoned.add(submitting)
    submitting.add_done_callback(_cancel_submitted)


def _cancel_submitted(submitting: asyncio.Future[StreamChannel]) -> None:
    _abandoned.discard(submitting)
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()
