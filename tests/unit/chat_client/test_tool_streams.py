"""Streams that run the calls of the model: the parts between its messages, and the end of the stream. On the fake engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.chat_world import FakeAsyncChats, FakeChats, run_async
from tests.unit.chat_client.test_chat_calls import add, broken, calling

from paceline import Conversation
from paceline.chat import ChatChunk, ChatReader, ParsedMessage
from paceline.chat_client import chat_call
from paceline.errors import Closed, DecodeError, EngineStopped, InvalidParams
from paceline.streaming import END, TIMEOUT, FinishReason
from paceline.testing import FakeBackend, FakeEngineClient

HELLO = [{"role": "user", "content": "Hello!"}]
SHORT: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "run_tools": True}
ONE = ("add", '{"a": 1, "b": 2}')
TWO = ("add", '{"a": 3, "b": 4}')


@pytest.fixture
def chats() -> Iterator[FakeChats]:
    engine = FakeEngineClient()
    yield FakeChats(engine)
    engine.close()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the messages of streams read as these, the last one for all that follow."""

    def scripted(*messages: ParsedMessage) -> None:
        left = list(messages)

        class Scripted(ChatReader):
            def read(self, chunk: Any) -> list[ChatChunk]:
                *before, last = super().read(chunk)
                if last.finish_reason is FinishReason.LENGTH:
                    message = left.pop(0) if len(left) > 1 else left[0]
                    reason = FinishReason.TOOL_CALLS if message.tool_calls else FinishReason.STOP
                    last = msgspec.structs.replace(last, message=message, finish_reason=reason)
                return [*before, last]

        monkeypatch.setattr(chat_call, "ChatReader", Scripted)

    return scripted


def shape(chunks: list[ChatChunk]) -> list[str]:
    """Return the kinds of the chunks with more than tokens."""
    kinds = []
    for chunk in chunks:
        if chunk.tool_result is not None:
            kinds.append(f"result {chunk.tool_result.call.id} {chunk.tool_result.content}")
        elif chunk.usage is not None:
            assert chunk.finish_reason is not None
            kinds.append(f"terminal {chunk.finish_reason.value}")
        elif chunk.message is not None:
            assert chunk.finish_reason is None
            kinds.append(f"calls {len(chunk.message.tool_calls)}")
    return kinds


