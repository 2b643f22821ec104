"""The stream of a caller without an event loop."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
from tests.unit.streaming.pieces import arrival, delta, ending

from paceline.errors import Closed, DecodeError, SamplingError, Unsupported
from paceline.streaming import END, TIMEOUT, FinishReason, Stream, StreamChannel, StreamChunk, StreamSender, Usage
from paceline.streaming.chunk import completion_of

ASSEMBLE = partial(completion_of, prompt=(7, 8), wants_logprobs=True, wants_prompt_logprobs=False, index=3)


def pair() -> tuple[Stream, StreamSender]:
    channel = StreamChannel.create()
    sender = channel.attach(assemble=ASSEMBLE)
    return Stream(channel), sender


def test_a_stream_yields_every_chunk_and_then_knows_its_end() -> None:
    """Before the end reason and usage are None; a loop to the end cancels nothing."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    assert (stream.finish_reason, stream.usage, stream.is_finished, stream.num_buffered) == (None, None, False, 1)
    sender.finish(ending(1, FinishReason.STOP, 2))
    assert [chunk.token_ids for chunk in stream] == [(1,), (2,)]
    assert (stream.finish_reason, stream.usage, stream.is_finished) == (FinishReason.STOP, Usage(), True)
    assert (stream.is_cancelled, stream.error) == (False, None)
    assert list(stream) == []


