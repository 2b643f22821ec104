"""Chats while they are generated: `ChatStream` for threads, `AsyncChatStream` for event loops.

They read a `Stream` or an `AsyncStream` and have its contract: every chunk up to exactly one terminal one, and leaving cancels.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from paceline.chat import ChatChunk, ToolCall, ToolResult
from paceline.chat_client.chat_call import ChatAssembly, ChatReply
from paceline.errors import PacelineError
from paceline.streaming import AsyncStream, FinishReason, Stream, StreamChunk, Usage
from paceline.streaming.sender import END, TIMEOUT, Nothing
from paceline.streaming.stream import LoopReadable, Readable, ThreadReadable


class _BaseChatStream(Readable[ChatChunk, ChatReply[Any]]):
    _stream: Stream | AsyncStream
    _assembly: ChatAssembly | None

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[ChatChunk] = deque()
        self._is_stopped = False  # while calls may still be run
        self._results: list[tuple[ToolCall, str]] = []
        self._ending: ChatChunk | None = None  # of a chat that ended in front of another request

    def cancel(self) -> None:
        """Ask the engine to end the request. Any thread; never blocks. Generated text can still be read."""
        self._is_stopped |= self._may_go_on
        self._stream.cancel()

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
        """Token counts and times; None before the end. With run_tools of the last message."""
        if self._ending is not None:
            return self._ending.usage
        return self._stream.usage if self.is_finished else None

    @property
    def num_buffered(self) -> int:
        """Tokens that were generated and not read yet."""
        return self._stream.num_buffered + sum(len(chunk.token_ids) for chunk in self._waiting)

    @property
    def request_index(self) -> int:
        """The number that the caller gave the request."""
        return self._stream.request_index

    @property
    def interval(self) -> int:
        """Tokens per chunk, the last chunk aside. May be set by any thread, also before the request is submitted."""
        return self._stream.interval

    @interval.setter
    def interval(self, interval: int) -> None:
        self._stream.interval = interval

    @property
    def is_open(self) -> bool:
        """Whether it can still bring something new: not ended, closed or cancelled."""
        return not (self._is_closed or self._has_ended or self.is_cancelled)

    @property
    def _may_go_on(self) -> bool:
        return self._assembly is not None and self._assembly.may_go_on

    @property
    def _has_ended(self) -> bool:  # type: ignore[override]
        assembly = self._assembly
        is_whole = assembly is not None and assembly.completion is not None and not assembly.pending
        return is_whole and not self._waiting

    def _whole(self) -> ChatReply[Any]:
        if self._error is not None:
            raise self._error
        assert self._assembly is not None  # noqa: S101 - it has ended
        return self._assembly.call.reply()

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

    def _close(self) -> None:
        self._is_closed = True
        self.cancel()
        self._stream._close()  # noqa: SLF001 - of both kinds


class ChatStream(_BaseChatStream, ThreadReadable[ChatChunk, ChatReply[Any]]):
    """The chunks of one chat as they are generated: `for chunk in stream`. One reader; `cancel` is for any thread.

    The contract is that of `Stream`: leaving the loop, a `with` block or dropping the stream cancels the request; a loop yields
    every chunk up to the terminal one, which has the usage, and then raises the first error of a chunk, if there was one.

        with llm.stream_chat([{"role": "user", "content": "Hello!"}]) as stream:
            for chunk in stream:
                for delta in chunk.deltas:
                    print(delta.content, end="", flush=True)
        print(stream.completion.finish_reason)

    With run_tools it goes on over calls and their results: a message with calls that are run ends with a chunk that has `message`
    and no finish_reason, and a chunk with `tool_result` for each call follows. The functions run on the thread that reads. The
    terminal chunk is that of the reply. A cancellation meanwhile, or a request that is refused, ends the stream with a
    terminal chunk too.
    """

    def __init__(self, open_round: Callable[[], tuple[Stream, ChatAssembly]]) -> None:
        """Submit the first request.

        Args:
            open_round: Submits the chat's next request; returns its stream, and the reader of its chunks.
        """
        super().__init__()
        self._open_round: Callable[[], tuple[Stream, ChatAssembly]] | None = open_round
        self._stream: Stream
        self._assembly: ChatAssembly
        self._stream, self._assembly = open_round()

    def _next(self, timeout_s: float | None) -> ChatChunk | Nothing:
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

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the request's slot is free and its KV cells can be reused.

        Args:
            timeout_s: How long to wait, in seconds; None: without limit.

        Returns:
            Whether that is so.
        """
        return self._stream.wait_released(timeout_s)

    def _close(self) -> None:
        self._open_round = None
        super()._close()


class AsyncChatStream(_BaseChatStream, LoopReadable[ChatChunk, ChatReply[Any]]):
    """The chunks of one chat, for an event loop: `async with ... as stream: async for chunk in stream`.

    The request is prepared and submitted by `open`, when the block is entered, or else by reading the first chunk; errors
    like `TemplateError` and `QueueFull` are raised there. Otherwise as `ChatStream`. Cancelling the task that reads cancels
    the request. Texts that take time are parsed in threads of the loop's executor. With run_tools the calls of a message run
    concurrently: async functions on the event loop, others in threads; their results come in the order of the calls.
    """

    def __init__(self, open_round: Callable[[], tuple[AsyncStream, Callable[[], ChatAssembly]]]) -> None:
        """Prepare a stream; nothing is submitted yet.

        Args:
            open_round: Returns the stream of the chat's next request, and a function that returns the reader of its chunks, which
                is called once the stream is open.
        """
        super().__init__()
        self._open_round = open_round
        self._stream: AsyncStream
        self._stream, self._make_assembly = open_round()
        self._assembly: ChatAssembly | None = None
        self._reading: asyncio.Future[list[ChatChunk]] | None = None
        self._running: list[asyncio.Task[str]] = []

    async def _next(self, timeout_s: float | None) -> ChatChunk | Nothing:
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
                if self._assembly is None:
                    self._assembly = self._make_assembly()
                assembly = self._assembly
                if not assembly.needs_parser(taken):
                    self._waiting.extend(assembly.read(taken))
                    continue
                self._reading = asyncio.ensure_future(asyncio.to_thread(assembly.read, taken))
            chunks = await asyncio.shield(self._reading)  # if the caller is cancelled meanwhile, the next call has them
            self._reading = None
            self._waiting.extend(chunks)
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
                self._running = [asyncio.create_task(toolbox.run_async(call, asyncio.to_thread)) for call in calls]
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

    async def released(self) -> None:
        """Wait until the request's slot is free and its KV cells can be reused; return at once if it was never submitted."""
        await self._stream.released()

    async def _open(self) -> None:
        await self._stream.open()
