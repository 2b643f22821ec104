"""Batch strategies: the views and allocations of a strategy, the shipped strategies, and strategies by name.

Shipped are `paced`, the default: as much prefill beside decoding as the inter-token latency target allows; `decode_maximal`:
decode first, prompts share the rest of the budget; `prefill_priority`: prompts first, for throughput of many prompts; and
`balanced`: half and half. A strategy is one method over a read-only view, and keeps nothing of a sequence but its key and counts.

A name is that of a shipped strategy, any `module:attr`, or an entry point of the group `paceline.batch_strategies`, which other
packages announce. Options follow the name, as in `paced:patience=4`, or stand in a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from paceline import validation
from paceline.cost_model import BLOCK_TOKENS, TILE_TOKENS
from paceline.errors import InvalidParams, InvalidType
from paceline.named_object import NamedObject
from paceline.request import turn_s

ENTRY_POINT_GROUP = "paceline.batch_strategies"


class SequenceView(Protocol):
    """One running sequence as a strategy sees it. It counts tokens, not phases.

    key: its name in a `TokenAllocation`. num_tokens: prompt and generated; num_computed_tokens: in the KV cache;
    num_uncomputed_tokens: its work, at least 1. limit: most tokens that it may get in this tick, 1 <= limit <=
    num_uncomputed_tokens. is_decoding: whether it has generated and a row of all its uncomputed tokens yields its next token (the
    last chunk of a prompt is prefill). order: place by arrival, lower came first. submitted_s: time of its submission. last_tick:
    the tick of its last row, or of its admission. priority: higher first.
    """

    @property
    def key(self) -> int: ...  # noqa: D102 - see the class
    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_computed_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_uncomputed_tokens(self) -> int: ...  # noqa: D102
    @property
    def limit(self) -> int: ...  # noqa: D102
    @property
    def is_decoding(self) -> bool: ...  # noqa: D102
    @property
    def order(self) -> int: ...  # noqa: D102
    @property
    def submitted_s(self) -> float: ...  # noqa: D102
    @property
    def last_tick(self) -> int: ...  # noqa: D102
    @property
    def priority(self) -> int: ...  # noqa: D102


AnySequence = TypeVar("AnySequence", bound=SequenceView)


class TickCost(Protocol):
    """The expected seconds of a tick: a high quantile, learned from the ticks so far."""

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        """Return the seconds of a pass over `num_tokens` tokens in all while `num_cells` cells are in use.

        num_outputs: tokens that get logits: each decoding row's, and the last of a prompt.
        """


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences that may have a row in this tick, in the order of their admission, and the allowed cost of the tick.

    chunk_size: most tokens of one sequence, already part of each `limit`. num_cells: KV cells in use. itl_target_s: inter-token
    latency target; max_tick_s: the longest tick while no sequence decodes. lost_share: part of about the last ten seconds that
    was lost to batches that were small as prompts waited, from 0 to 1; lost_tick_s: seconds lost in each tick that decoded
    meanwhile.
    """

    sequences: Sequence[SequenceView]
    chunk_size: int
    num_cells: int
    tick: int
    now_s: float
    itl_target_s: float
    max_tick_s: float
    cost: TickCost
    lost_share: float = 0.0
    lost_tick_s: float = 0.0


class TokenAllocation(msgspec.Struct, frozen=True):
    """Tokens of the tick for the sequence with this key."""

    key: int
    num_tokens: int


@runtime_checkable
class BatchStrategy(Protocol):
    """Decides which tokens the next tick computes. Drafts of speculation are added afterwards if there is room.

    `plan` returns at least one allocation: each key once and from the view, 1 <= num_tokens <= that sequence's limit, together at
    most `budget`. It must keep nothing of the view, nor wait, nor change anything: the result follows from the view alone. A plan
    that breaks these rules, or an exception, ends the sequences of the view with a `StrategyError` that names the strategy.
    `paceline.testing.check_strategy` tests a strategy against this contract.
    """

    def plan(self, view: SchedulerView, budget: int) -> Sequence[TokenAllocation]:
        """Return the allocations of the next tick."""


