"""Decode first: everybody who decodes gets a row, prompts share what is left. Pure."""

from __future__ import annotations

from paceline import validation
from paceline.scheduling.strategies.filling import (
    Filling,
    longest_waiting_first,
    most_urgent_first,
    split,
    ticks_without_row,
)
from paceline.scheduling.view import Share, View


class DecodeMaximal:
    """Decode rows first, then prompts by priority and arrival (with ageing), each as much as it may have.

    Where decoding alone fills the budget, the one whose last row is longest ago comes first, and prompts that had no row
    for more than `patience` ticks get one tick's half of the budget before everybody else.
    """

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = validation.integer("patience", patience, 1)

    def plan(self, view: View, budget: int) -> list[Share]:
        """The shares of the next tick."""
        decoders, prompts = split(view.sequences)
        prompts = most_urgent_first(prompts)
        filling = Filling(budget)
        if ticks_without_row(prompts, view.tick) > self._patience:
            filling.give(prompts, max(1, budget // 2))
        filling.give_rows(longest_waiting_first(decoders), budget)
        filling.give(prompts, budget)
        return filling.shares()
