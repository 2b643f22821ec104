"""The stream of a chat keeps the contract of `Stream`, on the fake engine."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tests.chat_world import FakeChats

from paceline.chat import ChatChunk
from paceline.errors import Closed, DecodeError, InvalidParams, InvalidType, QueueFull
from paceline.streaming import END, TIMEOUT, FinishReason
from paceline.testing import FakeBackend, FakeEngineClient

HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.fixture
def chats() -> Iterator[FakeChats]:
    engine = FakeEngineClient()
    yield FakeChats(engine)
    engine.close()


def text_of(chunks: list[ChatChunk], choice: int = 0) -> str:
    return "".join(delta.content for chunk in chunks if chunk.choice == choice for delta in chunk.deltas)


def test_a_stream_is_the_chat_in_pieces(chats: FakeChats) -> None:
    """Deltas make up the content, one chunk is terminal, and the whole equals the result of `chat`."""
    whole = chats.chat(HELLO, max_tokens=12, ignore_eos=True)
    with chats.stream_chat(HELLO, max_tokens=12, ignore_eos=True) as stream:
        assert stream.completion is None
        chunks = list(stream)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert text_of(chunks) == whole.content
    reply = stream.completion
    assert reply is not None
    assert (reply.choices, reply.messages, reply.prompt_token_ids) == (
        whole.choices,
        whole.messages,
        whole.prompt_token_ids,
    )
    assert reply.messages == [*HELLO, {"role": "assistant", "content": whole.content}]
    assert (stream.finish_reason, stream.usage, stream.is_finished) == (FinishReason.LENGTH, reply.usage, True)


def test_every_choice_ends_once(chats: FakeChats) -> None:
    """With n each choice has one last chunk with its message; the stream has one terminal chunk."""
    with chats.stream_chat(HELLO, max_tokens=5, n=3, ignore_eos=True, temperature=1, seed=3) as stream:
        chunks = list(stream)
        reply = stream.collect()
    ends = [chunk for chunk in chunks if chunk.finish_reason is not None]
    assert sorted(chunk.choice for chunk in ends) == [0, 1, 2]
    assert sum(chunk.usage is not None for chunk in chunks) == 1
    assert [text_of(chunks, choice.index) for choice in reply.choices] == [
        choice.message.content for choice in reply.choices
    ]


def test_collect_reads_the_rest(chats: FakeChats) -> None:
    """After some chunks, or none, the whole is the same; it can be had again."""
    with chats.stream_chat(HELLO, max_tokens=6, ignore_eos=True) as stream:
        assert isinstance(stream.get(), ChatChunk)
        reply = stream.collect()
        assert stream.collect() == reply == stream.completion
        assert stream.get() is END
    assert len(reply.choices[0].token_ids) == 6


def test_leaving_cancels_and_frees_the_slot(chats: FakeChats) -> None:
    """By break, by an exception, by close, by dropping the stream, by a handler that raises."""

    def endless() -> object:
        return chats.stream_chat(HELLO, max_tokens=3000, ignore_eos=True)

    stream = chats.stream_chat(HELLO, max_tokens=3000, ignore_eos=True)
    for _ in stream:
        break
    assert stream.is_cancelled
    assert stream.wait_released(30)
    with chats.stream_chat(HELLO, max_tokens=3000, ignore_eos=True) as left:
        left.get()
    assert left.wait_released(30)
    with pytest.raises(Closed):
        left.get()

    def fail(chunk: ChatChunk) -> None:
        raise KeyError

    with pytest.raises(KeyError), chats.stream_chat(HELLO, max_tokens=3000, ignore_eos=True) as handled:
        handled.consume(fail)
    assert handled.wait_released(30)
    dropped = endless()
    del dropped
    gc.collect()
    assert chats.chat(HELLO, max_tokens=2, ignore_eos=True).content
    assert chats._engine.num_open == 0 or chats._engine.slots()


def test_a_cancelled_stream_has_its_text_so_far(chats: FakeChats) -> None:
    """After cancel the rest can be read, and the reply has the reason."""
    with chats.stream_chat(HELLO, max_tokens=3000, ignore_eos=True) as stream:
        first = stream.get()
        assert isinstance(first, ChatChunk)
        stream.cancel()
        reply = stream.collect()
    assert reply.finish_reason is FinishReason.CANCELLED
    assert reply.content.startswith(text_of([first]))


def test_a_wait_can_time_out(chats: FakeChats) -> None:
    """A read without time returns TIMEOUT, and the stream goes on."""
    with chats.stream_chat(HELLO, max_tokens=1000, ignore_eos=True, interval=1000) as stream:
        assert stream.get(0) is TIMEOUT
        assert stream.interval == 1000
        stream.interval = 1
        assert stream.get(30) is not TIMEOUT


def test_a_failed_request_yields_its_terminal_chunk_and_raises() -> None:
    """The loop raises after the last chunk, `collect` as well, and later requests work."""
    fails = [True]

    def fail(number: int, rows: object) -> DecodeError | None:
        return DecodeError("broken") if fails[0] and number >= 3 else None

    engine = FakeEngineClient(backend=FakeBackend(fail=fail))
    chats = FakeChats(engine)
    stream = chats.stream_chat(HELLO, max_tokens=20, ignore_eos=True)
    seen: list[ChatChunk] = []
    with pytest.raises(DecodeError):
        stream.consume(seen.append)
    assert [chunk.finish_reason for chunk in seen if chunk.finish_reason] == [FinishReason.ERROR]
    with pytest.raises(DecodeError):
        stream.collect()
    with pytest.raises(DecodeError):
        chats.chat(HELLO, max_tokens=20, ignore_eos=True)
    fails[0] = False
    assert chats.chat(HELLO, max_tokens=3, ignore_eos=True).finish_reason is FinishReason.LENGTH
    engine.close()


def test_what_a_stream_does_not_take_is_refused(chats: FakeChats) -> None:
    """Lists of conversations, and a number that is none."""
    with pytest.raises(InvalidType, match="one conversation"):
        chats.stream_chat([HELLO, HELLO])  # type: ignore[list-item]
    with pytest.raises(InvalidParams, match="request_index"):
        chats.stream_chat(HELLO, request_index=-1)


def test_a_full_queue_refuses_a_chat() -> None:
    """Nothing begins, and the next one works when there is a place."""
    from paceline.config import EngineConfig

    engine = FakeEngineClient(backend=FakeBackend(num_seq_ids=2), config=EngineConfig(max_queue=0, when_full="refuse"))
    chats = FakeChats(engine)
    running = [
        chats.stream_chat(HELLO, max_tokens=3000, ignore_eos=True, max_buffered_tokens=1)
        for _ in range(engine.limits.num_slots)
    ]
    with pytest.raises(QueueFull):
        chats.chat(HELLO)
    with pytest.raises(QueueFull):
        chats.stream_chat(HELLO)
    for stream in running:
        stream.close()
        assert stream.wait_released(30)
    assert chats.chat(HELLO, max_tokens=2, ignore_eos=True).content
    engine.close()
