"""From ready sequences to the rows of a pass: whose adapters apply, what each may compute, what the strategy allocates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from paceline.cost_model import DecodeCost
from paceline.errors import PacelineError, StrategyError, Unsupported
from paceline.kv_cache import TEXT_LAYOUT, KVCache, MediaItem
from paceline.scheduling.strategies import BatchStrategy, SchedulerView, SequenceView, TickCost, TokenAllocation
from paceline.sequence import Limits, Row, Sequence

Lora = tuple[tuple[str, float], ...]

AnySequence = TypeVar("AnySequence", bound=SequenceView)
_MEMORY_S = 10.0  # of passes: what is older fades


@dataclass(slots=True)
class StepBatch:
    """The rows of a pass and its adapters; or, where none can be made, the sequences to end and why.

    lost_s: as in `StepPlan`.
    """

    rows: list[Row]
    lora: Lora
    failed: list[Sequence]
    error: PacelineError | None = None
    lost_s: float | None = None


class StepPlanner:
    """Gets allocations from the strategy and checks them. Rows of different adapter sets or kinds never share a pass.

    Passes over tokens and over media items take turns; an item whose attention is not causal has a pass of its own.
    """

    def __init__(
        self, limits: Limits, strategy: BatchStrategy, kv_cache: KVCache, cost: TickCost, lost_time: LostTime
    ) -> None:
        self._limits, self._strategy, self._kv_cache, self._cost = limits, strategy, kv_cache, cost
        self._lost_time = lost_time
        self._turns = AdapterTurns(limits.itl_target_s)
        self._at_media: list[Sequence] = []  # of the candidates, those that are at a media item
        self._was_media = False

    def plan(self, ready: list[Sequence], tick: int, now_s: float) -> StepBatch:
        """Return the next pass over some of the ready sequences. What the strategy does wrong is the batch's error."""
        lora, group = self._turns.choose(ready, now_s)
        candidates, max_tick_s = self.set_limits(group), self._limits.max_tick_s
        if self._at_media:
            num_ready, candidates = len(candidates), self._choose_kind(candidates)
            if len(candidates) < num_ready:  # others may be decoding
                max_tick_s = self._itl_target_s()
            item = candidates[0].layout.item_at(candidates[0].num_computed_tokens)
            if item is not None and not item.is_causal:
                return self._whole_item(candidates[0], item, lora)
        if not candidates:
            return StepBatch([], lora, [])
        view = SchedulerView(
            sequences=tuple(candidates),
            chunk_size=self._limits.chunk_size,
            num_cells=self._kv_cache.num_cells,
            tick=tick,
            now_s=now_s,
            itl_target_s=self._itl_target_s(),
            max_tick_s=max_tick_s,
            cost=self._cost,
            lost_share=self._lost_time.share,
            lost_tick_s=self._lost_time.mean_s,
        )
        try:
            rows = rows_of(self._strategy.plan(view, self._limits.n_batch), candidates, self._limits.n_batch)
        except Exception as error:  # noqa: BLE001 - whatever a strategy of the user's raises
            failure = StrategyError(f"batch strategy {type(self._strategy).__name__} failed: {error!r:.500}")
            failure.__cause__ = error
            return StepBatch([], lora, candidates, failure)
        return StepBatch(rows, lora, [], lost_s=self._lost_s(rows, candidates))

    def _lost_s(self, rows: list[Row], candidates: list[Sequence]) -> float | None:
        """Return `StepPlan.lost_s` of these rows, which the strategy chose among the candidates."""
        num_prompts = len(candidates) - sum([one.is_decoding for one in candidates])
        num_decode = sum([row.sequence.is_decoding for row in rows]) if num_prompts else 0
        return self._lost_time.of_pass(num_decode, num_prompts) if num_decode else None

    def set_limits(self, sequences: list[Sequence]) -> list[Sequence]:
        """Set how many tokens each sequence may compute in this tick, and return those that may compute any.

        Rows of logits for prompt tokens are scarce: they go to the first sequence that needs some.
        """
        num_scored = self._limits.max_scored
        if self._at_media:
            self._at_media = []
        for sequence in sequences:
            limit = min(sequence.num_uncomputed_tokens, self._limits.chunk_size)
            if sequence.num_computed_tokens < sequence.num_prompt_tokens - 1:
                limit, num_scored = self._prompt_limit(sequence, limit, num_scored)
            sequence.limit = limit
        return [sequence for sequence in sequences if sequence.limit > 0]

    def _prompt_limit(self, sequence: Sequence, limit: int, num_scored: int) -> tuple[int, int]:
        """Return the limit of a sequence before its prompt's last token, and the scored rows that are left."""
        up_to_last = sequence.num_prompt_tokens - 1 - sequence.num_computed_tokens
        if sequence.is_scoring:
            if sequence.num_computed_tokens < sequence.num_scored:  # computed again: these scores are known
                return min(limit, sequence.num_scored - sequence.num_computed_tokens), num_scored
            limit = min(limit, up_to_last, num_scored)
            return limit, num_scored - limit
        if sequence.layout is not TEXT_LAYOUT:
            item = sequence.layout.item_at(sequence.num_computed_tokens)
            if item is not None:
                self._at_media.append(sequence)
                return min(limit, item.end - sequence.num_computed_tokens), num_scored
            limit = min(limit, sequence.layout.tokens_left(sequence.num_computed_tokens) or limit)
        up_to_checkpoint = self._kv_cache.tokens_to_checkpoint(sequence)
        return limit if up_to_checkpoint is None else min(limit, up_to_checkpoint), num_scored

    def _choose_kind(self, candidates: list[Sequence]) -> list[Sequence]:
        """Return the candidates whose turn it is: those at tokens, or of those at items the one behind and its like."""
        at_tokens = [one for one in candidates if one not in self._at_media]
        self._was_media = not (at_tokens and self._was_media)
        if not self._was_media:
            return at_tokens
        behind = min(self._at_media, key=lambda one: one.last_tick)
        is_causal = _is_at_causal(behind)
        return [behind, *(one for one in self._at_media if one is not behind and _is_at_causal(one) == is_causal)]

    def _whole_item(self, sequence: Sequence, item: MediaItem, lora: Lora) -> StepBatch:
        """Return the pass over an item that cannot be computed in parts."""
        most = min(self._limits.n_batch, self._limits.n_ubatch)
        if item.num_cells > most:
            error = Unsupported(
                f"a media item of {item.num_cells} cells whose attention is not causal is computed at once, and n_ubatch "
                f"allows {most}; raise n_batch and n_ubatch"
            )
            return StepBatch([], lora, [sequence], error)
        return StepBatch([_row(sequence, item.num_cells)], lora, [])

    def _itl_target_s(self) -> float:
        """Return what transfers leave of the target; at least half, so that prompts make progress."""
        target_s = self._limits.itl_target_s
        return max(target_s / 2, target_s - self._kv_cache.transfer_s)


