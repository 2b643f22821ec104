"""Prefill first: prompts fill the tick, who decodes gets the rest. For throughput of many prompts. Pure."""

from __future__ import annotations

from paceline import validation
from paceline.scheduling.strategies.batch_builder import (
    BatchBuilder,
    longest_waiting_first,
    most_urgent_first,
    num_wanted,
    split,
)
from paceline.scheduling.view import SchedulerView, TokenAllocation


class PrefillPriority:
    """Prompts by priority and arrival (with ageing) first, then decode rows, the one that waits longest first.

    While prompts fill the budget no other sequence decodes, but not for ever: one that has waited `patience` ticks comes
    before the prompts. Where the budget is too small for that to leave the prompts half of it, patience is longer: twice the
    ticks that one row for every sequence takes.
    """

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = validation.integer("patience", patience, 1)

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        """Return the allocations of the next tick."""
        decoders, prompts = split(view.sequences)
        decoders = longest_waiting_first(decoders)
        since = view.tick - max(self._patience, -(-2 * num_wanted(decoders) // budget))
        num_overdue = sum(decoder.last_tick <= since for decoder in decoders)  # they stand in front
        batch = BatchBuilder(budget)
        batch.add_decode(decoders[:num_overdue], budget)
        batch.add_prefill(most_urgent_first(prompts), budget)
        batch.add_decode(decoders[num_overdue:], budget)
        return batch.allocations()
