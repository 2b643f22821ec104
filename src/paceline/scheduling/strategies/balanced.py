"""Half and half: decoding and prefill share the budget evenly. Pure."""

from __future__ import annotations

from paceline.scheduling.strategies.batch_builder import (
    BatchBuilder,
    longest_waiting_first,
    most_urgent_first,
    num_wanted,
    split,
    ticks_without_row,
)
from paceline.scheduling.view import SchedulerView, SequenceView, TokenAllocation


class Balanced:
    """Half of the budget for decode rows, half for prompts; what one side does not need goes to the other.

    Who decodes takes turns where not all fit (the one that waits longest first); prompts come by priority and arrival,
    with ageing. The odd token goes to the side that had a row longer ago, so a budget of 1 alternates.
    """

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        """Return the allocations of the next tick."""
        decoders, prompts = split(view.sequences)
        num_decode, num_prefill = self._halves(decoders, prompts, view.tick, budget)
        batch = BatchBuilder(budget)
        batch.add_decode(longest_waiting_first(decoders), num_decode)
        batch.add_prefill(most_urgent_first(prompts), num_prefill)
        return batch.allocations()

    def _halves(
        self, decoders: list[SequenceView], prompts: list[SequenceView], tick: int, budget: int
    ) -> tuple[int, int]:
        """Tokens for decoding and for prompts."""
        wanted_decode, wanted_prefill = num_wanted(decoders), num_wanted(prompts)
        half = budget // 2
        if budget % 2 and ticks_without_row(decoders, tick) >= ticks_without_row(prompts, tick):
            half += 1
        num_prefill = min(budget - min(half, wanted_decode), wanted_prefill)
        return min(budget - num_prefill, wanted_decode), num_prefill
