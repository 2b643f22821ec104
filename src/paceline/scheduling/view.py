"""What a batch strategy reads and returns. Pure: a strategy is one method over a read-only view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec


class SequenceView(Protocol):
    """One running sequence as a strategy sees it. It counts tokens, not phases.

    key: its name in a `TokenAllocation`. num_prompt_tokens: of its prompt; num_tokens: prompt and generated;
    num_computed_tokens: in the KV cache. num_uncomputed_tokens: its work, at least 1. limit: most tokens that it may get in
    this tick, 1 <= limit <= num_uncomputed_tokens. is_decoding: whether it has generated and a row of all its uncomputed
    tokens yields its next token (the last chunk of a prompt is prefill). order: place by arrival, lower came first.
    submitted_s: when; if several tenants run, when it was admitted. last_tick: the tick in which it last had a row, or was
    admitted. priority: higher first; if several tenants run, 0 is the highest of each.
    """

    @property
    def key(self) -> int: ...  # noqa: D102 - said above
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


class TickCost(Protocol):
    """What a tick is expected to take: a high quantile, learnt from the ticks so far."""

    def seconds(self, num_tokens: int, num_cells: int, num_outputs: int = 1) -> float:
        """Return the seconds of a pass over `num_tokens` tokens in all while `num_cells` cells are in use.

        num_outputs: how many of the tokens get logits. A decoding row's does, and a prompt's last one.
        """


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True):
    """The sequences that may have a row in this tick, in the order of their admission, and what the tick may cost.

    chunk_size: most tokens of one sequence, already part of each `limit`. num_cells: KV cells in use.
    itl_target_s: inter-token latency target; max_tick_s: the longest tick while no sequence decodes. lost_share: how much
    of the last ten seconds or so was lost to batches that were small as prompts waited, from 0 to 1; lost_tick_s: seconds
    that a tick which decoded meanwhile lost.
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
    """Tokens of the tick for the sequence of this key."""

    key: int
    num_tokens: int


@runtime_checkable
class BatchStrategy(Protocol):
    """Decides what goes into the next tick. What speculation proposes goes in behind it, where there is room.

    `plan` returns allocations: each key once and from the view, 1 <= num_tokens <= that sequence's limit, together at most
    `budget`, at least one. It must keep nothing of the view, nor wait, nor change anything: the result follows from the view
    alone. A plan that breaks this, or an exception, ends the sequences of the view with a `StrategyError` that names the
    strategy. `paceline.testing.check_strategy` tests a strategy against this contract.
    """

    def plan(self, view: SchedulerView, budget: int) -> Sequence[TokenAllocation]:
        """Return the allocations of the next tick."""
