"""What a tick is to do, and what came of it. Records between the scheduler and whatever computes."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import msgspec

from paceline.errors import PacelineError
from paceline.scheduling.embedding import EmbeddingItem
from paceline.scheduling.prefix_tree import Namespace, Saved
from paceline.scheduling.sequence import Sequence
from paceline.streaming.chunk import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Copy:
    """The first num_tokens of one sequence id become those of another, which is empty; the sequence that wants them."""

    from_seq_id: int
    to_seq_id: int
    num_tokens: int
    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Remove:
    """What lies under a sequence id goes away."""

    seq_id: int


@dataclass(frozen=True, slots=True)
class Save:
    """Tokens [start, end) under a sequence id go to host memory too; is_whole: all that it has, as one state.

    tokens: of its path to `end`, as bytes; namespace: where in the prefix tree they belong.
    """

    seq_id: int
    start: int
    end: int
    namespace: Namespace
    tokens: bytes
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens [start, end) of what was saved are added to a sequence id that holds exactly those before."""

    seq_id: int
    data: Saved
    start: int
    end: int
    sequence: Sequence


Operation = Copy | Remove | Save | Load


class Row(msgspec.Struct):
    """A sequence's share of a tick: tokens of it, from `position` on.

    draws: whether the last one's logits give its next token. targets: the prompt tokens that follow the first of
    token_ids, to be scored. num_logprobs: of what is drawn or scored; None for none.
    """

    sequence: Sequence
    position: int
    token_ids: list[int]
    draws: bool
    targets: list[int]
    num_logprobs: int | None


class RowOutput(msgspec.Struct):
    """What came of a row: drawn tokens with their logprobs (empty if not asked for), scored targets; or why nothing did.

    With `computed` and an error, the tokens are in memory and the draw failed.
    """

    token_ids: Many[int] = ()
    logprobs: Many[TokenLogprobs] = ()
    scored: Many[TokenLogprobs] = ()
    error: PacelineError | None = None
    computed: bool = True


@dataclass(slots=True)
class StepPlan:
    """A generation tick: memory operations in order, then one pass over the rows, with these adapters."""

    operations: list[Operation]
    rows: list[Row]
    lora: tuple[tuple[str, float], ...] = ()
    start_s: float = 0.0
    num_cells: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.rows and not self.operations


@dataclass(slots=True)
class EmbeddingPlan:
    """An embedding tick: memory operations, then one pass over these texts."""

    operations: list[Operation]
    items: list[EmbeddingItem]
    pooling: str | None
    start_s: float = 0.0
    is_empty: bool = False


Plan = StepPlan | EmbeddingPlan


@dataclass(slots=True)
class PlanOutput:
    """What came of a plan, row by row or text by text.

    step_s: seconds of the passes themselves; saving_s, loading_s: of the saves and loads before them. num_passes: how
    many it took; one, where nothing failed. saved: what came of the saves that succeeded. failed: the
    sequences that have not got what a copy or a load was to give them, by the sequence id that is concerned.
    """

    rows: list[RowOutput] = field(default_factory=list)
    vectors: list[Any] = field(default_factory=list)
    errors: list[PacelineError | None] = field(default_factory=list)
    saved: list[tuple[Save, Saved]] = field(default_factory=list)
    failed: dict[int, Sequence] = field(default_factory=dict)
    step_s: float = 0.0
    saving_s: float = 0.0
    loading_s: float = 0.0
    num_passes: int = 0
