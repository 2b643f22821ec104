"""Chats while they are generated: `ChatStream` for threads, `AsyncChatStream` for event loops.

They read a `Stream` or an `AsyncStream` and have its contract: every chunk up to exactly one terminal one, and leaving cancels.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from paceline.chat import ChatChunk, ToolCall, ToolResult
from paceline.chat_client.chat_call import ChatAssembly, ChatReply
from paceline.errors import Closed, PacelineError
from paceline.streaming import AsyncStream, FinishReason, Stream, StreamChunk, Usage
from paceline.streaming.channel import AsyncChunkIterator, ChunkIterator
from paceline.streaming.sender import END, TIMEOUT, Nothing
from paceline.streaming.stream import stream_repr


class _BaseChatStream:
    """The base of both kinds of stream."""

    _stream: Stream | AsyncStream
    _assembly: ChatAssembly | None

    def __init__(self) -> None:
        self._waiting: deque[ChatChunk] = deque()
        self._error: PacelineError | None = None
        self._is_closed = False
        self._is_stopped = False  # while calls may still be run
        self._results: list[tuple[ToolCall, str]] = []
        self._ending: ChatChunk | None = None  # of a chat that ended in front of another request

    def cancel(self) -> None:
        """Ask the engine to end the request. Any thread; never blocks. What was generated can still be read."""
        self._is_stopped |= self._may_go_on
        self._stream.cancel()

    def __repr__(self) -> str:
        return stream_repr(self, is_closed=self._is_closed)

    @property
    def is_finished(self) -> bool:
        """Whether the terminal chunk has come; with run_tools, whether it has been read."""
        return self._ending is not None or (self._stream.is_finished and not self._may_go_on)

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled before its end."""
        return self._is_stopped or self._stream.is_cancelled

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice that ended last did; None before the end."""
        if self._ending is not None:
            return self._ending.finish_reason
        return self._stream.finish_reason if self.is_finished else None

    @property
    def usage(self) -> Usage | None:
        """Token counts and times; None before the end. With run_tools those of the last message."""
        if self._ending is not None:
            return self._ending.usage
        return self._stream.usage if self.is_finished else None

    @property
    def error(self) -> PacelineError | None:
        """The first error among the chunks read so far."""
        return self._error

    @property
    def num_buffered(self) -> int:
        """Tokens that were generated and not read yet."""
        return self._stream.num_buffered + sum(len(chunk.token_ids) for chunk in self._waiting)

    @property
    def request_index(self) -> int:
        """The number that the caller gave the request."""
        return self._stream.request_index

    @property
    def completion(self) -> ChatReply[Any] | None:
        """The whole, as `chat` would return it; None before its terminal chunk was read. See `collect`.

        Raises:
            ResponseModelError: The reply is no instance of response_model.
        """
        return self._whole() if self._has_ended else None

    @property
    def is_open(self) -> bool:
        """Whether it can still bring something new: not ended, closed or cancelled."""
        return not (self._is_closed or self._has_ended or self.is_cancelled)

    @property
    def _may_go_on(self) -> bool:
        return self._assembly is not None and self._assembly.may_go_on

    @property
    def _has_ended(self) -> bool:
        assembly = self._assembly
        is_whole = assembly is not None and assembly.completion is not None and not assembly.pending
        return is_whole and not self._waiting

    def _whole(self) -> ChatReply[Any]:
        if self._error is not None:
            raise self._error
        assert self._assembly is not None  # noqa: S101 - it has ended
        return self._assembly.reply()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this stream was closed: read it inside its `with` block, or before close()")

    def _add_result(self, call: ToolCall, content: str) -> None:
        self._results.append((call, content))
        self._waiting.append(ChatChunk(choice=0, tool_result=ToolResult(call, content)))

    def _end(self, assembly: ChatAssembly, reason: FinishReason, error: PacelineError | None = None) -> None:
        """End in front of another request, with a terminal chunk as every stream has."""
        self._ending = assembly.cut_off(reason, error)
        self._waiting.append(self._ending)

    def _take(self) -> ChatChunk:
        chunk = self._waiting.popleft()
        if self._error is None:
            self._error = chunk.error
        return chunk

    def _after(self, taken: ChatChunk | Nothing) -> ChatChunk | Nothing:
        if taken is END and self._error is not None:
            raise self._error
        return taken


class ChatStream(_BaseChatStream):
    """The chunks of one chat as they are generated: `for chunk in stream`. One reader; `cancel` is for any thread.

    The contract is that of `Stream`: leaving the loop, a `with` block or dropping the stream cancels the request; a loop yields
    every chunk up to the terminal one, which has the usage, and then raises the first error of a chunk, if there was one.

        with llm.stream_chat([{"role": "user", "content": "Hello!"}]) as stream:
            for chunk in stream:
                for delta in chunk.deltas:
                    print(delta.content, end="", flush=True)
        print(stream.completion.finish_reason)

    With run_tools it goes on over calls and their results: a message whose calls are run ends with a chunk that has `message`
    and no finish_reason, and a chunk with `tool_result` for each call follows. The functions run on the thread that reads. The
    terminal chunk is that of the reply. A cancellation meanwhile, or a request that is refused, ends the stream with a
    terminal chunk too.
    """

    def __init__(self, open_round: Callable[[], tuple[Stream, ChatAssembly]]) -> None:
        """Submit the first request.

        Args:
            open_round: Submits the chat's next request; returns its stream, and what reads its chunks.
        """
        super().__init__()
        self._open_round: Callable[[], tuple[Stream, ChatAssembly]] | None = open_round
        self._stream: Stream
        self._assembly: ChatAssembly
        self._stream, self._assembly = open_round()

    @property
    def interval(self) -> int:
        """Tokens per chunk, the last chunk aside. May be set by any thread."""
        return self._stream.interval

    @interval.setter
    def interval(self, interval: int) -> None:
        self._stream.interval = interval

    def get(self, timeout_s: float | None = None) -> ChatChunk | Nothing:
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
        while not self._waiting:
            if self._assembly.pending:
                self._go_on(self._assembly)
                continue
            if self._ending is not None:
                return END
            taken = self._stream.get(timeout_s)
            if not isinstance(taken, StreamChunk):
                return taken
            self._waiting.extend(self._assembly.read(taken))
        return self._take()

    def _go_on(self, assembly: ChatAssembly) -> None:
        """Run the next of the calls, or submit the request that follows them."""
        call, num_run = assembly.call, len(self._results)
        try:
            if self._is_stopped or self._open_round is None:
                self._end(assembly, FinishReason.CANCELLED)
            elif num_run < len(assembly.pending):
                self._add_result(assembly.pending[num_run], call.toolbox.run(assembly.pending[num_run]))
            else:
                call.add_results(self._results)
                self._results, interval = [], self._stream.interval
                self._stream, self._assembly = self._open_round()
                self._stream.interval = interval
                if self.is_cancelled:  # meanwhile, by another thread
                    self._stream.cancel()
        except PacelineError as error:
            self._end(assembly, FinishReason.ERROR, error)
        except BaseException:
            self._is_stopped = True  # no call is run again
            raise

    def __iter__(self) -> ChunkIterator[ChatChunk]:
        return ChunkIterator(lambda: self._after(self.get()), self.cancel)

    def consume(self, handler: Callable[[ChatChunk], object]) -> FinishReason | None:
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
        return self.finish_reason

    def collect(self) -> ChatReply[Any]:
        """Return the whole, as `LLM.chat` would; read what has not been read yet.

        Returns:
            The reply.

        Raises:
            PacelineError: The request failed.
            ResponseModelError: The reply is no instance of response_model.
            Closed: The stream was closed before its end.
        """
        if not self._has_ended:
            for _ in self:
                pass
        return self._whole()

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the request's slot is free and its KV cells can be reused.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit.

        Returns:
            Whether that is so.
        """
        return self._stream.wait_released(timeout_s)

    def close(self) -> None:
        """Cancel the request if it has not ended, and read no more. Does not wait; see `wait_released`."""
        self._is_closed = True
        self._open_round = None
        self.cancel()
        self._stream.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncChatStream(_BaseChatStream):
    """The chunks of one chat, for an event loop: `async with ... as stream: async for chunk in stream`.

    The request is prepared and submitted by `open`, when the block is entered, or else by reading the first chunk; errors
    such as `TemplateError` and `QueueFull` are raised there. Otherwise as `ChatStream`. Cancelling the task that reads cancels
    the request. Texts that take time are parsed in threads of the loop's executor. With run_tools the calls of a message run
    concurrently: async functions on the event loop, others in threads; their results come in the order of the calls.
    """

    def __init__(self, open_round: Callable[[], tuple[AsyncStream, Callable[[], ChatAssembly]]]) -> None:
        """Prepare a stream; nothing is submitted yet.

        Args:
            open_round: Returns the stream of the chat's next request, and a function that returns what reads its chunks, which
                is called once the stream is open.
        """
        super().__init__()
        self._open_round = open_round
        self._stream: AsyncStream
        self._stream, self._make_assembly = open_round()
        self._assembly: ChatAssembly | None = None
        self._reading: asyncio.Future[list[ChatChunk]] | None = None
        self._running: list[asyncio.Task[str]] = []

    @property
    def interval(self) -> int:
        """Tokens per chunk, the last chunk aside. May be set before the request is submitted."""
        return self._stream.interval

    @interval.setter
    def interval(self, interval: int) -> None:
        self._stream.interval = interval

    async def get(self, timeout_s: float | None = None) -> ChatChunk | Nothing:
        """Return the next chunk, as `ChatStream.get` does.

        Args:
            timeout_s: How long to wait, in seconds, from when the request is submitted; None: without limit.

        Returns:
            The chunk; `TIMEOUT` if none came in time; `END` after the terminal chunk.

        Raises:
            Closed: The stream was closed.
        """
        self._check_open()
        while not self._waiting:
            if self._reading is None and self._assembly is not None and self._assembly.pending:
                if not await self._go_on(self._assembly, timeout_s):
                    return TIMEOUT
                continue
            if self._ending is not None:
                return END
            if self._reading is None:
                taken = await self._stream.get(timeout_s)
                if not isinstance(taken, StreamChunk):
                    return taken
                self._read(taken)
            await self._finish_reading()
        return self._take()

    def cancel(self) -> None:
        """Ask the engine to end the request, and functions that run to end. Any thread; never blocks."""
        super().cancel()
        for task in self._running:
            with suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def _go_on(self, assembly: ChatAssembly, timeout_s: float | None) -> bool:
        """Wait for the result of the next call, or submit the request that follows them; return whether that is done."""
        calls, num_run = assembly.pending, len(self._results)
        if not self._is_stopped and num_run < len(calls):
            if not self._running:
                toolbox = assembly.call.toolbox
                self._running = [asyncio.create_task(toolbox.run_async(one, asyncio.to_thread)) for one in calls]
            task = self._running[num_run]
            await asyncio.wait((task,), timeout=timeout_s)  # which leaves it alone when the caller is cancelled
            if not task.done():
                return False
            if not task.cancelled():
                self._add_result(calls[num_run], task.result())
                return True
            self._is_stopped = True
        if self._is_stopped:
            self._end(assembly, FinishReason.CANCELLED)
            return True
        assembly.call.add_results(self._results)
        self._results, self._running, interval = [], [], self._stream.interval
        self._stream, self._make_assembly = self._open_round()
        self._assembly, self._stream.interval = None, interval
        try:
            await self._stream.open()
        except PacelineError as error:
            self._assembly = assembly
            self._end(assembly, FinishReason.ERROR, error)
        return True

    def __aiter__(self) -> AsyncChunkIterator[ChatChunk]:
        async def get() -> ChatChunk | Nothing:
            return self._after(await self.get())

        return AsyncChunkIterator(get, self.cancel)

    async def collect(self) -> ChatReply[Any]:
        """Return the whole, as `AsyncLLM.chat` would; read what has not been read yet.

        Returns:
            The reply.

        Raises:
            PacelineError: The request failed.
            ResponseModelError: The reply is no instance of response_model.
            Closed: The stream was closed before its end.
        """
        if not self._has_ended:
            async for _ in self:
                pass
        return self._whole()

    async def released(self) -> None:
        """Wait until the request's slot is free and its KV cells can be reused; return at once if it was never submitted."""
        await self._stream.released()

    async def aclose(self) -> None:
        """Cancel the request if it has not ended, and read no more. Does not wait; see `released`."""
        self._is_closed = True
        self.cancel()
        await self._stream.aclose()

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
        await self._stream.open()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _read(self, chunk: StreamChunk) -> None:
        """Have a chunk read: here, or in a thread if it takes time."""
        if self._assembly is None:
            self._assembly = self._make_assembly()
        assembly = self._assembly
        if assembly.needs_parser(chunk):
            self._reading = asyncio.ensure_future(asyncio.to_thread(assembly.read, chunk))
        else:
            self._waiting.extend(assembly.read(chunk))

    async def _finish_reading(self) -> None:
        """Wait for the thread that reads; where the caller is cancelled meanwhile, the next call has its chunks."""
        if self._reading is None:
            return
        chunks = await asyncio.shield(self._reading)
        self._reading = None
        self._waiting.extend(chunks)
