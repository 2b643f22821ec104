"""Passes that are timed before the first request: their time, and their ends, on the fake backend."""

from __future__ import annotations

import threading

import pytest
from tests.engine_world import World
from tests.running_engine import LONG_S, Running

from paceline.engine import engine_thread
from paceline.engine.core import Command, Engine, Stop, Submit
from paceline.engine.questions import digest, slots
from paceline.errors import Closed


class Passes:
    """A number of passes; notes their calls. gate: an event that a pass waits for."""

    def __init__(self, number: int) -> None:
        self.left, self.done = number, list[str]()
        self.has_begun, self.has_ended, self.gate = threading.Event(), threading.Event(), threading.Event()
        self.gate.set()

    def step(self) -> bool:
        self.has_begun.set()
        assert self.gate.wait(LONG_S)
        self.done.append("pass")
        self.left -= 1
        return self.left > 0

    def end(self) -> None:
        self.done.append("end")
        self.has_ended.set()


def calibrating(world: World, passes: Passes) -> Engine:
    return Engine(world.commands, world.scheduler, world.executor, passes)


def test_what_was_measured_is_learned_once() -> None:
    """After the last pass; then there is nothing left to do."""
    passes = Passes(2)
    engine = calibrating(World(), passes)
    for _ in range(4):
        engine.calibrate()
    assert passes.done == ["pass", "pass", "end"]
    assert not engine.is_calibrating


def test_a_request_ends_a_calibration_before_it_is_queued() -> None:
    """Cells and sequence ids are the scheduler's from then on."""
    world, passes = World(), Passes(5)
    engine = calibrating(world, passes)
    engine.calibrate()
    world.commands.queue.append(Submit(world.request("hello", max_tokens=1)))
    engine.tick()
    engine.calibrate()
    assert passes.done == ["pass", "end"]


@pytest.mark.parametrize("question", [slots.command(1, ()), digest.command(1, (8, None))])
def test_questions_leave_a_calibration_alone(question: Command) -> None:
    """A page that shows the slots asks every second."""
    world, passes = World(), Passes(5)
    engine = calibrating(world, passes)
    world.commands.queue.append(question)
    engine.tick()
    assert engine.is_calibrating
    assert passes.done == []


def test_an_idle_engine_times_its_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, without a request."""
    monkeypatch.setattr(engine_thread, "_QUIET_S", 0.0)
    passes = Passes(3)
    with Running(calibration=passes):
        assert passes.has_ended.wait(LONG_S)
    assert passes.done == ["pass", "pass", "pass", "end"]


def test_the_first_request_waits_for_one_pass_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are given up."""
    monkeypatch.setattr(engine_thread, "_QUIET_S", 0.0)
    passes = Passes(1000)
    passes.gate.clear()
    with Running(calibration=passes) as engine:
        assert passes.has_begun.wait(LONG_S)
        channel = engine.submit("hello", max_tokens=2)
        passes.gate.set()
        assert channel.wait_finished(LONG_S)
    assert passes.done == ["pass", "end"]


def test_requests_that_come_at_once_wait_for_no_pass() -> None:
    """An engine is quiet for a while first."""
    passes = Passes(1000)
    with Running(calibration=passes) as engine:
        assert engine.submit("hello", max_tokens=2).wait_finished(LONG_S)
    assert passes.done == ["end"]


def test_an_engine_that_ends_before_its_calibration_closes_in_order() -> None:
    """Its context may be closed before the abort of a calibration's pass is called."""

    class Closing(Running):
        def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
            self.inbox.close()
            self.inbox.put(Stop())
            self.runner._thread.join(LONG_S)
            super().close(drain=drain, timeout_s=timeout_s)

    passes = Passes(1000)
    with Closing(calibration=passes) as engine:
        engine.backend.abort = engine.runner._abort = _closed  # type: ignore[method-assign]
    assert "pass" not in passes.done


def _closed() -> None:
    raise Closed("the context was closed")


def test_an_engine_that_is_closed_at_once_lets_go_of_its_passes() -> None:
    """They hold the model, and its memory is free when `close` returns."""
    passes = Passes(1000)
    with Running(calibration=passes):
        pass
    assert passes.done == ["end"]