def test_calls_and_results_come_between_the_messages(chats: FakeChats, script: Callable[..., None]) -> None:
    """A single terminal chunk, the reply's; the whole equals the result of `chat`."""
    script(calling(ONE, TWO), calling(("broken", '{"reason": "no"}')), ParsedMessage("done"))
    with chats.stream_chat(HELLO, tools=[add, broken], **SHORT) as stream:
        chunks = list(stream)
        assert stream.get() is END
        reply = stream.collect()
    assert shape(chunks) == [
        "calls 2",
        "result call_0 3",
        "result call_1 7",
        "calls 1",
        "result call_0 Error: RuntimeError: no",
        "terminal stop",
    ]
    assert chunks[-1].usage is not None
    assert (stream.usage, stream.is_finished) == (chunks[-1].usage, True)
    assert [message["role"] for message in reply.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert (reply.content, len(reply.rounds)) == ("done", 2)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 12
    assert not stream.is_cancelled


def test_a_stream_without_calls_is_as_any_other(chats: FakeChats, script: Callable[..., None]) -> None:
    """Functions may exist and never be called; properties have their values at the end."""
    script(ParsedMessage("hi"))
    with chats.stream_chat(HELLO, tools=[add], **SHORT) as stream:
        assert (stream.finish_reason, stream.usage, stream.is_finished) == (None, None, False)
        assert shape(list(stream)) == ["terminal stop"]
        stream.cancel()
    assert (stream.is_cancelled, stream.is_finished) == (False, True)


def test_rounds_have_a_limit(chats: FakeChats, script: Callable[..., None]) -> None:
    """The calls are the reply then, which are not run."""
    script(calling(ONE))
    stream = chats.stream_chat(HELLO, tools=[add], max_tool_rounds=2, **SHORT)
    assert shape(list(stream)) == ["calls 1", "result call_0 3"] * 2 + ["terminal tool_calls"]
    reply = stream.collect()
    assert (len(reply.tool_calls), len(reply.rounds)) == (1, 2)


def test_a_message_that_was_cut_off_ends_the_stream(chats: FakeChats) -> None:
    """Its calls may be incomplete."""
    assert shape(list(chats.stream_chat(HELLO, tools=[add], **SHORT))) == ["terminal length"]


def test_leaving_between_runs_no_more_functions(chats: FakeChats, script: Callable[..., None]) -> None:
    """And nothing more is generated."""
    ran: list[int] = []

    def note(a: int, b: int) -> int:
        ran.append(a)
        return a

    note.__name__ = "add"
    script(calling(ONE, TWO))
    stream = chats.stream_chat(HELLO, tools=[note], **SHORT)
    for chunk in stream:
        if chunk.tool_result is not None:
            break
    assert (ran, stream.is_cancelled) == ([1], True)
    reply = stream.collect()
    assert (ran, reply.finish_reason, stream.finish_reason) == ([1], FinishReason.CANCELLED, FinishReason.CANCELLED)
    assert len(reply.tool_calls) == 2
    with chats.stream_chat(HELLO, tools=[note], **SHORT) as closed:
        while not (isinstance(chunk := closed.get(), ChatChunk) and chunk.message):
            pass
    assert ran == [1]
    assert closed.wait_released(30)
    with pytest.raises(Closed):
        closed.get()
    assert chats._engine.num_open == 0


def test_cancelling_from_a_function_ends_the_stream(chats: FakeChats, script: Callable[..., None]) -> None:
    """As any thread may: with one terminal chunk, and with the result of the function that ran."""

    def stop(a: int, b: int) -> str:
        stream.cancel()
        return "stopped"

    stop.__name__ = "add"
    script(calling(ONE, TWO))
    stream = chats.stream_chat(HELLO, tools=[stop], **SHORT)
    assert shape(list(stream)) == ["calls 2", "result call_0 stopped", "terminal cancelled"]
    assert stream.usage is not None
    assert stream.error is None


def test_a_function_that_exits_is_not_run_again(chats: FakeChats, script: Callable[..., None]) -> None:
    """An exception that is no `Exception` goes to the caller; the stream then ends as cancelled."""
    ran: list[int] = []

    def leave(a: int, b: int) -> None:
        ran.append(a)
        raise KeyboardInterrupt

    leave.__name__ = "add"
    script(calling(ONE))
    stream = chats.stream_chat(HELLO, tools=[leave], **SHORT)
    with pytest.raises(KeyboardInterrupt):
        stream.collect()
    assert stream.collect().finish_reason is FinishReason.CANCELLED
    assert ran == [1]


def test_a_request_that_is_refused_is_the_streams_error(chats: FakeChats, script: Callable[..., None]) -> None:
    """One terminal chunk with it, then it is raised."""

    def end(a: int, b: int) -> int:
        chats._engine.close()
        return a

    end.__name__ = "add"
    script(calling(ONE))
    stream = chats.stream_chat(HELLO, tools=[end], **SHORT)
    seen: list[ChatChunk] = []
    with pytest.raises(EngineStopped):
        stream.consume(seen.append)
    assert shape(seen) == ["calls 1", "result call_0 1", "terminal error"]
    assert isinstance(seen[-1].error, EngineStopped)
    with pytest.raises(EngineStopped):
        stream.collect()


def test_a_later_message_that_fails_ends_the_stream(script: Callable[..., None]) -> None:
    """As the first one would."""
    fails = [False]
    engine = FakeEngineClient(backend=FakeBackend(fail=lambda *_: DecodeError("broken") if fails[0] else None))

    def arm(a: int, b: int) -> int:
        fails[0] = True
        return a

    arm.__name__ = "add"
    script(calling(ONE))
    stream = FakeChats(engine).stream_chat(HELLO, tools=[arm], **SHORT)
    seen: list[ChatChunk] = []
    with pytest.raises(DecodeError):
        stream.consume(seen.append)
    assert shape(seen) == ["calls 1", "result call_0 1", "terminal error"]
    engine.close()


def test_a_conversation_has_the_whole_turn(chats: FakeChats, script: Callable[..., None]) -> None:
    """Calls and results too, once the terminal chunk has been read."""
    chats._engine.model = type("FakeModel", (), {"fingerprint": b"x", "modalities": ()})()  # type: ignore[misc, assignment]
    script(calling(ONE), ParsedMessage("three"))
    talk = Conversation(chats, tools=[add], **SHORT)
    with talk.stream("1 + 2?") as stream:
        for chunk in stream:
            assert chunk.usage is not None or not talk.messages
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]


