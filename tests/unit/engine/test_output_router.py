"""From events to channels and futures, and back: refusals, cancels, slow readers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from tests.engine_world import make_request
from tests.running_engine import in_threads

from paceline.engine.core import Ask, Cancel, EndSlow, SetInterval, SetPaused, Submit
from paceline.engine.inbox import Inbox
from paceline.engine.output_router import OutputRouter
from paceline.errors import DecodeError, EngineStopped, InvalidParams, QueueFull
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, Embedded, EmbeddingRequest, Released, Started
from paceline.sequence import Request
from paceline.streaming import END, TIMEOUT, FinishReason, StreamChannel, StreamChunk, StreamState, Usage
from paceline.testing.fake_backend import FakeBackend, ManualClock

BACKEND, CLOCK = FakeBackend(), ManualClock()


def chunk(index: int, *tokens: int, **rest: Any) -> StreamChunk:
    return StreamChunk(index=index, token_ids=tokens, text="x" * len(tokens), **rest)


def ending(index: int, reason: FinishReason = FinishReason.LENGTH) -> StreamChunk:
    return StreamChunk(index=index, finish_reason=reason, usage=Usage())


class Door:
    """An inbox and a router, and the request and the channel that a test looks at."""

    def __init__(self, *, max_requests: int = 10, **options: Any) -> None:
        self.inbox = Inbox(max_requests)
        self.router = OutputRouter(self.inbox)
        self.options = options

    def request(self) -> Request:
        return make_request(BACKEND, CLOCK, self.inbox.next_key(), "hello", **self.options)

    def submit(self) -> tuple[Request, StreamChannel]:
        request = self.request()
        channel = self.router.submit(request, 3)
        assert self.inbox.take() == [Submit(request)]
        return request, channel

    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest(
            key=self.inbox.next_key(), texts=[[1], [2]], pooling=None, options=RequestOptions(), submitted_s=0
        )


def test_events_reach_the_channel_in_order() -> None:
    """Deltas, the terminal chunk, the release; the channel knows its request's place."""
    door = Door()
    request, channel = door.submit()
    assert channel.request_index == 3
    door.router.deliver([Started(request.key), Delta(request.key, chunk(0, 1, 2))])
    assert channel.get(0) == chunk(0, 1, 2)
    assert channel.get(0) is TIMEOUT
    door.router.deliver([Delta(request.key, ending(2), is_last=True), Released(request.key)])
    assert channel.is_released
    assert channel.get(0) == ending(2)
    assert channel.get(0) is END
    assert door.inbox.num_open == 0


def test_each_submit_has_a_channel_of_its_own() -> None:
    """No two requests share a channel, and each gets only its own chunks."""
    door = Door()
    (first, one), (second, other) = door.submit(), door.submit()
    assert one is not other
    assert (one.is_finished, one.is_cancelled, one.finish_reason) == (False, False, None)
    door.router.deliver(
        [Delta(second.key, chunk(0, 5)), Delta(first.key, ending(0), is_last=True), Released(first.key)]
    )
    assert (one.get(0), other.get(0)) == (ending(0), chunk(0, 5))
    assert not other.is_finished


def test_a_reader_that_waits_too_long_gets_a_timeout() -> None:
    """A wait that runs out returns TIMEOUT, takes nothing and changes nothing."""
    door = Door()
    request, channel = door.submit()
    assert channel.get(0.01) is TIMEOUT
    door.router.deliver([Delta(request.key, chunk(0, 1))])
    assert channel.get(0.01) == chunk(0, 1)


def test_a_refused_request_leaves_nothing_behind_and_can_be_tried_again() -> None:
    """After `QueueFull` neither a reader nor a cancel is left, and the same request may be accepted later."""
    door = Door(max_requests=1)
    kept, _channel = door.submit()
    request = door.request()
    with pytest.raises(QueueFull):
        door.router.submit(request, 0)
    gc.collect()
    assert not request.cancelled
    assert door.inbox.take() == []
    door.router.deliver([Delta(kept.key, ending(0), is_last=True), Released(kept.key)])
    channel = door.router.submit(request, 0)
    assert door.inbox.take() == [Submit(request)]
    assert not channel.is_cancelled


def test_a_change_of_the_interval_reaches_the_engine() -> None:
    """Each change is a command with the interval that holds then; after the end there is none."""
    door = Door(interval=4)
    request, channel = door.submit()
    assert channel.interval == 4
    channel.interval = 2
    channel.interval = 9
    assert door.inbox.take() == [SetInterval(request.key, 2), SetInterval(request.key, 9)]
    door.router.deliver([Delta(request.key, ending(0), is_last=True), Released(request.key)])
    channel.interval = 1
    assert door.inbox.take() == []


