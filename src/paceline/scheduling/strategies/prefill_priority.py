"""Prefill first: prompts fill the tick, who decodes gets the rest. For throughput of many prompts. Pure."""

from __future__ import annotations

from paceline import validation
from paceline.scheduling.strategies.filling import (
    Filling,
    longest_waiting_first,
    most_urgent_first,
    num_wanted,
    split,
)
from paceline.scheduling.view import Share, View


class PrefillPriority:
    """Prompts by priority and arrival (with ageing) first, then decode rows, the one that waits longest first.

    While prompts fill the budget nobody else decodes, but not for ever: who has waited `patience` ticks comes before the
    prompts. Where the budget is too small for that to leave the prompts half of it, patience is longer: twice the ticks
    that one row for everybody takes.
    """

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = validation.integer("patience", patience, 1)

    def plan(self, view: View, budget: int) -> list[Share]:
        """The shares of the next tick."""
        decoders, prompts = split(view.sequences)
        decoders = longest_waiting_first(decoders)
        since = view.tick - max(self._patience, -(-2 * num_wanted(decoders) // budget))
        num_overdue = sum(decoder.last_tick <= since for decoder in decoders)  # they stand in front
        filling = Filling(budget)
        filling.give_rows(decoders[:num_overdue], budget)
        filling.give(most_urgent_first(prompts), budget)
        filling.give_rows(decoders[num_overdue:], budget)
        return filling.shares()
