"""Queries to the worker: sent once to each, resolved once, also at its end."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from paceline.engine import questions as ask
from paceline.engine.prompts import KeyedPrompt
from paceline.engine.questions import FILE_REPLY_S, MEASURE_REPLY_S, REPLY_S, Reply
from paceline.engine.worker.supervisor import NEW_WORKER_S, NO_WORKER, Calls
from paceline.engine.worker.worker_process import WorkerProcess
from paceline.errors import EngineDied, EngineStopped, WorkerUnresponsive
from paceline.media import ImageExtent
from paceline.testing.fake_backend import ManualClock


class Listener:
    """A worker that receives everything and sends nothing."""

    is_ready = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)


NAMED = ("name", ((), "", ""))
SAVED = ("name", KeyedPrompt([]), ((), "", ""))


def test_a_query_during_shutdown_gets_one_result() -> None:
    """A late caller ends the rest, perhaps in the middle of the ending itself: no future is resolved twice."""
    questions, worker, late = Calls(lambda: None, ManualClock()), Listener(), []
    for _ in range(3):
        questions.ask(ask.report).add_done_callback(lambda _: late.append(questions.ask(ask.slots)))
    questions.pass_on(cast(WorkerProcess, worker))
    assert [message.name for message in worker.heard] == ["report"] * 3
    questions.end()
    assert [item.result(0) for item in late] == [NO_WORKER] * 3
    with pytest.raises(EngineStopped):
        questions.ask(ask.load_prefix, NAMED).result(0)


def test_without_a_worker_state_is_none_and_prefixes_wait() -> None:
    """They need a worker, which gets them once."""
    questions, worker = Calls(lambda: None, ManualClock()), Listener()
    slots, saved = questions.ask(ask.slots), questions.ask(ask.save_prefix, SAVED)
    assert questions.need_worker
    questions.pass_on(None)
    assert slots.result(0) is NO_WORKER
    for _ in range(2):
        questions.pass_on(cast(WorkerProcess, worker))
    (asked,) = worker.heard
    reply = ask.save_prefix.reply(asked.number, 5)
    for _ in range(2):
        questions.take(reply)
    assert saved.result(0) == 5
    assert not questions.need_worker


def test_after_a_death_the_next_worker_loads_again() -> None:
    """A command that may have been carried out fails with the death; an unsent command waits on."""
    questions, first, second = Calls(lambda: None, ManualClock()), Listener(), Listener()
    loaded, saved = questions.ask(ask.load_prefix, NAMED), questions.ask(ask.save_prefix, SAVED)
    slots = questions.ask(ask.slots)
    questions.pass_on(cast(WorkerProcess, first))
    unsent = questions.ask(ask.erase_prefix, ("name",))
    questions.died(EngineDied("killed"))
    assert slots.result(0) is NO_WORKER
    with pytest.raises(EngineDied):
        saved.result(0)
    questions.pass_on(cast(WorkerProcess, second))
    assert [message.name for message in second.heard] == ["load_prefix", "erase_prefix"]
    questions.take(ask.load_prefix.reply(second.heard[0].number, [1]))
    questions.take(ask.erase_prefix.reply(second.heard[1].number, None))
    assert (loaded.result(0), unsent.result(0)) == ([1], None)


def test_state_is_not_refused_where_no_worker_may_come() -> None:
    """There is none to be told, as without a worker at any time."""
    questions = Calls(lambda: None, ManualClock())
    activity, loaded = questions.ask(ask.activity, (0, None)), questions.ask(ask.load_prefix, NAMED)
    questions.refuse(EngineDied("its servers are away"))
    assert activity.result(0) is NO_WORKER
    with pytest.raises(EngineDied):
        loaded.result(0)


def test_a_load_of_which_two_workers_died_is_given_up() -> None:
    """Its file may be the cause of death. Freeing is repeated until it is done, since it fails with no file."""
    questions = Calls(lambda: None, ManualClock())
    adapter, saved = questions.ask(ask.load_adapter, ("a", "a.gguf")), questions.ask(ask.load_prefix, NAMED)
    freed = questions.ask(ask.free_adapter, ("b",))
    heard = []
    for _ in range(3):
        worker = Listener()
        questions.pass_on(cast(WorkerProcess, worker))
        questions.died(EngineDied("killed"))
        heard.append([message.name for message in worker.heard])
    assert heard == [["load_adapter", "load_prefix", "free_adapter"]] * 2 + [["free_adapter"]]
    for item in (adapter, saved):
        with pytest.raises(EngineDied):
            item.result(0)
    assert not freed.done()
    assert questions.need_worker


def test_a_cancelled_question_takes_no_reply() -> None:
    """Its caller has left; the reply and a report that no question asked for change nothing."""
    questions, worker = Calls(lambda: None, ManualClock()), Listener()
    asked = questions.ask(ask.slots)
    questions.pass_on(cast(WorkerProcess, worker))
    assert asked.cancel()
    questions.take(Reply(worker.heard[0].number))
    questions.take(Reply(0))
    assert asked.cancelled()


def test_a_question_waits_no_longer_than_its_kind_may() -> None:
    """From when it is sent to a worker; the delay of a look at the activity counts on top."""
    clock = ManualClock(1000.0)
    questions, worker = Calls(lambda: None, clock), Listener()
    limits = {
        questions.ask(ask.slots): REPLY_S,
        questions.ask(ask.report): REPLY_S,
        questions.ask(ask.digest, (1, None)): REPLY_S,
        questions.ask(ask.activity, (0, None), 25.0): 25.0 + REPLY_S,
        questions.ask(ask.measure_media, (ImageExtent(1, 1),)): MEASURE_REPLY_S,
        questions.ask(ask.save_prefix, SAVED): FILE_REPLY_S,
        questions.ask(ask.load_adapter, ("a", "a.gguf")): FILE_REPLY_S,
        questions.ask(ask.free_adapter, ("a",)): FILE_REPLY_S,
    }
    questions.pass_on(cast(WorkerProcess, worker))
    for limit_s in sorted(set(limits.values())):
        assert questions.next_due_s() == 1000.0 + limit_s
        clock.advance(1000.0 + limit_s - 0.5 - clock.now())
        questions.end_overdue()
        assert not any(limit.done() for limit, its_s in limits.items() if its_s >= limit_s)
        clock.advance(0.5)
        questions.end_overdue()
        for item in [limit for limit, its_s in limits.items() if its_s == limit_s]:
            with pytest.raises(WorkerUnresponsive, match=f"no reply within {limit_s:g} s"):
                item.result(0)
    assert math.isinf(questions.next_due_s())
    questions.take(ask.save_prefix.reply(worker.heard[5].number, 1))  # it comes too late, and nothing happens


def test_the_load_of_a_new_worker_is_no_silence() -> None:
    """A question about an image waits for it as a prompt does, with a limit of its own, also after a death."""
    clock = ManualClock(1000.0)
    questions, worker = Calls(lambda: None, clock), Listener()
    asked = questions.ask(ask.measure_media, (ImageExtent(1, 1),))
    for _ in range(2):
        questions.pass_on(None)
        clock.advance(NEW_WORKER_S - 1)
        questions.end_overdue()
        assert not asked.done()
        questions.pass_on(cast(WorkerProcess, worker))
        clock.advance(MEASURE_REPLY_S - 1)
        questions.end_overdue()
        assert not asked.done()
        questions.died(EngineDied("it died"))
    assert isinstance(asked.exception(0), EngineDied)
    late = questions.ask(ask.measure_media, (ImageExtent(1, 1),))
    clock.advance(NEW_WORKER_S)
    questions.end_overdue()
    with pytest.raises(WorkerUnresponsive, match="is being started: it was not ready within 600 s"):
        late.result(0)
