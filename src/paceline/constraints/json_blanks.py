"""Where blanks may come in generated JSON: after `{ [ , :` and before `} ]`, as in llama.cpp.

llguidance allows them between any two tokens of JSON. Where `}` or `]` cannot follow a value, models that want to end there write
blanks after it instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from paceline.constraints.constraint import TokenTable, TokenWords, clear_tokens, set_tokens
from paceline.constraints.grammar_constraint import GrammarConstraint
from paceline.constraints.thinking import PieceIndex
from paceline.errors import InvalidParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_STRIPPED: Final = b" \n\t\r"
_BLANKS: Final = frozenset(_STRIPPED)
_MAX_CHECKS: Final = 8  # of tokens in a mask that end with blanks after a value
_CANDIDATE: Final = re.compile(rb"[ \n\t\r][,:]|[ \n\t\r]$|^[,:]")


class Place(IntEnum):
    """Where in JSON a text ends."""

    OPEN = 0  # a value, a name or the end may follow
    VALUE = 1  # in or after a value that is no open string, or a name
    BLANK = 2  # in blanks after a value
    STRING = 3
    ESCAPE = 4  # after a backslash


def _next(place: Place, byte: int) -> Place | None:
    """Return the place after a byte; None if the byte may not come there."""
    if place is Place.STRING:
        return Place.VALUE if byte == 0x22 else Place.ESCAPE if byte == 0x5C else Place.STRING
    if place is Place.ESCAPE:
        return Place.STRING
    if byte in _BLANKS:
        return Place.OPEN if place is Place.OPEN else Place.BLANK
    if byte in b",:":
        return None if place is Place.BLANK else Place.OPEN
    return Place.STRING if byte == 0x22 else Place.OPEN if byte in b"{[" else Place.VALUE


def place_after(place: Place, text: bytes) -> Place | None:
    """Return the place after a text; None if the text has blanks before `,` or `:`."""
    for byte in text:
        found = _next(place, byte)
        if found is None:
            return None
        place = found
    return place


@dataclass(frozen=True, slots=True)
class _PlaceTokens:
    """The tokens of a vocabulary that matter at a place.

    Attributes:
        words: A mask without the tokens that have blanks before `,` or `:`.
        pending: Tokens that end with blanks after a value, which only `}` or `]` may follow.
        texts: The text of each of these before its last blanks.
    """

    words: TokenWords
    pending: npt.NDArray[np.int64]
    texts: tuple[bytes, ...]


class BlankTokens:
    """The tokens of a vocabulary that have blanks, by their place in JSON. Constant; any thread.

    Attributes:
        table: The vocabulary.
        at: The tokens that matter at each place.
    """

    def __init__(self, table: TokenTable, index: PieceIndex) -> None:
        self.table, self._index = table, index
        self._endings: dict[bytes, list[list[int]]] = {}  # of texts in the vocabulary alone
        candidates = [(one, piece) for one, piece in enumerate(table.pieces) if _CANDIDATE.search(piece)]
        self.at = {place: self._at(place, candidates) for place in Place}

    def _at(self, place: Place, candidates: list[tuple[int, bytes]]) -> _PlaceTokens:
        refused, pending = [], []
        for one, piece in candidates:
            after = place_after(place, piece)
            text = piece.rstrip(_STRIPPED)
            if after is None:
                refused.append(one)
            elif after is Place.BLANK and not (place is Place.BLANK and not text):
                pending.append((one, text))
        words = np.full(self.table.num_words, 0xFFFFFFFF, dtype=np.uint32)
        clear_tokens(words, refused)
        ids = np.array([one for one, _ in pending], dtype=np.int64)
        return _PlaceTokens(words, ids, tuple(text for _, text in pending))

    def endings(self, text: bytes) -> list[list[int]]:
        """Return the tokens of a text with each of the brackets that may follow blanks."""
        found = self._endings.get(text)
        if found is None:
            found = self._endings[text] = [self._index.split(text + bracket) for bracket in (b"}", b"]")]
        return found


class JsonConstraint(GrammarConstraint):
    """Follows the grammar of a JSON schema, and refuses blanks before `,` and `:`; see `Constraint`."""

    def __init__(self, matcher: LLMatcher, tokens: BlankTokens) -> None:
        super().__init__(matcher)
        self._tokens = tokens
        self._places = [Place.OPEN]  # after each token

    def fill_mask(self, words: TokenWords) -> bool:
        """See `Constraint`."""
        super().fill_mask(words)
        here = self._tokens.at[self._places[-1]]
        np.bitwise_and(words, here.words, out=words)
        if here.pending.size:
            bits = (words[here.pending >> 5] >> (here.pending & 31).astype(np.uint32)) & 1
            (open_places,) = np.nonzero(bits)
            if open_places.size:
                self._check_pending(words, here, open_places.tolist())
        return True

    def _check_pending(self, words: TokenWords, here: _PlaceTokens, places: list[int]) -> None:
        """Leave those of the tokens with blanks at their ends that a bracket may follow."""
        clear_tokens(words, here.pending[places])
        checked = set[bytes]()
        for place in sorted(places, key=lambda one: len(here.texts[one])):
            text = here.texts[place]
            if text not in checked:
                checked.add(text)
                if len(checked) > _MAX_CHECKS or not self._may_close(text):  # longer texts end at the same place
                    return
            set_tokens(words, [int(here.pending[place])])

    def _may_close(self, text: bytes) -> bool:
        """Return whether a bracket may follow a text that comes next."""
        return any(self._matcher.validate_tokens(ids) == len(ids) for ids in self._tokens.endings(text))

    def accept(self, token_id: int) -> None:
        """See `Constraint`. Raises `InvalidParams` for a token that may not come, and does not advance."""
        piece = self._tokens.table.pieces[token_id]
        place = self._places[-1]
        after, text = place_after(place, piece), piece.rstrip(_STRIPPED)
        is_blank = place is Place.BLANK and not text
        if after is None or (after is Place.BLANK and not is_blank and not self._may_close(text)):
            raise InvalidParams(
                f"token_id: the constraint does not allow token {token_id} here: no blanks may come there"
            )
        super().accept(token_id)
        self._places.append(after)

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        super().rollback(num_tokens)
        del self._places[len(self._places) - num_tokens :]

    def copy(self) -> JsonConstraint:
        """See `Constraint`."""
        copied = JsonConstraint(self._matcher.deep_copy(), self._tokens)
        copied._num_accepted, copied._places = self._num_accepted, list(self._places)
        return copied
