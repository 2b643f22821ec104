"""A small make-believe engine for trying batch strategies out: slots that are refilled for ever, and no model.

Deterministic: the same seed gives the same sequences and, with the same plans, the same ticks. Knows nothing of rules;
`strategy_check` asks for views, has them planned and hands the shares back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from paceline.scheduling.view import Share, View

TICK_S = 1.0
"""How long every tick takes here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSequence:
    """A `SequenceView` with plain values."""

    key: int
    num_prompt: int
    num_known: int
    num_computed: int
    limit: int
    is_decoding: bool
    order: int
    submitted_s: float
    last_tick: int
    priority: int

    @property
    def num_left(self) -> int:
        """Known but not computed."""
        return self.num_known - self.num_computed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialCost:
    """A `TickCost` of so many seconds a pass, a token, and a token and cell."""

    pass_s: float = 0.01
    token_s: float = 0.003
    cell_s: float = 1.5e-7

    def seconds(self, num_tokens: int, num_cells: int) -> float:
        """Of a pass over so many tokens with so many cells in use."""
        return self.pass_s + num_tokens * (self.token_s + num_cells * self.cell_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives, and where it runs. max_first_prompt, max_prompt: sizes of the first prompts, one a slot, and of the others.

    max_generated: tokens that a sequence generates; max_drafts: proposed to it in a tick. first_priority,
    last_priority: of the first ones and of the others.
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
        """In how many ticks each sequence must be done: several times what slow but fair strategies take."""
        service = min(16, max(1, self.budget // 2))
        prefill = self.num_slots * -(-max(self.max_first_prompt, self.max_prompt) // service)
        decode = self.max_generated * (1 + self.max_drafts) * (8 + 2 * -(-self.num_slots // self.budget))
        ageing = 10 * abs(self.last_priority - self.first_priority)
        return 100 + 4 * (prefill + decode) + int(ageing / TICK_S) * self.num_slots


@dataclass(slots=True)
class _Running:
    """A sequence in its slot."""

    key: int
    num_prompt: int
    num_known: int
    num_to_generate: int
    priority: int
    admitted_tick: int
    last_tick: int
    num_computed: int = 0
    is_decoding: bool = False


class Trial:
    """Slots that are always full: where a sequence is done, the next one begins."""

    def __init__(self, load: Load, seed: int) -> None:
        self.load = load
        self.tick = 0
        self.num_done = 0
        self._random = Random(seed)  # noqa: S311 - repeatable, and no secret
        self._num_arrived = 0
        self._slots = [self._arrive(load.max_first_prompt, load.first_priority) for _ in range(load.num_slots)]

    def view(self) -> View:
        """The view of the next tick."""
        self.tick += 1
        return View(
            sequences=tuple(self._seen(running) for running in self._slots),
            chunk_size=self.load.chunk_size,
            num_cells=sum(running.num_computed for running in self._slots),
            tick=self.tick,
            now_s=self.tick * TICK_S,
            itl_target_s=0.25,
            max_tick_s=1.0,
            cost=TrialCost(token_s=self.load.token_s),
        )

    def apply(self, shares: Sequence[Share]) -> None:
        """Computes a plan that keeps the rules."""
        given = {share.key: share.num_tokens for share in shares}
        for slot, running in enumerate(self._slots):
            if running.key in given:
                self._compute(running, given[running.key])
                if running.num_to_generate == 0:
                    self.num_done += 1
                    self._slots[slot] = self._arrive(self.load.max_prompt, self.load.last_priority)

    def oldest(self) -> tuple[int, int]:
        """Key and age in ticks of the sequence that is in its slot for the longest time."""
        running = min(self._slots, key=lambda one: one.admitted_tick)
        return running.key, self.tick - running.admitted_tick

    def num_rest_of(self, num_first: int) -> int:
        """How many of the first sequences that arrived are not done."""
        return sum(running.key < num_first for running in self._slots)

    def _arrive(self, max_prompt: int, priority: int) -> _Running:
        num_prompt = self._random.randint(1, max_prompt)
        running = _Running(
            key=self._num_arrived,
            num_prompt=num_prompt,
            num_known=num_prompt,
            num_to_generate=self._random.randint(1, self.load.max_generated),
            priority=priority,
            admitted_tick=self.tick,
            last_tick=self.tick,
        )
        self._num_arrived += 1
        return running

    def _seen(self, running: _Running) -> TrialSequence:
        num_left = running.num_known - running.num_computed
        return TrialSequence(
            key=running.key,
            num_prompt=running.num_prompt,
            num_known=running.num_known,
            num_computed=running.num_computed,
            limit=min(num_left, self.load.chunk_size),
            is_decoding=running.is_decoding,
            order=running.key,
            submitted_s=running.admitted_tick * TICK_S,
            last_tick=running.last_tick,
            priority=running.priority,
        )

    def _compute(self, running: _Running, num_tokens: int) -> None:
        running.num_computed += num_tokens
        running.last_tick = self.tick
        if running.num_computed == running.num_known:
            running.is_decoding = True
            running.num_to_generate -= 1
            running.num_known += 1 + self._random.randint(0, self.load.max_drafts)
