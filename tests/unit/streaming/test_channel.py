"""The channel: its states, its reader's view, and its end."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.unit.streaming.pieces import delta, ending

from paceline.errors import DecodeError, EngineStopped, InvalidParams
from paceline.streaming import END, TIMEOUT, FinishReason, StreamChannel, StreamChunk, StreamState, Usage


def test_a_new_channel_is_clean_and_its_own() -> None:
    """Neither finished nor cancelled, no reason, no index, nothing to take; two are two."""
    channel, other = StreamChannel.create(), StreamChannel.create()
    assert (channel.state, channel.request_index, channel.finish_reason) == (StreamState.NEW, -1, None)
    assert (channel.is_finished, channel.is_cancelled, channel.is_released) == (False, False, False)
    assert (channel.num_buffered, channel.usage, channel.get(0)) == (0, None, TIMEOUT)
    channel.attach().push(delta(0, 1))
    assert (channel.num_buffered, other.num_buffered, other.state) == (1, 0, StreamState.NEW)


def test_a_channel_goes_from_new_to_attached_to_finished() -> None:
    """The states of its life, and the known facts in each."""
    channel = StreamChannel.create()
    sender = channel.attach(request_index=3, interval=2)
    assert (channel.state, channel.request_index, channel.interval) == (StreamState.ATTACHED, 3, 2)
    assert sender.state is StreamState.ATTACHED
    sender.finish(ending(0, FinishReason.STOP))
    assert (channel.state, channel.is_finished, channel.finish_reason) == (
        StreamState.FINISHED,
        True,
        FinishReason.STOP,
    )
    assert channel.usage == Usage()


def test_a_channel_serves_one_request() -> None:
    """Attaching again raises, while it serves and after the end."""
    channel = StreamChannel.create()
    sender = channel.attach(request_index=5)
    with pytest.raises(InvalidParams, match="one request in its life"):
        channel.attach(request_index=6)
    sender.finish(ending(0))
    with pytest.raises(InvalidParams, match="is finished"):
        channel.attach()
    assert channel.request_index == 5


@pytest.mark.parametrize("interval", [0, -1, True, 1.5])
def test_a_bad_interval_is_refused_and_the_channel_still_new(interval: int) -> None:
    """An interval is a positive integer and never clamped; after the error the channel can be attached."""
    channel = StreamChannel.create()
    with pytest.raises(InvalidParams, match="interval"):
        channel.attach(interval=interval)
    assert channel.state is StreamState.NEW
    channel.attach()


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_bad_limit_is_refused_and_the_channel_still_new(limit: int) -> None:
    """The limit of gathering tokens is a positive integer, or None for no limit."""
    channel = StreamChannel.create()
    with pytest.raises(InvalidParams, match="max_buffered_tokens"):
        channel.attach(max_buffered_tokens=limit)
    channel.attach(max_buffered_tokens=None)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), True, "1"])
def test_a_bad_timeout_is_refused(timeout_s: float) -> None:
    """Seconds are finite and not negative; None is for ever."""
    with pytest.raises(InvalidParams, match="timeout_s"):
        StreamChannel.create().get(timeout_s)


def test_nothing_yet_a_chunk_and_the_end_are_three_results() -> None:
    """TIMEOUT while nothing is there, chunks in order, END for ever after the terminal one was taken."""
    channel = StreamChannel.create()
    sender = channel.attach()
    assert channel.get(0) is TIMEOUT
    sender.push(delta(0, 1))
    assert channel.get(0) == delta(0, 1)
    assert channel.get(0) is TIMEOUT
    sender.finish(ending(1))
    assert channel.get(0) == ending(1)
    assert channel.get(0) is END
    assert channel.get() is END


def test_a_get_gives_up_after_its_time() -> None:
    """With nothing in the channel a short wait returns TIMEOUT and leaves no trace."""
    channel = StreamChannel.create()
    sender = channel.attach()
    assert channel.get(0.001) is TIMEOUT
    assert not sender._readers.wakers
    sender.push(delta(0, 1))
    assert channel.get(0.001) == delta(0, 1)


def test_a_reader_that_sees_the_end_finds_the_terminal_chunk() -> None:
    """Finished means that the terminal chunk is in the queue, after earlier chunks."""
    channel = StreamChannel.create()
    sender = channel.attach()
    sender.push(delta(0, 1))
    sender.finish(ending(1, FinishReason.STOP, 2))
    assert (channel.is_finished, channel.num_buffered) == (True, 2)
    seen: list[StreamChunk] = []
    assert channel.consume(seen.append) is FinishReason.STOP
    assert [chunk.token_ids for chunk in seen] == [(1,), (2,)]
    assert channel.num_buffered == 0


def test_the_first_ending_wins() -> None:
    """Later endings and later deltas are ignored and raise nothing."""
    channel = StreamChannel.create()
    sender = channel.attach()
    assert sender.finish(ending(0, FinishReason.CANCELLED))
    assert not sender.finish(ending(0, FinishReason.ERROR))
    sender.push(delta(0, 1))
    assert channel.finish_reason is FinishReason.CANCELLED
    assert [chunk.finish_reason for chunk in channel] == [FinishReason.CANCELLED]


def test_an_error_is_on_the_terminal_chunk() -> None:
    """The reader of a channel gets the exception itself, and none is raised."""
    channel = StreamChannel.create()
    error = DecodeError("broken")
    channel.attach().finish(ending(0, FinishReason.ERROR, error=error))
    assert [chunk.error for chunk in channel] == [error]


def test_what_waits_is_joined_and_nothing_is_lost() -> None:
    """A slow reader finds one chunk with all ids, text and logprobs of the missed chunks."""
    channel = StreamChannel.create()
    sender = channel.attach()
    for index in range(200):
        sender.push(delta(index, index + 10))
    assert channel.num_buffered == sender.num_buffered == 200
    assert channel.get(0) == delta(0, *range(10, 210))
    assert channel.num_buffered == 0


def test_an_interval_holds_chunks_back_until_they_are_ripe() -> None:
    """Two tokens wait for a third; the ending brings the rest."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=3)
    sender.push(delta(0, 1))
    sender.push(delta(1, 2))
    assert channel.get(0) is TIMEOUT
    assert channel.num_buffered == 2
    sender.push(delta(2, 3))
    assert channel.get(0) == delta(0, 1, 2, 3)
    sender.push(delta(3, 4))
    sender.finish(ending(4, FinishReason.LENGTH, 5))
    last = channel.get(0)
    assert isinstance(last, StreamChunk)
    assert (last.index, last.token_ids, last.finish_reason) == (3, (4, 5), FinishReason.LENGTH)


