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

    draws: whether the last one's logits give its next token. num_drafts: how many of token_ids, at their end, are only
    proposed; the row then draws behind the last known token and behind every draft up to the first wrong one. targets: the
    prompt tokens that follow the first of token_ids, to be scored. num_logprobs: of what is drawn or scored; None for none.
    item: the media item whose cells these are, from its cell `offset` on; `position` is where it begins, and token_ids are
    parts of its key.
    """

    sequence: Sequence
    position: int
    token_ids: list[int]
    draws: bool
    targets: list[int]
    num_logprobs: int | None
    item: MediaItem | None = None
    offset: int = 0
    num_drafts: int = 0

    @property
    def kind(self) -> RowKind:
        """What it is computed from."""
        if self.item is None:
            return RowKind.TOKENS
        return RowKind.EMBEDDINGS if self.item.is_causal else RowKind.WHOLE_EMBEDDINGS

    @property
    def drafts(self) -> list[int]:
        """The proposed tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_outputs(self) -> int:
        """How many of its tokens' logits are computed."""
        return self.draws + self.num_drafts or len(self.targets)

    def num_right(self, token_ids: SequenceOf[int]) -> int:
        """Return how many of its drafts are right, where these tokens were drawn."""
        num_right = 0
        for draft, token_id in zip(self.drafts, token_ids, strict=False):
            if draft != token_id:
                break
            num_right += 1
        return num_right


class RowOutput(msgspec.Struct):
    """The outcome of a row: drawn tokens with their logprobs (empty if not requested), scored targets; or an error.

    Of a row with drafts more than one token may be drawn: the right drafts, and one behind them. With `computed` and an
    error, the tokens are in the KV cache and the draw behind token_ids failed. is_complete: nothing may follow, so that the
    choice ends; without a token if none was left to draw. num_verified: drafts that were in the pass: a backend leaves out
    those that a constraint forbids, and all behind them. num_accepted: of these the right ones, which are in the KV cache as
    well; a token may be drawn that is a draft left out. is_taken_back: as a draft was wrong and memory could not be cut there,
    nothing of the row is in the KV cache; what was drawn stands. waited_s: seconds before the pass in which masks along its
    drafts were filled.
    """

    token_ids: SequenceOf[int] = ()
    logprobs: SequenceOf[TokenLogprobs] = ()
    scored: SequenceOf[TokenLogprobs] = ()
    error: PacelineError | None = None
    computed: bool = True
    is_complete: bool = False
    num_verified: int = 0
    num_accepted: int = 0
    is_taken_back: bool = False
    waited_s: float = 0.0


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
