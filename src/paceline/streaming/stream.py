"""The streams that callers read while requests run: `Stream` for threads, `AsyncStream` for event loops, and their batches.

They know no engine: the front door passes an attached channel, or a function that returns one. One reader; `cancel` and the
properties are for any thread.

Each prompt of a batch has a channel and a stream of its own. A batch reads any stream that has something, on one thread or loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from paceline import validation
from paceline.errors import BatchError, Closed, PacelineError
from paceline.request import MAX_INTERVAL
from paceline.streaming.channel import (
    AsyncChunkIterator,
    ChunkIterator,
    StreamChannel,
    checked_seconds,
    wait_any,
    wait_any_async,
)
from paceline.streaming.chunk import Completion, FinishReason, StreamChunk, Usage
from paceline.streaming.sender import END, TIMEOUT, Nothing, Pieces

_MOST_APART = 256  # chunks that a stream keeps as they were read

Opener = Callable[[], Awaitable[StreamChannel]]
T = TypeVar("T")
AnyChunk = TypeVar("AnyChunk")
AnyResult = TypeVar("AnyResult")  # all chunks together


class _Source(Generic[AnyChunk, AnyResult]):
    """What the readers of streams and of batches need."""

    _has_ended: bool  # whether the last chunk was read
    _closed_reason = "this stream was closed: read it inside its `with` block, or before close()"

    def __init__(self) -> None:
        self._is_closed = False

    @abstractmethod
    def cancel(self) -> None:
        """Ask the engine to end the request. Any thread; never blocks. Generated text can still be read."""

    @abstractmethod
    def _whole(self) -> AnyResult: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _checked(self, taken: AnyChunk | Nothing) -> AnyChunk | Nothing:
        """Return the next item of a loop. Raises the error of the requests after the last chunk."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(self._closed_reason)


class Readable(_Source[AnyChunk, AnyResult]):
    """The base of all streams, of completions and of chats."""

    def __init__(self) -> None:
        super().__init__()
        self._error: PacelineError | None = None

    def __repr__(self) -> str:
        stream: Any = self
        reason, num_unread = stream.finish_reason, stream.num_buffered
        running = "cancelled" if stream.is_cancelled else "running"
        state = running if reason is None else f"finish_reason={str(reason)!r}"
        unread = f", {num_unread} tokens unread" if num_unread else ""
        return f"{type(self).__name__}({state}{unread}{', closed' if self._is_closed else ''})"

    @property
    @abstractmethod
    def finish_reason(self) -> FinishReason | None:
        """Why the choice that ended last did; None before the end."""

    @property
    def error(self) -> PacelineError | None:
        """The first error among the chunks read so far."""
        return self._error

    @property
    def completion(self) -> AnyResult | None:
        """The whole, as `generate` or `chat` would return it; None before its terminal chunk was read. See `collect`.

        Raises:
            PacelineError: The request failed: every choice of it; for a chat, any choice.
            ResponseModelError: The reply of a chat is no instance of response_model.
        """
        return self._whole() if self._has_ended else None

    def _checked(self, taken: AnyChunk | Nothing) -> AnyChunk | Nothing:
        if taken is END and self._error is not None:
            raise self._error
        return taken