class AdapterTurns:
    """Gives each set of adapters a share of `itl_target_s`; then it is the turn of the one that has waited longest."""

    def __init__(self, itl_target_s: float) -> None:
        self._itl_target_s = itl_target_s
        self._current: Lora = ()
        self._since_s = 0.0

    def choose(self, sequences: list[Sequence], now_s: float) -> tuple[Lora, list[Sequence]]:
        """Return the adapters of this tick and, of these sequences, those that use them."""
        groups: dict[Lora, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.request.lora, []).append(sequence)
        if not groups:
            return self._current, []
        is_over = now_s - self._since_s >= self._itl_target_s / len(groups)
        if self._current not in groups or (len(groups) > 1 and is_over):
            others = {lora: group for lora, group in groups.items() if lora != self._current}
            self._current = min(others, key=lambda lora: min(one.last_tick for one in others[lora]))
            self._since_s = now_s
        return self._current, groups[self._current]


def checked_allocations(
    allocations: object, sequences: Iterable[AnySequence], budget: int
) -> list[tuple[AnySequence, int]]:
    """Return each sequence of a strategy's plan with its tokens. Raise `StrategyError` where it breaks `BatchStrategy`'s rules.

    The error's message continues after the strategy's name.
    """
    if not isinstance(allocations, (list, tuple)):
        raise StrategyError(f"must return a list or a tuple of TokenAllocation, not {allocations!r:.80}")
    left = {sequence.key: sequence for sequence in sequences}
    if not allocations:
        raise StrategyError(f"planned nothing, and {len(left)} sequences have work")
    found, total = [], 0
    for allocation in allocations:
        if not isinstance(allocation, TokenAllocation):
            raise StrategyError(f"must return TokenAllocations, not {allocation!r:.80}")
        key, num_tokens = allocation.key, allocation.num_tokens
        sequence = left.pop(key, None)
        if sequence is None:
            raise StrategyError(f"planned key {key!r:.80}, which is not in the view or came before")
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
            raise StrategyError(f"must plan an int of tokens, not {num_tokens!r:.80}")
        if not 1 <= num_tokens <= sequence.limit:
            raise StrategyError(f"planned {num_tokens} tokens for key {key}, which may have 1 to {sequence.limit}")
        total += num_tokens
        found.append((sequence, num_tokens))
    if total > budget:
        raise StrategyError(f"planned {total} tokens, over the budget of {budget}")
    return found


