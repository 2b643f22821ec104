"""Checks a batch strategy against the contract of `BatchStrategy`: for authors of strategies.

    from paceline.testing import check_strategy
    check_strategy(MyStrategy())

Pure and deterministic; needs neither a model nor the compiled core, and takes a few seconds at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from random import Random

import msgspec

from paceline import validation
from paceline.errors import StrategyError
from paceline.scheduling.strategies import resolve_strategy
from paceline.scheduling.view import BatchStrategy, SchedulerView, TokenAllocation
from paceline.testing.strategy_trial import StrategyTrial, TrialCost, TrialLoad, TrialSequence

_NUM_VIEWS = 400
_NUM_ROUNDS = 6  # how often the slots of a load are refilled, at least
_BUDGETS = (1, 2, 3, 7, 16, 64, 512, 2048)
_SHOWN = 6  # sequences of a view that go into a message

_LOADS = (
    *(
        TrialLoad(num_slots=slots, budget=budget, max_first_prompt=prompt, max_prompt=prompt, max_generated=12)
        for slots, budget, prompt in ((1, 1, 20), (3, 1, 10), (5, 2, 20), (8, 3, 20), (8, 64, 300), (6, 2048, 5000))
    ),
    TrialLoad(num_slots=4, budget=512, max_first_prompt=5000, max_prompt=600, max_generated=20, token_s=0.05),
    TrialLoad(num_slots=6, budget=16, max_first_prompt=60, max_prompt=60, max_generated=12, max_drafts=4),
    TrialLoad(num_slots=8, budget=2, max_first_prompt=4, max_prompt=4, max_generated=60),  # more decoders than budget
    TrialLoad(num_slots=4, budget=8, max_first_prompt=200, max_prompt=8, max_generated=1),  # short ones after long ones
    TrialLoad(num_slots=3, budget=1, max_first_prompt=4, max_prompt=4, max_generated=3, last_priority=2),
)


def check_strategy(strategy: str | BatchStrategy, *, seed: int = 0) -> None:
    """Raise `StrategyError` at the first rule that a strategy breaks.

    strategy: an object or a name, as the engine's option. Plans hundreds of random views, each of them twice; then runs
    endless loads, in which every sequence must finish in a bounded number of ticks. Another `seed` gives other views and
    loads. Raises `InvalidParams` for an argument that is no strategy.
    """
    seed = validation.integer("seed", seed, 0)
    resolved = resolve_strategy(strategy)
    _check_views(resolved, seed)
    for load in _LOADS:
        _check_load(resolved, load, seed)


def _check_views(strategy: BatchStrategy, seed: int) -> None:
    """Check single plans, and that equal views get equal plans: in another order, after others."""
    random = Random(seed)  # noqa: S311 - repeatable, and no secret
    asked = [(_random_view(random), random.choice((*_BUDGETS, random.randint(1, 2048)))) for _ in range(_NUM_VIEWS)]
    plans = [_plan(strategy, view, budget) for view, budget in asked]
    for index in random.sample(range(_NUM_VIEWS), _NUM_VIEWS):
        view, budget = asked[index]
        again = _plan(strategy, _copy(view), budget)
        if again != plans[index]:
            what = f"gave two equal views different plans, {plans[index]!s:.200} and {again!s:.200}: it keeps state"
            raise _broken(strategy, what, view, budget)


def _check_load(strategy: BatchStrategy, load: TrialLoad, seed: int) -> None:
    """Check that every sequence finishes although others keep arriving."""
    trial = StrategyTrial(load, seed)
    num_first = _NUM_ROUNDS * load.num_slots
    while trial.num_done < num_first or trial.num_rest_of(num_first):
        view = trial.view()
        trial.apply(_plan(strategy, view, load.budget))
        key, age = trial.oldest()
        if age > load.patience_ticks:
            raise _broken(
                strategy, f"starves sequence {key}, which has not finished after {age} ticks", view, load.budget
            )


def _plan(strategy: BatchStrategy, view: SchedulerView, budget: int) -> list[TokenAllocation]:
    """Return the strategy's plan, which keeps the rules."""
    try:
        allocations = strategy.plan(view, budget)
    except Exception as error:
        raise _broken(strategy, f"raised {error!r:.200}", view, budget) from error
    rule = _broken_rule(allocations, view, budget)
    if rule is not None:
        raise _broken(strategy, rule, view, budget)
    return list(allocations)