def test_a_conversation_has_no_turn_that_ended_between_its_messages(
    chats: FakeChats, script: Callable[..., None]
) -> None:
    """Calls without their results would be refused by templates; the next turn goes on from before."""
    chats._engine.model = type("FakeModel", (), {"fingerprint": b"x", "modalities": ()})()  # type: ignore[misc, assignment]
    script(calling(ONE, TWO), ParsedMessage("fine"))
    talk = Conversation(chats, tools=[add], **SHORT)
    with talk.stream("1 + 2?") as stream:
        for chunk in stream:
            if chunk.tool_result is not None:
                stream.cancel()
    assert stream.finish_reason is FinishReason.CANCELLED
    assert talk.messages == []
    assert talk.stream("Hello!").collect().content == "fine"
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


async def async_add(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0)
    return a + b


async_add.__name__ = "add"


def test_async_functions_need_an_event_loop(chats: FakeChats) -> None:
    """Refused before anything is generated."""
    with pytest.raises(InvalidParams, match="AsyncLLM"):
        chats.stream_chat(HELLO, tools=[async_add], **SHORT)


@pytest.mark.parametrize("function", [add, async_add])
def test_an_event_loop_streams_over_calls(script: Callable[..., None], function: Any) -> None:
    """Plain and async functions; the events equal those of threads."""
    script(calling(ONE, TWO), calling(ONE), ParsedMessage("done"))

    async def main(chats: FakeAsyncChats) -> None:
        async with chats.stream_chat(HELLO, tools=[function], **SHORT) as stream:
            chunks = [chunk async for chunk in stream]
            assert await stream.get() is END
            reply = await stream.collect()
        found = ["calls 2", "result call_0 3", "result call_1 7", "calls 1", "result call_0 3", "terminal stop"]
        assert shape(chunks) == found
        assert (reply.content, len(reply.rounds)) == ("done", 2)
        assert (stream.is_finished, stream.is_cancelled) == (True, False)

    run_async(main)


def test_the_calls_of_a_message_run_concurrently_on_a_loop(script: Callable[..., None]) -> None:
    """The second is waited for by the first; results keep the order of the calls, and a wait can time out."""
    script(calling(ONE, TWO), ParsedMessage("done"))

    async def main(chats: FakeAsyncChats) -> None:
        came = asyncio.Event()

        async def wait(a: int, b: int) -> int:
            if a == 1:
                await came.wait()
            else:
                came.set()
            return a

        wait.__name__ = "add"
        stream = chats.stream_chat(HELLO, tools=[wait], **SHORT)
        chunks: list[ChatChunk] = []
        timeouts = 0
        while (taken := await stream.get(0)) is not END:
            if taken is TIMEOUT:
                timeouts += 1
                await asyncio.sleep(0.001)
            else:
                assert isinstance(taken, ChatChunk)
                chunks.append(taken)
        assert timeouts
        assert shape(chunks) == ["calls 2", "result call_0 1", "result call_1 3", "terminal stop"]

    run_async(main)


