"""Workers that hang: stopped processes, threads that do not come back, and long passes, which are no hangs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tests.faulty_backend import HIDDEN_POISON, POISON
from tests.polling import wait_until
from tests.running_engine import LONG_S
from tests.unit.engine.worker.test_worker_engine import FAULTY, engine, first_of, read, read_error, start, undisturbed

from paceline.config import EngineConfig
from paceline.cost_model import TickCostModel
from paceline.engine.questions import QUESTIONS, free_adapter, load_adapter
from paceline.engine.worker import supervisor
from paceline.engine.worker.black_box import PassAllowance
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineDied, InvalidParams, WorkerUnresponsive
from paceline.request import RequestOptions
from paceline.scheduling.records import StepPlan
from paceline.streaming import FinishReason

SOON_S = 60.0
"""For what a front does about a second after it was due."""


@contextmanager
def stopped(engine: WorkerEngine) -> Iterator[int]:
    """The worker's process is stopped in the block, and goes on behind it if it is not gone."""
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def seconds(act: Callable[[], object]) -> float:
    """Return the duration of a call."""
    begin_s = time.monotonic()
    act()
    return time.monotonic() - begin_s


def num_hangs(engine: WorkerEngine) -> int:
    return engine.heartbeat().num_hangs


# ---- requests that the worker does not end


def test_a_front_ends_what_is_past_a_deadline_or_cancelled_if_the_worker_does_not() -> None:
    """A second after that, once, with all tokens so far; later tokens of the worker are dropped, and then the slot is free."""
    with engine(hang_timeout_s=600.0, num_slots=4) as one:
        late = start(one, "late", max_tokens=None, options=RequestOptions(timeout_s=1.5))
        first_late = start(one, "first", max_tokens=None, options=RequestOptions(ttft_timeout_s=1000, timeout_s=1.0))
        cancelled, other = start(one, "cancelled", max_tokens=None), start(one, "other", max_tokens=3000)
        firsts = [first_of(channel) for channel in (late, first_late, cancelled, other)]
        with stopped(one):
            waiting = start(one, "waiting", options=RequestOptions(queue_timeout_s=0.5))
            embedding = one.embed(["text"], None, RequestOptions(timeout_s=0.5))
            cancelled.cancel()
            outcomes: list[Any] = []
            took_s = seconds(lambda: outcomes.append(read(cancelled, firsts[2])))
            assert 0.5 < took_s < SOON_S
            for channel, first in ((late, firsts[0]), (first_late, firsts[1])):
                ids, _, last = read(channel, first)
                assert last.finish_reason is FinishReason.DEADLINE
                assert last.usage is not None
                assert last.usage.completion_tokens == len(ids)
            assert outcomes[0][2].finish_reason is FinishReason.CANCELLED
            assert read(waiting)[2].finish_reason is FinishReason.DEADLINE
            assert embedding.exception(SOON_S) is not None
            assert not cancelled.is_released  # its slot is the worker's, as far as is known
            assert one.num_open == 6
        assert cancelled.wait_released(LONG_S)
        assert late.wait_released(LONG_S)
        wait_until(lambda: one.num_open <= 1)
        assert read(other, firsts[3])[:2] == undisturbed("other", max_tokens=3000)
        assert num_hangs(one) == 0
        one.metrics.check()


def test_a_request_that_ended_without_its_worker_is_released_when_that_dies() -> None:
    """It is not replayed, and nothing of it is left."""
    with engine(hang_timeout_s=600.0) as one:
        channel = start(one, "hello", max_tokens=None)
        first = first_of(channel)
        with stopped(one) as pid:
            channel.cancel()
            assert read(channel, first)[2].finish_reason is FinishReason.CANCELLED
            assert not channel.is_released
            os.kill(pid, signal.SIGKILL)
            assert channel.wait_released(LONG_S)
        assert len(read(start(one, "next", max_tokens=3))[0]) == 3
        assert one.num_open == 0


def test_a_start_that_is_reported_late_is_no_queue_timeout() -> None:
    """A request starts in a tick that outlasts its queue timeout: it goes on."""
    options = {"token_s": 0.04, "most_slow": 2}
    with engine(backend=FAULTY, backend_options=options, chunk_size=100) as one:
        channel = start(one, "x" * 100, max_tokens=3, options=RequestOptions(queue_timeout_s=0.3))
        assert read(channel)[2].finish_reason is FinishReason.LENGTH


