"""Requests that wait in line for room, with an engine in this process, in a worker process and over replicas."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cluster_world import ClusterWorld
from tests.polling import wait_until
from tests.running_engine import LONG_S, Running

from paceline.config import EngineConfig
from paceline.engine.client import EngineClient
from paceline.errors import DeadlineExceeded, EngineStopped, QueueFull
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import FinishReason, StreamChannel, StreamChunk
from paceline.testing import FakeEngineClient
from paceline.testing.fake_backend import FakeBackend
from paceline.testing.fake_engine_client import fake_worker_engine

BACKEND: dict[str, Any] = {"num_cells": 200_000, "eos_every": 10**9, "num_seq_ids": 2}  # one slot
ROOM = 2  # one slot, and a queue of one


@contextmanager
def in_process() -> Iterator[EngineClient]:
    engine = FakeEngineClient(backend=FakeBackend(**BACKEND), config=EngineConfig(max_queue=1))
    yield engine
    engine.close()


@contextmanager
def with_worker() -> Iterator[EngineClient]:
    engine = fake_worker_engine(max_queue=1, backend_options=BACKEND)
    yield engine
    engine.close()


@contextmanager
def over_replicas() -> Iterator[EngineClient]:
    world = ClusterWorld("a", **BACKEND)
    engine = world.engine(max_queue=1)
    wait_until(lambda: len(engine.replicas) == 1)
    yield engine
    engine.close()
    world.close()


@pytest.fixture(params=[in_process, with_worker, over_replicas])
def engine(request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    with request.param() as made:
        yield made


def start(
    engine: EngineClient, prompt: str, *, waits: bool = True, max_tokens: int | None = 5, **options: Any
) -> StreamChannel:
    params = SamplingParams(max_tokens=max_tokens, seed=1, n=options.pop("n", 1))
    return engine.accept(engine.prepare(prompt, params, RequestOptions(**options)), waits=waits)


def fill(engine: EngineClient) -> list[StreamChannel]:
    """Take all room with requests that do not end by themselves; the first request runs, the second waits in the queue.

    The first request runs before the second is sent: requests that are prepared at the same time may change places.
    """
    running = start(engine, "filler 0", max_tokens=None)
    assert isinstance(running.get(LONG_S), StreamChunk)
    channels = [running, *(start(engine, f"filler {index}", max_tokens=None) for index in range(1, ROOM))]
    assert engine.num_open == ROOM
    return channels


def free(channels: list[StreamChannel]) -> None:
    for channel in channels:
        channel.cancel()


def read(channel: StreamChannel) -> list[StreamChunk]:
    assert channel.wait_finished(LONG_S)
    return list(channel)


def text_of(channel: StreamChannel) -> str:
    return "".join(chunk.text for chunk in read(channel))


def test_requests_beyond_the_queue_wait_for_room(engine: EngineClient) -> None:
    """They run in order of arrival and read as alone; a caller that does not wait is refused meanwhile."""
    alone = [text_of(start(engine, f"prompt {index}")) for index in range(8)]
    fillers = fill(engine)
    waiting = [start(engine, f"prompt {index}") for index in range(8)]
    with pytest.raises(QueueFull, match="8 requests wait for room"):
        start(engine, "refused", waits=False)
    assert engine.num_open == ROOM
    assert not any(channel.is_finished for channel in waiting)
    free(fillers)
    assert [text_of(channel) for channel in waiting] == alone
    wait_until(lambda: engine.num_open == 0)
    assert text_of(start(engine, "prompt 0", waits=False)) == alone[0]


def test_a_wait_counts_in_the_time_in_the_queue(engine: EngineClient) -> None:
    """From the call on."""
    fillers = fill(engine)
    waiting = start(engine, "hello")
    time.sleep(0.2)
    free(fillers)
    *_, last = read(waiting)
    assert last.usage is not None
    assert last.usage.queue_s >= 0.2


def ending(chunks: list[StreamChunk]) -> list[Any]:
    """Return the text of a stream, without times."""
    return [
        (chunk.choice, chunk.text, chunk.token_ids, chunk.finish_reason, type(chunk.error), chunk.usage is None)
        for chunk in chunks
    ]


@pytest.mark.parametrize("options", [{"queue_timeout_s": 0.2}, {"timeout_s": 0.2}, {"ttft_timeout_s": 0.2, "n": 2}])
def test_a_deadline_ends_a_wait_as_it_ends_a_queued_request(engine: EngineClient, options: dict[str, Any]) -> None:
    """With the same chunks, at its time, while nothing else happens."""
    fillers = fill(engine)
    fillers[1].cancel()
    wait_until(lambda: engine.num_open == 1)
    queued = start(engine, "late", waits=False, **options)
    begun = time.monotonic()
    waiting = start(engine, "late", **options)
    chunks = read(waiting)
    assert time.monotonic() - begun >= 0.19
    assert chunks[-1].finish_reason is FinishReason.DEADLINE
    assert ending(chunks) == ending(read(queued))
    wait_until(lambda: engine.num_open == 1)
    free(fillers)


def test_a_deadline_ends_a_wait_while_the_engine_sleeps() -> None:
    """All open requests are paused, and no tick comes."""
    with in_process() as engine:
        slow = [start(engine, f"slow {index}", max_tokens=None, max_buffered_tokens=1) for index in range(ROOM)]
        wait_until(lambda: slow[0].num_buffered > 0)
        time.sleep(0.1)
        (last,) = read(start(engine, "late", timeout_s=0.1))
        assert last.finish_reason is FinishReason.DEADLINE
        free(slow)


def test_a_cancelled_wait_leaves_nothing_behind(engine: EngineClient) -> None:
    """By its caller, or by dropping the channel; the requests after it are served."""
    fillers = fill(engine)
    one, other, last = [start(engine, f"prompt {index}") for index in range(3)]
    one.cancel()
    assert ending(read(one))[-1][3] is FinishReason.CANCELLED
    assert one.wait_released(LONG_S)
    del other
    gc.collect()
    free(fillers)
    assert read(last)[-1].finish_reason is FinishReason.LENGTH
    wait_until(lambda: engine.num_open == 0)


@pytest.mark.parametrize("drain", [False, True])
def test_closing_ends_waits_with_engine_stopped(engine: EngineClient, drain: bool) -> None:
    """Streams and embeddings; accepted requests end as they do otherwise."""
    fillers = fill(engine)
    waiting, vectors = start(engine, "hello"), engine.embed(["a text"], None, RequestOptions(), waits=True)
    closing = threading.Thread(target=lambda: engine.close(drain=drain))
    closing.start()
    (last,) = read(waiting)
    assert last.finish_reason is FinishReason.ERROR
    assert isinstance(last.error, EngineStopped)
    assert isinstance(vectors.exception(LONG_S), EngineStopped)
    free(fillers)
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert {channel.finish_reason for channel in fillers} <= {FinishReason.SHUTDOWN, FinishReason.CANCELLED}
    with pytest.raises(EngineStopped):
        start(engine, "hello")


def test_embeddings_wait_in_the_same_line(engine: EngineClient) -> None:
    """In order of arrival, with cancels and deadlines."""
    fillers = fill(engine)
    with pytest.raises(QueueFull):
        engine.embed(["a text"], None, RequestOptions())
    before = start(engine, "hello")
    vectors = engine.embed(["a text"], None, RequestOptions(), waits=True)
    left = engine.embed(["a text"], None, RequestOptions(), waits=True)
    late = engine.embed(["a text"], None, RequestOptions(timeout_s=0.1), waits=True)
    assert left.cancel()
    assert isinstance(late.exception(LONG_S), DeadlineExceeded)
    assert not vectors.done()
    free(fillers)
    assert len(vectors.result(LONG_S)) == 1
    assert read(before)[-1].finish_reason is FinishReason.LENGTH
    wait_until(lambda: engine.num_open == 0)


def test_an_interval_that_is_set_during_the_wait_holds(engine: EngineClient) -> None:
    """The engine makes chunks of as many tokens."""
    fillers = fill(engine)
    waiting = start(engine, "hello", max_tokens=12)
    waiting.interval = 4
    free(fillers)
    assert len(read(waiting)[0].token_ids) >= 4


def test_a_tick_that_fails_leaves_the_line_alone() -> None:
    """Requests that the engine had not accepted go on."""
    with Running(max_requests=1) as running:

        def broken(plan: Any, output: Any) -> Any:
            del running.scheduler.apply  # type: ignore[method-assign]
            raise AssertionError("our own mistake")

        running.hold()
        first = running.submit("hello")
        running.wait_for_pass()
        waiting = running.router.submit(running.request("waits", max_tokens=3, ignore_eos=True), 0, waits=True)
        running.scheduler.apply = broken  # type: ignore[method-assign]
        running.backend.gate.set()
        assert read(first)[-1].finish_reason is FinishReason.ERROR
        assert read(waiting)[-1].finish_reason is FinishReason.LENGTH


def test_a_thousand_tasks_wait_without_threads() -> None:
    """Tasks that are cancelled leave the line; the others get their text."""
    with in_process() as engine:
        alone = text_of(start(engine, "hello"))
        fillers = fill(engine)

        async def one() -> str:
            return "".join([chunk.text async for chunk in start(engine, "hello")])

        async def main() -> None:
            num_threads = threading.active_count()
            tasks = [asyncio.create_task(one()) for _ in range(1000)]
            await asyncio.sleep(0)
            assert threading.active_count() == num_threads
            for task in tasks[::2]:
                task.cancel()
            free(fillers)
            found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), LONG_S)
            assert all(isinstance(text, asyncio.CancelledError) for text in found[::2])
            assert set(found[1::2]) == {alone}

        asyncio.run(main())
        wait_until(lambda: engine.num_open == 0)
