"""A draft model without a model: it has the cells of a context, and draws the fake backend's tokens, more or less often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.params import SamplingParams
from paceline.speculation.drafters.model_drafter import DraftLimits, DraftRow, DraftToken, ModelDrafter
from paceline.testing.fake_backend import BOS, EOS, FakeCost, FakeMemory, FakeSampler, ManualClock, mix

CHEAP = FakeCost(base_s=0.001, token_s=0.0001)


class FakeDraftBackend:
    """Draws as greedy fake sequences do, but for one in `wrong_every` places. passes: the rows of each."""

    def __init__(
        self,
        num_cells: int = 600,
        num_seq_ids: int = 8,
        *,
        wrong_every: int = 0,
        clock: ManualClock | None = None,
        cost: FakeCost = CHEAP,
    ) -> None:
        self.memory = FakeMemory(num_cells, num_seq_ids, "attention", 0)
        self.passes: list[list[DraftRow]] = []
        self.failures: list[Exception] = []
        self._wrong_every, self._clock, self._cost = wrong_every, clock, cost
        self._sampler = FakeSampler(SamplingParams(temperature=0, ignore_eos=True), 0, 40)

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        self.memory.copy(from_seq_id, to_seq_id, end)

    def truncate(self, seq_id: int, end: int) -> None:
        self.memory.truncate(seq_id, end)

    def remove(self, seq_id: int) -> None:
        self.memory.remove(seq_id)

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        num_tokens = sum(len(row.token_ids) for row in rows)
        if self._clock is not None:
            self._clock.advance(self._cost.base_s + self._cost.token_s * num_tokens)
        if self.failures:
            raise self.failures.pop(0)
        self.memory.needs(num_tokens)
        self.passes.append([DraftRow(row.seq_id, row.position, list(row.token_ids), row.draws) for row in rows])
        return [self._compute(row) for row in rows]

    def _compute(self, row: DraftRow) -> DraftToken | None:
        last = self.memory.append(row.seq_id, row.position, row.token_ids)
        if not row.draws:
            return None
        is_wrong = self._wrong_every and mix(last) % self._wrong_every == 0
        return DraftToken(EOS if is_wrong else self._sampler.draw(last), 0.3 if is_wrong else 0.9)

    @property
    def num_computed(self) -> int:
        """Tokens of all passes."""
        return sum(len(row.token_ids) for rows in self.passes for row in rows)


def model_drafter(backend: FakeDraftBackend, **limits: Any) -> ModelDrafter:
    """A drafter on it, with the limits of the fake backend."""
    return ModelDrafter(
        backend,
        DraftLimits(
            **{
                "num_cells": backend.memory.num_cells,
                "num_seq_ids": backend.memory.num_seq_ids,
                "n_batch": 64,
                "max_positions": backend.memory.num_cells,
                "n_vocab": BOS + 1,
                "target_n_vocab": BOS + 1,
                "eog_ids": frozenset({EOS}),
                **limits,
            }
        ),
    )


def check_drafter(drafter: ModelDrafter, backend: FakeDraftBackend) -> None:
    """The cells hold the drafter's tokens, except for operations that the next pass carries out."""
    drafter.check()
    drafter._operate(drafter._cache.take_operations())
    for sequence in drafter._sequences.values():
        if sequence.seq_id is not None:
            assert backend.memory.length(sequence.seq_id) == sequence.num_computed_tokens
            alone = FakeMemory(4096, 1, "attention", 0)
            if sequence.num_computed_tokens:
                alone.append(0, 0, sequence.token_ids[: sequence.num_computed_tokens])
            assert backend.memory.hashes(sequence.seq_id) == alone.hashes(0)
    assert backend.memory.num_used == drafter._cache.num_cells
