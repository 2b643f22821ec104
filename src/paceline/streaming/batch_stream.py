"""The streams of several prompts that were submitted together: `BatchStream` for threads, `AsyncBatchStream` for event loops.

Each prompt has a channel and a stream of its own. A batch reads whichever of them has something, on one thread or loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Self

from paceline.errors import BatchError, Closed, PacelineError
from paceline.streaming.channel import (
    AsyncChunkIterator,
    ChunkIterator,
    StreamChannel,
    checked_seconds,
    wait_any,
    wait_any_async,
)
from paceline.streaming.chunk import Completion, StreamChunk
from paceline.streaming.sender import END, TIMEOUT, Nothing
from paceline.streaming.stream import AsyncStream, Stream, submitted

IndexedChunk = tuple[int, StreamChunk]
BatchOpener = Callable[[], Awaitable[Sequence[StreamChannel]]]


class BatchStream:
    """The chunks of several prompts as they are generated: `for index, chunk in streams`.

    `index` is the prompt's place in the list, counted from the `request_index` of the call. Leaving the loop cancels all
    requests, and so does leaving a `with` block, `close()`, or dropping the batch. A request that fails ends its own stream
    alone, with a chunk that has the error; after the last chunk of all, the loop raises `BatchError` with the finish reason or
    the error of each. `streams` has the stream of each prompt, to read or cancel it alone.

        with llm.stream(["A fox", "An owl"], max_tokens=40) as streams:
            for index, chunk in streams:
                print(index, chunk.text)
    """

    def __init__(self, channels: Sequence[StreamChannel], *, keep_alive: object = None) -> None:
        """Wrap channels.

        Args:
            channels: Channels that are attached to requests.
            keep_alive: An object to hold until the streams are closed or collected.
        """
        self._streams = tuple([Stream(channel, keep_alive=keep_alive) for channel in channels])
        self._unread = deque(zip(self._streams, channels, strict=True))
        self._is_closed = False

    def __repr__(self) -> str:
        return _batch_repr(self, self._streams, is_closed=self._is_closed)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The stream of each prompt, in order."""
        return self._streams

    def get(self, timeout_s: float | None = None) -> IndexedChunk | Nothing:
        """Return the next chunk of any stream, waiting for it if need be. Does not raise the requests' errors.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit; 0: not at all.

        Returns:
            The prompt's place and its chunk; `TIMEOUT` if none came in time; `END` after the last chunk of all.

        Raises:
            Closed: The batch was closed.
        """
        if self._is_closed:
            raise _closed()
        timeout_s = checked_seconds(timeout_s)
        taken = self._take()
        while taken is TIMEOUT and timeout_s != 0 and wait_any([channel for _, channel in self._unread], timeout_s):
            taken = self._take()
        return taken

    def _take(self) -> IndexedChunk | Nothing:
        """Return a chunk that is there, of the streams in turns; `END` after the last one."""
        for _ in range(len(self._unread)):
            stream, channel = self._unread.popleft()
            try:
                taken = stream.get(0)
            except Closed:  # this stream alone was closed
                continue
            if taken is not END:
                self._unread.append((stream, channel))
            if isinstance(taken, StreamChunk):
                return stream.request_index, taken
        return TIMEOUT if self._unread else END

    def __iter__(self) -> ChunkIterator[IndexedChunk]:
        return ChunkIterator(lambda: _checked(self.get(), self._streams), self.cancel)

    def consume(self, handler: Callable[[int, StreamChunk], object]) -> None:
        """Call a function with the place and every chunk of all prompts.

        Args:
            handler: Called on this thread. Its exception cancels all requests and is raised here.

        Raises:
            BatchError: Some requests failed; after the last chunk.
        """
        for index, chunk in self:
            try:
                handler(index, chunk)
            except BaseException:
                self.cancel()
                raise

    def collect(self) -> list[Completion]:
        """Return the completions, as `LLM.generate` would for a list: read the chunks that have not been read yet, and join all.

        Returns:
            A completion for each prompt, in order.

        Raises:
            BatchError: Some requests failed; `outcomes` has the completions of the others.
            Closed: The batch was closed before its end.
        """
        try:
            while self._unread:
                self.get()
        except BaseException:
            self.cancel()
            raise
        return _completions(self._streams)

    def cancel(self) -> None:
        """Ask the engine to end all requests. Any thread; never blocks. Generated chunks can still be read."""
        for stream in self._streams:
            stream.cancel()

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the slots of all requests are free and their KV cells can be reused.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit.

        Returns:
            Whether that is so.
        """
        timeout_s = checked_seconds(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return all(
            stream.wait_released(None if deadline is None else max(deadline - time.monotonic(), 0))
            for stream in self._streams
        )

    def close(self) -> None:
        """Cancel the requests that have not ended, and read no more. Does not wait; see `wait_released`."""
        self._is_closed = True
        for stream in self._streams:
            stream.close()

    def __enter__(self) -> Self:
        if self._is_closed:
            raise _closed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncBatchStream:
    """The chunks of several prompts, for an event loop: `async with ... as streams: async for index, chunk in streams`.

    The requests are submitted when the block is entered, or else by reading the first chunk. Otherwise as `BatchStream`.
    Cancelling the task that reads cancels all requests, also while they are being submitted.
    """

    def __init__(self, opener: BatchOpener, *, keep_alive: object = None) -> None:
        """Prepare a batch; nothing is submitted yet.

        Args:
            opener: Submits the requests and returns their channels; called once.
            keep_alive: An object to hold until the streams are closed or collected.
        """
        self._opener: BatchOpener | None = opener
        self._keep_alive = keep_alive
        self._streams: tuple[AsyncStream, ...] = ()
        self._unread = deque[tuple[AsyncStream, StreamChannel]]()
        self._is_open = self._is_cancelled = self._is_closed = False

    def __repr__(self) -> str:
        return _batch_repr(self, self._streams, is_closed=self._is_closed)

    @property
    def streams(self) -> tuple[AsyncStream, ...]:
        """The stream of each prompt, in order; empty before the requests are submitted."""
        return self._streams

    async def get(self, timeout_s: float | None = None) -> IndexedChunk | Nothing:
        """Return the next chunk of any stream, as `BatchStream.get` does.

        Args:
            timeout_s: How long to wait, in seconds, from when the requests are submitted; None: without limit.

        Returns:
            The prompt's place and its chunk; `TIMEOUT` if none came in time; `END` after the last chunk of all.

        Raises:
            Closed: The batch was closed.
        """
        await self._open()
        timeout_s = checked_seconds(timeout_s)
        taken = await self._take()
        if taken is not TIMEOUT or timeout_s == 0:
            return taken
        try:
            async with asyncio.timeout(timeout_s):
                while taken is TIMEOUT:
                    await wait_any_async([channel for _, channel in self._unread])
                    taken = await self._take()
        except TimeoutError:
            return TIMEOUT  # nothing was taken: that never waits
        return taken

    async def _take(self) -> IndexedChunk | Nothing:
        """Return a chunk that is there, as `BatchStream` does. Does not wait, and so takes none that is lost."""
        for _ in range(len(self._unread)):
            stream, channel = self._unread.popleft()
            try:
                taken = await stream.get(0)
            except Closed:  # this stream alone was closed
                continue
            if taken is not END:
                self._unread.append((stream, channel))
            if isinstance(taken, StreamChunk):
                return stream.request_index, taken
        return TIMEOUT if self._unread else END

    def __aiter__(self) -> AsyncChunkIterator[IndexedChunk]:
        async def get() -> IndexedChunk | Nothing:
            return _checked(await self.get(), self._streams)

        return AsyncChunkIterator(get, self.cancel)

    async def collect(self) -> list[Completion]:
        """Return the completions, as `AsyncLLM.generate` would for a list; see `BatchStream.collect`.

        Returns:
            A completion for each prompt, in order.

        Raises:
            BatchError: Some requests failed; `outcomes` has the completions of the others.
            Closed: The batch was closed before its end.
        """
        try:
            if not self._is_open:
                await self._open()
            while self._unread:
                await self.get()
        except BaseException:
            self.cancel()
            raise
        return _completions(self._streams)

    def cancel(self) -> None:
        """Ask the engine to end all requests. Any thread; never blocks. Generated chunks can still be read."""
        self._is_cancelled = True
        for stream in self._streams:
            stream.cancel()

    async def released(self) -> None:
        """Wait until the slots of all requests are free; return at once if they were never submitted."""
        for stream in self._streams:
            await stream.released()

    async def aclose(self) -> None:
        """Cancel the requests that have not ended, and read no more. Does not wait; see `released`."""
        self._is_closed = True
        self.cancel()
        for stream in self._streams:
            await stream.aclose()
        self._keep_alive = None

    async def open(self) -> Self:
        """Submit the requests now. Does nothing the second time. A request that is refused ends its own stream.

        Returns:
            The stream itself.

        Raises:
            RequestError: An option is invalid.
            EngineStopped: The engine has stopped.
            Closed: The stream was closed.
        """
        await self._open()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _open(self) -> None:
        if self._is_closed:
            raise _closed()
        if self._is_open:
            return
        opener, self._opener = self._opener, None
        if opener is None:
            raise Closed("these requests are being submitted elsewhere, or were not accepted: make a new batch")
        channels = await submitted(opener, _cancel_all)
        try:
            streams = tuple([self._stream_of(channel) for channel in channels])
            for stream in streams:
                await stream.open()
        except BaseException:
            _cancel_all(channels)
            raise
        self._streams, self._is_open = streams, True
        self._unread.extend(zip(streams, channels, strict=True))
        if self._is_cancelled:  # meanwhile, by another task or thread
            self.cancel()
        if self._is_closed:
            raise _closed()

    def _stream_of(self, channel: StreamChannel) -> AsyncStream:
        async def opened() -> StreamChannel:
            return channel

        index, interval = channel.request_index, channel.interval
        return AsyncStream(opened, interval=interval, request_index=index, keep_alive=self._keep_alive)


def _batch_repr(batch: object, streams: Sequence[Stream | AsyncStream], *, is_closed: bool) -> str:
    num_running = sum(not stream.is_finished for stream in streams)
    closed = ", closed" if is_closed else ""
    return f"{type(batch).__name__}({len(streams)} streams, {num_running} running{closed})"


def _closed() -> Closed:
    return Closed("these streams were closed: read them inside their `with` block, or before close()")


def _cancel_all(channels: Iterable[StreamChannel]) -> None:
    for channel in channels:
        channel.cancel()


def _checked(taken: IndexedChunk | Nothing, streams: Sequence[Stream | AsyncStream]) -> IndexedChunk | Nothing:
    """Return the next item of a loop. Raises `BatchError` after the last chunk if a request failed."""
    if taken is END:
        _check_outcomes([stream.error or stream.finish_reason for stream in streams])
    return taken


def _completions(streams: Sequence[Stream | AsyncStream]) -> list[Completion]:
    """Return the completions of streams that were read. Raises `BatchError` if a request failed."""
    outcomes: list[Completion | PacelineError] = []
    completions: list[Completion] = []
    for stream in streams:
        try:
            completion = stream.completion
        except PacelineError as error:
            outcomes.append(error)
        else:
            if completion is None:
                raise _closed()
            outcomes.append(completion)
            completions.append(completion)
    _check_outcomes(outcomes)
    return completions


def _check_outcomes(outcomes: Sequence[object]) -> None:
    errors = [outcome for outcome in outcomes if isinstance(outcome, PacelineError)]
    if errors:
        raise BatchError(
            f"{len(errors)} of {len(outcomes)} streams failed, the first with: {errors[0]}; `outcomes` has all",
            outcomes,
        ) from errors[0]
