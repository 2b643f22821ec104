"""From events to channels and futures, and back: refusals, cancels, slow readers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from tests.engine_world import make_request
from tests.running_engine import in_threads

from paceline.engine.commands import Cancel, EndSlow, Inspect, SetPaused, Submit
from paceline.engine.delivery import Delivery
from paceline.engine.inbox import Inbox
from paceline.errors import DecodeError, EngineStopped, QueueFull
from paceline.request import RequestOptions
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Delta, Embedded, Ended, Released, Started
from paceline.scheduling.sequence import Request
from paceline.streaming import END, TIMEOUT, FinishReason, StreamChannel, StreamChunk, Usage
from paceline.testing.fake_backend import FakeBackend
from paceline.testing.manual_clock import ManualClock

BACKEND, CLOCK = FakeBackend(), ManualClock()


def chunk(index: int, *tokens: int, **rest: Any) -> StreamChunk:
    return StreamChunk(index=index, token_ids=tokens, text="x" * len(tokens), **rest)


def ending(index: int, reason: FinishReason = FinishReason.LENGTH) -> StreamChunk:
    return StreamChunk(index=index, finish_reason=reason, usage=Usage())


class Door:
    """An inbox and a delivery, and the request and the channel that a test looks at."""

    def __init__(self, *, max_requests: int = 10, **options: Any) -> None:
        self.inbox = Inbox(max_requests)
        self.delivery = Delivery(self.inbox)
        self.options = options

    def request(self) -> Request:
        return make_request(BACKEND, CLOCK, self.inbox.next_key(), "hello", **self.options)

    def submit(self) -> tuple[Request, StreamChannel]:
        request = self.request()
        channel = self.delivery.submit(request, 3)
        assert self.inbox.take() == [Submit(request)]
        return request, channel

    def embedding(self) -> EmbeddingRequest:
        return EmbeddingRequest(
            key=self.inbox.next_key(), texts=[[1], [2]], pooling=None, options=RequestOptions(), submitted_s=0
        )


def test_events_reach_the_channel_in_order() -> None:
    """Deltas, the terminal chunk, the release; the channel knows its request's place (edge 22, 30, 33, 62, rule 5, rule 19)."""
    door = Door()
    request, channel = door.submit()
    assert channel.request_index == 3
    door.delivery.deliver([Started(request.key), Delta(request.key, chunk(0, 1, 2))])
    assert channel.get(0) == chunk(0, 1, 2)
    assert channel.get(0) is TIMEOUT
    door.delivery.deliver([Ended(request.key, ending(2)), Released(request.key)])
    assert channel.is_released
    assert channel.get(0) == ending(2)
    assert channel.get(0) is END
    assert door.inbox.num_open == 0


def test_each_submit_has_a_channel_of_its_own() -> None:
    """No two requests share a channel, and each is told only what is its own (edge 20, 21, 39)."""
    door = Door()
    (first, one), (second, other) = door.submit(), door.submit()
    assert one is not other
    assert (one.is_finished, one.is_cancelled, one.finish_reason) == (False, False, None)
    door.delivery.deliver([Delta(second.key, chunk(0, 5)), Ended(first.key, ending(0)), Released(first.key)])
    assert (one.get(0), other.get(0)) == (ending(0), chunk(0, 5))
    assert not other.is_finished


def test_a_reader_that_waits_too_long_is_told_so() -> None:
    """A wait that runs out answers TIMEOUT, takes nothing and changes nothing (edge 22, 23)."""
    door = Door()
    request, channel = door.submit()
    assert channel.get(0.01) is TIMEOUT
    door.delivery.deliver([Delta(request.key, chunk(0, 1))])
    assert channel.get(0.01) == chunk(0, 1)


def test_a_refused_request_leaves_nothing_behind_and_can_be_tried_again() -> None:
    """After `QueueFull` neither a reader nor a cancel is left, and the same request may be accepted later."""
    door = Door(max_requests=1)
    kept, _channel = door.submit()
    request = door.request()
    with pytest.raises(QueueFull):
        door.delivery.submit(request, 0)
    gc.collect()
    assert not request.cancelled
    assert door.inbox.take() == []
    door.delivery.deliver([Ended(kept.key, ending(0)), Released(kept.key)])
    channel = door.delivery.submit(request, 0)
    assert door.inbox.take() == [Submit(request)]
    assert not channel.is_cancelled


def test_a_refused_embedding_leaves_nothing_behind() -> None:
    """Its key is known to nobody, and the next one is accepted when there is room."""
    door = Door(max_requests=1)
    first = door.embedding()
    future = door.delivery.submit_embedding(first)
    with pytest.raises(QueueFull):
        door.delivery.submit_embedding(door.embedding())
    door.delivery.deliver([Embedded(first.key, [1.0, 2.0], None), Released(first.key)])
    assert future.result(0) == [1.0, 2.0]
    door.delivery.submit_embedding(door.embedding())
    assert door.inbox.num_open == 1


def test_a_cancel_sets_the_flag_and_tells_the_engine_once() -> None:
    """The flag is seen even in the tick that is running; the command wakes the engine (edge rule 6, 28, 29, 59, 61)."""
    door = Door()
    request, channel = door.submit()
    channel.cancel()
    channel.cancel()
    assert request.cancelled
    assert door.inbox.take() == [Cancel(request.key)]
    assert channel.is_cancelled
    assert not channel.is_finished