def test_leaving_a_loop_ends_functions_that_run(script: Callable[..., None]) -> None:
    """By cancelling the task that reads, and by another thread's cancel, after which the terminal chunk comes."""
    script(calling(ONE, TWO))

    async def main(chats: FakeAsyncChats) -> None:
        begun: list[int] = []
        ended: list[int] = []

        async def hang(a: int, b: int) -> None:
            begun.append(a)
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(a)

        async def wait_for(found: list[int], these: list[int]) -> None:
            deadline = time.monotonic() + 30
            while sorted(found) != these:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)

        hang.__name__ = "add"
        stream = chats.stream_chat(HELLO, tools=[hang], **SHORT)
        task = asyncio.create_task(stream.collect())
        await wait_for(begun, [1, 3])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await stream.collect()).finish_reason is FinishReason.CANCELLED
        await wait_for(ended, [1, 3])
        stream = chats.stream_chat(HELLO, tools=[hang], **SHORT)
        task = asyncio.create_task(stream.collect())
        await wait_for(begun, [1, 1, 3, 3])
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        reply = await task
        thread.join()
        assert (reply.finish_reason, stream.finish_reason) == (FinishReason.CANCELLED, FinishReason.CANCELLED)
        await wait_for(ended, [1, 1, 3, 3])
        async with chats.stream_chat(HELLO, tools=[hang], **SHORT) as closed:
            while not (isinstance(chunk := await closed.get(), ChatChunk) and chunk.message):
                pass
            assert await closed.get(0.01) is TIMEOUT
            await wait_for(begun, [1, 1, 1, 3, 3, 3])
        await wait_for(ended, [1, 1, 1, 3, 3, 3])

    run_async(main)


def test_a_refused_request_ends_a_loops_stream_too(script: Callable[..., None]) -> None:
    """With a terminal chunk and its error."""
    script(calling(ONE))

    async def main(chats: FakeAsyncChats) -> None:
        async def end(a: int, b: int) -> int:
            chats._fake.close()
            return a

        end.__name__ = "add"
        stream = chats.stream_chat(HELLO, tools=[end], **SHORT)
        seen: list[ChatChunk] = []
        with pytest.raises(EngineStopped):
            async for chunk in stream:
                seen += [chunk]
        assert shape(seen) == ["calls 1", "result call_0 1", "terminal error"]
        with pytest.raises(EngineStopped):
            await stream.collect()

    run_async(main)


def test_an_error_of_a_tool_is_logged_as_information(
    chats: FakeChats, script: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """A program without a configuration of logging prints nothing, since the model reads the error."""
    script(calling(("broken", '{"reason": "no"}')), ParsedMessage("done"))
    with caplog.at_level("INFO", "paceline.chat"):
        chats.stream_chat(HELLO, tools=[broken], **SHORT).collect()
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [
        ("INFO", "the tool broken failed, and the model reads the error as its result: RuntimeError('no')")
    ]


@pytest.mark.parametrize(("content", "num_warnings"), [("", 1), ("done", 0)])
def test_an_empty_reply_after_results_of_tools_has_a_warning(
    chats: FakeChats, script: Callable[..., None], caplog: pytest.LogCaptureFixture, content: str, num_warnings: int
) -> None:
    """In the log, in the terminal chunk and in the reply. Small models end their turn there."""
    script(calling(ONE), ParsedMessage(content))
    with chats.stream_chat(HELLO, tools=[add], **SHORT) as stream:
        for chunk in stream:
            assert chunk.content == "".join(delta.content for delta in chunk.deltas)
    warnings = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert [warning.startswith("the model's reply after the results of tools is empty") for warning in warnings] == (
        [True] * num_warnings
    )
    expected = warnings[0] if warnings else None
    for warning in (chunk.warning, stream.collect().choices[0].warning):
        assert (None if warning is None else str(warning)) == expected
    assert all(round_.choices[0].warning is None for round_ in stream.collect().rounds)