@pytest.mark.parametrize("num_read", [0, 1, 150, 300])
def test_a_stream_is_collected_with_the_chunks_read_before(num_read: int) -> None:
    """All choices of the completion are whole, wherever reading began; collecting again returns the same."""
    stream, sender = pair()
    chunks = [delta(at // 2, at % 99, choice=at % 2) for at in range(300)]
    chunks += [StreamChunk(index=150, choice=1, finish_reason=FinishReason.STOP, stop="x"), ending(150, choice=0)]
    for chunk in chunks[:num_read]:
        sender.push(chunk)
        assert stream.get() == chunk
        assert stream.completion is None
    for chunk in chunks[num_read:-1]:
        sender.push(chunk)
    sender.finish(chunks[-1])
    expected = ASSEMBLE(chunks)
    assert [len(choice.token_ids) for choice in expected.choices] == [150, 150]
    assert stream.collect() == stream.collect() == stream.completion == expected
    assert (stream.is_cancelled, stream.get()) == (False, END)
    stream.close()
    assert stream.collect() == expected


def test_a_stream_that_is_read_keeps_its_chunks_joined() -> None:
    """A long reply takes a few objects, not one for each chunk."""
    stream, sender = pair()
    for at in range(5000):
        sender.push(delta(at, 1))
        stream.get()
    assert len(stream._received) + len(stream._joined[0]._chunks) < 300


def test_collecting_raises_where_every_choice_failed() -> None:
    """A failure of one choice of several is in its choice, as in a completion of `generate`."""
    error = DecodeError("broken")
    stream, sender = pair()
    sender.finish(ending(0, FinishReason.ERROR, 2, error=error))
    with pytest.raises(DecodeError):
        stream.collect()
    with pytest.raises(DecodeError):
        _ = stream.completion
    stream, sender = pair()
    sender.push(StreamChunk(index=0, choice=1, finish_reason=FinishReason.ERROR, error=error))
    sender.finish(ending(0, FinishReason.LENGTH, 2))
    assert [choice.error for choice in stream.collect().choices] == [None, error]


def test_a_loop_that_was_left_is_collected_as_cancelled() -> None:
    """The engine ends the request, and its tokens until then are there."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    for _ in stream:
        break
    sender.finish(ending(1, FinishReason.CANCELLED, 2))
    completion = stream.collect()
    assert (completion.token_ids, completion.finish_reason) == ((1, 2), "cancelled")


def test_no_part_of_a_stream_is_collected_as_the_whole() -> None:
    """Not of a stream that was closed before its end, and not if its channel was read, wholly or in part."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    stream.get()
    stream.close()
    with pytest.raises(Closed, match="was closed"):
        stream.collect()
    for num_read in (1, 2):
        channel = StreamChannel.create()
        sender = channel.attach(assemble=ASSEMBLE)
        for index in range(num_read):
            sender.push(delta(index, 1))
            channel.get()
        sender.finish(ending(num_read, FinishReason.LENGTH, *[1] * (2 - num_read)))
        with pytest.raises(Closed, match="chunks of this request were read from its channel"):
            Stream(channel).collect()
    channel = StreamChannel.create()
    channel.attach(assemble=ASSEMBLE).finish(ending(0))
    channel.get()
    with pytest.raises(Closed, match="chunks of this request were read from its channel"):
        Stream(channel).collect()
    channel = StreamChannel.create()
    channel.attach().finish(ending(0))
    with pytest.raises(Unsupported, match="without `assemble`"):
        Stream(channel).collect()


def test_single_chunks_can_be_taken() -> None:
    """`get` returns chunks, TIMEOUT and END as a channel does, and leaves the stream open."""
    stream, sender = pair()
    assert stream.get(0) is TIMEOUT
    sender.push(delta(0, 1))
    assert stream.get() == delta(0, 1)
    assert not stream.is_cancelled
    sender.finish(ending(1))
    assert stream.get() == ending(1)
    assert stream.get() is END


def test_a_failed_stream_yields_its_last_chunk_and_then_raises_its_error() -> None:
    """There is one terminal chunk, nothing is lost, and the failure is raised."""
    stream, sender = pair()
    error = DecodeError("broken")
    sender.push(delta(0, 1))
    sender.finish(ending(1, FinishReason.ERROR, 2, error=error))
    seen: list[StreamChunk] = []
    with pytest.raises(DecodeError) as caught:
        stream.consume(seen.append)
    assert caught.value is error
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in seen] == [((1,), None), ((2,), FinishReason.ERROR)]
    with pytest.raises(DecodeError):
        list(stream)


def test_the_error_of_one_choice_is_raised_after_all_have_ended() -> None:
    """With several choices the first error counts, wherever it stands."""
    stream, sender = pair()
    sender.push(ending(0, FinishReason.ERROR, choice=1, error=SamplingError("first")))
    sender.push(ending(0, FinishReason.ERROR, choice=2, error=SamplingError("second")))
    sender.finish(ending(0, FinishReason.STOP, 5, choice=0))
    seen: list[int] = []
    with pytest.raises(SamplingError, match="first"):
        stream.consume(lambda chunk: seen.append(chunk.choice))
    assert seen == [1, 2, 0]


def test_get_raises_no_error_of_the_request() -> None:
    """Who takes chunks one by one looks at them."""
    stream, sender = pair()
    sender.finish(ending(0, FinishReason.ERROR, error=DecodeError("broken")))
    assert isinstance(stream.get(), StreamChunk)
    assert stream.get() is END
    assert isinstance(stream.error, DecodeError)


def test_consume_returns_the_reason() -> None:
    """The callback has had every chunk by then."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    sender.finish(ending(1, FinishReason.STOP))
    seen: list[StreamChunk] = []
    assert stream.consume(seen.append) is FinishReason.STOP
    assert len(seen) == 2


def test_a_failing_callback_cancels_and_is_raised() -> None:
    """The request does not run on for a handler that is gone."""
    stream, sender = pair()
    sender.push(delta(0, 1))

    def handler(_: StreamChunk) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stream.consume(handler)
    assert sender.is_cancelled


def test_leaving_the_loop_cancels_though_the_stream_is_held() -> None:
    """The loop is the reader, not the variable."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    for _ in stream:
        break
    assert sender.is_cancelled
    assert stream.is_cancelled


def test_leaving_the_block_cancels() -> None:
    """In any way of leaving; an ended stream does not change."""
    stream, sender = pair()
    with stream:
        pass
    assert sender.is_cancelled
    stream, sender = pair()
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError
    assert sender.is_cancelled
    stream, sender = pair()
    with stream as entered:
        assert entered is stream
        sender.finish(ending(0, FinishReason.STOP))
    assert (sender.is_cancelled, stream.finish_reason) == (False, FinishReason.STOP)


def test_a_cancelled_stream_can_be_read_to_its_end() -> None:
    """`cancel` keeps the generated text; the engine adds the ending."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    stream.cancel()
    assert sender.is_cancelled
    sender.finish(ending(1, FinishReason.CANCELLED, 2))
    assert [chunk.token_ids for chunk in stream] == [(1,), (2,)]
    assert stream.finish_reason is FinishReason.CANCELLED


def test_a_closed_stream_reads_no_more() -> None:
    """`close` may be called twice; reading raises `Closed`; the end can still be seen."""
    stream, sender = pair()
    stream.close()
    stream.close()
    with pytest.raises(Closed, match="was closed"):
        stream.get(0)
    with pytest.raises(Closed, match="was closed"):
        next(iter(stream))
    with pytest.raises(Closed, match="was closed"), stream:
        pass
    sender.finish(ending(0, FinishReason.CANCELLED))
    assert stream.finish_reason is FinishReason.CANCELLED


def test_a_forgotten_stream_cancels() -> None:
    """It has no reader any more."""
    stream, sender = pair()
    sender.push(delta(0, 1))
    del stream
    gc.collect()
    assert sender.is_cancelled


def test_a_forgotten_stream_that_ended_cancels_nothing() -> None:
    """It cancels nothing even when its last chunk was not read."""
    stream, sender = pair()
    sender.finish(ending(0))
    del stream
    gc.collect()
    assert not sender.is_cancelled


class Owner:
    """The maker of a stream."""


def test_a_stream_keeps_its_maker_until_it_is_closed_or_forgotten() -> None:
    """An iterator alone is enough to keep it; closing lets it go."""
    for let_go in ("close", "forget"):
        owner = Owner()
        watched = weakref.ref(owner)
        channel = StreamChannel.create()
        channel.attach()
        stream = Stream(channel, keep_alive=owner)
        iterator = iter(stream)
        del owner, channel
        gc.collect()
        assert watched() is not None
        if let_go == "close":
            stream.close()
        del stream
        gc.collect()
        assert (watched() is None) == (let_go == "close")
        del iterator
        gc.collect()
        assert watched() is None


def test_waiting_for_the_slot() -> None:
    """`wait_released` returns whether the slot is free, also for a closed stream."""
    stream, sender = pair()
    stream.close()
    assert not stream.wait_released(0)
    waiting = arrival(sender._release_waiters)
    results: list[bool] = []
    thread = threading.Thread(daemon=True, target=lambda: results.append(stream.wait_released()))
    thread.start()
    assert waiting.wait(30)
    sender.finish(ending(0, FinishReason.CANCELLED))
    assert results == []
    sender.release()
    thread.join(30)
    assert results == [True]