def rows_of(allocations: object, sequences: Iterable[Sequence], budget: int) -> list[Row]:
    """Return the rows of a strategy's plan. Raise `StrategyError` as `checked_allocations`."""
    return [_row(sequence, num_tokens) for sequence, num_tokens in checked_allocations(allocations, sequences, budget)]


def _is_at_causal(sequence: Sequence) -> bool:
    item = sequence.layout.item_at(sequence.num_computed_tokens)
    return item is not None and item.is_causal


def _row(sequence: Sequence, num_tokens: int) -> Row:
    params, start = sequence.request.params, sequence.num_computed_tokens
    end = start + num_tokens
    scores = sequence.is_scoring and start == sequence.num_scored
    row = Row(
        sequence=sequence,
        position=start,
        token_ids=sequence.token_ids[start:end],
        draws=sequence.drawing and end == sequence.num_tokens,
        targets=sequence.token_ids[start + 1 : end + 1] if scores else [],
        num_logprobs=params.prompt_logprobs if scores else params.logprobs,
    )
    if sequence.layout is not TEXT_LAYOUT:
        _place(row, start)
    return row


def _place(row: Row, cell: int) -> None:
    """Set the position of a row, and the media item that it is part of, where positions are not cells."""
    layout = row.sequence.layout
    row.position, row.item = layout.position(cell), layout.item_at(cell)
    row.offset = 0 if row.item is None else cell - row.item.start


class LostTime:
    """Sums up the passes of about the last ten seconds."""

    def __init__(self, decode_cost: DecodeCost) -> None:
        self._decode_cost = decode_cost
        self._total_s = 0.0  # of passes
        self._lost_s = 0.0
        self._num_mixed = 0.0  # passes that decoded while prompts waited

    @property
    def share(self) -> float:
        """Of the time of all passes, from 0 to 1."""
        return min(1.0, self._lost_s / self._total_s) if self._total_s else 0.0

    @property
    def mean_s(self) -> float:
        """Seconds lost in a pass that decoded while prompts waited."""
        return self._lost_s / self._num_mixed if self._num_mixed else 0.0

    def of_pass(self, num_decode: int, num_prompts: int) -> float:
        """Return the seconds that a pass loses in which so many sequences decode while so many prompts wait.

        Less than 0 where the rows are cheaper than in the larger batch.
        """
        num_rows = num_decode + num_prompts
        return self._decode_cost.seconds(num_decode) - self._decode_cost.seconds(num_rows) * num_decode / num_rows

    def observe(self, seconds: float, lost_s: float | None) -> None:
        """Add a pass and what it lost; None where no prompt waited, or nothing decoded."""
        fade = math.exp(-seconds / _MEMORY_S)
        self._total_s = self._total_s * fade + seconds
        self._lost_s *= fade
        self._num_mixed *= fade
        if lost_s is not None:
            self._lost_s = max(0.0, self._lost_s + lost_s)
            self._num_mixed += 1
