"""Engines with a worker that is stopped while idle: real processes on the fake backend."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from tests.polling import wait_until
from tests.running_engine import LONG_S
from tests.unit.engine.worker.test_worker_engine import engine, first_of, read, start, undisturbed, wait_until_gone

from paceline.config import EngineConfig
from paceline.engine.worker import worker_engine
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineStopped, InvalidParams
from paceline.request import RequestOptions
from paceline.streaming import FinishReason

SHORT_S = 0.05


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on a busy machine has time to report its work."""
    monkeypatch.setattr(worker_engine, "_STATS_S", 60.0)


def until_asleep(one: WorkerEngine) -> None:
    wait_until(lambda: one.heartbeat().state == "sleeping" and one.worker_pid is None)


def test_an_idle_worker_is_let_go_and_the_next_request_starts_another() -> None:
    """The process is gone, its memory with it; later output is as usual, and nothing counts as a crash."""
    with engine(sleep_idle_s=SHORT_S) as one:
        pid = one.worker_pid
        assert pid is not None
        until_asleep(one)
        assert wait_until_gone(pid)
        heartbeat = one.heartbeat()
        assert (heartbeat.is_alive, heartbeat.worker_pid, heartbeat.num_restarts) == (True, None, 0)
        for _ in range(3):
            ids, text, last = read(start(one, "hello", max_tokens=20))
            assert (ids, text) == undisturbed("hello", max_tokens=20)
            assert last.finish_reason is FinishReason.LENGTH
            until_asleep(one)
        assert one.heartbeat().num_restarts == 0
        assert one.stats().number("paceline_engine_restarts_total") == 0


def test_what_a_worker_did_still_counts_when_it_was_let_go() -> None:
    """The counters of ticks and tokens are the last it had."""
    with engine(sleep_idle_s=SHORT_S) as one:
        for number in range(1, 3):
            read(start(one, "hello", max_tokens=20))
            until_asleep(one)
            assert one.stats().number("paceline_tokens_generated_total") == 20 * number


def test_questions_do_not_wake_it() -> None:
    """Metrics, slots and heartbeats of a sleeping engine equal those of an idle engine."""
    with engine(sleep_idle_s=SHORT_S) as one:
        until_asleep(one)
        one.stats()
        assert all(slot.key is None for slot in one.slots().slots)
        assert one.num_open == 0
        assert (one.heartbeat().state, one.worker_pid) == ("sleeping", None)


def test_it_can_be_woken_without_a_request() -> None:
    """As for a server's routes that will need it; then it idles, and sleeps again."""
    with engine(sleep_idle_s=SHORT_S) as one:
        until_asleep(one)
        one.wake()
        wait_until(lambda: one.heartbeat().state != "sleeping")
        until_asleep(one)


def test_requests_that_come_while_it_falls_asleep_are_computed() -> None:
    """At whatever moment: none is lost, none ends with an error."""
    with engine(sleep_idle_s=1e-4) as one:
        for count in range(6):
            threading.Event().wait(0.002 * count)
            ids, _, last = read(start(one, "hello", max_tokens=5))
            assert (len(ids), last.finish_reason) == (5, FinishReason.LENGTH)


def test_a_request_waits_for_the_worker_within_its_deadline() -> None:
    """One without the time ends with DEADLINE, and the next one is computed."""
    with engine(sleep_idle_s=SHORT_S) as one:
        until_asleep(one)
        _, _, last = read(start(one, "hello", options=RequestOptions(timeout_s=1e-4), max_tokens=5))
        assert last.finish_reason is FinishReason.DEADLINE
        assert read(start(one, "hello", max_tokens=5))[2].finish_reason is FinishReason.LENGTH


def test_embeddings_wake_it_and_an_open_request_keeps_it_awake() -> None:
    """Every kind of request."""
    with engine(sleep_idle_s=SHORT_S) as one:
        until_asleep(one)
        (vector,) = one.embed(["text"], None, RequestOptions()).result(LONG_S)
        assert vector is not None
        channel = start(one, "hello", options=RequestOptions(max_buffered_tokens=1), max_tokens=100_000)
        first = first_of(channel)
        pid = one.worker_pid
        threading.Event().wait(4 * SHORT_S)  # it is paused for want of a reader, so that nothing happens
        assert (one.num_open, one.worker_pid) == (1, pid)
        channel.cancel()
        assert read(channel, first)[2].finish_reason is FinishReason.CANCELLED


def test_a_worker_that_dies_while_it_is_needed_counts_as_before() -> None:
    """A crash after a sleep is a restart."""
    with engine(sleep_idle_s=60.0) as one:
        channel = start(one, "hello", max_tokens=3000)
        first = first_of(channel)
        pid = one.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert read(channel, first)[2].finish_reason is FinishReason.LENGTH
        assert one.heartbeat().num_restarts == 1


def test_an_engine_that_sleeps_can_be_closed() -> None:
    """At once, and takes no requests afterwards."""
    with engine(sleep_idle_s=SHORT_S) as one:
        until_asleep(one)
        one.close()
        assert one.heartbeat().state == "ended"
        with pytest.raises(EngineStopped):
            start(one, "hello")


def test_a_thread_cannot_sleep() -> None:
    """The error has the way out; so has that of an invalid time."""
    with pytest.raises(InvalidParams, match='sleep_idle_s=5 needs isolation="process"'):
        EngineConfig(sleep_idle_s=5.0)
    with pytest.raises(InvalidParams, match="sleep_idle_s"):
        EngineConfig(sleep_idle_s=0, isolation="process")
