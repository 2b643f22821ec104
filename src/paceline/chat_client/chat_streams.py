"""Chats while they are generated: `ChatStream` for threads, `AsyncChatStream` for event loops.

They read a `Stream` or an `AsyncStream` and have its contract: every chunk up to exactly one terminal one, and leaving cancels.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from paceline.chat import ChatChoice, ChatChunk, ChatCompletion, ChatReader
from paceline.chat_client.chat_call import ChatCall
from paceline.chat_client.chat_reply import ChatReply
from paceline.completion import Completion, completion_of
from paceline.errors import Closed, PacelineError
from paceline.streaming import AsyncStream, FinishReason, Stream, StreamChunk, Usage
from paceline.streaming.channel import AsyncChunkIterator, ChunkIterator
from paceline.streaming.sender import END, Nothing


class ChatAssembly:
    """Reads the chunks of one request as chunks of a chat, and puts them together at the end. One thread at a time."""

    def __init__(
        self, call: ChatCall, prompt: Sequence[int], on_end: Callable[[ChatCall], object] | None = None
    ) -> None:
        """Begin to read.

        Args:
            call: The chat, prepared.
            prompt: Its prompt as it is computed.
            on_end: Called with the chat on the thread that reads the terminal chunk.
        """
        self._call, self._prompt = call, prompt
        self._reader = ChatReader(call.rendered, call.request.params.n)
        self._received: list[StreamChunk] = []
        self._last_chunks: dict[int, ChatChunk] = {}
        self._on_end = on_end
        self.completion: ChatCompletion | None = None

    def needs_parser(self, chunk: StreamChunk) -> bool:
        """Return whether reading this chunk takes time."""
        return self._reader.needs_parser(chunk)

    def read(self, chunk: StreamChunk) -> list[ChatChunk]:
        """Return what a chunk brings."""
        self._received.append(chunk)
        chunks = self._reader.read(chunk)
        self._last_chunks |= {one.choice: one for one in chunks if one.finish_reason is not None}
        if chunk.usage is not None:
            self.completion = self._assembled()
            self._call.take_read(self.completion)
            if self._on_end is not None:
                self._on_end(self._call)
        return chunks

    def reply(self) -> ChatReply[Any]:
        """Return the reply of a chat that has ended. Raises `ResponseModelError`."""
        return self._call.reply()

    def _assembled(self) -> ChatCompletion:
        params = self._call.request.params
        whole = completion_of(
            self._received,
            prompt=self._prompt,
            wants_logprobs=params.logprobs is not None,
            wants_prompt_logprobs=params.prompt_logprobs is not None,
            index=0,
        )
        self._received.clear()
        return ChatCompletion(
            choices=tuple(self._choices(whole)),
            prompt_token_ids=whole.prompt_token_ids,
            usage=whole.usage,
            prompt_logprobs=whole.prompt_logprobs,
        )

    def _choices(self, whole: Completion) -> Iterable[ChatChoice]:
        """Yield the choices with the messages that were streamed, whose calls have their ids."""
        texts = {choice.index: choice for choice in whole.choices}
        for index, last in sorted(self._last_chunks.items()):
            generated = texts.get(index)
            assert last.message is not None  # noqa: S101 - a choice's last chunk has its message
            assert last.finish_reason is not None  # noqa: S101 - and its reason
            yield ChatChoice(
                index=index,
                message=last.message,
                finish_reason=last.finish_reason,
                text="" if generated is None else generated.text,
                token_ids=() if generated is None else generated.token_ids,
                stop=last.stop,
                logprobs=None if generated is None else generated.logprobs,
                error=last.error,
                warning=last.warning,
            )


class _BaseChatStream:
    """The base of both kinds of stream."""

    _stream: Stream | AsyncStream
    _assembly: ChatAssembly | None

    def __init__(self) -> None:
        self._waiting: deque[ChatChunk] = deque()
        self._error: PacelineError | None = None
        self._is_closed = False

    def cancel(self) -> None:
        """Ask the engine to end the request. Any thread; never blocks. What was generated can still be read."""
        self._stream.cancel()

    @property
    def is_finished(self) -> bool:
        """Whether the terminal chunk has come."""
        return self._stream.is_finished

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled before its end."""
        return self._stream.is_cancelled

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the choice that ended last did; None before the end."""
        return self._stream.finish_reason

    @property
    def usage(self) -> Usage | None:
        """Token counts and times; None before the end."""
        return self._stream.usage

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
    def _has_ended(self) -> bool:
        return self._assembly is not None and self._assembly.completion is not None and not self._waiting

    def _whole(self) -> ChatReply[Any]:
        if self._error is not None:
            raise self._error
        assert self._assembly is not None  # noqa: S101 - it has ended
        return self._assembly.reply()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("this stream was closed: read it inside its `with` block, or before close()")

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
    """

    def __init__(self, stream: Stream, assembly: ChatAssembly) -> None:
        """Wrap a stream.

        Args:
            stream: Of the request.
            assembly: Reads its chunks.
        """
        super().__init__()
        self._stream: Stream = stream
        self._assembly: ChatAssembly = assembly

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
            timeout_s: How long to wait, in seconds; None: without limit; 0: not at all.

        Returns:
            The chunk; `TIMEOUT` if none came in time; `END` after the terminal chunk.

        Raises:
            Closed: The stream was closed.
        """
        self._check_open()
        if not self._waiting:
            taken = self._stream.get(timeout_s)
            if not isinstance(taken, StreamChunk):
                return taken
            self._waiting.extend(self._assembly.read(taken))
        return self._take()

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

    The request is prepared and submitted when the block is entered, or else by reading the first chunk; errors such as
    `TemplateError` and `QueueFull` are raised there. Otherwise as `ChatStream`. Cancelling the task that reads cancels the
    request. What takes time is parsed in threads of the loop's executor.
    """

    def __init__(self, stream: AsyncStream, assembly: Callable[[], ChatAssembly]) -> None:
        """Wrap a stream.

        Args:
            stream: Of the request.
            assembly: Returns what reads its chunks; called once the stream is open.
        """
        super().__init__()
        self._stream: AsyncStream = stream
        self._make_assembly = assembly
        self._assembly: ChatAssembly | None = None
        self._reading: asyncio.Future[list[ChatChunk]] | None = None

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
        if not self._waiting:
            if self._reading is None:
                taken = await self._stream.get(timeout_s)
                if not isinstance(taken, StreamChunk):
                    return taken
                self._read(taken)
            await self._finish_reading()
        return self._take()

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
        await self._stream.aclose()

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

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
