"""Heartbeats, judged by a clock that a test moves."""

from __future__ import annotations

from paceline.observability.heartbeat import (
    CRASH_LOOP,
    LONGEST_SILENCE_S,
    LONGEST_TICK_S,
    Heartbeat,
    Pulse,
    Sign,
    WorkerHistory,
    heartbeat_of,
    starting,
)
from paceline.testing.fake_backend import ManualClock


def test_an_idle_loop_is_alive_for_any_time() -> None:
    """Waiting for work is not a hang."""
    clock = ManualClock()
    pulse = Pulse(clock)
    pulse.tick()
    pulse.rest()
    clock.advance(10_000)
    heart = heartbeat_of(pulse.sign, clock.now())
    assert heart == Heartbeat(is_alive=True, state="idle", state_s=10_000)
    assert heart.is_idle


def test_a_tick_longer_than_the_bound_counts_as_hung() -> None:
    """The engine is alive up to the bound and not beyond it; the next turn starts anew."""
    clock = ManualClock()
    pulse = Pulse(clock)
    pulse.tick()
    clock.advance(LONGEST_TICK_S)
    assert heartbeat_of(pulse.sign, clock.now()) == Heartbeat(is_alive=True, state="ticking", state_s=LONGEST_TICK_S)
    clock.advance(1)
    assert not heartbeat_of(pulse.sign, clock.now()).is_alive
    pulse.tick()
    assert heartbeat_of(pulse.sign, clock.now()).is_alive


def test_a_loop_that_ended_is_not_alive() -> None:
    """There is no grace period."""
    clock = ManualClock()
    pulse = Pulse(clock)
    pulse.end()
    assert heartbeat_of(pulse.sign, clock.now()) == Heartbeat(is_alive=False, state="ended", state_s=0)


def test_a_silent_process_is_not_alive_even_if_its_last_sign_was_idle() -> None:
    """A stopped process gives no sign, and its last one may have been good."""
    sign = Sign("idle", 5.0)
    assert heartbeat_of(sign, 9.0, silent_s=LONGEST_SILENCE_S).is_alive
    assert not heartbeat_of(sign, 9.0, silent_s=LONGEST_SILENCE_S + 1).is_alive


def test_a_process_that_starts_is_alive_however_long_it_loads() -> None:
    """A large model takes minutes to load."""
    assert starting(3000.0, WorkerHistory(worker_pid=7, num_restarts=2)) == Heartbeat(
        is_alive=True, state="starting", state_s=3000.0, worker_pid=7, num_restarts=2
    )


def test_a_worker_that_crashed_several_times_in_a_row_is_in_a_crash_loop_until_it_is_ready() -> None:
    """A crash loop is alive, since the next worker is due; once that is ready, the state is its loop's."""
    assert starting(1.0, WorkerHistory(num_crashes=CRASH_LOOP - 1)).state == "starting"
    history = WorkerHistory(num_restarts=9, num_crashes=CRASH_LOOP)
    assert starting(1.0, history, 0.5) == Heartbeat(
        is_alive=True, state="crash_loop", state_s=1.0, num_restarts=9, num_crashes=CRASH_LOOP, restart_in_s=0.5
    )
    assert heartbeat_of(Sign("idle", 5.0), 6.0, history).state == "idle"
    assert heartbeat_of(Sign("idle", 5.0), 6.0, history).num_crashes == CRASH_LOOP


def test_a_sign_from_another_thread_may_be_newer_than_the_time_it_is_compared_with() -> None:
    """The time since this sign is 0."""
    assert heartbeat_of(Sign("ticking", 5.001), 5.0).state_s == 0
