"""The queue between the engine and the one reader of a request: the reader's end.

Only the engine pushes, into the sender that `attach` returns (sender.py). The reader may be any one thread or any one
event loop; cancel() and the properties are for any thread.

Iterators are objects and not generators, so that leaving a loop, which drops them, cancels: a generator that was never started
is dropped without running its `finally`, and an async one is closed only when the event loop comes to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from paceline import validation
from paceline.errors import Unsupported
from paceline.streaming import sender
from paceline.streaming.chunk import Completion, FinishReason, StreamChunk, Usage
from paceline.streaming.sender import TIMEOUT, Condition, Nothing, StreamSender, StreamState

C = TypeVar("C")


class ChunkIterator(Generic[C]):
    """Iterates over the chunks that `get` returns; calls `cancel` when the loop is left, which has no effect after the end."""

    def __init__(self, get: Callable[[], C | Nothing], cancel: Callable[[], None]) -> None:
        self._get = get
        self._cancel = cancel

    def __iter__(self) -> ChunkIterator[C]:
        return self

    def __next__(self) -> C:
        try:
            taken = self._get()
        except BaseException:
            self._cancel()
            raise
        if isinstance(taken, Nothing):
            raise StopIteration
        return taken

    def __del__(self) -> None:
        self._cancel()


class AsyncChunkIterator(Generic[C]):
    """As `ChunkIterator`, for an event loop; cancelling the task that waits in it also cancels the request."""

    def __init__(self, get: Callable[[], Awaitable[C | Nothing]], cancel: Callable[[], None]) -> None:
        self._get = get
        self._cancel = cancel

    def __aiter__(self) -> AsyncChunkIterator[C]:
        return self

    async def __anext__(self) -> C:
        try:
            taken = await self._get()
        except BaseException:
            self._cancel()
            raise
        if isinstance(taken, Nothing):
            raise StopAsyncIteration
        return taken

    def __del__(self) -> None:
        self._cancel()


def _of_sender(name: str) -> Any:
    return property(lambda self: getattr(self._sender, name))


_LONGEST_S = 1e9
_NUMBERS = (int, float)


class StreamChannel:
    """The queue between the engine and the one reader of one request. Make it with `StreamChannel.create()`.

    Every stream has one. To read on another thread than the one that submits, or to start reading before there is a
    request, make a channel first and pass it to `LLM.stream`:

        channel = StreamChannel.create()
        reader = threading.Thread(target=channel.consume, args=(print,))
        reader.start()
        llm.stream("A fox", channel=channel)

    A channel that is collected before its stream has ended cancels the request.
    """

    def __init__(self) -> None:
        self._sender = StreamSender()
        self._request_index = -1
        self._assemble: Callable[[Iterable[StreamChunk]], Completion] | None = None

    @classmethod
    def create(cls) -> StreamChannel:
        """Make a channel.

        Returns:
            A channel that is not attached to a request yet.
        """
        return cls()

    def attach(  # noqa: PLR0913 - what an engine and its request bring
        self,
        *,
        request_index: int = 0,
        interval: int = 1,
        max_buffered_tokens: int | None = None,
        on_cancel: Callable[[], None] | None = None,
        on_backlog: Callable[[], None] | None = None,
        on_interval: Callable[[], None] | None = None,
        assemble: Callable[[Iterable[StreamChunk]], Completion] | None = None,
    ) -> StreamSender:
        """Attach the channel to a request. The engine holds the returned sender, and not the channel, see sender.py.

        No callback may block, and none carries a value: read `is_behind` or `interval` when the engine gets to it. All are
        dropped at the end of the stream.

        Args:
            request_index: The caller's number of the request.
            interval: Tokens per chunk; one that was set on the channel applies instead.
            max_buffered_tokens: Readable tokens beyond which `is_behind` becomes true; it becomes false again at half.
            on_cancel: Called once, on the thread that cancels; from here if that has happened already. It may run inside a
                garbage collection, on any thread, so that it must take no lock which that thread could hold:
                `queue.SimpleQueue.put` is made for this, `Event.set` is not.
            on_backlog: Called after each change of `is_behind`: to true on the thread that pushes, to false on the thread that
                reads. Two calls may overtake each other.
            on_interval: Called after each change of `interval`, on the thread that changes it.
            assemble: Makes the completion of all chunks, for `Stream.collect`; None: the stream cannot be collected.

        Returns:
            The engine's end of the channel.

        Raises:
            InvalidParams: The channel has served before, or a value is out of its range.
        """
        self._sender.attach(interval, max_buffered_tokens, on_cancel, on_backlog, on_interval)
        self._request_index = request_index
        self._assemble = assemble
        return self._sender

    def check_new(self) -> None:
        """Check that the channel can serve a request.

        Raises:
            InvalidParams: It is attached to a request, or was.
        """
        self._sender.check_new()

    # ---- the reader

    def get(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """Return the next chunk, waiting for it if need be.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit; 0: not at all.

        Returns:
            The chunk; `TIMEOUT` if none came in time; `END` after the terminal chunk.

        Raises:
            EngineStopped: This process was forked from the engine's, so that nothing can come.
        """
        timeout_s = checked_seconds(timeout_s)
        taken = self._sender.take()
        while taken is TIMEOUT and timeout_s != 0 and self._sender.wait(timeout_s):
            taken = self._sender.take()
        return taken

    async def get_async(self, timeout_s: float | None = None) -> StreamChunk | Nothing:
        """Return the next chunk, on an event loop. Cancelling the task that waits takes nothing out of the channel.

        Args:
            timeout_s: As for `get`.

        Returns:
            As `get` does.

        Raises:
            EngineStopped: As `get` does.
        """
        timeout_s = checked_seconds(timeout_s)
        taken = self._sender.take()
        if taken is not TIMEOUT or timeout_s == 0:
            return taken
        if timeout_s is None:
            return await self._next()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._next()
        except TimeoutError:
            return TIMEOUT  # nothing was taken: that is done last

    async def _next(self) -> StreamChunk | Nothing:
        taken: StreamChunk | Nothing = TIMEOUT
        while taken is TIMEOUT:
            await self._sender.wait_async()
            taken = self._sender.take()
        return taken

    def __iter__(self) -> ChunkIterator[StreamChunk]:
        """Iterate over every chunk up to the terminal one. Leaving the loop before cancels the request."""
        return ChunkIterator(self.get, self.cancel)

    def __aiter__(self) -> AsyncChunkIterator[StreamChunk]:
        """Iterate on an event loop; cancelling the task that reads cancels the request too."""
        return AsyncChunkIterator(self.get_async, self.cancel)

    def consume(self, handler: Callable[[StreamChunk], object]) -> FinishReason:
        """Call a function with every chunk. Not for the engine's own thread.

        Args:
            handler: Called on this thread. Its exception cancels the request and is raised here.

        Returns:
            The finish reason of the choice that ended last.

        Raises:
            EngineStopped: As `get` does.
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

    def completion_of(self, chunks: Iterable[StreamChunk]) -> Completion:
        """Return the completion that all chunks of the channel make.

        Args:
            chunks: The chunks in order, up to the terminal one. Consecutive chunks of a choice may be joined.

        Returns:
            The completion.

        Raises:
            Unsupported: The channel was attached without `assemble`.
        """
        if self._assemble is None:
            raise Unsupported(
                "this channel was attached without `assemble`, so no completion can be made of its chunks"
            )
        return self._assemble(chunks)

    def wait_finished(self, timeout_s: float | None = None) -> bool:
        """Wait for the terminal chunk without taking anything.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit.

        Returns:
            Whether it has come.

        Raises:
            EngineStopped: As `get` does.
        """
        return self._sender.wait_finished(checked_seconds(timeout_s))

    async def finished(self) -> None:
        """Wait for the terminal chunk, on an event loop, without a timeout."""
        await self._sender.wait_finished_async()

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the request's slot is free and its KV cells can be reused.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit.

        Returns:
            Whether that is so.

        Raises:
            EngineStopped: As `get` does.
        """
        return self._sender.wait_released(checked_seconds(timeout_s))

    async def released(self) -> None:
        """Wait until the slot is free, on an event loop, without a timeout."""
        await self._sender.wait_released_async()

    readable: Condition = _of_sender("readable")
    """The condition that a chunk or the end can be read, for `wait_any`."""

    # ---- any thread

    def cancel(self) -> None:
        """Ask the engine to end the request. Idempotent, never blocks, drops no chunk; no effect after the end."""
        self._sender.cancel()

    def __del__(self) -> None:
        self._sender.cancel()

    state: StreamState = _of_sender("state")
    """Whether the channel is new, attached to a request, or finished."""
    is_finished: bool = _of_sender("is_finished")
    """Whether the terminal chunk has come."""
    is_cancelled: bool = _of_sender("is_cancelled")
    """Whether the request was cancelled before its end."""
    is_released: bool = _of_sender("is_released")
    """Whether the request's slot is free and its KV cells can be reused."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice that ended last did; None before the end."""
        terminal = self._sender.terminal
        return None if terminal is None else terminal.finish_reason

    @property
    def usage(self) -> Usage | None:
        """Token counts and times; None before the end."""
        terminal = self._sender.terminal
        return None if terminal is None else terminal.usage

    @property
    def interval(self) -> int:
        """Tokens per chunk, at least 1; the last chunk of a choice may have fewer.

        May be set at any time, by any thread: before the channel is attached, and while the stream runs. Waiting tokens that
        suffice for the new interval can be read at once; tokens that could be read before still can. No effect after the end.
        Setting a value out of range raises `InvalidParams` and changes nothing.
        """
        return self._sender.interval

    @interval.setter
    def interval(self, interval: int) -> None:
        self._sender.set_interval(interval)

    own_interval: int | None = _of_sender("own_interval")
    """The interval that was set on the channel; None if none was, so that the request's option applies."""

    @property
    def request_index(self) -> int:
        """The caller's number of the request; -1 before the channel is attached."""
        return -1 if self._sender.state is StreamState.NEW else self._request_index

    num_buffered: int = _of_sender("num_buffered")
    """Tokens that were generated and not read yet."""


def wait_any(channels: Sequence[StreamChannel], timeout_s: float | None) -> bool:
    """Wait until a channel has a chunk or its end; return False after the timeout."""
    return sender.wait_any([channel.readable for channel in channels], timeout_s)


async def wait_any_async(channels: Sequence[StreamChannel]) -> None:
    """Wait as `wait_any` does, on an event loop, without a timeout."""
    await sender.wait_any_async([channel.readable for channel in channels])


def checked_seconds(timeout_s: float | None) -> float | None:
    """Return a timeout in seconds. Raises `InvalidParams`."""
    if timeout_s is None or (
        timeout_s.__class__ in _NUMBERS and 0 <= timeout_s <= _LONGEST_S
    ):  # in short, for each token
        return timeout_s
    return validation.number("timeout_s", timeout_s, 0, _LONGEST_S)
