"""Paced, the default: as much prefill beside decoding as the inter-token latency target allows. Pure."""

from __future__ import annotations

from paceline import validation
from paceline.request import SECONDS_PER_PRIORITY
from paceline.scheduling.cost_model import TILE_TOKENS
from paceline.scheduling.strategies.batch_builder import (
    BatchBuilder,
    longest_waiting_first,
    num_wanted,
    split,
    ticks_without_row,
)
from paceline.scheduling.view import SchedulerView, SequenceView, TokenAllocation


class Paced:
    """Decode rows first; prompts get what keeps the tick within `view.itl_target_s`, as `view.cost` expects it.

    Never less than a least share, so that prompts go on where decoding alone takes longer than the target: the most that
    makes the tick `least_growth` longer than decoding alone (0.25: a quarter), and at least `least_tokens`. While
    no sequence decodes, a tick is as large as `view.max_tick_s` allows, and at least `least_tokens`.

    While a sequence decodes, a tick of less than 64 tokens is filled up to 64 where that takes at most `stretch` times what it
    may, and prompts come `stretch` times as fast for it: on a CPU a token of them costs less from there on, see `pace`.

    Prompts come in the order of `submitted_s + what it still takes alone - 10 s * priority`: the shortest first, but a long
    one comes before all that are submitted after the time at which it could have been done. Each gets as much as it may.

    Where decoding alone fills the budget, the one that waits longest comes first, and prompts that had no row for more than
    `patience` ticks get `least_tokens`, at most half of the budget, before all others.
    """

    def __init__(
        self, *, least_growth: float = 0.25, least_tokens: int = 16, patience: int = 8, stretch: float = 1.25
    ) -> None:
        self._growth = 1 + validation.number("least_growth", least_growth, 0, 100)
        self._least_tokens = validation.integer("least_tokens", least_tokens, 1)
        self._patience = validation.integer("patience", patience, 1)
        self._stretch = validation.number("stretch", stretch, 1, 100)

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        """Return the allocations of the next tick."""
        if all(one.is_decoding for one in view.sequences):  # as most ticks are
            allocations = [TokenAllocation(one.key, one.limit) for one in view.sequences]
            if sum(one.num_tokens for one in allocations) <= budget:
                return allocations
        decoders, prompts = split(view.sequences)
        prompts = self._earliest_due_first(prompts, view, budget)
        batch = BatchBuilder(budget)
        if ticks_without_row(prompts, view.tick) > self._patience:
            batch.add_prefill(prompts, max(1, min(self._least_tokens, budget // 2)))
        num_early = budget - batch.tokens_left
        batch.add_decode(longest_waiting_first(decoders), budget)
        num_decode = budget - batch.tokens_left - num_early
        most = min(budget - num_decode, num_wanted(prompts))
        batch.add_prefill(prompts, self._prefill_tokens(view, num_decode, most) - num_early)
        return batch.allocations()

    def _earliest_due_first(self, prompts: list[SequenceView], view: SchedulerView, budget: int) -> list[SequenceView]:
        if len(prompts) < 2:
            return prompts
        chunk = max(1, min(view.chunk_size, budget))
        token_s = view.cost.seconds(chunk, view.num_cells) / chunk
        return sorted(
            prompts,
            key=lambda one: (
                one.submitted_s + one.num_uncomputed_tokens * token_s - SECONDS_PER_PRIORITY * one.priority,
                one.order,
            ),
        )

    def _prefill_tokens(self, view: SchedulerView, num_decode: int, most: int) -> int:
        """How many tokens prompts get in this tick, beside so many of decoding: at most `most`."""
        limit_s, stretch = view.max_tick_s, 1.0
        if num_decode:
            stretch = self._stretch
            alone_s = view.cost.seconds(num_decode, view.num_cells)
            limit_s = max(view.itl_target_s, self._growth * alone_s)
        return _Search(view, num_decode, most).best(min(self._least_tokens, most), limit_s, stretch)


class _Search:
    """The largest prefill beside `num_decode` tokens, of at most `most`."""

    def __init__(self, view: SchedulerView, num_decode: int, most: int) -> None:
        self._view, self._num_decode, self._most = view, num_decode, most
        self._tile = TILE_TOKENS - num_decode  # what fills a tile

    def best(self, least: int, limit_s: float, stretch: float) -> int:
        """For a tick that is expected to take at most `limit_s`: in whole tiles, else below, else a tile that is worth it."""
        if self._most <= least or self._seconds(self._most) <= limit_s:
            return self._most
        if not least < self._tile < self._most:
            return self._largest(least, self._most, limit_s)
        if self._seconds(self._tile) <= limit_s:
            return self._largest(self._tile, self._most, limit_s)
        below = self._largest(least, self._tile, limit_s)
        return self._tile if self._is_worth_it(below, stretch, limit_s) else below

    def _largest(self, low: int, high: int, limit_s: float) -> int:
        """Return the largest in [low, high) that fits, else `low`, which is allowed anyway; in between more takes longer."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._seconds(middle) <= limit_s else (low, middle)
        return low

    def _is_worth_it(self, below: int, stretch: float, limit_s: float) -> bool:
        tile_s = self._seconds(self._tile)
        return tile_s <= stretch * limit_s and self._tile * self._seconds(below) >= stretch * below * tile_s

    def _seconds(self, num_tokens: int) -> float:
        return self._view.cost.seconds(self._num_decode + num_tokens, self._view.num_cells + num_tokens)
