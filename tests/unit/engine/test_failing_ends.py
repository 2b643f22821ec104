"""One stream's end fails, because memory is short for instance: no other stream stays open, and the way out is closed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.engine_world import World
from tests.isolated_world import WorkerLife
from tests.running_engine import LONG_S, Running, fail_the_next_tick
from tests.unit.engine.test_output_router import Door, chunk, ending

from paceline.engine.output_router import end_each
from paceline.engine.questions import Reply, activity
from paceline.engine.worker import messages
from paceline.errors import DecodeError, EngineError, EngineStopped
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, Released
from paceline.streaming import FinishReason, StreamChannel, StreamChunk
from paceline.testing.fake_backend import ManualClock
from paceline.testing.fake_engine_client import fake_worker_engine


class NoMemory:
    """Stands in for a function and raises so many times before it lets calls through."""

    def __init__(self, function: Any, times: int = 1_000_000) -> None:
        self._function, self._left = function, times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._left:
            self._left -= 1
            raise MemoryError
        return self._function(*args, **options)


def last_of(channel: StreamChannel) -> StreamChunk:
    *_, last = channel
    return last


# ---- many ends


def test_each_has_its_turn_and_those_that_failed_a_second_one() -> None:
    """The exception of a second failure is raised, after all others had theirs."""
    calls: list[int] = []

    def end(key: int) -> None:
        calls.append(key)
        if key == 3 or (key == 1 and calls.count(1) == 1):
            raise MemoryError(key)

    with pytest.raises(MemoryError, match="3"):
        end_each([1, 2, 3, 4], end)
    assert calls == [1, 2, 3, 4, 1, 3]


# ---- router


@pytest.mark.parametrize("times", [1, 1_000_000])
def test_a_stream_that_cannot_be_ended_leaves_no_other_open(times: int) -> None:
    """Streams before and after it end and are released, futures too; it is tried again, and a second failure is raised."""
    door = Door()
    (_, one), (request, broken), (_, other) = door.submit(), door.submit(), door.submit()
    future = door.router.submit_embedding(door.embedding())
    sender = door.router._senders[request.key]
    sender.finish = NoMemory(sender.finish, times)  # type: ignore[method-assign]
    error = DecodeError("the device is gone")
    if times == 1:
        door.router.end_all(error)
        assert last_of(broken).error is error
        assert door.inbox.num_open == 0
    else:
        with pytest.raises(MemoryError):
            door.router.end_all(error)
        assert (broken.is_finished, door.inbox.num_open) == (False, 1)
    for channel in (one, other):
        assert last_of(channel).error is error
        assert channel.is_released
    assert future.exception(0) is error


def test_what_fails_in_one_event_keeps_no_other_from_its_reader() -> None:
    """All other events of the tick are handed out, and then the failure is raised."""
    door = Door()
    (first, broken), (second, other) = door.submit(), door.submit()
    sender = door.router._senders[first.key]
    sender.push = NoMemory(sender.push)  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        door.router.deliver(
            [Delta(first.key, chunk(0, 1)), Delta(second.key, ending(0), is_last=True), Released(second.key)]
        )
    assert last_of(other) == ending(0)
    assert other.is_released
    assert not broken.is_finished


# ---- the engine's thread


def test_others_keep_what_they_held_back_where_one_request_cannot_be_ended() -> None:
    """After a failure of the engine itself all requests but one end in order, and the failure of that one is reported."""
    world = World(eos_every=10**9)
    one, broken, other = (world.submit("hello", max_tokens=None, interval=1_000_000) for _ in range(3))
    world.tick(10)
    output, finisher = broken.request.sequences[0].output, world.scheduler._finisher
    finisher.finish = only_of(output, finisher.finish)  # type: ignore[method-assign]
    failures: list[Exception] = []
    world.take(world.engine.fail_all(DecodeError("everything"), failures))
    for outcome in (one, other):
        assert outcome.reason() is FinishReason.ERROR
        assert len(outcome.token_ids()) > 3
        assert outcome.is_released
    assert [type(failure) for failure in failures] == [MemoryError]
    assert broken.terminal is None


def only_of(output: Any, finish: Any) -> Any:
    """An ending that fails for the sequence with this output processor."""

    def broken(sequence: Any, now_s: float) -> Any:
        if sequence.output is output:
            raise MemoryError
        return finish(sequence, now_s)

    return broken


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_a_stream_cannot_be_ended_at_all_the_engine_ends_and_everything_else_with_it() -> None:
    """All others end, requests are refused, queries get a result, and the memory is given back."""
    engine = Running(eos_every=10**9)
    engine.hold()
    channels = [engine.submit("hello", max_tokens=None) for _ in range(3)]
    future = engine.embed("text")
    engine.wait_for_pass()
    sender = list(engine.router._senders.values())[1]
    sender.finish = NoMemory(sender.finish)  # type: ignore[method-assign]
    fail_the_next_tick(engine.scheduler)
    engine.backend.gate.set()
    for channel in (channels[0], channels[2]):
        assert last_of(channel).finish_reason is FinishReason.ERROR
        assert channel.wait_released(LONG_S)
    assert isinstance(future.exception(LONG_S), EngineError)
    engine.runner._thread.join(LONG_S)
    assert engine.backend.is_closed
    with pytest.raises(EngineStopped):
        engine.submit("again")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("step", ["fail_all", "end_all", "close"])
def test_each_step_of_the_end_is_taken_whatever_the_one_before_it_raises(step: str) -> None:
    """The thread ends its streams, closes its way out and gives the memory back."""
    engine = Running(eos_every=10**9)
    engine.hold()
    channel = engine.submit("hello", max_tokens=None)
    engine.wait_for_pass()
    owner: Any = engine.scheduler if step == "fail_all" else engine.router
    setattr(owner, step, NoMemory(getattr(owner, step), 1 if step == "end_all" else 1_000_000))

    def broken(*_: Any) -> Any:
        raise SystemExit

    engine.scheduler.apply = broken  # type: ignore[method-assign]
    engine.backend.gate.set()
    assert last_of(channel).finish_reason is FinishReason.ERROR
    engine.runner._thread.join(LONG_S)
    assert engine.backend.is_closed


# ---- processes


def test_replies_go_out_with_the_tick_that_they_are_of() -> None:
    """In one write, so that the front wakes up once; if the engine fails before, the front learns that there is none."""
    worker = WorkerLife(ManualClock(), {"num_seq_ids": 8, "eos_every": 10**9})
    worker.hear(messages.EngineRequest(1, [[65, 66]], {"max_tokens": 9}, {}, 0.0, states=[None]))
    worker.sink.answer(activity.call(21, (0, None)), 0.0)
    worker.sink.deliver(worker.engine.tick())
    assert [type(write) for write in worker.link.writes[-1]] == [messages.Happened, Reply]
    reply = worker.link.writes[-1][1]
    assert isinstance(reply, Reply)
    assert (reply.number, activity.result(reply).slots.num_processing) == (21, 1)
    worker.sink.answer(activity.call(22, (0, None)), 1e9)
    worker.sink.deliver(worker.engine.tick())
    assert [type(write) for write in worker.link.writes[-1]] == [messages.Happened]
    worker.sink.end_all(DecodeError("the device is gone"))
    assert worker.link.received[-1] == Reply(22)
    worker.close()


def test_a_question_that_cannot_be_replied_to_learns_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its reply could not be encoded, beside requests that go on, or not be sent at first."""
    worker = WorkerLife(ManualClock(), {"num_seq_ids": 8, "eos_every": 10**9})
    worker.hear(messages.EngineRequest(1, [[65, 66]], {"max_tokens": 9}, {}, 0.0, states=[None]))
    tick = worker.engine.tick

    worker.sink.answer(activity.call(21, (0, None)), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(activity, "reply", NoMemory(activity.reply))
        worker.sink.deliver(tick())
    assert [type(write) for write in worker.link.writes[-1]] == [messages.Happened, Reply]
    assert worker.link.writes[-1][1] == Reply(21)
    worker.sink.answer(activity.call(22, (0, None)), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(worker.link, "send", NoMemory(worker.link.send))
        with pytest.raises(MemoryError):
            worker.sink.deliver(tick())
    with monkeypatch.context() as patch:
        patch.setattr(worker.link, "send", NoMemory(worker.link.send, 1))
        worker.sink.end_all(DecodeError("the device is gone"))
    assert Reply(22) in worker.link.received
    worker.close()


def test_a_worker_reports_the_failure_of_all_requests_but_one_that_cannot_be_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If memory runs out over one message, the others are sent, and it is tried again."""
    worker = WorkerLife(ManualClock(), {"num_seq_ids": 8})
    for key in (1, 2, 3):
        worker.hear(messages.EngineRequest(key, [[65, 66]], {"max_tokens": 9}, {}, 0.0, states=[None]))
    worker.tick()
    with monkeypatch.context() as patch:
        patch.setattr(worker.link, "send", NoMemory(worker.link.send, 1))
        worker.sink.end_all(DecodeError("the device is gone"))
    (failed,) = [[part.key for message in worker.link.received for part in message.events]]  # type: ignore[union-attr]
    assert sorted(failed) == [1, 2, 3]
    assert worker.inbox.num_open == 0
    worker.close()


def test_a_front_ends_every_request_though_one_cannot_be_ended_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """At a shutdown that takes too long for the worker: the others end with SHUTDOWN, that request with an error."""
    engine = fake_worker_engine(backend_options={"num_cells": 200_000, "eos_every": 10**9})
    supervisor = engine._supervisor
    held = threading.Event()
    channels = []
    for _ in range(3):
        request = engine.prepare("hello", SamplingParams(seed=1, max_tokens=None), RequestOptions())
        channels.append(engine.accept(request))
        assert isinstance(channels[-1].get(LONG_S), StreamChunk)
    replay_log = supervisor._requests._replay_log
    broken, whole = list(replay_log)[1], replay_log.end

    def end(key: int, *rest: Any, **named: Any) -> Any:
        held.set()
        if key == broken:
            raise MemoryError
        return whole(key, *rest, **named)

    replay_log.end = end  # type: ignore[method-assign]
    supervisor._stop = lambda: supervisor._requests.end_all(FinishReason.SHUTDOWN)  # type: ignore[method-assign]
    engine.close()
    assert held.is_set()
    reasons = [last_of(channel).finish_reason for channel in channels]
    assert reasons == [FinishReason.SHUTDOWN, FinishReason.ERROR, FinishReason.SHUTDOWN]
    assert all(channel.is_released for channel in channels)
    assert not supervisor.is_alive
    assert engine.worker_pid is None
    assert "could not be ended in order" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_front_whose_worker_cannot_be_let_go_still_ends_its_streams() -> None:
    """Each step of the end is taken: streams, questions, and the refusal of more."""
    engine = fake_worker_engine(backend_options={"num_cells": 200_000, "eos_every": 10**9})
    supervisor = engine._supervisor
    channel = engine.accept(engine.prepare("hello", SamplingParams(seed=1, max_tokens=None), RequestOptions()))
    assert isinstance(channel.get(LONG_S), StreamChunk)
    dismiss = supervisor._dismiss

    def broken() -> None:
        dismiss()
        raise MemoryError

    supervisor._dismiss = broken  # type: ignore[method-assign]
    supervisor._turn = NoMemory(supervisor._turn)  # type: ignore[method-assign]
    supervisor._inbox.wake()
    assert last_of(channel).finish_reason is FinishReason.ERROR
    supervisor._thread.join(LONG_S)
    assert not supervisor.is_alive
    with pytest.raises(EngineStopped):
        engine.ask_slots().result(LONG_S)
