"""The interval of a stream: the tokens of a chunk, changed before and while the stream runs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.running_engine import LONG_S, in_threads
from tests.unit.streaming.pieces import arrival, delta, ending

from paceline.errors import InvalidParams
from paceline.streaming import TIMEOUT, AsyncStream, FinishReason, Stream, StreamChannel, StreamState
from paceline.streaming.sender import Backlog, whole


def test_a_smaller_interval_lets_what_waits_be_taken() -> None:
    """Tokens that are enough by the new interval can be taken at once, without another token."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=5)
    sender.push(delta(0, 1, 2))
    assert channel.get(0) is TIMEOUT
    channel.interval = 2
    assert (channel.interval, sender.interval) == (2, 2)
    assert channel.get(0) == delta(0, 1, 2)


def test_a_larger_interval_holds_for_what_comes_next() -> None:
    """A takeable chunk still can be taken; then a chunk needs as many tokens as the new interval."""
    channel = StreamChannel.create()
    sender = channel.attach()
    sender.push(delta(0, 1))
    channel.interval = 3
    assert channel.get(0) == delta(0, 1)
    sender.push(delta(1, 2, 3))
    assert channel.get(0) is TIMEOUT
    sender.push(delta(3, 4))
    assert channel.get(0) == delta(1, 2, 3, 4)


def test_each_choice_is_held_to_the_new_interval() -> None:
    """Of several choices those with enough tokens go out, and the others wait."""
    backlog = Backlog(interval=10)
    backlog.add(delta(0, 1, 2, 3, choice=0))
    backlog.add(delta(0, 4, choice=1))
    backlog.add(delta(0, 5, 6, choice=2))
    assert not backlog.set_interval(2)
    assert list(backlog.ripe) == [0, 2]
    assert (backlog.num_ripe, backlog.num_tokens) == (5, 6)
    assert whole(backlog.take()).token_ids == (1, 2, 3)
    assert not backlog.set_interval(1)
    assert list(backlog.ripe) == [2, 1]


def test_a_smaller_interval_wakes_a_reader_that_waits() -> None:
    """The thread that sleeps in `get` has the chunk as soon as the interval allows it."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=100)
    sender.push(delta(0, 1))
    waits = arrival(sender._readers)
    seen: list[object] = []
    reader = threading.Thread(target=lambda: seen.append(channel.get(LONG_S)))
    reader.start()
    assert waits.wait(LONG_S)
    channel.interval = 1
    reader.join(LONG_S)
    assert seen == [delta(0, 1)]


def test_a_smaller_interval_can_put_a_reader_behind() -> None:
    """More than `max_buffered_tokens` may be there to be taken then, and `on_backlog` is called."""
    reported: list[bool] = []
    channel = StreamChannel.create()
    sender = channel.attach(interval=100, max_buffered_tokens=2, on_backlog=lambda: reported.append(sender.is_behind))
    sender.push(delta(0, 1, 2, 3))
    assert reported == []
    channel.interval = 3
    assert reported == [True]
    channel.get(0)
    assert reported == [True, False]


def test_each_change_is_reported_to_the_engine_until_the_end() -> None:
    """After the end a change has no effect and no listener."""
    reported: list[int] = []
    channel = StreamChannel.create()
    sender = channel.attach(on_interval=lambda: reported.append(sender.interval))
    channel.interval = 4
    channel.interval = 2
    sender.finish(ending(0))
    channel.interval = 9
    assert reported == [4, 2]
    assert channel.get(0) == ending(0)


def test_an_interval_set_before_the_request_counts() -> None:
    """A channel that was given one is attached with it, whatever the engine proposes; another one takes the engine's."""
    channel, other = StreamChannel.create(), StreamChannel.create()
    channel.interval = 3
    assert (channel.interval, channel.own_interval, other.own_interval) == (3, 3, None)
    assert (channel.attach(interval=8).interval, other.attach(interval=8).interval) == (3, 8)


@pytest.mark.parametrize("interval", [0, -1, True, 1.5, "2", 1_000_001])
def test_a_bad_interval_is_refused_and_the_old_one_stays(interval: int) -> None:
    """The error names the field; the stream goes on as before."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=2)
    for item in (channel, Stream(channel)):
        with pytest.raises(InvalidParams, match="interval"):
            item.interval = interval
    sender.push(delta(0, 1))
    assert (channel.interval, channel.get(0)) == (2, TIMEOUT)
    sender.push(delta(1, 2))
    assert channel.get(0) == delta(0, 1, 2)


def test_changes_race_pushes_and_lose_nothing() -> None:
    """Two threads change the interval while another one pushes and one reads: all tokens come, in order."""
    channel = StreamChannel.create()
    sender = channel.attach(interval=7)
    seen: list[int] = []

    def push() -> None:
        for index in range(500):
            sender.push(delta(index, index))
        sender.finish(ending(500, FinishReason.STOP))

    def change(first: int, second: int) -> None:
        for _ in range(300):
            channel.interval = first
            channel.interval = second

    in_threads(
        push,
        lambda: change(1, 50),
        lambda: change(3, 1000),
        lambda: seen.extend(token for chunk in channel for token in chunk.token_ids),
    )
    assert seen == list(range(500))


def test_a_stream_shows_and_changes_its_channels_interval() -> None:
    """`interval` and `request_index` of a `Stream` equal its channel's."""
    channel = StreamChannel.create()
    sender = channel.attach(request_index=7, interval=4)
    stream = Stream(channel)
    assert (stream.interval, stream.request_index) == (4, 7)
    stream.interval = 2
    assert (stream.interval, channel.interval) == (2, 2)
    sender.push(delta(0, 1, 2))
    assert stream.get(0) == delta(0, 1, 2)


def test_an_async_stream_keeps_an_interval_until_it_has_a_channel() -> None:
    """Before it is entered it has the requested interval; an interval set then holds from the first chunk on."""

    async def main() -> None:
        channel = StreamChannel.create()

        async def open_one() -> StreamChannel:
            channel.attach(request_index=3, interval=5)
            return channel

        stream = AsyncStream(open_one, interval=5, request_index=3)
        assert (stream.interval, stream.request_index) == (5, 3)
        with pytest.raises(InvalidParams, match="interval"):
            stream.interval = 0
        stream.interval = 2
        assert (stream.interval, channel.state) == (2, StreamState.NEW)
        async with stream:
            assert (stream.interval, channel.interval) == (2, 2)
            stream.interval = 1
            assert channel.interval == 1

    asyncio.run(main())


def test_an_async_stream_that_sets_nothing_leaves_the_channel_alone() -> None:
    """The interval of a caller's channel, changed between making and entering the stream, is not undone by entering it."""

    async def main() -> None:
        channel = StreamChannel.create()

        async def open_one() -> StreamChannel:
            channel.attach()
            return channel

        stream = AsyncStream(open_one)
        channel.interval = 9
        async with stream:
            assert stream.interval == 9

    asyncio.run(main())


def test_a_detached_channel_is_new() -> None:
    """After a refusal nothing of the engine is kept, the caller's setting stays, and another request can have the channel."""
    cancels: list[None] = []
    channel = StreamChannel.create()
    channel.interval = 6
    channel.attach(request_index=2, on_cancel=lambda: cancels.append(None)).detach()
    assert (channel.state, channel.request_index, channel.interval) == (StreamState.NEW, -1, 6)
    channel.cancel()
    assert cancels == []
    channel.attach(on_cancel=lambda: cancels.append(None))
    assert cancels == [None]