class ThreadReadable(_Source[AnyChunk, AnyResult]):
    """The base of streams and batches for threads."""

    def get(self, timeout_s: float | None = None) -> AnyChunk | Nothing:
        """Return the next chunk, waiting for it if need be. Does not raise the request's error: see `error`.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit; 0: not at all. A function that run_tools runs takes
                as long as it takes.

        Returns:
            The chunk; `TIMEOUT` if none came in time; `END` after the terminal chunk.

        Raises:
            Closed: The stream was closed.
        """
        self._check_open()
        return self._next(timeout_s)

    @abstractmethod
    def _next(self, timeout_s: float | None) -> AnyChunk | Nothing: ...

    def __iter__(self) -> ChunkIterator[AnyChunk]:
        return ChunkIterator(lambda: self._checked(self.get()), self.cancel)

    def consume(self, handler: Callable[[AnyChunk], object]) -> FinishReason | None:
        """Call a function with every chunk.

        Args:
            handler: Called on this thread. Its exception cancels the request and is raised here.

        Returns:
            The finish reason of the choice that ended last.

        Raises:
            PacelineError: The first error of a chunk, after the terminal chunk.
        """
        for chunk in self:
            try:
                handler(chunk)
            except BaseException:
                self.cancel()
                raise
        return self.finish_reason if isinstance(self, Readable) else None  # a batch has none

    def collect(self) -> AnyResult:
        """Return the whole, as `LLM.generate` or `LLM.chat` would: read the chunks that have not been read yet, and join all.

        Until it is dropped a stream keeps the text, tokens and log-probabilities that were read, joined: some 10 bytes a token
        without log-probabilities.

        Returns:
            The completion or reply. Its finish reason is "cancelled" if the request was cancelled, also by leaving a loop.

        Raises:
            PacelineError: The request failed: every choice of it; for a chat, any choice.
            ResponseModelError: The reply of a chat is no instance of response_model.
            Closed: The stream was closed before its end, or its chunks were read from its channel.
        """
        try:
            while not self._has_ended and self.get() is not END:
                pass
        except BaseException:
            self.cancel()
            raise
        return self._whole()

    def close(self) -> None:
        """Cancel the request if it has not ended, and read no more. Does not wait; see `wait_released`."""
        self._close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LoopReadable(_Source[AnyChunk, AnyResult]):
    """The base of streams and batches for event loops."""

    async def get(self, timeout_s: float | None = None) -> AnyChunk | Nothing:
        """Return the next chunk, as the `get` of the stream for threads does.

        Args:
            timeout_s: How long to wait, in seconds, from when the request is submitted; None: without limit.

        Returns:
            The chunk; `TIMEOUT` if none came in time; `END` after the terminal chunk.

        Raises:
            Closed: The stream was closed.
        """
        self._check_open()
        return await self._next(timeout_s)

    @abstractmethod
    async def _next(self, timeout_s: float | None) -> AnyChunk | Nothing: ...

    def __aiter__(self) -> AsyncChunkIterator[AnyChunk]:
        async def get() -> AnyChunk | Nothing:
            return self._checked(await self.get())

        return AsyncChunkIterator(get, self.cancel)

    async def collect(self) -> AnyResult:
        """Return the whole, as `AsyncLLM.generate` or `AsyncLLM.chat` would; see `Stream.collect`.

        Cancelling the task that reads cancels the request.

        Returns:
            The completion or reply.

        Raises:
            PacelineError: The request failed: every choice of it; for a chat, any choice.
            ResponseModelError: The reply of a chat is no instance of response_model.
            Closed: The stream was closed before its end, or its chunks were read from its channel.
        """
        try:
            while not self._has_ended and await self.get() is not END:
                pass
        except BaseException:
            self.cancel()
            raise
        return self._whole()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended, and read no more. Does not wait; see `released`."""
        self._close()

    async def open(self) -> Self:
        """Submit the request now, so that a refusal is raised here and not at the first chunk. Does nothing the second time.

        Returns:
            The stream itself.

        Raises:
            QueueFull: The queue is full, and `when_full` of the engine is "refuse".
            RequestError: The request cannot be served as it is.
            EngineStopped: The engine has stopped.
            Closed: The stream was closed.
        """
        await self._open()
        return self

    @abstractmethod
    async def _open(self) -> object: ...

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _BaseStream(Readable[StreamChunk, Completion]):
    """The base of both kinds of stream of completions."""

    def __init__(self, channel: StreamChannel | None, keep_alive: object, request_index: int) -> None:
        super().__init__()
        self._channel = channel
        self._request_index = request_index
        self._keep_alive = keep_alive
        self._received: list[StreamChunk] = []  # the latest ones; those before are joined
        self._joined: dict[int, Pieces] = {}  # by choice, that of the latest chunk last
        self._has_ended = False
        self._has_gaps = False  # since some chunks were read from the channel
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ask the engine to end the request. Any thread; never blocks. Generated text can still be read."""
        self._is_cancelled = True
        if self._channel is not None:  # else `_open` looks at the flag after it has set the channel
            self._channel.cancel()

    @property
    def is_finished(self) -> bool:
        """Whether the terminal chunk has come."""
        return self._channel is not None and self._channel.is_finished

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled before its end."""
        return self._is_cancelled if self._channel is None else self._channel.is_cancelled

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice that ended last did; None before the end. If n > 1, each choice's last chunk has its own reason."""
        return None if self._channel is None else self._channel.finish_reason

    @property
    def usage(self) -> Usage | None:
        """Token counts and times; None before the end."""
        return None if self._channel is None else self._channel.usage

    @property
    def num_buffered(self) -> int:
        """Tokens that were generated and not read yet."""
        return 0 if self._channel is None else self._channel.num_buffered

    @property
    def request_index(self) -> int:
        """The number that the caller gave the request."""
        return self._request_index

    def _close(self) -> None:
        self.cancel()
        self._is_closed = True
        self._keep_alive = None

    def _read(self, taken: StreamChunk | Nothing) -> StreamChunk | Nothing:
        if isinstance(taken, StreamChunk):
            if self._error is None:
                self._error = taken.error
            self._received.append(taken)
            if taken.usage is not None:
                self._has_ended = True
            elif len(self._received) >= _MOST_APART:
                self._join()
        elif taken is END:
            self._has_ended = True
        return taken

    def _join(self) -> None:
        """Join the latest chunks of each choice, and append them to those before."""
        by_choice: dict[int, list[StreamChunk]] = {}
        for chunk in self._received:
            by_choice.setdefault(chunk.choice, []).append(chunk)
        by_choice[chunk.choice] = by_choice.pop(chunk.choice)
        for choice, chunks in by_choice.items():
            pieces = self._joined.pop(choice, None) or Pieces()
            pieces.add(StreamChunk.joined_all(chunks))
            self._has_gaps |= pieces.num_tokens < chunks[-1].index + len(chunks[-1].token_ids)
            self._joined[choice] = pieces
        self._received.clear()

    def _whole(self) -> Completion:
        """Return the completion of the chunks that were read, which end with the terminal one."""
        if self._received:
            self._join()
        if self._channel is None or not self._joined or self._has_gaps:
            raise Closed(
                "chunks of this request were read from its channel, and a stream collects the chunks that it reads"
            )
        return self._channel.completion_of([pieces.joined() for pieces in self._joined.values()]).unless_failed()


