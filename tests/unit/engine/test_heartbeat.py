"""Signs of life of real threads and processes."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.polling import wait_until
from tests.running_engine import LONG_S, Running

from paceline.engine.worker.black_box import Beat, BlackBox
from paceline.engine.worker.supervisor import RestartLimits
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.observability.heartbeat import Sign
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.streaming import StreamChunk
from paceline.testing.fake_engine_client import fake_worker_engine

LONG: dict[str, Any] = {"num_cells": 200_000, "eos_every": 10**9}


@pytest.mark.parametrize("sign", [None, Sign("idle", 12.5), Sign("ticking", 12.5)])
def test_a_beat_comes_out_of_the_box_as_it_went_in(sign: Sign | None) -> None:
    """Through a mapping of its own of the same memory; without keys of a pass getting in its way."""
    front = BlackBox.create()
    worker = BlackBox(front.fileno())
    assert front.read_beat() is None
    worker.begin_pass(range(1, 5001))
    worker.listen(13.0)
    if sign is not None:
        worker.beat(14.0, sign, 15.0)
    worker.begin_pass(range(1, 5001))
    assert front.read_beat() == (Beat(13.0) if sign is None else Beat(13.0, sign, 14.0, 15.0))
    worker.close()
    front.close()
    assert front.read_beat() is None


def test_a_worker_whose_loop_has_ended_is_one_that_is_about_to_be_replaced() -> None:
    """It leaves by itself, so there is no loop to speak of."""
    box = BlackBox.create()
    box.listen(13.0)
    box.beat(13.0, Sign("ended", 12.0))
    assert box.read_beat() == Beat(13.0, None, 13.0)
    box.close()


def test_an_engine_s_thread_reports_whether_it_ticks_or_waits() -> None:
    """Idle before and after, ticking in a pass that does not end, ended when it is closed."""
    with Running(eos_every=10**9) as engine:
        engine.hold()
        channel = engine.submit("on and on", max_tokens=2)
        engine.wait_for_pass()
        assert engine.runner.heartbeat().state == "ticking"
        assert engine.runner.heartbeat().is_alive
        engine.backend.gate.set()
        assert channel.wait_released(LONG_S)
        wait_until(lambda: engine.runner.heartbeat().is_idle)
        engine.close()
        heart = engine.runner.heartbeat()
    assert (heart.is_alive, heart.state) == (False, "ended")


def test_a_loop_that_fails_is_reported() -> None:
    """Three failing ticks in a row end it, and no request to the engine is needed to know."""
    with Running() as engine:
        engine.runner._engine.tick = broken  # type: ignore[method-assign]
        engine.submit("one")
        engine.runner._thread.join(LONG_S)
        assert (engine.runner.heartbeat().is_alive, engine.runner.heartbeat().state) == (False, "ended")


def broken() -> Any:
    raise RuntimeError("it is broken")


def start(engine: WorkerEngine) -> Any:
    request = engine.prepare("on and on", SamplingParams(seed=1, max_tokens=None), RequestOptions())
    channel = engine.accept(request)
    assert isinstance(channel.get(), StreamChunk)
    return channel


def test_a_front_knows_its_worker_s_heart() -> None:
    """The worker's idleness and ticks, its process, its replacement after a death, and the end of it all."""
    engine = fake_worker_engine(backend_options=LONG, restarts=RestartLimits(first_wait_s=0.0))
    try:
        first = engine.worker_pid
        wait_until(lambda: engine.heartbeat().is_idle)
        assert engine.heartbeat().worker_pid == first
        channel = start(engine)
        wait_until(lambda: engine.heartbeat().state == "ticking")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: engine.heartbeat().num_restarts == 1)
        wait_until(lambda: engine.heartbeat().state == "ticking")
        assert engine.heartbeat().worker_pid not in (None, first)
        assert engine.heartbeat().is_alive
        channel.cancel()
    finally:
        engine.close()
    assert (engine.heartbeat().is_alive, engine.heartbeat().state) == (False, "ended")


def test_a_front_that_is_out_of_restarts_is_not_alive() -> None:
    """The worker died more often than it may."""
    engine = fake_worker_engine(backend_options=LONG, restarts=RestartLimits(max_restarts=0))
    try:
        assert engine.worker_pid is not None
        os.kill(engine.worker_pid, signal.SIGKILL)
        engine._supervisor._thread.join(LONG_S)
        assert (engine.heartbeat().is_alive, engine.heartbeat().state) == (False, "ended")
    finally:
        engine.close()


def test_a_worker_that_was_stopped_grows_silent() -> None:
    """Whatever it reported last, the time since then goes on; continued, it reports again."""
    engine = fake_worker_engine(backend_options=LONG)
    pid = engine.worker_pid
    assert pid is not None
    try:
        wait_until(lambda: engine.heartbeat().is_idle)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: engine.heartbeat().silent_s > 2.0)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: engine.heartbeat().silent_s < 2.0)
    finally:
        os.kill(pid, signal.SIGCONT)
        engine.close()
