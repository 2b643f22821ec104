"""Checks a batch strategy against the contract of `BatchStrategy`: for authors of strategies.

    from paceline.testing import check_strategy
    check_strategy(MyStrategy())

Plans random views, and runs loads on a simulated engine: slots that are always refilled, and no model. Deterministic: the same
seed gives the same sequences and, with the same plans, the same ticks. Takes a few seconds at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from random import Random

import msgspec

from paceline import validation
from paceline.errors import StrategyError
from paceline.scheduling.step_planner import checked_allocations
from paceline.scheduling.strategies import BatchStrategy, SchedulerView, TokenAllocation, resolve_strategy

TICK_S = 1.0
"""Duration of every tick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSequence:
    """A `SequenceView` with plain values."""

    key: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    limit: int
    is_decoding: bool
    order: int
    submitted_s: float
    last_tick: int
    priority: int

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known but not computed."""
        return self.num_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCost:
    """A `TickCost` in seconds a pass, a token, a token and cell, and an output."""

    pass_s: float = 0.01
    token_s: float = 0.003
    cell_s: float = 1.5e-7
    output_s: float = 0.0

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        """Of a pass over so many tokens with so many cells in use, and logits of so many."""
        return self.pass_s + num_tokens * (self.token_s + num_cells * self.cell_s) + num_outputs * self.output_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLoad:
    """The requests that arrive, and the slots they run in.

    max_first_prompt, max_prompt: largest prompts, of the first requests (one a slot) and of the others. max_generated: most
    tokens that a sequence generates; max_drafts: most drafts of a tick. first_priority, last_priority: of the first requests
    and of the others.
    """

    num_slots: int
    budget: int
    chunk_size: int = 512
    max_first_prompt: int
    max_prompt: int
    max_generated: int
    max_drafts: int = 0
    first_priority: int = 0
    last_priority: int = 0
    token_s: float = 0.003

    @property
    def patience_ticks(self) -> int:
        """Ticks in which each sequence must finish: several times the ticks of slow but fair strategies."""
        service = min(16, max(1, self.budget // 2))
        prefill = self.num_slots * -(-max(self.max_first_prompt, self.max_prompt) // service)
        decode = self.max_generated * (1 + self.max_drafts) * (8 + 2 * -(-self.num_slots // self.budget))
        ageing = 10 * abs(self.last_priority - self.first_priority)
        return 100 + 4 * (prefill + decode) + int(ageing / TICK_S) * self.num_slots


@dataclass(slots=True)
class _RunningTrial:
    """A sequence in its slot."""

    key: int
    num_prompt_tokens: int
    num_tokens: int
    num_to_generate: int
    priority: int
    admitted_tick: int
    last_tick: int
    num_computed_tokens: int = 0
    is_decoding: bool = False


class StrategyTrial:
    """Slots that are always full: when a sequence finishes, the next sequence starts."""

    def __init__(self, load: TrialLoad, seed: int) -> None:
        self.load = load
        self.tick = 0
        self.num_done = 0
        self._random = Random(seed)  # noqa: S311 - repeatable, and no secret
        self._num_arrived = 0
        self._slots = [self._arrive(load.max_first_prompt, load.first_priority) for _ in range(load.num_slots)]

    def view(self) -> SchedulerView:
        """Return the view of the next tick."""
        self.tick += 1
        return SchedulerView(
            sequences=tuple(self._seen(running) for running in self._slots),
            chunk_size=self.load.chunk_size,
            num_cells=sum(running.num_computed_tokens for running in self._slots),
            tick=self.tick,
            now_s=self.tick * TICK_S,
            itl_target_s=0.25,
            max_tick_s=1.0,
            cost=TrialCost(token_s=self.load.token_s),
        )

    def apply(self, shares: Sequence[TokenAllocation]) -> None:
        """Compute a plan that keeps the rules."""
        given = {share.key: share.num_tokens for share in shares}
        for slot, running in enumerate(self._slots):
            if running.key in given:
                self._compute(running, given[running.key])
                if running.num_to_generate == 0:
                    self.num_done += 1
                    self._slots[slot] = self._arrive(self.load.max_prompt, self.load.last_priority)

    def oldest(self) -> tuple[int, int]:
        """Return key and age in ticks of the sequence that has been in its slot for the longest time."""
        running = min(self._slots, key=lambda sequence: sequence.admitted_tick)
        return running.key, self.tick - running.admitted_tick

    def num_rest_of(self, num_first: int) -> int:
        """Return how many of the first sequences that arrived have not finished."""
        return sum(running.key < num_first for running in self._slots)

    def _arrive(self, max_prompt: int, priority: int) -> _RunningTrial:
        num_prompt_tokens = self._random.randint(1, max_prompt)
        running = _RunningTrial(
            key=self._num_arrived,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_prompt_tokens,
            num_to_generate=self._random.randint(1, self.load.max_generated),
            priority=priority,
            admitted_tick=self.tick,
            last_tick=self.tick,
        )
        self._num_arrived += 1
        return running

    def _seen(self, running: _RunningTrial) -> TrialSequence:
        num_uncomputed_tokens = running.num_tokens - running.num_computed_tokens
        return TrialSequence(
            key=running.key,
            num_prompt_tokens=running.num_prompt_tokens,
            num_tokens=running.num_tokens,
            num_computed_tokens=running.num_computed_tokens,
            limit=min(num_uncomputed_tokens, self.load.chunk_size),
            is_decoding=running.is_decoding,
            order=running.key,
            submitted_s=running.admitted_tick * TICK_S,
            last_tick=running.last_tick,
            priority=running.priority,
        )

    def _compute(self, running: _RunningTrial, num_tokens: int) -> None:
        running.num_computed_tokens += num_tokens
        running.last_tick = self.tick
        if running.num_computed_tokens == running.num_tokens:
            running.is_decoding = True
            running.num_to_generate -= 1
            running.num_tokens += 1 + self._random.randint(0, self.load.max_drafts)


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
    try:
        allocations = strategy.plan(view, budget)
    except Exception as error:
        raise _broken(strategy, f"raised {error!r:.200}", view, budget) from error
    try:
        checked_allocations(allocations, view.sequences, budget)
    except StrategyError as rule:
        raise _broken(strategy, str(rule), view, budget) from None
    return list(allocations)


def _broken(strategy: BatchStrategy, what: str, view: SchedulerView, budget: int) -> StrategyError:
    shown = ", ".join(
        f"key {sequence.key} ({'decoding' if sequence.is_decoding else 'prompt'}, limit {sequence.limit}, "
        f"last tick {sequence.last_tick})"
        for sequence in view.sequences[:_SHOWN]
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
        sequences=tuple(replace(sequence, order=order) for order, sequence in enumerate(sequences)),
        chunk_size=chunk_size,
        num_cells=sum(sequence.num_computed_tokens for sequence in sequences),
        tick=tick,
        now_s=float(tick),
        itl_target_s=random.choice((0.001, 0.05, 0.25)),
        max_tick_s=random.choice((0.001, 1.0)),
        cost=TrialCost(pass_s=random.choice((0.0, 0.01, 1.0)), token_s=random.choice((1e-6, 0.003, 0.3))),
        lost_share=random.choice((0.0, 0.01, 0.5)),
        lost_tick_s=random.choice((0.0, 0.01, 1.0)),
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
    return msgspec.structs.replace(view, sequences=tuple(copy(sequence) for sequence in view.sequences))
