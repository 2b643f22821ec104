"""The protocol of constraints, the tokens of a vocabulary by their bytes, and logits processors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, PacelineError
from paceline.params import SamplingParams

MAX_BLANKS: Final = 8
"""Bytes of white space that may come between the end of thinking and content that does not begin with any."""
_MAX_PIECE: Final = 64  # bytes of a token, where a text is split greedily

TokenWords = npt.NDArray[np.uint32]


class Constraint(Protocol):
    """Which tokens may come next in one choice.

    The engine calls one method at a time: `fill_mask` on a thread of its own while a forward pass runs, the others on the
    engine's thread. An exception of a method ends this choice alone, with an error.
    """

    def fill_mask(self, words: TokenWords) -> bool:
        """Set bit `t % 32` of word `t // 32` if token t may come next, and clear all others.

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
        pieces: The bytes of every token by id; of control tokens their spelling.
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


class PieceIndex:
    """A vocabulary's tokens by their bytes. Constant; any thread. Sorting a large one takes a few tenths of a second."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self._by_piece = sorted((piece, token) for token, piece in enumerate(table.pieces) if piece)
        self._ids: dict[bytes, list[int]] = {}
        for piece, token in self._by_piece:
            self._ids.setdefault(piece, []).append(token)
        self.blanks = [token for piece, token in self._by_piece if len(piece) <= MAX_BLANKS and piece.isspace()]
        short = [pair for pair in self._by_piece if len(pair[0]) <= 3 and all(0x80 <= byte < 0xC0 for byte in pair[0])]
        self.continuations = [[token for piece, token in short if len(piece) <= most] for most in range(4)]
        """Tokens that continue a character of which so many bytes are missing, and hold no more."""

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return the tokens that have just these bytes."""
        return [token for piece in pieces for token in self._ids.get(piece, ())]

    def beginning_with(self, prefix: bytes) -> list[int]:
        """Return the tokens that begin with these bytes."""
        found = []
        for piece, token in itertools.islice(self._by_piece, bisect.bisect_left(self._by_piece, (prefix, -1)), None):
            if not piece.startswith(prefix):
                break
            found.append(token)
        return found

    def containing(self, part: bytes) -> list[int]:
        """Return the tokens that have these bytes anywhere."""
        return [token for piece, token in self._by_piece if part in piece]

    def encode(self, text: str) -> list[int]:
        """Return tokens with exactly the bytes of the text: the vocabulary's own, if it adds none."""
        try:
            found = self.table.encode(text) if text else []
        except PacelineError:
            found = []
        is_exact = b"".join(self.table.pieces[token] for token in found) == text.encode()
        return found if is_exact else self.split(text.encode())

    def split(self, data: bytes) -> list[int]:
        """Return tokens of these bytes, the longest first. Raises `InvalidParams` if the vocabulary cannot spell them."""
        found: list[int] = []
        at = 0
        while at < len(data):
            end = next((e for e in range(min(len(data), at + _MAX_PIECE), at, -1) if data[at:e] in self._ids), None)
            if end is None:
                raise InvalidParams(f"thinking: the vocabulary cannot spell {data.decode(errors='replace')!r:.80}")
            found.append(self._ids[data[at:end]][0])
            at = end
        return found


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


LogitRow = npt.NDArray[np.float32]

LogitsProcessor = Callable[[list[int], LogitRow], LogitRow]
"""Takes the tokens that a choice has generated and the logits of the next one, and returns logits."""


class LogitsProcessors:
    """The processors of one choice, in order, and the tokens that it has generated."""

    def __init__(self, processors: Sequence[LogitsProcessor], token_ids: Sequence[int] = ()) -> None:
        self._processors = tuple(processors)
        self._token_ids = list(token_ids)

    def process(self, logits: LogitRow) -> LogitRow:
        """Return the logits that a token is drawn by. They may be the given logits, changed in place.

        Raises:
            InvalidType: A processor returned no row of logits.
            Exception: Whatever a processor raises.
        """
        shape = logits.shape
        for processor in self._processors:
            returned: Any = processor(list(self._token_ids), logits)
            try:
                row = None if returned is None else np.ascontiguousarray(returned, dtype=np.float32)
            except (TypeError, ValueError):
                row = None
            if row is None or row.shape != shape:
                name = getattr(processor, "__qualname__", type(processor).__name__)
                kind = type(returned).__name__ if row is None else f"an array of the shape {row.shape}"
                raise InvalidType(f"logits_processors: {name} must return an array of the shape {shape}, not {kind}")
            logits = row
        return logits

    def accept(self, token_id: int) -> None:
        """Note a token that was drawn."""
        self._token_ids.append(token_id)

    def copy(self) -> LogitsProcessors:
        """Return the same for another choice; the functions are shared."""
        return LogitsProcessors(self._processors, self._token_ids)


def logits_processors_of(params: SamplingParams) -> LogitsProcessors | None:
    """Return the processors of params, and import named processors; None if there are none.

    Raises:
        InvalidParams: A name is not of the form "module:attr".
        InvalidType: The object of a name is no function.
        Exception: Whatever an import raises.
    """
    if not params.logits_processors:
        return None
    processors = list[LogitsProcessor]()
    for index, given in enumerate(params.logits_processors):
        made = validation.import_named(given) if isinstance(given, str) else given
        if not callable(made):
            raise InvalidType(
                f"logits_processors[{index}]: {given!r:.80} is not a function, but a {type(made).__name__}"
            )
        processors.append(made)
    return LogitsProcessors(processors)
