"""A simulated engine for checks of batch strategies: slots that are always refilled, and no model.

Deterministic: the same seed gives the same sequences and, with the same plans, the same ticks. Checks no rules:
`strategy_check` takes views from it, has them planned and passes the plans back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from paceline.scheduling.view import SchedulerView, TokenAllocation

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
    """A `TickCost` in seconds a pass, a token, and a token and cell."""

    pass_s: float = 0.01
    token_s: float = 0.003
    cell_s: float = 1.5e-7

    def seconds(self, num_tokens: int, num_cells: int) -> float:
        """Of a pass over so many tokens with so many cells in use."""
        return self.pass_s + num_tokens * (self.token_s + num_cells * self.cell_s)


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
        """Ticks in which each sequence must finish: several times what slow but fair strategies take."""
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
    """Slots that are always full: where a sequence finishes, the next one starts."""

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
        running = min(self._slots, key=lambda one: one.admitted_tick)
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
