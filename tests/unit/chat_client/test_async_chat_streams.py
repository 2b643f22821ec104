"""The stream of a chat on an event loop keeps the contract of `AsyncStream`, on the fake engine."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.chat_world import FakeAsyncChats, run_async

from paceline.chat import ChatChunk, ChatReader
from paceline.errors import Closed, InvalidParams
from paceline.streaming import END, TIMEOUT, FinishReason

HELLO = [{"role": "user", "content": "Hello!"}]
ENDLESS: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}


def test_a_stream_is_the_chat_in_pieces() -> None:
    """One terminal chunk; deltas make up the content; the whole equals the result of `chat`."""

    async def main(chats: FakeAsyncChats) -> None:
        whole = await chats.chat(HELLO, max_tokens=12, ignore_eos=True)
        stream = chats.stream_chat(HELLO, max_tokens=12, ignore_eos=True, request_index=7)
        assert (stream.completion, stream.is_finished, stream.request_index) == (None, False, 7)
        async with stream:
            chunks = [chunk async for chunk in stream]
            assert await stream.get() is END
        assert sum(chunk.usage is not None for chunk in chunks) == 1
        assert "".join(delta.content for chunk in chunks for delta in chunk.deltas) == whole.content
        assert stream.completion is not None
        assert stream.completion.choices == whole.choices
        assert await stream.collect() == stream.completion

    run_async(main)


def test_leaving_cancels_and_frees_the_slot() -> None:
    """By break, by the end of the block, by cancelling the task that reads."""

    async def main(chats: FakeAsyncChats) -> None:
        left = chats.stream_chat(HELLO, **ENDLESS)
        async for _ in left:
            break
        await left.released()
        async with chats.stream_chat(HELLO, **ENDLESS) as closed:
            await closed.get()
        await closed.released()
        with pytest.raises(Closed):
            await closed.get()
        read = chats.stream_chat(HELLO, **ENDLESS, interval=2000)
        task = asyncio.create_task(read.collect())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await read.released()
        assert read.is_cancelled
        assert (await chats.chat(HELLO, max_tokens=2, ignore_eos=True)).content

    run_async(main)


def test_a_wait_that_is_cancelled_while_a_chunk_is_parsed_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next read has the thread's result."""
    may_read = threading.Event()
    read = ChatReader.read

    def slowly(self: ChatReader, chunk: Any) -> list[ChatChunk]:
        may_read.wait(30)
        return read(self, chunk)

    monkeypatch.setattr(ChatReader, "read", slowly)
    monkeypatch.setattr(ChatReader, "needs_parser", lambda self, chunk: True)

    async def main(chats: FakeAsyncChats) -> None:
        async with chats.stream_chat(HELLO, max_tokens=5, ignore_eos=True) as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.get(), 0.2)
            assert not stream.is_cancelled
            may_read.set()
            reply = await stream.collect()
        assert len(reply.choices[0].token_ids) == 5
        assert reply.finish_reason is FinishReason.LENGTH

    run_async(main)


def test_errors_come_when_it_is_entered_and_waits_can_time_out() -> None:
    """Nothing is submitted before; an option that is wrong raises then."""

    async def main(chats: FakeAsyncChats) -> None:
        wrong = chats.stream_chat([{"role": "user"}])
        with pytest.raises(InvalidParams, match="content is missing"):
            async with wrong:
                pass
        with pytest.raises(InvalidParams, match="request_index"):
            chats.stream_chat(HELLO, request_index=-1)
        async with chats.stream_chat(HELLO, **ENDLESS, interval=2000) as stream:
            assert await stream.get(0) is TIMEOUT
            stream.interval = 1
            assert isinstance(await stream.get(30), ChatChunk)

    run_async(main)