def test_the_last_of_racing_changes_is_the_last_command() -> None:
    """Whichever thread sets it last, the engine ends up with the interval that the channel has."""
    door = Door()
    request, channel = door.submit()

    def change(interval: int) -> None:
        for _ in range(200):
            channel.interval = interval

    in_threads(*(lambda interval=interval: change(interval) for interval in (2, 3, 5)))
    assert door.inbox.take()[-1] == SetInterval(request.key, channel.interval)


def test_an_interval_set_while_the_request_is_submitted_is_not_lost() -> None:
    """A command that the engine takes before it has the request is sent again behind it."""
    door, channel = Door(), StreamChannel.create()
    request = door.request()
    submit = door.inbox.submit

    def submit_late(*args: Any, **options: Any) -> None:
        channel.interval = 7
        submit(*args, **options)

    door.inbox.submit = submit_late  # type: ignore[method-assign]
    door.router.submit(request, 0, channel)
    assert door.inbox.take() == [SetInterval(request.key, 7), Submit(request), SetInterval(request.key, 7)]


def test_a_channel_that_the_caller_made_serves_one_request() -> None:
    """It is the returned channel and fills up; for a second request, and after the end, it is refused before any work."""
    door, channel = Door(), StreamChannel.create()
    request, second = door.request(), door.request()
    assert door.router.submit(request, 4, channel) is channel
    assert channel.request_index == 4
    assert door.inbox.take() == [Submit(request)]
    with pytest.raises(InvalidParams, match="attached.*one request in its life"):
        door.router.submit(second, 0, channel)
    door.router.deliver([Delta(request.key, ending(0), is_last=True), Released(request.key)])
    with pytest.raises(InvalidParams, match=r"finished.*StreamChannel.create\(\)"):
        door.router.submit(second, 0, channel)
    assert door.inbox.take() == []
    assert (door.inbox.num_open, channel.request_index, channel.get(0)) == (0, 4, ending(0))
    assert not door.router.submit(second, 0).is_finished


def test_of_two_requests_for_one_channel_at_once_one_has_it() -> None:
    """The other request is refused, and the engine never hears of it."""
    for _ in range(50):
        door, channel = Door(), StreamChannel.create()
        refused: list[InvalidParams] = []

        def submit(door: Door = door, channel: StreamChannel = channel, refused: list[InvalidParams] = refused) -> None:
            try:
                door.router.submit(door.request(), 0, channel)
            except InvalidParams as error:
                refused.append(error)

        in_threads(submit, submit)
        assert (len(refused), door.inbox.num_open) == (1, 1)


def test_a_channel_whose_request_was_refused_can_be_used_again() -> None:
    """`QueueFull` leaves it new: neither finished nor cancelled, with the interval that the caller gave it."""
    door, channel = Door(max_requests=1), StreamChannel.create()
    channel.interval = 3
    kept, _channel = door.submit()
    request = door.request()
    with pytest.raises(QueueFull):
        door.router.submit(request, 0, channel)
    assert (channel.state, channel.is_cancelled, channel.get(0)) == (StreamState.NEW, False, TIMEOUT)
    door.router.deliver([Delta(kept.key, ending(0), is_last=True), Released(kept.key)])
    door.router.submit(request, 0, channel)
    assert door.inbox.take() == [Submit(request)]
    assert (channel.interval, request.options.interval) == (3, 3)


def test_a_channel_cancelled_before_its_request_cancels_it() -> None:
    """The engine is notified as soon as there is a request."""
    door, channel = Door(), StreamChannel.create()
    channel.cancel()
    request = door.request()
    door.router.submit(request, 0, channel)
    assert request.cancelled
    assert door.inbox.take() == [Cancel(request.key), Submit(request)]


def test_a_refused_embedding_leaves_nothing_behind() -> None:
    """Its key is unknown, and the next request is accepted when there is room."""
    door = Door(max_requests=1)
    first = door.embedding()
    future = door.router.submit_embedding(first)
    with pytest.raises(QueueFull):
        door.router.submit_embedding(door.embedding())
    door.router.deliver([Embedded(first.key, [1.0, 2.0], None), Released(first.key)])
    assert future.result(0) == [1.0, 2.0]
    door.router.submit_embedding(door.embedding())
    assert door.inbox.num_open == 1


def test_a_cancel_sets_the_flag_and_notifies_the_engine_once() -> None:
    """The flag is seen even in the tick that is running; the command wakes the engine."""
    door = Door()
    request, channel = door.submit()
    channel.cancel()
    channel.cancel()
    assert request.cancelled
    assert door.inbox.take() == [Cancel(request.key)]
    assert channel.is_cancelled
    assert not channel.is_finished


def test_a_cancel_after_the_end_notifies_no_listener() -> None:
    """A late cancel changes neither the reason nor anything in the engine."""
    door = Door()
    request, channel = door.submit()
    door.router.deliver([Delta(request.key, ending(0, FinishReason.STOP), is_last=True), Released(request.key)])
    channel.cancel()
    assert door.inbox.take() == []
    assert (channel.finish_reason, request.cancelled) == (FinishReason.STOP, False)


