"""Embedding requests: the contents of a pass, their turns, and their ends."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_world import World

from paceline.engine.core import Submit
from paceline.errors import Aborted, Cancelled, DeadlineExceeded, DecodeError, EngineStopped, InvalidParams
from paceline.kv_cache import MediaItem
from paceline.request import RequestOptions
from paceline.scheduling.embedding import EmbeddingQueue
from paceline.scheduling.records import EmbeddingItem, EmbeddingRequest, PlanOutput, RequestRecord
from paceline.testing.fake_backend import FakeCost


def request(*lengths: int, pooling: str | None = "mean", **options: Any) -> EmbeddingRequest:
    texts = [[65] * length for length in lengths]
    return EmbeddingRequest(key=1, texts=texts, pooling=pooling, options=RequestOptions(**options), submitted_s=0)


def pictured(*lengths: int, media: dict[int, int], **options: Any) -> EmbeddingRequest:
    """A request with texts of given lengths; media: cells of the starts of two-cell items, by the texts' indexes."""
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    items = tuple(MediaItem(starts[index] + start, 2, 1, b"%d" % index) for index, start in media.items())
    texts = [[65] * length for length in lengths]
    return EmbeddingRequest(
        key=1, texts=texts, pooling="last", options=RequestOptions(**options), submitted_s=0, media=items
    )


def queue_of(*requests: EmbeddingRequest) -> EmbeddingQueue:
    queue = EmbeddingQueue()
    for request in requests:
        queue.add(request)
    return queue


def test_texts_fill_a_pass_in_order() -> None:
    """As many as both limits allow, of several requests; each text once."""
    one, other = request(3, 3, 3), request(3, 3)
    queue = queue_of(one, other)
    assert [(item.request, item.index) for item in queue.take(4, 100)] == [(one, 0), (one, 1), (one, 2), (other, 0)]
    assert [(item.request, item.index) for item in queue.take(4, 100)] == [(other, 1)]
    assert queue.take(4, 100) == []


def test_a_pass_has_at_least_one_text() -> None:
    """One that is longer than the limit goes alone."""
    one = request(50, 2, 2)
    queue = queue_of(one)
    assert [item.index for item in queue.take(10, 10)] == [0]
    assert [item.index for item in queue.take(10, 4)] == [1, 2]


def test_only_texts_that_are_pooled_alike_share_a_pass() -> None:
    """Others wait for their own pass, whatever stands between."""
    one, other, third = request(1), request(1, pooling="cls"), request(1)
    queue = queue_of(one, other, third)
    assert [item.request for item in queue.take(10, 10)] == [one, third]
    queue.remove(one)
    assert [item.request for item in queue.take(10, 10)] == [other]


def test_a_text_with_media_has_a_pass_of_its_own() -> None:
    """Neighbouring texts share their passes, as far as they are together."""
    one, other = pictured(3, 4, 3, 3, media={1: 1}), pictured(2, 4, media={1: 0})
    queue = queue_of(one, other)
    passes = []
    while items := queue.take(10, 100):
        passes.append([(item.request is one, item.index) for item in items])
    assert passes == [[(True, 0)], [(True, 1)], [(True, 2), (True, 3), (False, 0)], [(False, 1)]]


def test_segments_of_a_text_are_its_tokens_and_items() -> None:
    """The start of its items is counted from the first text on."""
    found = pictured(3, 6, 4, media={1: 2, 2: 0})
    first, second = found.media
    assert EmbeddingItem(found, 0).segments() == [[65] * 3]
    assert EmbeddingItem(found, 1).segments() == [[65] * 2, first, [65] * 2]
    assert EmbeddingItem(found, 2).segments() == [second, [65] * 2]
    assert [EmbeddingItem(found, index).media for index in range(3)] == [(), (first,), (second,)]
    assert (found.longest_text, found.longest_media_prompt, found.largest_whole_item) == (3, 6, 0)


def test_an_encoding_that_failed_ends_its_request_alone() -> None:
    """With the reason; neighbours get their vectors."""
    world = World()
    requests = [pictured(3, 4, media={1: 1}) for _ in range(3)]
    requests[1].embeddings = InvalidParams("image 0 is damaged")
    for number, request in enumerate(requests):
        request.key = 100 + number
        world.embedding_requests[request.key] = request
        world.commands.queue.append(Submit(request))
    text = world.submit_embedding(["text"])
    world.run()
    errors = [world.embedded[request.key].error for request in requests]
    assert [type(error) for error in errors] == [type(None), InvalidParams, type(None)]
    assert world.embedded[100].vectors == world.embedded[102].vectors
    assert world.embedded[100].vectors[0] != world.embedded[100].vectors[1]
    assert world.embedded[text].error is None
    world.check_done()