def _broken_rule(allocations: object, view: SchedulerView, budget: int) -> str | None:
    """Return the rule that a plan breaks; None where it keeps all."""
    if not isinstance(allocations, (list, tuple)):
        return f"must return a list or a tuple of TokenAllocation, not {allocations!r:.80}"
    if not allocations:
        return "planned nothing, though there is work"
    limits = {sequence.key: sequence.limit for sequence in view.sequences}
    for allocation in allocations:
        rule = _broken_by_allocation(allocation, limits)
        if rule is not None:
            return rule
        del limits[allocation.key]
    total = sum(allocation.num_tokens for allocation in allocations)
    return f"planned {total} tokens, over the budget of {budget}" if total > budget else None


def _broken_by_allocation(allocation: object, limits: dict[int, int]) -> str | None:
    """Return the rule that one allocation breaks; `limits`: of the sequences without an allocation before it."""
    if not isinstance(allocation, TokenAllocation):
        return f"must return TokenAllocations, not {allocation!r:.80}"
    if allocation.key not in limits:
        return f"planned key {allocation.key!r:.80}, which is not in the view or came before"
    if isinstance(allocation.num_tokens, bool) or not isinstance(allocation.num_tokens, int):
        return f"must plan an int of tokens, not {allocation.num_tokens!r:.80}"
    if not 1 <= allocation.num_tokens <= limits[allocation.key]:
        return f"planned {allocation.num_tokens} tokens for key {allocation.key}, which may have 1 to {limits[allocation.key]}"
    return None


def _broken(strategy: BatchStrategy, what: str, view: SchedulerView, budget: int) -> StrategyError:
    shown = ", ".join(
        f"key {one.key} ({'decoding' if one.is_decoding else 'prompt'}, limit {one.limit}, last tick {one.last_tick})"
        for one in view.sequences[:_SHOWN]
    )
    rest = ", ..." if len(view.sequences) > _SHOWN else ""
    return StrategyError(
        f"batch strategy {type(strategy).__name__} {what}; "
        f"in tick {view.tick}, with a budget of {budget} tokens for {len(view.sequences)} sequences: {shown}{rest}"
    )


def _random_view(random: Random) -> SchedulerView:
    tick = random.randint(0, 1000)
    chunk_size = random.choice((1, 16, 512))
    num = random.choice((1, 2, 5, 40))
    share_decoding = random.choice((0.0, 0.5, 1.0))
    keys = random.sample(range(10 * num), num)
    sequences: Sequence[TrialSequence] = [
        _random_sequence(random, key, tick, chunk_size, is_decoding=random.random() < share_decoding) for key in keys
    ]
    return SchedulerView(
        sequences=tuple(replace(one, order=order) for order, one in enumerate(sequences)),
        chunk_size=chunk_size,
        num_cells=sum(one.num_computed_tokens for one in sequences),
        tick=tick,
        now_s=float(tick),
        itl_target_s=random.choice((0.001, 0.05, 0.25)),
        max_tick_s=random.choice((0.001, 1.0)),
        cost=TrialCost(pass_s=random.choice((0.0, 0.01, 1.0)), token_s=random.choice((1e-6, 0.003, 0.3))),
    )


def _random_sequence(random: Random, key: int, tick: int, chunk_size: int, *, is_decoding: bool) -> TrialSequence:
    num_prompt_tokens = round(5000 ** random.random())
    num_uncomputed_tokens = random.choice((1, 1, 1, 5)) if is_decoding else random.randint(1, num_prompt_tokens)
    num_tokens = num_prompt_tokens + (random.randint(1, 100) + num_uncomputed_tokens if is_decoding else 0)
    return TrialSequence(
        key=key,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        num_computed_tokens=num_tokens - num_uncomputed_tokens,
        limit=random.randint(1, min(num_uncomputed_tokens, chunk_size)),
        is_decoding=is_decoding,
        order=0,
        submitted_s=tick - 100 * random.random(),
        last_tick=tick - random.choice((0, 1, 1, 1, 5, 100)),
        priority=random.choice((0, 0, 0, 1, -3)),
    )


def _copy(view: SchedulerView) -> SchedulerView:
    """Return an equal view made of other objects."""
    return msgspec.structs.replace(view, sequences=tuple(copy(one) for one in view.sequences))