def test_a_burst_is_one_chunk() -> None:
    """Several tokens of one tick come together, whatever the interval below their number."""
    channel = StreamChannel.create()
    channel.attach(interval=2).push(delta(0, 1, 2, 3, 4))
    assert channel.get(0) == delta(0, 1, 2, 3, 4)


def test_choices_are_separate_and_end_one_by_one() -> None:
    """Each choice has its own chunks and ending; the terminal chunk is the last of all."""
    channel = StreamChannel.create()
    sender = channel.attach()
    sender.push(delta(0, 1, choice=0))
    sender.push(delta(0, 2, choice=1))
    sender.push(delta(1, 3, choice=0))
    sender.push(ending(1, FinishReason.STOP, choice=1))
    sender.finish(ending(2, FinishReason.LENGTH, choice=0))
    assert [(chunk.choice, chunk.token_ids, chunk.finish_reason) for chunk in channel] == [
        (0, (1, 3), None),
        (1, (2,), FinishReason.STOP),
        (0, (), FinishReason.LENGTH),
    ]


def test_an_unripe_choice_is_not_lost_when_the_stream_ends() -> None:
    """Held-back text of a choice comes out even if another choice's ending is the terminal chunk."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=10)
    sender.push(delta(0, 1, choice=1))
    sender.finish(ending(0, FinishReason.ERROR))
    assert [(chunk.choice, chunk.token_ids) for chunk in channel] == [(1, (1,)), (0, ())]


# ---- slow readers


def test_falling_behind_and_catching_up_are_reported_to_the_engine() -> None:
    """A call on each change, and the state to read back; the effect of the limit is the engine's affair."""
    calls: list[bool] = []
    channel = StreamChannel.create()
    sender = channel.attach(max_buffered_tokens=2, on_backlog=lambda: calls.append(sender.is_behind))
    sender.push(delta(0, 1, 2))
    assert calls == []
    sender.push(delta(2, 3))
    sender.push(delta(3, 4))
    assert (calls, sender.is_behind, sender.num_times_behind) == ([True], True, 1)
    assert channel.get(0) == delta(0, 1, 2, 3, 4)
    assert (calls, sender.is_behind, sender.num_times_behind) == ([True, False], False, 1)


def test_a_backlog_may_be_read_while_it_is_reported_to_the_engine() -> None:
    """The calls are made without the channel's lock, so that they may use the channel."""
    channel = StreamChannel.create()
    taken: list[object] = []
    sender = channel.attach(max_buffered_tokens=1, on_backlog=lambda: taken.append(channel.get(0)))
    sender.push(delta(0, 1, 2))
    assert taken == [TIMEOUT, delta(0, 1, 2)]  # the inner read recorded its own first


def test_a_limit_without_a_listener_can_be_looked_at() -> None:
    """The callback may be missing."""
    channel = StreamChannel.create()
    sender = channel.attach(max_buffered_tokens=1)
    sender.push(delta(0, 1, 2))
    assert sender.is_behind
    channel.get(0)
    assert not sender.is_behind


def test_after_the_end_a_backlog_is_not_reported() -> None:
    """Chunks taken by a late reader are no news to the engine."""
    calls: list[bool] = []
    channel = StreamChannel.create()
    sender = channel.attach(max_buffered_tokens=1, on_backlog=lambda: calls.append(True))
    sender.push(delta(0, 1, 2))
    sender.finish(ending(2, FinishReason.SLOW_READER))
    assert [chunk.token_ids for chunk in channel] == [(1, 2), ()]
    assert calls == [True]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_in_a_forked_child_an_open_channel_raises() -> None:
    """Waiting readers raise at once; an ended stream can still be read; a new channel works."""
    open_one, ended = StreamChannel.create(), StreamChannel.create()
    open_one.attach().push(delta(0, 1))
    ended.attach().finish(ending(0, FinishReason.STOP))
    child = os.fork()
    if child == 0:  # pragma: no cover - in the child
        status = 1
        try:
            for wait in (open_one.get, open_one.wait_finished, open_one.wait_released, ended.wait_released):
                with pytest.raises(EngineStopped, match="forked"):
                    wait()
            with pytest.raises(EngineStopped, match="forked"):
                asyncio.run(open_one.get_async())
            assert [chunk.finish_reason for chunk in ended] == [FinishReason.STOP]
            new = StreamChannel.create()
            new.attach().push(delta(0, 1))
            assert new.get() is not None
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isinstance(open_one.get(), StreamChunk)