class Stream(_BaseStream, ThreadReadable[StreamChunk, Completion]):
    """The chunks of one request as they are generated: `for chunk in stream`.

    Leaving the loop cancels the request, and so does leaving a `with` block, `close()`, or dropping the stream. A loop
    yields every chunk up to the terminal one, which has the finish reason. If a chunk had an error, the loop raises the
    first error after the terminal chunk. To take single chunks use `get`.

        with llm.stream("Once upon a time", max_tokens=40) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    """

    def __init__(self, channel: StreamChannel, *, keep_alive: object = None) -> None:
        """Wrap a channel.

        Args:
            channel: A channel that is attached to a request.
            keep_alive: An object to hold until the stream is closed or collected.
        """
        super().__init__(channel, keep_alive, channel.request_index)
        self._attached = channel

    @property
    def interval(self) -> int:
        """Tokens per chunk, the last chunk aside. May be set by any thread; see `StreamChannel.interval`."""
        return self._attached.interval

    @interval.setter
    def interval(self, interval: int) -> None:
        self._attached.interval = interval

    def _next(self, timeout_s: float | None) -> StreamChunk | Nothing:
        return self._read(self._attached.get(timeout_s))

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the request's slot is free and its KV cells can be reused.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit.

        Returns:
            Whether that is so.
        """
        return self._attached.wait_released(timeout_s)


class AsyncStream(_BaseStream, LoopReadable[StreamChunk, Completion]):
    """The chunks of one request, for an event loop: `async with ... as stream: async for chunk in stream`.

    The request is submitted by `open`, when the block is entered, or else by reading the first chunk; errors like
    `QueueFull` and `PromptTooLong` are raised there. Otherwise as `Stream`. Cancelling the task that reads cancels the request,
    also while it is being submitted.
    """

    def __init__(self, opener: Opener, *, interval: int = 1, request_index: int = 0, keep_alive: object = None) -> None:
        """Prepare a stream; nothing is submitted yet.

        Args:
            opener: Submits the request and returns its channel; called once.
            interval: Tokens per chunk that the request will have.
            request_index: The caller's number of the request.
            keep_alive: An object to hold until the stream is closed or collected.
        """
        super().__init__(None, keep_alive, request_index)
        self._opener: Opener | None = opener
        self._interval = interval
        self._has_set_interval = False

    @property
    def interval(self) -> int:
        """Tokens per chunk, the last chunk aside; see `Stream.interval`. May be set before the request is submitted."""
        return self._interval if self._channel is None else self._channel.interval

    @interval.setter
    def interval(self, interval: int) -> None:
        self._interval = validation.integer("interval", interval, 1, MAX_INTERVAL)
        self._has_set_interval = True
        if self._channel is not None:  # else `_open` looks at the flag after it has set the channel
            self._channel.interval = interval

    async def _next(self, timeout_s: float | None) -> StreamChunk | Nothing:
        channel = await self._open()
        return self._read(await channel.get_async(timeout_s))

    async def released(self) -> None:
        """Wait until the request's slot is free and its KV cells can be reused; return at once if it was never submitted."""
        if self._channel is not None:
            await self._channel.released()

    async def _open(self) -> StreamChannel:
        self._check_open()
        if self._channel is None:
            self._channel = await self._submit()
            if self._is_cancelled:  # meanwhile, by another task or thread
                self._channel.cancel()
            if self._has_set_interval:
                self._channel.interval = self._interval
            self._check_open()
        return self._channel

    async def _submit(self) -> StreamChannel:
        opener, self._opener = self._opener, None
        if opener is None:
            raise Closed("this stream's request is being submitted elsewhere, or was not accepted: make a new stream")
        return await submitted(opener, StreamChannel.cancel)


