"""Drafters that propose for all sequences of a tick at once: their calls, their cost, their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from tests.drafters import BatchOracle
from tests.engine_world import World
from tests.unit.speculation.test_speculation import futures, speculative, told, usage

from paceline.cost_model import MeasuredPass
from paceline.errors import DrafterError
from paceline.testing.fake_backend import FakeCost

LONG: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize("error_rate", [0.0, 0.4])
def test_all_sequences_of_a_tick_are_asked_for_at_once(error_rate: float) -> None:
    """Each gets its own drafts, and the output that it has alone."""
    prompts = ("abc", "xyz", "once upon")
    oracle = BatchOracle([future for prompt in prompts for future in futures(prompt, **LONG)], error_rate=error_rate)
    world = speculative(oracle)
    outcomes = [world.submit(prompt, **LONG) for prompt in prompts]
    world.run()
    world.check_done()
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert told(outcome) == told(World(num_cells=400).alone(prompt, **LONG))
        assert usage(outcome).accepted_tokens > 0
    assert max(map(len, oracle.batches)) == len(prompts)
    assert len(oracle.batches) <= world.num_ticks


class BatchOf(BatchOracle):
    """Proposes, or raises, the same for every call."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.ended: list[int] = []

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> Any:
        super().propose_all(wanted)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def rollback(self, key: int, num_tokens: int) -> None:
        pass

    def end(self, key: int) -> None:
        super().end(key)
        self.ended.append(key)