# ---- questions


def test_a_question_without_a_reply_fails_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Each of them, with a clear error; metrics are the last report's."""
    for question in QUESTIONS.values():
        monkeypatch.setattr(question, "patience_s", 1.0)
    adapter = tmp_path / "adapter.gguf"
    adapter.write_bytes(b"GGUF")
    with engine(hang_timeout_s=600.0, state_folder=tmp_path) as one:
        asking = one._supervisor.calls
        with stopped(one):
            for ask in (
                one.ask_slots,
                one.prefix_digest,
                one.ask_activity,
                lambda: asking.ask(load_adapter, ("adapter", str(adapter))),
                lambda: asking.ask(free_adapter, ("adapter",)),
            ):
                with pytest.raises(WorkerUnresponsive, match="no reply within 1 s"):
                    ask().result(SOON_S)
            for act in (
                lambda: one.save_prefix("name", "prompt", RequestOptions()),
                lambda: one.load_prefix("name", RequestOptions()),
                lambda: one.erase_prefix("name"),
            ):
                with pytest.raises(WorkerUnresponsive):
                    act()
        wait_until(lambda: not asking._open and one.heartbeat().is_idle)
        assert len(one.slots()) > 0
        assert not one._supervisor._adapters  # it was loaded after its caller had given up, and freed again


# ---- hangs


def test_a_stopped_worker_is_replaced_and_no_token_is_lost_or_doubled() -> None:
    """Streams go on as after a death; no request is blamed; the engine says that it hangs, and how often it did."""
    with engine(hang_timeout_s=3.0, num_slots=4) as one, ThreadPoolExecutor(24) as threads:
        clock = start(one, "clock", max_tokens=None)
        channels = {index: start(one, f"prompt {index}", max_tokens=300, seed=index) for index in range(24)}
        first_of(clock)
        states: set[str] = set()
        with stopped(one) as pid:
            reading = {index: threads.submit(read, channel) for index, channel in channels.items()}

            def is_replaced() -> bool:
                states.add(one.heartbeat().state)
                return one.worker_pid not in (None, pid) and one.heartbeat().state != "hung"

            begin_s = time.monotonic()
            wait_until(is_replaced)
            assert time.monotonic() - begin_s < LONG_S
            for index, future in reading.items():
                assert future.result()[:2] == undisturbed(f"prompt {index}", max_tokens=300, seed=index)
        assert "hung" in states
        assert num_hangs(one) == one.stats().number("paceline_engine_restarts_total") == 1


def test_a_request_that_hangs_the_engine_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pass does not come back: twice, and it ends with an error."""
    monkeypatch.setattr(supervisor, "_MOST_PATIENCE", 1)  # else the second time takes four times as long
    with engine(backend=FAULTY, backend_options={"hangs": True}, hang_timeout_s=3.0) as one:
        good = start(one, "good", max_tokens=300)
        first = first_of(good)
        error = read_error(start(one, [65, POISON, 66], max_tokens=10))
        assert isinstance(error, EngineDied)
        assert "hung and was killed: its engine has been in one tick" in str(error)
        assert read(good, first)[:2] == undisturbed("good", max_tokens=300)
        assert num_hangs(one) == 2


def test_a_prefill_that_takes_long_is_no_hang() -> None:
    """A slow machine computes a prompt in pieces, each far longer than the limit for a thread that waits."""
    options = {"token_s": 0.05, "most_slow": 4}
    with engine(backend=FAULTY, backend_options=options, hang_timeout_s=3.0, chunk_size=100, max_tick_ms=60000) as one:
        assert read(start(one, "x" * 180, max_tokens=20))[0] == undisturbed("x" * 180, max_tokens=20)[0]
        assert num_hangs(one) == 0


def test_a_pass_may_take_twenty_times_as_long_as_expected() -> None:
    """A tick of decoding has the limit; a slow machine's piece of a prompt has minutes; saved states and RPC have more."""
    cost = TickCostModel()
    sequence = SimpleNamespace()
    row = SimpleNamespace(sequence=sequence, token_ids=[1] * 512, num_outputs=1)
    piece: Any = StepPlan([], [row], num_cells=13000)  # type: ignore[list-item]
    single: Any = StepPlan([], [SimpleNamespace(token_ids=[1], num_outputs=1)], num_cells=100)  # type: ignore[list-item]
    assert PassAllowance(EngineConfig(), cost).seconds(single) == 20.0
    assert PassAllowance(EngineConfig(), cost).seconds(piece) > 407.0
    moving: Any = StepPlan([object()], [], num_cells=100)  # type: ignore[list-item]
    assert PassAllowance(EngineConfig(), cost).seconds(moving) == 220.0
    remote = EngineConfig(rpc="10.0.0.2:1", rpc_timeout_s=300.0, isolation="process")
    assert PassAllowance(remote, cost).seconds(single) == 620.0
    for num_tokens in (64, 512) * 10:
        cost.observe(num_tokens, 1000, num_tokens * 0.8)  # 410 s for a piece
    assert PassAllowance(EngineConfig(), cost).seconds(piece) > 4000.0