class BatchBuilder:
    """Builds token allocations. tokens_left: of the budget."""

    __slots__ = ("_allocated", "tokens_left")

    def __init__(self, budget: int) -> None:
        self._allocated: dict[int, int] = {}
        self.tokens_left = budget

    def add_prefill(self, sequences: Iterable[SequenceView], most: int) -> None:
        """Add at most `most` tokens together, in this order: to each sequence as many as it may still have."""
        for sequence in sequences:
            room = min(most, self.tokens_left)
            if room <= 0:
                return
            most -= self._add(sequence, min(room, sequence.limit - self._allocated.get(sequence.key, 0)))

    def add_decode(self, decoders: Sequence[SequenceView], most: int) -> None:
        """Add at most `most` tokens together to sequences without an allocation: one each in this order, then the rest."""
        room = min(most, self.tokens_left)
        for behind, decoder in zip(range(len(decoders) - 1, -1, -1), decoders, strict=True):
            if room <= 0:
                return
            room -= self._add(decoder, min(decoder.limit, max(1, room - behind)))

    def allocations(self) -> list[TokenAllocation]:
        """Return the allocations, one for each sequence."""
        return [TokenAllocation(key, num_tokens) for key, num_tokens in self._allocated.items()]

    def _add(self, sequence: SequenceView, num_tokens: int) -> int:
        if num_tokens > 0:
            self._allocated[sequence.key] = self._allocated.get(sequence.key, 0) + num_tokens
            self.tokens_left -= num_tokens
        return num_tokens


def split(sequences: Iterable[SequenceView]) -> tuple[list[SequenceView], list[SequenceView]]:
    """Return the sequences that decode, and the others: prompts, or tokens to compute again after a preemption."""
    decoders: list[SequenceView] = []
    prompts: list[SequenceView] = []
    for sequence in sequences:
        (decoders if sequence.is_decoding else prompts).append(sequence)
    return decoders, prompts


def longest_waiting_first(sequences: Iterable[SequenceView]) -> list[SequenceView]:
    """Return the sequences by the tick of their last row, so that they take turns if not all fit."""
    return sorted(sequences, key=attrgetter("last_tick", "order"))


def most_urgent_first(sequences: Iterable[AnySequence]) -> list[AnySequence]:
    """Return the sequences by priority and arrival, with ageing: by `submitted_s - 10 s * priority`."""
    return sorted(sequences, key=lambda sequence: (turn_s(sequence.submitted_s, sequence.priority), sequence.order))


def ticks_without_row(sequences: Sequence[SequenceView], tick: int) -> int:
    """Return the ticks since the last row of any sequence (1: the tick before; just admitted: less); 0 without sequences."""
    return tick - max(sequence.last_tick for sequence in sequences) if sequences else 0


def num_wanted(sequences: Iterable[SequenceView]) -> int:
    """Return the tokens that the sequences may have in this tick, all together."""
    return sum(sequence.limit for sequence in sequences)


