"""What a batch strategy sees and answers. Pure: a strategy is one method over a read-only view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec


class SequenceView(Protocol):
    """One running sequence, as a strategy may see it. It counts tokens, not phases.

    key: its name in a `Share`. num_prompt, num_known, num_computed: tokens of its prompt, known so far (prompt, generated
    and proposed), and in memory. num_left: known but not computed, at least 1: its work. limit: most tokens that it may get
    this tick, 1 <= limit <= num_left. is_decoding: whether a row of `num_left` tokens gives its next token and nothing but
    that was left (a prompt's last chunk is no decoding). order: place by arrival, lower came first. submitted_s: when.
    last_tick: the tick in which it last had a row, or was admitted. priority: higher first.
    """

    @property
    def key(self) -> int: ...  # noqa: D102 - said above
    @property
    def num_prompt(self) -> int: ...  # noqa: D102
    @property
    def num_known(self) -> int: ...  # noqa: D102
    @property
    def num_computed(self) -> int: ...  # noqa: D102
    @property
    def num_left(self) -> int: ...  # noqa: D102
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
    """What a tick is expected to take: learnt from the ticks so far, a high quantile."""

    def seconds(self, num_tokens: int, num_cells: int) -> float:
        """Of a pass over `num_tokens` tokens in all while `num_cells` cells are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The sequences that may have a row in this tick, in the order of their admission, and what the tick may cost.

    chunk_size: most tokens of one sequence, already part of each `limit`. num_cells: KV cells in use.
    itl_target_s, max_tick_s: the time between two tokens that is aimed at, and the longest tick while nobody decodes.
    """

    sequences: Sequence[SequenceView]
    chunk_size: int
    num_cells: int
    tick: int
    now_s: float
    itl_target_s: float
    max_tick_s: float
    cost: TickCost


class Share(msgspec.Struct, frozen=True):
    """So many tokens of the tick for the sequence of this key."""

    key: int
    num_tokens: int


@runtime_checkable
class BatchStrategy(Protocol):
    """Decides what goes into the next tick.

    `plan` answers shares: each key once and from the view, 1 <= num_tokens <= that sequence's limit, together at most
    `budget`, at least one. It must not keep anything of the view, nor wait, nor change anything: what it decides follows
    from the view alone. A plan that breaks this, or an exception, ends the sequences of the view with a `StrategyError`
    that names the strategy. `paceline.testing.check_strategy` tries a strategy out.
    """

    def plan(self, view: View, budget: int) -> Sequence[Share]:
        """The shares of the next tick."""
