"""Front and workers under everything that can happen to them, deaths among it, in any order and with each kind of memory.

The oracle recomputes each request from scratch, alone, with a worker that nothing happens to.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.isolated_world import IsolatedWorld, ReaderOutcome
from tests.stream_reference import expected_output

from paceline.streaming import FinishReason
from paceline.testing.fake_backend import EOS

KINDS = ("attention", "sliding_window", "hybrid", "recurrent")
BY_ITSELF = {FinishReason.STOP, FinishReason.LENGTH}
CODES = {FinishReason.CANCELLED: "cancelled", FinishReason.DEADLINE: "deadline_exceeded"}

PATHS = ([7, 8, 9] * 7, [7, 8, 9] * 6 + [1, 2, 3], [65] * 20)  # what many prompts begin with
PROMPTS = st.one_of(
    st.lists(st.integers(3, 255), min_size=1, max_size=24),
    st.builds(
        lambda path, length, tail: path[:length] + tail,
        st.sampled_from(PATHS),
        st.sampled_from([3, 17, 18, 20]),
        st.lists(st.integers(60, 70), max_size=4),
    ),
)
INTERVALS = st.sampled_from([1, 3, 1000])
REQUESTS = st.fixed_dictionaries(
    {"max_tokens": st.none() | st.integers(0, 25)},
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(st.sampled_from([" ", "e", "th", "\n", "ta"]), max_size=2, unique=True),
        "logprobs": st.integers(0, 1),
        "prompt_logprobs": st.integers(0, 1),
        "echo": st.booleans(),
        "temperature": st.just(1.0),
        "seed": st.integers(0, 3),
        "mirostat": st.sampled_from([0, 2]),
        "interval": INTERVALS,
        "lora": st.sampled_from([(), (("one", 1.0),)]),
    },
)
AROUND = st.fixed_dictionaries(  # what changes no token
    {},
    optional={
        "priority": st.integers(-2, 2),
        "timeout_s": st.sampled_from([0.05, 0.5]),
        "queue_timeout_s": st.sampled_from([0.01, 0.3]),
        "cache_salt": st.sampled_from(["", "s"]),
        "tenant": st.sampled_from(["", "s"]),
        "cache_prompt": st.booleans(),
    },
)


class Machine(RuleBasedStateMachine):
    """Callers, readers and deaths; a subclass sets the memory."""

    kind = "attention"

    @initialize(num_cells=st.integers(30, 200), num_seq_ids=st.integers(2, 8))
    def begin(self, num_cells: int, num_seq_ids: int) -> None:
        self.make = {
            "kind": self.kind,
            "num_cells": num_cells,
            "num_seq_ids": num_seq_ids,
            "eos_every": 25,
            "adapters": ("one",),
        }
        self.world = IsolatedWorld(**self.make)
        self.asked: dict[int, tuple[list[int], dict[str, Any]]] = {}
        self.causes: dict[int, set[FinishReason]] = {}  # why each may have ended, beside by itself
        self.texts: dict[int, list[list[int]]] = {}

    # ---- callers and readers

    @rule(prompt=PROMPTS, wanted=REQUESTS, around=AROUND)
    def submit(self, prompt: list[int], wanted: dict[str, Any], around: dict[str, Any]) -> None:
        key = self.world.submit(prompt, **wanted, **around).request.key
        self.asked[key] = (prompt, wanted)
        self.causes[key] = {FinishReason.DEADLINE} if {"timeout_s", "queue_timeout_s"} & around.keys() else set()

    @rule(texts=st.lists(st.lists(st.integers(3, 255), min_size=1, max_size=9), min_size=1, max_size=3))
    def embed(self, texts: list[list[int]]) -> None:
        key = self.world.submit_embedding(texts)
        self.texts[key], self.causes[key] = texts, set()

    @precondition(lambda self: len(self.world.replay_log))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.world.replay_log)))
        self.world.cancel(key)
        self.causes[key].add(FinishReason.CANCELLED)

    @precondition(lambda self: len(self.world.replay_log))
    @rule(data=st.data(), is_paused=st.booleans())
    def pause(self, data: st.DataObject, is_paused: bool) -> None:
        self.world.pause(data.draw(st.sampled_from(list(self.world.replay_log))), is_paused=is_paused)

    @precondition(lambda self: len(self.world.replay_log))
    @rule(data=st.data(), interval=INTERVALS)
    def set_interval(self, data: st.DataObject, interval: int) -> None:
        self.world.set_interval(data.draw(st.sampled_from(list(self.world.replay_log))), interval)

    @precondition(lambda self: len(self.world.replay_log))
    @rule(data=st.data())
    def end_slow(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(self.world.replay_log)))
        self.world.end_slow(key)
        self.causes[key].add(FinishReason.SLOW_READER)

    @precondition(lambda self: len(self.world.replay_log))
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.DEADLINE]))
    def end_without_worker(self, data: st.DataObject, reason: FinishReason) -> None:
        """It does not respond in time; its later reports of the request are dropped."""
        key = data.draw(st.sampled_from(list(self.world.replay_log)))
        self.causes[key].add(reason)
        self.world.end_without_worker(key, reason)

    # ---- workers

    @precondition(lambda self: self.world.is_served)
    @rule(loses_a_tick=st.booleans())
    def die(self, loses_a_tick: bool) -> None:
        self.num_crashes = self.world.reap(loses_a_tick=loses_a_tick) + 1

    @precondition(lambda self: not self.world.is_served)
    @rule(times=st.integers(1, 12))
    def fail_to_start(self, times: int) -> None:
        """A crash loop: no worker gets ready."""
        for _ in range(times):
            self.world.fail_to_start()
            self.num_crashes += 1
            self.back_off_doubles_up_to_ten_seconds()

    @precondition(lambda self: not self.world.is_served)
    @rule()
    def take_over(self) -> None:
        self.world.start()

    @precondition(lambda self: len(self.world.replay_log) and self.world.is_served)
    @rule(before=st.integers(1, 12), loses_a_tick=st.booleans(), after=st.integers(0, 12))
    def change_workers(self, before: int, loses_a_tick: bool, after: int) -> None:
        """In the middle of whatever goes on."""
        self.tick(before)
        self.die(loses_a_tick)
        self.take_over()
        self.tick(after)

    # ---- time

    @rule(times=st.integers(1, 8))
    def tick(self, times: int) -> None:
        for _ in range(times):
            self.world.tick()

    @rule(seconds=st.sampled_from([0.01, 0.2, 5.0, 60.0]))
    def advance(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    # ---- what must hold

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        if hasattr(self, "world"):
            self.world.metrics.check()
            now = self.world.metrics.snapshot()
            assert now.queued + now.resident == len(self.world.replay_log)

    @invariant()
    def back_off_doubles_up_to_ten_seconds(self) -> None:
        if not hasattr(self, "world") or self.world.is_served:
            return
        assert self.world.num_crashes == self.num_crashes
        assert self.world.start_at_s is not None, "some number of crashes was the last one"
        assert self.world.start_at_s - self.world.clock.now() <= min(10.0, 0.1 * 2 ** (self.num_crashes - 1)) + 1e-9

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if not self.world.is_served:
            self.world.start()
        for key in self.world.replay_log:
            self.world.pause(key, is_paused=False)
        worker = self.world.worker
        self.world.run()
        worker.tick()  # what is to be removed goes with the next pass
        worker.check_done()
        assert self.world.outcomes.keys() | self.world.embedded.keys() == self.world.requests.keys()
        for key, outcome in self.world.outcomes.items():
            self.judge(key, outcome)
        for key, texts in self.texts.items():
            self.judge_embedding(key, texts)

    def judge(self, key: int, outcome: ReaderOutcome) -> None:
        """Compare with the same request alone, choice by choice."""
        assert outcome.terminal is not None
        assert outcome.is_released
        prompt, wanted = self.asked[key]
        alone = lone(repr(sorted(self.make.items())), repr((prompt, sorted(wanted.items()))))
        for mine, whole in zip(outcome.summary(), alone, strict=True):
            ids, text, logprobs, scored, reasons, stop, stop_ids = mine
            (reason,) = reasons
            if reason in BY_ITSELF:
                assert mine == whole
            else:
                assert reason in self.causes[key], f"{reason} without a cause"
                drawn_alone = (
                    *whole[0],
                    *whole[6],
                )  # cut off within a stop text, it has the text's first tokens as well
                assert ids == drawn_alone[: len(ids)]
                assert (text, stop) == self.cut_off(outcome, [*ids, *stop_ids], reason)
                assert len(logprobs) <= len(ids)
                assert logprobs[: len(whole[2])] == whole[2][: len(logprobs)]
                assert scored == whole[3][: len(scored)]
        assert outcome.terminal.usage is not None
        assert outcome.terminal.usage.completion_tokens >= sum(len(choice[0]) for choice in outcome.summary())

    def cut_off(self, outcome: ReaderOutcome, drawn: list[int], reason: FinishReason) -> tuple[str, Any]:
        """Text and stop of a completion that ended after these tokens for a reason from outside."""
        params = outcome.request.params
        expected = expected_output(
            drawn,
            pieces=self.world.worker.backend.vocabulary.pieces,
            ends={EOS},
            stops=params.stop,
            max_tokens=params.max_tokens,
            cut_off=reason,
        )
        return outcome.request.echo + expected.text, expected.stop

    def judge_embedding(self, key: int, texts: list[list[int]]) -> None:
        embedded = self.world.embedded[key]
        if embedded.error is None:
            backend = self.world.worker.backend
            expected = [
                np.float32(backend.embed([text], backend.prepare_embedding(None, len(text)))[0]) for text in texts
            ]
            assert [list(vector) for vector in embedded.vectors] == [list(vector) for vector in expected]
        else:
            assert embedded.error.code in {CODES.get(cause) for cause in self.causes[key]}


@lru_cache(maxsize=4096)
def lone(make: str, asked: str) -> list[tuple[Any, ...]]:
    """Run the request in a world of its own, without events."""
    prompt, wanted = eval(asked)
    world = IsolatedWorld(**dict(eval(make)))
    outcome = world.submit(prompt, **dict(wanted))
    world.run()
    return outcome.summary()


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_dies_each_request_ends_once_with_the_output_it_has_alone(kind: str) -> None:
    """Workers check themselves after every tick, counts add up after every step, and nothing is left of any request."""
    machine = type("Machine", (Machine,), {"kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