class Paced:
    """Decode rows first; prompts get the tokens that keep the tick within `view.itl_target_s`, as `view.cost` expects.

    The target yields if keeping it would cost too much, and by no more than that:

    - Prompts get at least `prefill_share` of the time. If decoding alone takes too much of the target, the tick is longer, up to
      `view.max_tick_s`; beyond that prompts get half of it.
    - Prompts in pieces cost throughput: fewer sequences decode beside each piece than could, and a row of a small batch is dearer
      than a row of a large batch. While more than 1 - `efficiency` of the time is lost so (`view.lost_share`), a tick is long
      enough that its loss is no larger part of it, up to `view.max_tick_s`.
    - Prompts get at least `least_tokens`, all together.
    - A tick of less than 64 tokens is filled up to 64 if that takes at most `stretch` times the allowed time and makes prompts
      `stretch` times as fast: on some backends a token costs less from 64 on.
    - A prompt is cut so that the tick has a multiple of four tokens: kernels compute four at once, and a rest costs as much.

    While no sequence decodes, a tick is as large as `view.max_tick_s` allows, and at least `least_tokens`.

    Prompts come in the order of `submitted_s + remaining time alone - 10 s * priority`: the shortest first, but a long prompt
    comes before all that are submitted after the time at which it could have been done. Each prompt gets as much as it may.

    If decoding alone fills the budget, the sequence that waits longest comes first, and prompts that had no row for more than
    `patience` ticks get `least_tokens`, at most half of the budget, before all others.
    """

    def __init__(
        self,
        *,
        efficiency: float = 0.99,
        prefill_share: float = 0.7,
        least_tokens: int = 16,
        patience: int = 8,
        stretch: float = 1.25,
    ) -> None:
        self._efficiency = validation.number("efficiency", efficiency, 0, 1)
        self._prefill_share = validation.number("prefill_share", prefill_share, 0, 0.99)
        self._least_tokens = validation.integer("least_tokens", least_tokens, 1)
        self._patience = validation.integer("patience", patience, 1)
        self._stretch = validation.number("stretch", stretch, 1, 100)

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        """Return the allocations of the next tick."""
        if all(sequence.is_decoding for sequence in view.sequences):  # as in most ticks
            allocations = [TokenAllocation(sequence.key, sequence.limit) for sequence in view.sequences]
            if sum(allocation.num_tokens for allocation in allocations) <= budget:
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
        limit_s = self._limit_s(view, num_decode)
        stretch = self._stretch if num_decode else 1.0
        num_prefill = _Search(view, num_decode, most).best(min(self._least_tokens, most), limit_s, stretch)
        batch.add_prefill(prompts, num_prefill - num_early)
        return batch.allocations()

    def _earliest_due_first(self, prompts: list[SequenceView], view: SchedulerView, budget: int) -> list[SequenceView]:
        if len(prompts) < 2:
            return prompts
        chunk = max(1, min(view.chunk_size, budget))
        token_s = view.cost.seconds(chunk, view.num_cells) / chunk
        return sorted(
            prompts,
            key=lambda prompt: (
                turn_s(prompt.submitted_s, prompt.priority) + prompt.num_uncomputed_tokens * token_s,
                prompt.order,
            ),
        )

    def _limit_s(self, view: SchedulerView, num_decode: int) -> float:
        """Return the allowed seconds of the tick, with `num_decode` tokens of decoding."""
        if not num_decode:
            return view.max_tick_s
        decode_s = view.cost.seconds(num_decode, view.num_cells, num_decode)
        shared_s = min(decode_s / (1 - self._prefill_share), max(view.max_tick_s, 2 * decode_s))
        limit_s = max(view.itl_target_s, shared_s)
        most_lost = 1 - self._efficiency
        if view.lost_share <= most_lost:
            return limit_s
        efficient_s = view.lost_tick_s / most_lost if most_lost else view.max_tick_s
        return max(limit_s, min(view.max_tick_s, efficient_s))


class _Search:
    """The largest prefill beside `num_decode` tokens, of at most `most`."""

    def __init__(self, view: SchedulerView, num_decode: int, most: int) -> None:
        self._view, self._num_decode, self._most = view, num_decode, most
        self._tile = TILE_TOKENS - num_decode  # tokens that fill a tile

    def best(self, least: int, limit_s: float, stretch: float) -> int:
        """Return the largest for a tick of at most `limit_s`: in whole tiles, else below a tile, else a tile that is worth it."""
        if self._most <= least or self._seconds(self._most) <= limit_s:
            return self._most
        num_prefill = self._fitting(least, limit_s, stretch)
        return max(least, num_prefill - (self._num_decode + num_prefill) % BLOCK_TOKENS)

    def _fitting(self, least: int, limit_s: float, stretch: float) -> int:
        if not least < self._tile < self._most:
            return self._largest(least, self._most, limit_s)
        if self._seconds(self._tile) <= limit_s:
            return self._largest(self._tile, self._most, limit_s)
        below = self._largest(least, self._tile, limit_s)
        return self._tile if self._is_worth_it(below, stretch, limit_s) else below

    def _largest(self, low: int, high: int, limit_s: float) -> int:
        """Return the largest number in [low, high) that fits, else `low`, which is always allowed."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._seconds(middle) <= limit_s else (low, middle)
        return low

    def _is_worth_it(self, below: int, stretch: float, limit_s: float) -> bool:
        tile_s = self._seconds(self._tile)
        return tile_s <= stretch * limit_s and self._tile * self._seconds(below) >= stretch * below * tile_s

    def _seconds(self, num_tokens: int) -> float:
        cost, num_cells = self._view.cost, self._view.num_cells + num_tokens
        return cost.seconds(self._num_decode + num_tokens, num_cells, max(1, self._num_decode))


class DecodeMaximal:
    """Decode rows first, then prompts by priority and arrival (with ageing), each as much as it may have.

    If decoding alone fills the budget, the sequence with the oldest last row comes first, and prompts that had no row for more
    than `patience` ticks get half of a tick's budget before all others.
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


