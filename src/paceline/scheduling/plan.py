"""What a tick does, and its outcome: records between scheduler and executor."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.errors import PacelineError
from paceline.kv_cache import MediaItem, Operation, TransferOutput
from paceline.scheduling.sequence import Sequence
from paceline.streaming.chunk import TokenLogprobs

if TYPE_CHECKING:
    from paceline.scheduling.embedding import EmbeddingItem


class RowKind(Enum):
    """What a row is computed from, and how. A pass has rows of one kind: llama.cpp's batches and attention are of one."""

    TOKENS = auto()
    EMBEDDINGS = auto()  # any part of a media item
    WHOLE_EMBEDDINGS = auto()  # all of a media item, as its attention is not causal


class Row(msgspec.Struct):
    """The cells of a sequence that a tick computes, one for each of token_ids, from `position` on.

    draws: whether the last one's logits give its next token. targets: the prompt tokens that follow the first of
    token_ids, to be scored. num_logprobs: of what is drawn or scored; None for none. item: the media item whose cells these
    are, from its cell `offset` on; `position` is where it begins, and token_ids are parts of its key.
    """

    sequence: Sequence
    position: int
    token_ids: list[int]
    draws: bool
    targets: list[int]
    num_logprobs: int | None
    item: MediaItem | None = None
    offset: int = 0

    @property
    def kind(self) -> RowKind:
        """What it is computed from."""
        if self.item is None:
            return RowKind.TOKENS
        return RowKind.EMBEDDINGS if self.item.is_causal else RowKind.WHOLE_EMBEDDINGS


class RowOutput(msgspec.Struct):
    """The outcome of a row: drawn tokens with their logprobs (empty if not requested), scored targets; or an error.

    With `computed` and an error, the tokens are in the KV cache and the draw failed. is_complete: nothing may follow, so that
    the choice ends; without a token if none was left to draw.
    """

    token_ids: SequenceOf[int] = ()
    logprobs: SequenceOf[TokenLogprobs] = ()
    scored: SequenceOf[TokenLogprobs] = ()
    error: PacelineError | None = None
    computed: bool = True
    is_complete: bool = False


class StepPlan(msgspec.Struct):
    """A generation tick: cache operations in order, then one pass over the rows, with these adapters.

    lost_s: seconds that the pass loses as prompts wait (`LostTime`); None where none waits, or no row decodes.
    """

    operations: list[Operation]
    rows: list[Row]
    lora: tuple[tuple[str, float], ...] = ()
    start_s: float = 0.0
    num_cells: int = 0
    lost_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.rows and not self.operations


class EmbeddingPlan(msgspec.Struct):
    """An embedding tick: cache operations, then one pass over these texts."""

    operations: list[Operation]
    items: list[EmbeddingItem]
    pooling: str | None
    start_s: float = 0.0
    is_empty: bool = False


Plan = StepPlan | EmbeddingPlan


class PlanOutput(msgspec.Struct):
    """The outcome of a plan, row by row or text by text.

    step_s: seconds of the passes themselves. num_passes: how many it took; 1 where nothing failed. transfers: the outcome
    of the operations; None where there were none.
    """

    rows: list[RowOutput] = []
    vectors: list[Any] = []
    errors: list[PacelineError | None] = []
    transfers: TransferOutput | None = None
    step_s: float = 0.0
    num_passes: int = 0
