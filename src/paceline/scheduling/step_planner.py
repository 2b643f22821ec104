"""From ready sequences to the rows of a pass: adapters, limits of the sequences, allocations of the strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paceline.cost_model import DecodeCost
from paceline.errors import PacelineError, StrategyError, Unsupported
from paceline.kv_cache import TEXT_LAYOUT, KVCache, MediaItem
from paceline.scheduling.fair_shares import FairShares
from paceline.scheduling.records import StepPlan
from paceline.scheduling.strategies import AnySequence, BatchStrategy, SchedulerView, TickCost, TokenAllocation
from paceline.sequence import Limits, Row, Sequence

Lora = tuple[tuple[str, float], ...]

_MEMORY_S = 10.0  # older passes fade


class StepPlanner:
    """Gets allocations from the strategy, checks them, and divides prompt tokens among tenants.

    Rows of different adapter sets or kinds never share a pass.

    Passes over tokens and over media take turns; a media item with attention that is not causal has a pass of its own.

    failed, error: sequences for which the last plan could not be made, and the reason.
    """

    def __init__(
        self,
        limits: Limits,
        strategy: BatchStrategy,
        kv_cache: KVCache,
        cost: TickCost,
        lost_time: LostTime,
        shares: FairShares,
    ) -> None:
        self._limits, self._strategy, self._kv_cache, self._cost = limits, strategy, kv_cache, cost
        self._lost_time, self._shares = lost_time, shares
        self._turns = AdapterTurns(limits.itl_target_s)
        self._at_media: list[Sequence] = []  # candidates at a media item
        self._was_media = False
        self.failed: list[Sequence] = []
        self.error: PacelineError | None = None

    def plan(self, ready: list[Sequence], tick: int, now_s: float) -> StepPlan:
        """Return the next pass over some of the ready sequences, still without cache operations; empty if it `failed`."""
        self.failed, self.error = [], None  # the error has frames with sequences
        lora, group = self._turns.choose(ready, now_s)
        candidates, max_tick_s = self.set_limits(group), self._limits.max_tick_s
        if self._at_media:
            num_ready, candidates = len(candidates), self._choose_kind(candidates)
            if len(candidates) < num_ready:  # others may be decoding
                max_tick_s = self._itl_target_s()
            item = candidates[0].layout.item_at(candidates[0].num_computed_tokens)
            if item is not None and not item.is_causal:
                return StepPlan([], self._whole_item(candidates[0], item), lora, now_s)
        if not candidates:
            return StepPlan([], [], lora, now_s)
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
            allocations = self._strategy.plan(view, self._limits.n_batch)
            rows = rows_of(allocations, candidates, self._limits.n_batch, self._shares)
        except Exception as error:  # noqa: BLE001 - whatever a strategy of the user's raises
            self.error = StrategyError(f"batch strategy {type(self._strategy).__name__} failed: {error!r:.500}")
            self.error.__cause__ = error
            self.failed, rows = candidates, []
        return StepPlan([], rows, lora, now_s, lost_s=self._lost_s(rows, candidates))

    def _lost_s(self, rows: list[Row], candidates: list[Sequence]) -> float | None:
        """Return `StepPlan.lost_s` of the rows that the strategy chose among the candidates."""
        num_prompts = len(candidates) - sum([sequence.is_decoding for sequence in candidates])
        num_decode = sum([row.sequence.is_decoding for row in rows]) if num_prompts else 0
        return self._lost_time.of_pass(num_decode, num_prompts) if num_decode else None

    def set_limits(self, sequences: list[Sequence]) -> list[Sequence]:
        """Set the tokens that each sequence may compute in this tick, and return the sequences that may compute any.

        Rows of logits for prompt tokens are scarce: the first sequence that needs some gets them, of the tenant with the lowest
        virtual time.
        """
        num_scored, in_turn = self._limits.max_scored, sequences
        if self._at_media:
            self._at_media = []
        if self._shares.is_shared:
            in_turn = sorted(sequences, key=lambda sequence: self._shares.time(sequence.request.options.tenant))
        for sequence in in_turn:
            limit = min(sequence.num_uncomputed_tokens, self._limits.chunk_size)
            if sequence.num_computed_tokens < sequence.num_prompt_tokens - 1:
                limit, num_scored = self._prompt_limit(sequence, limit, num_scored)
            sequence.limit = limit
        return [sequence for sequence in sequences if sequence.limit > 0]

    def _prompt_limit(self, sequence: Sequence, limit: int, num_scored: int) -> tuple[int, int]:
        """Return the limit of a sequence before its prompt's last token, and the number of scored rows left."""
        up_to_last = sequence.num_prompt_tokens - 1 - sequence.num_computed_tokens
        if sequence.num_computed_tokens < sequence.num_scored:  # no scores are wanted, or they are known
            limit = min(limit, sequence.num_scored - sequence.num_computed_tokens) if sequence.is_scoring else limit
        elif sequence.is_scoring:
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
        """Return the next candidates: sequences at tokens, or sequences at media of the kind that has waited longest."""
        at_tokens = [sequence for sequence in candidates if sequence not in self._at_media]
        self._was_media = not (at_tokens and self._was_media)
        if not self._was_media:
            return at_tokens
        first = min(self._at_media, key=lambda sequence: sequence.last_tick)
        is_causal = _is_at_causal(first)
        others = [sequence for sequence in self._at_media if sequence is not first]
        return [first, *(sequence for sequence in others if _is_at_causal(sequence) == is_causal)]

    def _whole_item(self, sequence: Sequence, item: MediaItem) -> list[Row]:
        """Return the row of a media item that cannot be computed in parts."""
        most = min(self._limits.n_batch, self._limits.n_ubatch)
        if item.num_cells <= most:
            return [_row(sequence, item.num_cells)]
        self.failed = [sequence]
        self.error = Unsupported(
            f"a media item of {item.num_cells} cells whose attention is not causal is computed at once, and n_ubatch "
            f"allows {most}; raise n_batch and n_ubatch"
        )
        return []

    def _itl_target_s(self) -> float:
        """Return the target less the time of transfers; at least half of it, so that prompts make progress."""
        target_s = self._limits.itl_target_s
        return max(target_s / 2, target_s - self._kv_cache.transfer_s)


