"""Decode first: everybody who decodes gets a row, prompts share what is left. Pure."""

from __future__ import annotations

from paceline import validation
from paceline.scheduling.strategies.batch_builder import (
    BatchBuilder,
    longest_waiting_first,
    most_urgent_first,
    split,
    ticks_without_row,
)
from paceline.scheduling.view import SchedulerView, TokenAllocation


class DecodeMaximal:
    """Decode rows first, then prompts by priority and arrival (with ageing), each as much as it may have.

    Where decoding alone fills the budget, the one whose last row is longest ago comes first, and prompts that had no row
    for more than `patience` ticks get one tick's half of the budget before all others.
    """

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = validation.integer("patience", patience, 1)

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        """Return the allocations of the next tick."""
        decoders, prompts = split(view.sequences)
        prompts = most_urgent_first(prompts)
        batch = BatchBuilder(budget)
        if ticks_without_row(prompts, view.tick) > self._patience:
            batch.add_prefill(prompts, max(1, budget // 2))
        batch.add_decode(longest_waiting_first(decoders), budget)
        batch.add_prefill(prompts, budget)
        return batch.allocations()