def test_a_forgotten_channel_cancels_its_request() -> None:
    """Losing the channel is leaving."""
    door = Door()
    request, channel = door.submit()
    del channel
    gc.collect()
    assert request.cancelled
    assert door.inbox.take() == [Cancel(request.key)]
    door.router.deliver(
        [Delta(request.key, chunk(0, 1)), Delta(request.key, ending(1), is_last=True), Released(request.key)]
    )
    assert door.inbox.num_open == 0


def test_the_terminal_chunk_comes_once_and_deltas_after_it_are_ignored() -> None:
    """The first ending wins."""
    door = Door()
    request, channel = door.submit()
    door.router.deliver(
        [Delta(request.key, ending(0, FinishReason.STOP), is_last=True), Delta(request.key, ending(0), is_last=True)]
    )
    door.router.deliver([Delta(request.key, chunk(0, 9)), Released(request.key)])
    assert [completion.finish_reason for completion in channel] == [FinishReason.STOP]


def test_a_slow_reader_pauses_and_goes_on() -> None:
    """Above max_buffered_tokens the engine gets a command to pause the request, at half of it to resume."""
    door = Door(max_buffered_tokens=4)
    request, channel = door.submit()
    door.router.deliver([Delta(request.key, chunk(0, 1, 2, 3, 4))])
    assert door.inbox.take() == []
    door.router.deliver([Delta(request.key, chunk(4, 5))])
    assert door.inbox.take() == [SetPaused(request.key, True)]
    assert channel.get(0) == StreamChunk(index=0, token_ids=(1, 2, 3, 4, 5), text="xxxxx")
    assert door.inbox.take() == [SetPaused(request.key, False)]


def test_a_slow_reader_is_cancelled_where_the_request_asks_for_it() -> None:
    """With slow_reader="cancel" the engine gets a command to end the request."""
    door = Door(max_buffered_tokens=1, slow_reader="cancel")
    request, channel = door.submit()
    door.router.deliver([Delta(request.key, chunk(0, 1, 2))])
    assert door.inbox.take() == [EndSlow(request.key)]
    assert channel.num_buffered == 2


def test_a_reader_that_comes_back_after_the_end_wakes_no_engine() -> None:
    """Reading a finished stream sends the engine nothing."""
    door = Door(max_buffered_tokens=1)
    request, channel = door.submit()
    door.router.deliver(
        [Delta(request.key, chunk(0, 1, 2)), Delta(request.key, ending(2), is_last=True), Released(request.key)]
    )
    assert door.inbox.take() == [SetPaused(request.key, True)]
    assert len(list(channel)) == 2
    assert door.inbox.take() == []


def test_an_embedding_future_that_is_cancelled_cancels_its_request() -> None:
    """Cancelling the future sets the flag and notifies the engine; later results are dropped."""
    door = Door()
    request = door.embedding()
    future = door.router.submit_embedding(request)
    assert future.cancel()
    assert request.cancelled
    assert door.inbox.take() == [Submit(request), Cancel(request.key)]
    door.router.deliver([Embedded(request.key, [], EngineStopped("late")), Released(request.key)])
    assert future.cancelled()
    assert door.inbox.num_open == 0


def test_an_embedding_that_fails_raises_at_its_caller() -> None:
    """The error of the request is the future's."""
    door = Door()
    request = door.embedding()
    future = door.router.submit_embedding(request)
    door.router.deliver([Embedded(request.key, [None, None], DecodeError("no")), Released(request.key)])
    with pytest.raises(DecodeError, match="no"):
        future.result(0)


def test_end_all_ends_every_stream_and_future_with_the_error() -> None:
    """Whatever is open when the engine goes gets a terminal chunk or an exception, and its release."""
    door = Door()
    request, channel = door.submit()
    embedding = door.embedding()
    future = door.router.submit_embedding(embedding)
    door.router.deliver([Delta(request.key, chunk(0, 1))])
    door.router.end_all(EngineStopped("gone"))
    chunks = list(channel)
    assert [chunk.token_ids for chunk in chunks] == [(1,), ()]
    assert chunks[-1].finish_reason is FinishReason.ERROR
    assert isinstance(chunks[-1].error, EngineStopped)
    assert channel.is_released
    with pytest.raises(EngineStopped, match="gone"):
        future.result(0)
    assert door.inbox.num_open == 0
    door.router.end_all(EngineStopped("again"))


def test_questions_that_come_while_all_end_disturb_no_ending() -> None:
    """Other threads go on to ask while the engine's thread ends everything; so many questions, and so many ends."""
    door = Door()

    def ask() -> None:
        for _ in range(2000):
            door.router.ask(Ask(door.inbox.next_key(), lambda _: None))

    def end() -> None:
        for _ in range(50):
            door.router.end_all(EngineStopped("the end"))

    in_threads(ask, ask, end)