class PrefillPriority:
    """Prompts by priority and arrival (with ageing) first, then decode rows, the row that waits longest first.

    While prompts fill the budget no sequence decodes, but not for ever: a sequence that has waited `patience` ticks comes before
    the prompts. If the budget is too small for that to leave half of it to the prompts, patience is longer: twice the ticks that
    one row for every sequence takes.
    """

    def __init__(self, *, patience: int = 8) -> None:
        self._patience = validation.integer("patience", patience, 1)

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        """Return the allocations of the next tick."""
        decoders, prompts = split(view.sequences)
        decoders = longest_waiting_first(decoders)
        since = view.tick - max(self._patience, -(-2 * num_wanted(decoders) // budget))
        num_overdue = sum(decoder.last_tick <= since for decoder in decoders)  # they are first in the list
        batch = BatchBuilder(budget)
        batch.add_decode(decoders[:num_overdue], budget)
        batch.add_prefill(most_urgent_first(prompts), budget)
        batch.add_decode(decoders[num_overdue:], budget)
        return batch.allocations()


class Balanced:
    """Half of the budget for decode rows, half for prompts; tokens that one side does not need go to the other.

    Decode rows take turns if not all fit (the row that waits longest first); prompts come by priority and arrival, with ageing.
    The odd token goes to the side that had a row longer ago, so a budget of 1 alternates.
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
        """Return the tokens for decoding and for prompts."""
        wanted_decode, wanted_prefill = num_wanted(decoders), num_wanted(prompts)
        half = budget // 2
        if budget % 2 and ticks_without_row(decoders, tick) >= ticks_without_row(prompts, tick):
            half += 1
        num_prefill = min(budget - min(half, wanted_decode), wanted_prefill)
        return min(budget - num_prefill, wanted_decode), num_prefill


_SHIPPED: Mapping[str, type] = {
    "balanced": Balanced,
    "decode_maximal": DecodeMaximal,
    "paced": Paced,
    "prefill_priority": PrefillPriority,
}


def resolve_strategy(value: str | Mapping[str, Any] | BatchStrategy) -> BatchStrategy:
    """Return the strategy of a name, of `module:attr` or of an entry point, in this order; a strategy itself is returned as is.

    A name may have options, as "paced:patience=4,stretch=1.5" or {"name": "paced", "patience": 4, "stretch": 1.5}. It leads to a
    strategy or to a class, which is called with the options. Raises `InvalidParams` for a name that is unknown or cannot be
    loaded and for a wrong value of an option, `InvalidType` for an unknown option and for an object without a method `plan`.
    """
    if not isinstance(value, (str, Mapping)):
        return _checked(value, "strategy")
    named = NamedObject.parse("strategy", value, _SHIPPED)
    name = named.name
    if name in _SHIPPED:
        load: Callable[[], Any] = partial(_SHIPPED.__getitem__, name)
    else:
        load = partial(validation.import_named, name) if ":" in name else _announced(name)
    return _checked(named.make(load), f"strategy {name!r}")


def check_strategy_name(value: object) -> None:
    """Raise the errors of a name and its options that can be found without importing code that is not shipped."""
    if isinstance(value, (str, Mapping)) and NamedObject.parse("strategy", value, _SHIPPED).name in _SHIPPED:
        resolve_strategy(value)


def _announced(name: str) -> Callable[[], Any]:
    """Return the loader of the entry point of this name."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    try:
        return points[validation.choice("strategy", name, sorted({*_SHIPPED, *points}))].load
    except InvalidParams as error:
        raise InvalidParams(f"{error}; one of your own is given as 'module:attr' or as an object") from None


def _checked(value: Any, name: str) -> BatchStrategy:
    if isinstance(value, type):
        raise InvalidType(f"{name} must be an object with a method plan, not the class itself; pass {value.__name__}()")
    if not callable(getattr(value, "plan", None)):
        raise InvalidType(
            f"{name} must be an object with a method plan, or name one; a {type(value).__name__} has none"
        )
    strategy: BatchStrategy = value
    return strategy