async def submitted(opener: Callable[[], Awaitable[T]], cancel: Callable[[T], None]) -> T:
    """Submit by `opener` and return its result; if the caller is cancelled meanwhile, `cancel` the result when it comes."""
    submitting = asyncio.ensure_future(opener())
    try:
        await asyncio.wait((submitting,))  # submitting goes on if the caller is cancelled
    except asyncio.CancelledError:
        _abandon(submitting, cancel)
        raise
    return submitting.result()


_abandoned: set[asyncio.Future[Any]] = set()  # an event loop alone does not keep its tasks


def _abandon(submitting: asyncio.Future[T], cancel: Callable[[T], None]) -> None:
    """Cancel the requests once they are submitted, if they are accepted."""

    def cancel_submitted(done: asyncio.Future[T]) -> None:
        _abandoned.discard(done)
        if not done.cancelled() and done.exception() is None:
            cancel(done.result())

    _abandoned.add(submitting)
    submitting.add_done_callback(cancel_submitted)


IndexedChunk = tuple[int, StreamChunk]
BatchOpener = Callable[[], Awaitable[Sequence[StreamChannel]]]


AnyStream = TypeVar("AnyStream", Stream, AsyncStream)


class _BaseBatch(_Source[IndexedChunk, list[Completion]], Generic[AnyStream]):
    """The base of both kinds of batch."""

    _closed_reason = "these streams were closed: read them inside their `with` block, or before close()"

    def __init__(self) -> None:
        super().__init__()
        self._streams: tuple[AnyStream, ...] = ()
        self._unread: deque[tuple[AnyStream, StreamChannel]] = deque()

    def __repr__(self) -> str:
        num_running = sum(not stream.is_finished for stream in self._streams)
        closed = ", closed" if self._is_closed else ""
        return f"{type(self).__name__}({len(self._streams)} streams, {num_running} running{closed})"

    @property
    def streams(self) -> tuple[AnyStream, ...]:
        """The stream of each prompt, in order; empty before the requests are submitted."""
        return self._streams

    def cancel(self) -> None:
        """Ask the engine to end all requests. Any thread; never blocks. Generated chunks can still be read."""
        for stream in self._streams:
            stream.cancel()

    def _taken(self) -> IndexedChunk | Nothing:
        """Return a chunk that is there, of the streams in turns; `END` after the last one. Does not wait."""
        for _ in range(len(self._unread)):
            stream, channel = self._unread.popleft()
            if stream._is_closed:  # this stream alone  # noqa: SLF001 - of this module
                continue
            taken = stream._read(channel.get(0))  # noqa: SLF001
            if taken is not END:
                self._unread.append((stream, channel))
            if isinstance(taken, StreamChunk):
                return stream.request_index, taken
        return TIMEOUT if self._unread else END

    def _checked(self, taken: IndexedChunk | Nothing) -> IndexedChunk | Nothing:
        if taken is END:
            _check_outcomes([stream.error or stream.finish_reason for stream in self._streams])
        return taken

    def _whole(self) -> list[Completion]:
        """Return the completions of streams that were read. Raises `BatchError` if a request failed."""
        outcomes: list[Completion | PacelineError] = []
        completions: list[Completion] = []
        for stream in self._streams:
            try:
                completion = stream.completion
            except PacelineError as error:
                outcomes.append(error)
            else:
                if completion is None:
                    raise Closed(self._closed_reason)
                outcomes.append(completion)
                completions.append(completion)
        _check_outcomes(outcomes)
        return completions

    def _close(self) -> None:
        self._is_closed = True
        for stream in self._streams:
            stream._close()  # noqa: SLF001 - of this module


