"""`check_strategy`: it passes correct strategies, and names the first rule that a strategy breaks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from paceline.errors import InvalidParams, InvalidType, StrategyError
from paceline.scheduling.strategies import DecodeMaximal, SchedulerView, TokenAllocation
from paceline.testing import check_strategy

Change = Callable[[list[TokenAllocation], SchedulerView, int], Any]


class Changed:
    """A good strategy with changed plans."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def plan(self, view: SchedulerView, budget: int) -> Any:
        return self._change(DecodeMaximal().plan(view, budget), view, budget)


def over_budget(shares: list[TokenAllocation], view: SchedulerView, budget: int) -> list[TokenAllocation]:
    return [TokenAllocation(sequence.key, sequence.limit) for sequence in view.sequences]


def over_limit(shares: list[TokenAllocation], view: SchedulerView, budget: int) -> list[TokenAllocation]:
    limit = next(sequence.limit for sequence in view.sequences if sequence.key == shares[0].key)
    return [TokenAllocation(shares[0].key, limit + 1), *shares[1:]]


def raising(shares: list[TokenAllocation], view: SchedulerView, budget: int) -> list[TokenAllocation]:
    raise KeyError("slot 3")


@pytest.mark.parametrize("name", ["balanced", "decode_maximal", "paced", "prefill_priority"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_shipped_strategies_pass(name: str, seed: int) -> None:
    """All four keep every rule and starve no sequence."""
    check_strategy(name, seed=seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (over_budget, r"planned \d+ tokens, over the budget of \d+"),
        (over_limit, r"planned \d+ tokens for key \d+, which may have 1 to \d+"),
        (lambda shares, view, budget: [*shares, shares[0]], "not in the view or came before"),
        (
            lambda shares, view, budget: [*shares[1:], TokenAllocation(10**6, 1)],
            "planned key 1000000, which is not in the view",
        ),
        (lambda shares, view, budget: [TokenAllocation(shares[0].key, 0), *shares[1:]], "planned 0 tokens"),
        (lambda shares, view, budget: [TokenAllocation(shares[0].key, -1), *shares[1:]], "planned -1 tokens"),
        (
            lambda shares, view, budget: [TokenAllocation(shares[0].key, True), *shares[1:]],
            "must plan an int of tokens, not True",
        ),
        (
            lambda shares, view, budget: [TokenAllocation(shares[0].key, 1.0), *shares[1:]],
            "must plan an int of tokens, not 1.0",
        ),  # type: ignore[arg-type]
        (lambda shares, view, budget: [], r"planned nothing, and \d+ sequences have work"),
        (lambda shares, view, budget: None, "must return a list or a tuple of TokenAllocation, not None"),
        (lambda shares, view, budget: iter(shares), "must return a list or a tuple of TokenAllocation"),
        (
            lambda shares, view, budget: [(share.key, share.num_tokens) for share in shares],
            r"must return TokenAllocations, not \(",
        ),
        (raising, "raised KeyError"),
    ],
)
def test_a_plan_against_the_rules_is_named(change: Change, message: str) -> None:
    """The error names the strategy, the rule, and the view with which it was broken."""
    with pytest.raises(StrategyError, match=message) as caught:
        check_strategy(Changed(change))
    assert str(caught.value).startswith("batch strategy Changed ")
    assert "in tick " in str(caught.value)


def test_an_error_of_the_strategy_is_the_cause() -> None:
    """The exception can be inspected."""
    with pytest.raises(StrategyError) as caught:
        check_strategy(Changed(raising))
    assert isinstance(caught.value.__cause__, KeyError)


def test_views_in_which_time_was_lost_are_tried() -> None:
    """A strategy that looks at `lost_share` is tried on both sides of a limit."""

    def where_lost(shares: list[TokenAllocation], view: SchedulerView, budget: int) -> list[TokenAllocation]:
        return [] if view.lost_share > 0 and view.lost_tick_s > 0 else shares

    with pytest.raises(StrategyError, match="planned nothing"):
        check_strategy(Changed(where_lost))


def test_a_strategy_that_changes_the_view_fails() -> None:
    """The sequences of a view are read-only, and the error names the strategy."""

    def change(shares: list[TokenAllocation], view: SchedulerView, budget: int) -> list[TokenAllocation]:
        view.sequences[0].limit = 1  # type: ignore[misc]
        return shares

    with pytest.raises(StrategyError, match="Changed raised FrozenInstanceError"):
        check_strategy(Changed(change))


class Counting:
    """Every third plan it gives one token less."""

    def __init__(self) -> None:
        self._num_plans = 0

    def plan(self, view: SchedulerView, budget: int) -> Sequence[TokenAllocation]:
        self._num_plans += 1
        shares = DecodeMaximal().plan(view, budget)
        if self._num_plans % 3 == 0 and shares[0].num_tokens > 1:
            shares[0] = TokenAllocation(shares[0].key, shares[0].num_tokens - 1)
        return shares


class Remembering:
    """Gives a sequence that it has seen before nothing, if another has work."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def plan(self, view: SchedulerView, budget: int) -> Sequence[TokenAllocation]:
        fresh = [sequence for sequence in view.sequences if sequence.key not in self._seen]
        self._seen.update(sequence.key for sequence in view.sequences)
        return [TokenAllocation(sequence.key, 1) for sequence in (fresh or view.sequences)[:budget]]


@pytest.mark.parametrize("strategy", [Counting(), Remembering()])
def test_state_between_plans_is_found(strategy: Any) -> None:
    """Equal views must get equal plans, whatever was planned in between."""
    with pytest.raises(StrategyError, match="gave two equal views different plans.* it keeps state"):
        check_strategy(strategy)


class Ordered:
    """Serves sequences in an order, each as far as it may go."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self._key = key

    def plan(self, view: SchedulerView, budget: int) -> Sequence[TokenAllocation]:
        shares = []
        for sequence in sorted(view.sequences, key=self._key):
            if budget:
                shares.append(TokenAllocation(sequence.key, min(sequence.limit, budget)))
                budget -= shares[-1].num_tokens
        return shares


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(lambda seq: -seq.order, id="newest first"),
        pytest.param(lambda seq: (-seq.priority, seq.order), id="strictly by priority"),
        pytest.param(lambda seq: (not seq.is_decoding, seq.num_uncomputed_tokens, -seq.order), id="shortest first"),
        pytest.param(lambda seq: seq.key % 5, id="by key"),
    ],
)
def test_a_strategy_that_starves_a_sequence_is_found(key: Callable[[Any], Any]) -> None:
    """A sequence that is never served while others keep coming is named."""
    with pytest.raises(StrategyError, match=r"Ordered starves sequence \d+, which has not finished after \d+ ticks"):
        check_strategy(Ordered(key))


def test_first_come_first_served_starves_no_sequence() -> None:
    """The plainest fair order passes."""
    check_strategy(Ordered(lambda seq: seq.order))


def test_invalid_strategy_is_refused_as_by_the_engine() -> None:
    """An object without a plan, an unknown name and a bad seed are errors of the call."""
    with pytest.raises(InvalidType, match="method plan"):
        check_strategy(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidParams, match="did you mean 'paced'"):
        check_strategy("pacd")
    with pytest.raises(InvalidParams, match="seed"):
        check_strategy("paced", seed=-1)


def test_importing_the_check_loads_no_models() -> None:
    """`paceline.testing` needs neither the compiled core nor NumPy nor gguf."""
    code = "import sys, paceline.testing; print([m for m in ('paceline._native', 'numpy', 'gguf') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