@pytest.mark.parametrize(
    ("result", "words"),
    [(ValueError("no idea"), "no idea"), ([], "0 proposals for 2 sequences"), (7, "a list of proposals")],
)
def test_what_fails_for_all_is_logged_and_ends_no_request(
    result: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The sequences go on without drafts, and the drafter is asked for later sequences again."""
    drafter = BatchOf(result)
    world = speculative(drafter)
    outcomes = [world.submit(prompt, **LONG) for prompt in ("abc", "xyz")]
    world.run()
    world.check_done()
    for outcome in outcomes:
        assert outcome.last().error is None
        assert usage(outcome).draft_tokens == 0
    assert len(drafter.batches) == len(caplog.messages) == 1
    assert words in caplog.text
    assert "BatchOf" in caplog.text
    assert sorted(drafter.ended) == [1, 2]
    again = world.submit("more", **LONG)
    world.run()
    assert again.last().error is None
    assert len(drafter.batches) == 2


def test_a_wrong_proposal_of_a_batch_ends_its_own_sequence() -> None:
    """The others keep their drafts."""
    world = speculative(BatchOf([[5], [999], [6]]))
    outcomes = [world.submit(prompt, **{**LONG, "max_tokens": 3}) for prompt in ("abc", "xyz", "uvw")]
    world.run()
    world.check_done()
    assert [isinstance(outcome.last().error, DrafterError) for outcome in outcomes] == [False, True, False]
    assert [usage(outcome).draft_tokens for outcome in outcomes] == [1, 0, 1]


class LaggingOracle(BatchOracle):
    """Never lags behind, and returns or raises given values."""

    def __init__(self, futures: Sequence[Sequence[int]], **results: Any) -> None:
        super().__init__(futures)
        self.results = results

    def _result(self, name: str, usual: Any) -> Any:
        result = self.results.get(name, usual)
        if isinstance(result, Exception):
            raise result
        return result

    @property
    def num_caught_up(self) -> Any:
        return self._result("num_caught_up", 0) if self.batches else 0

    def lag(self, key: int) -> Any:
        return self._result("lag", 0)

    def limit_catch_up(self, num_tokens: int) -> Any:
        return self._result("limit_catch_up", num_tokens)


class OwnLag(BatchOracle):
    """Has methods with the names of a lagging drafter's, but counts no caught up tokens."""

    def lag(self, key: int) -> int:
        raise NotImplementedError

    def limit_catch_up(self, num_tokens: int) -> int:
        raise NotImplementedError


def test_a_drafter_that_counts_no_caught_up_tokens_never_lags() -> None:
    """Its methods of these names are its own, and are not called."""
    world = speculative(OwnLag(futures("abc", **LONG)))
    outcome = world.submit("abc", **LONG)
    world.run()
    assert outcome.last().error is None
    assert usage(outcome).accepted_tokens > 0


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ({"limit_catch_up": ValueError("no idea")}, "failed to limit_catch_up: ValueError('no idea')"),
        ({"limit_catch_up": ValueError("no idea"), "lag": 50}, "failed to limit_catch_up"),
        ({"limit_catch_up": None}, "as limit_catch_up, not None"),
        ({"limit_catch_up": -1}, "as limit_catch_up, not -1"),
        ({"num_caught_up": None}, "as num_caught_up, not None"),
        ({"num_caught_up": ValueError("no idea")}, "failed at num_caught_up: ValueError('no idea')"),
    ],
)
def test_a_lagging_drafter_that_fails_ends_no_request(
    results: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, the sequences go on without drafts, and later sequences have drafts again once it works."""
    oracle = LaggingOracle([future for prompt in ("abc", "xyz") for future in futures(prompt, **LONG)], **results)
    world = speculative(oracle)
    outcomes = [world.submit(prompt, **LONG) for prompt in ("abc", "xyz")]
    world.run()
    world.check_done()
    for prompt, outcome in zip(("abc", "xyz"), outcomes, strict=True):
        assert outcome.last().error is None
        assert told(outcome) == told(World(num_cells=400).alone(prompt, **LONG))
        assert usage(outcome).draft_tokens == 0
    assert len(caplog.messages) == 1
    assert words in caplog.text
    oracle.results.clear()
    again = world.submit("abc", **LONG)
    world.run()
    assert usage(again).accepted_tokens > 0


@pytest.mark.parametrize("lag", [None, -1, math.nan, "far"])
def test_a_lag_that_is_no_number_of_tokens_ends_its_sequence(lag: Any) -> None:
    """With an error that names the drafter; the engine goes on."""
    oracle = LaggingOracle(futures("abc", **LONG), lag=lag)
    world = speculative(oracle)
    outcome = world.submit("abc", **LONG)
    world.run()
    world.check_done()
    assert isinstance(outcome.last().error, DrafterError)
    assert "LaggingOracle must return a number of tokens, 0 or more, from lag" in str(outcome.last().error)
    oracle.results.clear()
    again = world.submit("abc", **LONG)
    world.run()
    assert usage(again).accepted_tokens > 0


class HalfBegun(BatchOracle):
    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        super().begin(key, token_ids)
        if key == 1:
            raise ValueError("half-way")


def test_a_sequence_that_cannot_begin_is_not_asked_for() -> None:
    """It ends with the error, and the others have drafts."""
    oracle = HalfBegun(futures("xyz", **LONG))
    world = speculative(oracle)
    first, second = world.submit("abc", **LONG), world.submit("xyz", **LONG)
    world.run()
    assert "half-way" in str(first.last().error)
    assert usage(second).accepted_tokens > 0
    assert all(keys == [2] for keys in oracle.batches)


class Timed(BatchOracle):
    """Takes a time for each step."""

    world: World

    def __init__(self, futures: Sequence[Sequence[int]], step_s: float) -> None:
        super().__init__(futures, error_rate=0.3, seed=1)
        self.step_s = step_s

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        proposals = super().propose_all(wanted)
        self.world.clock.advance(self.step_s * max(map(len, proposals), default=0))
        return proposals


def test_depth_follows_what_steps_take() -> None:
    """If passes of any size cost the same, steps without cost are many, and dear steps none."""
    options = {"max_tokens": 250, "ignore_eos": True}
    asked, spent, times = futures("abc", **options), {}, {}
    for step_s in (0.0, 0.003, 0.03):
        oracle = Timed(asked, step_s)
        cost = FakeCost(base_s=0.01, token_s=0.0)
        oracle.world = world = speculative(oracle, depth=None, cost=cost, limits={"max_draft": 8})
        world.scheduler.calibrate([MeasuredPass(num, num, 0.01, num) for num in (1, 2, 3, 4, 5, 8, 16)])
        outcome = world.submit("abc", **options)
        world.run()
        spent[step_s], times[step_s] = usage(outcome).draft_tokens, world.clock.now()
    assert spent[0.0] > spent[0.003] > 100
    assert times[0.0] < times[0.003] < 0.9 * 250 * 0.01
    assert spent[0.03] < 30
    assert times[0.03] < 1.2 * 250 * 0.01  # the first proposal is made at no known price
