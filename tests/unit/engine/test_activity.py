"""The activity of an engine with a thread, and of one with a worker process."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import pytest
from tests.running_engine import LONG_S

from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineStopped, InvalidParams
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import StreamChannel, StreamChunk
from paceline.testing import FakeBackend, FakeEngineClient
from paceline.testing.fake_engine_client import fake_worker_engine

LONG: dict[str, Any] = {"num_cells": 200_000, "eos_every": 10**9}


def start(engine: FakeEngineClient | WorkerEngine, **options: Any) -> StreamChannel:
    params = SamplingParams(seed=1, max_tokens=None, ignore_eos=True)
    channel = engine.accept(engine.prepare("on and on and on and on", params, RequestOptions(**options)))
    assert isinstance(channel.get(), StreamChunk)
    return channel


def made(kind: str) -> FakeEngineClient | WorkerEngine:
    if kind == "thread":
        return FakeEngineClient(backend=FakeBackend(num_seq_ids=8, **LONG))
    return fake_worker_engine(backend_options=LONG, restarts=RestartLimits(first_wait_s=0.0))


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_what_an_engine_does_is_the_same_from_a_thread_and_a_process(kind: str) -> None:
    """Slots, ticks and the tree come in one reply; the next one has the ticks since. Wrong numbers and a closed engine raise."""
    engine = made(kind)
    try:
        assert engine.ask_activity().result(LONG_S).slots.num_processing == 0
        channel = start(engine, request_id="mine", tenant="blue")
        first = engine.ask_activity(max_nodes=8).result(LONG_S)
        (slot,) = [slot for slot in first.slots if slot.is_processing]
        assert (slot.request_id, slot.tenant) == ("mine", "blue")
        assert first.ticks
        assert first.trees is not None
        assert [tree.tenant for tree in first.trees] == ["blue"]
        assert first.trees[0].nodes[0].running == ((slot.key, 0),)
        assert start(engine).get() is not None  # a tick later
        second = engine.ask_activity(first.last_number).result(LONG_S)
        assert second.ticks[0].number > first.last_number
        assert (second.started_s, second.trees) == (first.started_s, None)
        due_s = time.monotonic() + 0.2
        third = engine.ask_activity(second.last_number, delay_s=0.2).result(LONG_S)
        assert time.monotonic() >= due_s
        assert third.ticks[-1].number > second.ticks[-1].number
        for wrong in ({"after": -1}, {"max_nodes": 5000}, {"delay_s": -1}, {"delay_s": 1.1}, {"delay_s": math.nan}):
            with pytest.raises(InvalidParams):
                engine.ask_activity(**wrong)
        channel.cancel()
    finally:
        engine.close()
    with pytest.raises(EngineStopped):
        engine.ask_activity().result(LONG_S)


def test_another_worker_begins_another_log() -> None:
    """The request goes on there, and the first worker's state is void; in between nothing is done."""
    engine = fake_worker_engine(backend_options=LONG, restarts=RestartLimits(first_wait_s=0.0))
    try:
        channel = start(engine, request_id="mine")
        before = engine.ask_activity().result(LONG_S)
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        while (after := engine.ask_activity().result(LONG_S)).slots.num_processing == 0:
            assert after.started_s != before.started_s or after.last_number >= before.last_number
        assert after.started_s > before.started_s
        assert [slot.request_id for slot in after.slots if slot.is_processing] == ["mine"]
        channel.cancel()
    finally:
        engine.close()