# ---- ends


def test_an_engine_whose_worker_hangs_closes_soon() -> None:
    """Idle or not; open requests end with SHUTDOWN."""
    with engine(hang_timeout_s=600.0) as one, stopped(one):
        wait_until(lambda: one.heartbeat().silent_s > 3.0)
        assert seconds(one.close) < LONG_S
    with engine(hang_timeout_s=600.0) as one:
        channel = start(one, "hello", max_tokens=None)
        first = first_of(channel)
        with stopped(one):
            wait_until(lambda: one.heartbeat().silent_s > 3.0)
            assert seconds(one.close) < LONG_S
        assert read(channel, first)[2].finish_reason is FinishReason.SHUTDOWN


def test_an_engine_whose_worker_hangs_falls_asleep_and_wakes() -> None:
    """The worker is killed that does not leave; the next request has a new one."""
    with engine(hang_timeout_s=600.0, sleep_idle_s=1.0) as one:
        read(start(one, "hello", max_tokens=3))
        with stopped(one):
            wait_until(lambda: one.heartbeat().state == "sleeping" and one.worker_pid is None)
        assert read(start(one, "hello", max_tokens=20))[:2] == undisturbed("hello", max_tokens=20)
        assert num_hangs(one) == 0


def test_the_limit_is_checked() -> None:
    """A second without a heartbeat is none too many; infinity turns it off."""
    with pytest.raises(InvalidParams, match=r"hang_timeout_s must be a finite number >= 3.*math\.inf"):
        EngineConfig(hang_timeout_s=1.0, isolation="process")
    assert EngineConfig(hang_timeout_s=float("inf"), isolation="process").hang_timeout_s == float("inf")
    assert EngineConfig(hang_timeout_s=None).hang_timeout_s == 20.0


def test_a_request_that_is_prepared_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that prepares requests does not come back; requests after it go on."""
    monkeypatch.setattr(supervisor, "LONG_WORK", 1)
    with engine(backend=FAULTY, backend_options={"hangs": True}, hang_timeout_s=8.0) as one:
        bad = start(one, [65, HIDDEN_POISON], max_tokens=10)
        behind = start(one, "behind", max_tokens=100)
        error = read_error(bad)
        assert isinstance(error, EngineDied)
        assert "it has prepared one request for" in str(error)
        assert read(behind)[:2] == undisturbed("behind", max_tokens=100)
        assert num_hangs(one) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace and /proc are Linux's")
def test_a_worker_that_a_debugger_holds_is_no_hang() -> None:
    """For as long as it does, here its listening thread; the stream goes on in the same worker."""
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    attach, detach, every_child = 16, 17, 0x40000000  # PTRACE_ATTACH, PTRACE_DETACH, __WALL
    with engine(hang_timeout_s=3.0) as one:
        pid = one.worker_pid
        assert pid is not None
        if ptrace(attach, pid, None, None) != 0:
            pytest.skip(f"this system lets no process be traced: {os.strerror(ctypes.get_errno())}")
        try:
            assert os.waitpid(pid, every_child)[0] == pid
            channel = start(one, "hello", max_tokens=500)
            time.sleep(5.0)
        finally:
            ptrace(detach, pid, None, None)
        assert read(channel)[:2] == undisturbed("hello", max_tokens=500)
        assert one.worker_pid == pid
        assert num_hangs(one) == 0