class BatchStream(_BaseBatch[Stream], ThreadReadable[IndexedChunk, list[Completion]]):
    """The chunks of several prompts as they are generated: `for index, chunk in streams`.

    `index` is the prompt's place in the list, counted from the `request_index` of the call. Leaving the loop cancels all
    requests, and so does leaving a `with` block, `close()`, or dropping the batch. A request that fails ends its own stream
    alone, with a chunk that has the error; after the last chunk of all, the loop raises `BatchError` with the finish reason or
    the error of each. `streams` has the stream of each prompt, to read or cancel it alone. `get` returns the next chunk of any
    stream with its prompt's place, and `collect` a completion for each prompt; it raises `BatchError` if some requests failed.

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
        super().__init__()
        self._streams = tuple([Stream(channel, keep_alive=keep_alive) for channel in channels])
        self._unread.extend(zip(self._streams, channels, strict=True))

    @property
    def _has_ended(self) -> bool:  # type: ignore[override]
        return not self._unread

    def _next(self, timeout_s: float | None) -> IndexedChunk | Nothing:
        timeout_s = checked_seconds(timeout_s)
        taken = self._taken()
        while taken is TIMEOUT and timeout_s != 0 and wait_any([channel for _, channel in self._unread], timeout_s):
            taken = self._taken()
        return taken

    def consume(self, handler: Callable[[int, StreamChunk], object]) -> None:  # type: ignore[override]
        """Call a function with the place and every chunk of all prompts.

        Args:
            handler: Called on this thread. Its exception cancels all requests and is raised here.

        Raises:
            BatchError: Some requests failed; after the last chunk.
        """
        super().consume(lambda item: handler(*item))

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


class AsyncBatchStream(_BaseBatch[AsyncStream], LoopReadable[IndexedChunk, list[Completion]]):
    """The chunks of several prompts, for an event loop: `async with ... as streams: async for index, chunk in streams`.

    The requests are submitted by `open`, when the block is entered, or else by reading the first chunk; a request that is
    refused then ends its own stream. Otherwise as `BatchStream`. Cancelling the task that reads cancels all requests, also while
    they are being submitted.
    """

    def __init__(self, opener: BatchOpener, *, keep_alive: object = None) -> None:
        """Prepare a batch; nothing is submitted yet.

        Args:
            opener: Submits the requests and returns their channels; called once.
            keep_alive: An object to hold until the streams are closed or collected.
        """
        super().__init__()
        self._opener: BatchOpener | None = opener
        self._keep_alive = keep_alive
        self._is_open = self._is_cancelled = False

    @property
    def _has_ended(self) -> bool:  # type: ignore[override]
        return self._is_open and not self._unread

    async def _next(self, timeout_s: float | None) -> IndexedChunk | Nothing:
        await self._open()
        timeout_s = checked_seconds(timeout_s)
        taken = self._taken()
        if taken is not TIMEOUT or timeout_s == 0:
            return taken
        try:
            async with asyncio.timeout(timeout_s):
                while taken is TIMEOUT:
                    await wait_any_async([channel for _, channel in self._unread])
                    taken = self._taken()
        except TimeoutError:
            return TIMEOUT  # nothing was taken: that never waits
        return taken

    def cancel(self) -> None:
        """Ask the engine to end all requests. Any thread; never blocks. Generated chunks can still be read."""
        self._is_cancelled = True
        super().cancel()

    async def released(self) -> None:
        """Wait until the slots of all requests are free; return at once if they were never submitted."""
        for stream in self._streams:
            await stream.released()

    def _close(self) -> None:
        self.cancel()
        super()._close()
        self._keep_alive = None

    async def _open(self) -> None:
        self._check_open()
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
        self._check_open()

    def _stream_of(self, channel: StreamChannel) -> AsyncStream:
        async def opened() -> StreamChannel:
            return channel

        index, interval = channel.request_index, channel.interval
        return AsyncStream(opened, interval=interval, request_index=index, keep_alive=self._keep_alive)


def _cancel_all(channels: Iterable[StreamChannel]) -> None:
    for channel in channels:
        channel.cancel()


def _check_outcomes(outcomes: Sequence[object]) -> None:
    errors = [outcome for outcome in outcomes if isinstance(outcome, PacelineError)]
    if errors:
        raise BatchError(
            f"{len(errors)} of {len(outcomes)} streams failed, the first with: {errors[0]}; `outcomes` has all",
            outcomes,
        ) from errors[0]
