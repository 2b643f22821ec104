"""What a drafter with a model needs of it: rows in, the likeliest next tokens out. llama.cpp, or a fake; engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class DraftRow(msgspec.Struct):
    """Tokens of one sequence id to be computed from `position` on. draws: whether its next token is wanted."""

    seq_id: int
    position: int
    token_ids: list[int]
    draws: bool


class DraftToken(NamedTuple):
    """The likeliest next token. probability: that the model gives it; 1 where it was not asked for probabilities."""

    token_id: int
    probability: float


class DraftBackend(Protocol):
    """A context of a draft model. What raises has changed nothing, except for the operations that went before it."""

    def copy(self, from_seq_id: int, to_seq_id: int, end: int) -> None:
        """Copy the positions before `end` of one sequence id to another, which is empty."""

    def truncate(self, seq_id: int, end: int) -> None:
        """Remove the positions of a sequence id from `end` on."""

    def remove(self, seq_id: int) -> None:
        """Empty a sequence id."""

    def step(self, rows: Sequence[DraftRow]) -> list[DraftToken | None]:
        """Compute all rows in one pass; return what each draws, None for one that does not."""
