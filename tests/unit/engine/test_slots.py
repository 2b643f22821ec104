"""The slots of an engine: alone, with a thread, with a process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from tests.engine_world import World
from tests.running_engine import LONG_S, Running

from paceline.engine.output_router import map_future
from paceline.engine.questions import slots
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineStopped
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Answered, SlotsSnapshot, SlotView
from paceline.scheduling.telemetry import slots_snapshot
from paceline.streaming import StreamChannel, StreamChunk
from paceline.testing.fake_engine_client import fake_worker_engine

LONG: dict[str, Any] = {"num_cells": 200_000, "eos_every": 10**9}


def ask(world: World) -> SlotsSnapshot:
    """Tick once."""
    world.commands.queue.append(slots.command(10**6, ()))
    world.num_ticks += 1
    events = world.engine.tick()
    (found,) = [event.result for event in events if isinstance(event, Answered)]
    world.take([event for event in events if not isinstance(event, Answered)])
    return found


def test_all_slots_of_an_engine_without_work_are_idle() -> None:
    """With their numbers and nothing else."""
    found = ask(World(limits={"num_slots": 3}))
    assert found == SlotsSnapshot((SlotView(id=0), SlotView(id=1), SlotView(id=2)), 0)
    assert (len(found), found.num_processing) == (3, 0)
    assert found == slots_snapshot((), num_slots=3, num_waiting=0)


def test_a_slot_shows_the_state_of_its_sequence() -> None:
    """A prompt in parts, then tokens one by one: the counts after the tick, by which it is prefilling or decoding."""
    world = World(limits={"num_slots": 2, "chunk_size": 4, "n_batch": 4}, eos_every=10**9)
    outcome = world.submit([1, 2, 3, 4, 5, 6], max_tokens=5, request_id="mine")
    first = ask(world).slots[0]
    assert (first.state, first.num_prompt_tokens, first.num_computed_tokens, first.num_generated) == (
        "prefilling",
        6,
        4,
        0,
    )
    assert (first.is_processing, first.key, first.request_id) == (True, outcome.request.key, "mine")
    second, idle = ask(world)
    assert (second.state, second.num_computed_tokens, second.num_generated) == ("decoding", 6, 1)
    assert (second.max_tokens, second.num_remaining) == (5, 4)
    assert second.running_s > first.running_s >= 0
    assert idle == SlotView(id=1)


def test_a_request_without_a_slot_is_counted_as_waiting() -> None:
    """Sequences of the same request each count; a choice in a slot has its number."""
    world = World(limits={"num_slots": 2}, eos_every=10**9)
    world.submit("abc", n=3, max_tokens=None)
    world.tick(3)
    found = ask(world)
    assert found.num_waiting == 1
    assert [slot.choice for slot in found] == [0, 1]
    assert all(slot.num_remaining is None for slot in found)


def test_a_slot_whose_reader_is_slow_is_shown_as_paused() -> None:
    """The slot also shows its computed tokens."""
    world = World(eos_every=10**9)
    outcome = world.submit("abc", max_tokens=None)
    world.tick(3)
    world.pause(outcome)
    found = ask(world).slots[0]
    assert (found.state, found.num_generated) == ("paused", 3)


def test_a_slot_shows_how_much_was_cached() -> None:
    """The number is that of the usage."""
    world = World(eos_every=10**9)
    prompt = list(range(30, 60))
    world.submit(prompt, max_tokens=2)
    world.run()
    outcome = world.submit(prompt, max_tokens=9)
    world.tick(2)
    found = ask(world).slots[0]
    assert found.num_cached == outcome.request.progress.num_cached > 0


def test_an_engine_with_a_thread_replies_between_two_ticks() -> None:
    """Not during the pass that runs: the caller waits for it, and sees its outcome."""
    with Running(num_slots=2, eos_every=10**9) as engine:
        engine.hold()
        channel = engine.submit("on and on", max_tokens=None)
        engine.wait_for_pass()
        asked = engine.router.ask(slots.command(engine.inbox.next_key(), ()))
        assert not asked.done()
        engine.backend.gate.set()
        found = asked.result(LONG_S)
        assert [slot.is_processing for slot in found] == [True, False]
        channel.cancel()
        assert channel.wait_released(LONG_S)
        found = engine.router.ask(slots.command(engine.inbox.next_key(), ())).result(LONG_S)
        assert found.num_processing == 0


def test_a_query_to_a_closed_engine_raises() -> None:
    """No caller waits for ever."""
    with Running() as engine:
        engine.close()
        with pytest.raises(EngineStopped):
            engine.router.ask(slots.command(engine.inbox.next_key(), ())).result(LONG_S)


def start(engine: WorkerEngine, **options: Any) -> StreamChannel:
    params = SamplingParams(seed=1, max_tokens=None, ignore_eos=True)
    channel = engine.accept(engine.prepare("on and on", params, RequestOptions(**options)))
    assert isinstance(channel.get(), StreamChunk)
    return channel


def test_a_front_asks_its_worker() -> None:
    """The request's own name and key come back, also after another worker has taken it over; a closed engine raises."""
    engine = fake_worker_engine(backend_options=LONG, restarts=RestartLimits(first_wait_s=0.0))
    try:
        assert [slot.is_processing for slot in engine.slots()] == [False] * engine.limits.num_slots
        channel = start(engine, request_id="mine")
        (slot,) = [slot for slot in engine.slots() if slot.is_processing]
        assert (slot.request_id, slot.num_prompt_tokens, slot.state) == ("mine", len("on and on"), "decoding")
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        while (found := engine.slots()).num_processing == 0:  # the next one loads, and all that is there waits
            assert found.num_waiting in (0, 1)
        (again,) = [slot for slot in found if slot.is_processing]
        assert (again.key, again.request_id) == (slot.key, "mine")
        assert asyncio.run(asked(engine)).num_processing == 1
        channel.cancel()
    finally:
        engine.close()
    with pytest.raises(EngineStopped):
        engine.slots()


async def asked(engine: WorkerEngine) -> SlotsSnapshot:
    return await asyncio.wrap_future(engine.ask_slots())


def test_a_caller_that_stops_waiting_for_a_future_disturbs_no_other() -> None:
    """The engine resolves a future that was cancelled, and goes on."""
    with Running() as engine:
        engine.hold()
        channel = engine.submit("one")
        engine.wait_for_pass()
        question = engine.router.ask(slots.command(engine.inbox.next_key(), ()))
        mapped = map_future(question, lambda found: found)
        assert mapped.cancel()
        engine.backend.gate.set()
        assert question.result(LONG_S)
        assert mapped.cancelled()
        assert channel.wait_released(LONG_S)


def test_a_mapping_function_that_raises_fails_the_mapped_future() -> None:
    """The error goes to the mapped future, not to the thread that resolves the original."""
    with Running() as engine:
        question = engine.router.ask(slots.command(engine.inbox.next_key(), ()))
        mapped = map_future(question, lambda found: list(found)[10])
        with pytest.raises(IndexError):
            mapped.result(LONG_S)
