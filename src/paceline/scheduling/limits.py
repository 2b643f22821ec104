"""The numbers that scheduling needs to know of its backend and its configuration. Frozen records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What backend and configuration allow.

    num_slots: sequences that run at once. n_batch: tokens of a tick; n_ubatch: computed at once. chunk_size: prefill tokens
    of one sequence in a tick. max_positions: tokens that one sequence can hold. num_cells: KV cells that all share; None
    where memory is not made of cells. max_scored: rows of logits that a tick can spend on prompt tokens. can_share_part:
    whether a sequence can take over a part of another's memory; otherwise only the whole. embed_tokens, embed_texts: most of
    an embedding tick. num_seq_ids: running sequences and kept paths; as many as slots, and more where parts can be shared.
    host_bytes: most that saved prefixes may take in host memory.
    itl_target_s, max_tick_s: the time between two tokens that is aimed at, the longest tick while nobody decodes.
    """

    num_slots: int
    n_batch: int
    chunk_size: int
    max_positions: int
    num_cells: int | None
    max_scored: int
    can_share_part: bool
    itl_target_s: float
    max_tick_s: float
    num_seq_ids: int = 0
    host_bytes: int = 0
    n_ubatch: int = 512
    embed_tokens: int = 2048
    embed_texts: int = 64


@dataclass(frozen=True)
class Vocabulary:
    """Of the model: the bytes of every token, without and with its control tokens' text, and the ends of generation."""

    pieces: Sequence[bytes]
    pieces_special: Sequence[bytes]
    eog_ids: frozenset[int]

    @cached_property
    def texts(self) -> Sequence[str | None]:
        """The text of every token that is text by itself; None for parts of characters. Made once, when first asked for."""
        return [_text(piece) for piece in self.pieces]

    @cached_property
    def texts_special(self) -> Sequence[str | None]:
        """As `texts`, with control tokens."""
        return [_text(piece) for piece in self.pieces_special]


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