class AdapterTurns:
    """Gives sets of adapters turns of equal parts of `itl_target_s`.

    Tenants take turns, so that a tenant with many sets gets no more turns than another one. Of the next tenant's sets the set
    that has waited longest is next.
    """

    def __init__(self, itl_target_s: float) -> None:
        self._itl_target_s = itl_target_s
        self._current: Lora = ()
        self._since_s = 0.0
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}  # by tenant

    def choose(self, sequences: list[Sequence], now_s: float) -> tuple[Lora, list[Sequence]]:
        """Return the adapters of this tick and the sequences that use them."""
        groups: dict[Lora, list[Sequence]] = {}
        for sequence in sequences:
            groups.setdefault(sequence.request.lora, []).append(sequence)
        if not groups:
            return self._current, []
        is_over = now_s - self._since_s >= self._itl_target_s / len(groups)
        if self._current not in groups or (len(groups) > 1 and is_over):
            self._current, self._since_s = self._next(groups), now_s
        return self._current, groups[self._current]

    def _next(self, groups: dict[Lora, list[Sequence]]) -> Lora:
        last_ticks: dict[str, dict[Lora, int]] = {}  # by tenant and set
        for lora, group in groups.items():
            for sequence in group:
                own = last_ticks.setdefault(sequence.request.options.tenant, {})
                own[lora] = min(own.get(lora, sequence.last_tick), sequence.last_tick)
        lowest = min(self._last_turns.values(), default=0)
        turns = {tenant: self._last_turns.get(tenant, lowest) for tenant in last_ticks}
        tenant = min(turns, key=lambda tenant: (turns[tenant], min(last_ticks[tenant].values())))
        self._num_turns += 1
        self._last_turns = {**turns, tenant: self._num_turns}
        own = last_ticks[tenant]
        others = [lora for lora in own if lora != self._current]
        return min(others or own, key=own.__getitem__)


def checked_allocations(
    allocations: object, sequences: Iterable[AnySequence], budget: int
) -> list[tuple[AnySequence, int]]:
    """Return each sequence of a strategy's plan with its tokens. Raise `StrategyError` for a plan against the rules.

    The message of the error continues a sentence that begins with the strategy's name.
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


def rows_of(allocations: object, sequences: list[Sequence], budget: int, shares: FairShares | None = None) -> list[Row]:
    """Return the rows of a strategy's plan, divided by `shares`. Raise `StrategyError` as `checked_allocations` does."""
    checked = checked_allocations(allocations, sequences, budget)
    if shares is not None and shares.is_shared:
        checked = shares.divide(checked, sequences)
    return [_row(sequence, num_tokens) for sequence, num_tokens in checked]


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
    layout = sequence.layout
    if layout is not TEXT_LAYOUT:  # positions are not cells
        row.position, row.item = layout.position(start), layout.item_at(start)
        row.offset = 0 if row.item is None else start - row.item.start
    return row


class LostTime:
    """The throughput that the inter-token target costs, in the passes of about the last ten seconds.

    Rows that share a pass are cheaper than rows in passes of their own, and while prompts wait, fewer sequences decode than
    could. A pass that decodes meanwhile loses the difference between the cost of its rows and their cost in a batch with the
    sequences that wait.
    """

    def __init__(self, decode_cost: DecodeCost) -> None:
        self._decode_cost = decode_cost
        self._total_s = 0.0  # of passes
        self._lost_s = 0.0
        self._num_mixed = 0.0  # passes that decoded while prompts waited

    @property
    def share(self) -> float:
        """Lost part of the time of all passes, from 0 to 1."""
        return min(1.0, self._lost_s / self._total_s) if self._total_s else 0.0

    @property
    def mean_s(self) -> float:
        """Seconds lost in a pass that decoded while prompts waited."""
        return self._lost_s / self._num_mixed if self._num_mixed else 0.0

    def of_pass(self, num_decode: int, num_prompts: int) -> float:
        """Return the seconds that a pass loses; less than 0 if its rows are cheaper than in the larger batch.

        num_decode: sequences that decode in it. num_prompts: prompts that wait.
        """
        num_rows = num_decode + num_prompts
        return self._decode_cost.seconds(num_decode) - self._decode_cost.seconds(num_rows) * num_decode / num_rows

    def observe(self, seconds: float, lost_s: float | None) -> None:
        """Add a pass and its lost seconds; None if no prompt waited or nothing decoded."""
        fade = math.exp(-seconds / _MEMORY_S)
        self._total_s = self._total_s * fade + seconds
        self._lost_s *= fade
        self._num_mixed *= fade
        if lost_s is not None:
            self._lost_s = max(0.0, self._lost_s + lost_s)
            self._num_mixed += 1
