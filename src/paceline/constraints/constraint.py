"""The protocol of constraints, and what one may know of a vocabulary. Standard library and NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

TokenWords = npt.NDArray[np.uint32]


class Constraint(Protocol):
    """Which tokens may come next in one choice.

    The engine calls one method at a time: `fill_mask` on a thread of its own while a forward pass runs, the others on the
    engine's thread. What a method raises ends this choice with an error, and no other.
    """

    def fill_mask(self, words: TokenWords) -> bool:
        """Set bit `t % 32` of word `t // 32` where token t may come next, and clear all others.

        May be called more than once for the same token: it must not advance.

        Args:
            words: uint32 of shape (ceil(n_vocab / 32),), with any content.

        Returns:
            Whether the words were written; False if every token may come.
        """

    def accept(self, token_id: int) -> None:
        """Advance by a token that was drawn. Never called for a token that ends generation."""

    def rollback(self, num_tokens: int) -> None:
        """Take the last accepted tokens back."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more may come: the choice ends at once, with the finish reason STOP."""

    @property
    def may_end(self) -> bool:
        """Whether the text is valid as it is."""

    def copy(self) -> Self:
        """Return an independent constraint in the same state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """A vocabulary, as far as constraints need it.

    Attributes:
        pieces: The bytes of every token by id, those of control tokens as they are spelt.
        control_ids: Tokens that are no text.
        eog_ids: Tokens that end generation.
        encode: Encodes a text to token ids without adding any; text that spells a control token becomes that token.
    """

    pieces: Sequence[bytes]
    control_ids: frozenset[int]
    eog_ids: frozenset[int]
    encode: Callable[[str], list[int]]

    @property
    def num_words(self) -> int:
        """Words of a mask."""
        return (len(self.pieces) + 31) // 32


ConstraintFactory = Callable[[TokenTable], Constraint]
"""Makes a constraint of a user's own."""


def set_tokens(words: TokenWords, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
    """Set the bits of these tokens, and leave the others as they are."""
    ids = np.asarray(token_ids, dtype=np.int64)
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))


def clear_tokens(words: TokenWords, token_ids: Sequence[int] | npt.NDArray[np.int64]) -> None:
    """Clear the bits of these tokens, and leave the others as they are."""
    ids = np.asarray(token_ids, dtype=np.int64)
    np.bitwise_and.at(words, ids >> 5, ~(np.uint32(1) << (ids & 31).astype(np.uint32)))