def test_vectors_come_back_in_the_order_of_the_texts() -> None:
    """Over several passes, several requests and two ways of pooling."""
    world = World()
    texts = [[f"text {index} " * (index + 1) for index in range(count)] for count in (5, 1, 3)]
    keys = [
        world.submit_embedding(many, pooling=pooling) for many, pooling in zip(texts, (None, "cls", None), strict=True)
    ]
    world.run()
    world.check_done()
    for key, many, pooling in zip(keys, texts, (None, "cls", None), strict=True):
        alone = [world.backend.embed([world.backend.encode(text)], pooling)[0] for text in many]
        assert world.embedded[key].vectors == alone


def test_each_way_to_end_has_its_error() -> None:
    """Cancelled, out of time, shut down, failed: the future's error has the reason; nothing hangs."""
    world = World()
    keys = [world.submit_embedding(["text"], **options) for options in ({}, {"timeout_s": 5}, {"queue_timeout_s": 5})]
    world.cancel_embedding(keys[0])
    world.clock.advance(5)
    last = world.submit_embedding(["bad"])
    world.faults.next_passes.append(DecodeError("broken"))
    world.tick()
    errors = [type(world.embedded[key].error) for key in (*keys, last)]
    assert errors == [Cancelled, DeadlineExceeded, DeadlineExceeded, DecodeError]
    key = world.submit_embedding(["late"])
    world.stop()
    world.run()
    world.check_done()
    assert isinstance(world.embedded[key].error, EngineStopped)


def test_a_text_that_fails_ends_its_request_alone() -> None:
    """Others in the same pass have their vectors."""
    world = World(limits={"embed_texts": 8})
    good, bad = world.submit_embedding(["good"]), world.submit_embedding(["bad", "worse"])
    embed = world.backend.embed

    def broken(texts: list[list[int]], pooling: str | None) -> list[Any]:
        if list(b"bad") in texts:
            raise DecodeError("bad")
        return embed(texts, pooling)

    world.backend.embed = broken  # type: ignore[method-assign]
    world.run()
    world.check_done()
    assert world.embedded[good].error is None
    assert isinstance(world.embedded[bad].error, DecodeError)


def test_an_aborted_pass_is_run_again() -> None:
    """The same texts come in the next embedding tick, each vector in its place."""
    world = World()
    key = world.submit_embedding(["one", "two", "three"])
    world.faults.next_passes.append(Aborted("stop"))
    world.run()
    world.check_done()
    assert None not in world.embedded[key].vectors


def test_a_text_that_is_computed_twice_counts_once() -> None:
    """If parts of a pass were aborted, the results of the rest are kept, and the request still ends whole."""
    world = World(limits={"max_tick_s": 100})
    key = world.submit_embedding(["one", "two", "three"])
    world.engine._take_commands()
    plan = world.scheduler.plan()
    stopped = Aborted("stop")
    output = PlanOutput(vectors=[None, [2.0], None], errors=[stopped, None, stopped], num_passes=3)
    world.take(world.scheduler.apply(plan, output))
    assert key not in world.embedded
    world.run()
    world.check_done()
    assert None not in world.embedded[key].vectors


@pytest.mark.parametrize("cost", [FakeCost(), FakeCost(0.2, 0.0), FakeCost(0, 0.001)])
def test_turns_are_even_in_time(cost: FakeCost) -> None:
    """While both have work, embedding and generation get about the same time."""
    world = World(cost=cost, limits={"embed_texts": 2})
    outcomes = [world.submit("hello", max_tokens=None, ignore_eos=True) for _ in range(3)]
    world.tick(10)
    world.submit_embedding(["some text"] * 500)
    start = world.clock.now()
    spent = {True: 0.0, False: 0.0}
    for _ in range(100):
        before, count = world.clock.now(), sum(len(outcome.token_ids()) for outcome in outcomes)
        world.tick()
        generated = sum(len(outcome.token_ids()) for outcome in outcomes) > count
        spent[generated] += world.clock.now() - before
    assert spent[True] == pytest.approx(spent[False], abs=max(0.25, 0.1 * (world.clock.now() - start)))


def test_usage_and_deadlines() -> None:
    """All tokens are prompt; a request that has begun has only its whole time as a limit."""
    one = request(3, 4, queue_timeout_s=2, timeout_s=9)
    assert (one.num_tokens, one.deadline_s()) == (7, 2)
    one.progress.started_s = 1.0
    assert one.deadline_s() == 9
    usage = one.usage(5.0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.queue_s, usage.prefill_s) == (7, 0, 1.0, 4.0)
    assert RequestRecord.of(one).kind == "embed"


def test_an_embedding_does_not_wait_for_the_time_of_one_that_has_ended() -> None:
    """Beside a stream each request that comes to an empty queue has the next tick, for any length of earlier ticks."""
    world = World()
    world.submit("hello", max_tokens=400, ignore_eos=True)
    world.tick(5)
    for _ in range(4):
        key = world.submit_embedding(["a long text " * 4])
        world.tick()
        assert key in world.embedded
        world.tick(3)