def test_a_cancel_after_the_end_tells_nobody() -> None:
    """A late cancel changes neither the reason nor anything in the engine (edge rule 8)."""
    door = Door()
    request, channel = door.submit()
    door.delivery.deliver([Ended(request.key, ending(0, FinishReason.END)), Released(request.key)])
    channel.cancel()
    assert door.inbox.take() == []
    assert (channel.finish_reason, request.cancelled) == (FinishReason.END, False)


def test_a_forgotten_channel_cancels_its_request() -> None:
    """Losing the channel is leaving (lcx C3, C4)."""
    door = Door()
    request, channel = door.submit()
    del channel
    gc.collect()
    assert request.cancelled
    assert door.inbox.take() == [Cancel(request.key)]
    door.delivery.deliver([Delta(request.key, chunk(0, 1)), Ended(request.key, ending(1)), Released(request.key)])
    assert door.inbox.num_open == 0


def test_the_terminal_chunk_comes_once_and_deltas_after_it_are_ignored() -> None:
    """The first ending wins (edge rule 12, 31)."""
    door = Door()
    request, channel = door.submit()
    door.delivery.deliver([Ended(request.key, ending(0, FinishReason.STOP)), Ended(request.key, ending(0))])
    door.delivery.deliver([Delta(request.key, chunk(0, 9)), Released(request.key)])
    assert [one.finish_reason for one in channel] == [FinishReason.STOP]


def test_a_slow_reader_pauses_and_goes_on() -> None:
    """Above max_buffered_tokens the engine is told to pause the request, at half of it to go on (edge rule 26, H)."""
    door = Door(max_buffered_tokens=4)
    request, channel = door.submit()
    door.delivery.deliver([Delta(request.key, chunk(0, 1, 2, 3, 4))])
    assert door.inbox.take() == []
    door.delivery.deliver([Delta(request.key, chunk(4, 5))])
    assert door.inbox.take() == [SetPaused(request.key, True)]
    assert channel.get(0) == StreamChunk(index=0, token_ids=(1, 2, 3, 4, 5), text="xxxxx")
    assert door.inbox.take() == [SetPaused(request.key, False)]


def test_a_slow_reader_is_cut_off_where_the_request_says_so() -> None:
    """With slow_reader="cancel" the engine is told to end the request (edge H)."""
    door = Door(max_buffered_tokens=1, slow_reader="cancel")
    request, channel = door.submit()
    door.delivery.deliver([Delta(request.key, chunk(0, 1, 2))])
    assert door.inbox.take() == [EndSlow(request.key)]
    assert channel.num_buffered == 2


def test_a_reader_that_comes_back_after_the_end_wakes_nobody() -> None:
    """What is read of a finished stream tells the engine nothing."""
    door = Door(max_buffered_tokens=1)
    request, channel = door.submit()
    door.delivery.deliver([Delta(request.key, chunk(0, 1, 2)), Ended(request.key, ending(2)), Released(request.key)])
    assert door.inbox.take() == [SetPaused(request.key, True)]
    assert len(list(channel)) == 2
    assert door.inbox.take() == []


def test_an_embedding_future_that_is_cancelled_cancels_its_request() -> None:
    """Cancelling the future plants the flag and tells the engine; what comes afterwards is dropped."""
    door = Door()
    request = door.embedding()
    future = door.delivery.submit_embedding(request)
    assert future.cancel()
    assert request.cancelled
    assert door.inbox.take() == [Submit(request), Cancel(request.key)]
    door.delivery.deliver([Embedded(request.key, [], EngineStopped("late")), Released(request.key)])
    assert future.cancelled()
    assert door.inbox.num_open == 0


def test_an_embedding_that_fails_raises_at_its_caller() -> None:
    """The error of the request is the future's."""
    door = Door()
    request = door.embedding()
    future = door.delivery.submit_embedding(request)
    door.delivery.deliver([Embedded(request.key, [None, None], DecodeError("no")), Released(request.key)])
    with pytest.raises(DecodeError, match="no"):
        future.result(0)


def test_end_all_ends_every_stream_and_future_with_the_error() -> None:
    """Whatever is open when the engine goes gets a terminal chunk or an exception, and its release (edge rule 15, 92)."""
    door = Door()
    request, channel = door.submit()
    embedding = door.embedding()
    future = door.delivery.submit_embedding(embedding)
    door.delivery.deliver([Delta(request.key, chunk(0, 1))])
    door.delivery.end_all(EngineStopped("gone"))
    chunks = list(channel)
    assert [one.token_ids for one in chunks] == [(1,), ()]
    assert chunks[-1].finish_reason is FinishReason.ERROR
    assert isinstance(chunks[-1].error, EngineStopped)
    assert channel.is_released
    with pytest.raises(EngineStopped, match="gone"):
        future.result(0)
    assert door.inbox.num_open == 0
    door.delivery.end_all(EngineStopped("again"))


def test_questions_that_come_while_all_end_disturb_no_ending() -> None:
    """Other threads go on to ask while the engine's thread ends everything; so many questions, and so many ends."""
    door = Door()

    def ask() -> None:
        for _ in range(2000):
            door.delivery.ask(Inspect(door.inbox.next_key()))

    def end() -> None:
        for _ in range(50):
            door.delivery.end_all(EngineStopped("the end"))

    in_threads(ask, ask, end)
