"""The constraint of a JSON schema: llguidance's, with llama.cpp's places of blanks and its length of numbers.

llguidance allows blanks between any two tokens of JSON, and digits without end. Blanks may come after `{ [ , :` and before `} ]`:
if `}` or `]` cannot follow a value, models that want to end there write blanks after it instead. A small model that has begun to
repeat a digit does not stop by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
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
_MAX_EXPONENT: Final = 2  # digits, with which a number of 16 digits is finite as a float
_CANDIDATE: Final = re.compile(rb"[ \n\t\r][,:]|[ \n\t\r]$|^[,:]|\d{16}|[eE][+-]?\d{3}")
_DIGITS: Final = frozenset(b"0123456789")


class Place(IntEnum):
    """The kind of place in JSON at which a text ends."""

    OPEN = 0  # a value, a name or the end may follow
    VALUE = 1  # in or after a value that is no open string, or a name
    BLANK = 2  # in blanks after a value
    STRING = 3
    ESCAPE = 4  # after a backslash


@dataclass(frozen=True, slots=True)
class State:
    """The end of a text in JSON, with the digits that its number may still get.

    Attributes:
        place: The place.
        num_digits: How many digits may follow in a number.
    """

    place: Place
    num_digits: int


def state_after(state: State, text: bytes, max_digits: int) -> State | None:
    """Return the state after a text; None if it has blanks before `,` or `:`, or too many digits in a row.

    max_digits: How many digits a number may have before the point, and after it.
    """
    place, left = state.place, state.num_digits
    for byte in text:
        if place is Place.VALUE and byte in _DIGITS:
            left -= 1
            if left < 0:
                return None
            continue
        if byte not in b"+-":
            left = _MAX_EXPONENT if place is Place.VALUE and byte in b"eE" else max_digits
        found = _next(place, byte)
        if found is None:
            return None
        if found is Place.VALUE and byte in _DIGITS:
            left = max_digits - 1
        place = found
    return State(place, left)


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


@dataclass(frozen=True, slots=True)
class _StateTokens:
    """The tokens of a vocabulary that matter at a state.

    Attributes:
        words: A mask without the tokens that have blanks before `,` or `:`, or too many digits.
        pending: Tokens that end with blanks after a value, which only `}` or `]` may follow.
        texts: The text of each of these before its last blanks.
    """

    words: TokenWords
    pending: npt.NDArray[np.int64]
    texts: tuple[bytes, ...]


class JsonTokens:
    """The tokens of a vocabulary that matter in JSON, by the state before them. Any thread.

    Attributes:
        table: The vocabulary.
        max_digits: How many digits a number may have before the point, and after it.
        start: The state at the beginning of a text.
        nonzero_digits: A mask of the tokens that are a digit from 1 to 9. If a number cannot end after the last digit that it
            may have, as 0.000 cannot above an exclusive bound of 0, they end it.
    """

    def __init__(self, table: TokenTable, index: PieceIndex, max_digits: int) -> None:
        self.table, self.max_digits, self._index = table, max_digits, index
        self.start = State(Place.OPEN, max_digits)
        self._endings: dict[bytes, list[list[int]]] = {}  # of texts in the vocabulary alone
        pieces = list(enumerate(table.pieces))
        self._candidates = [(token, piece) for token, piece in pieces if _CANDIDATE.search(piece)]
        self._with_digits = [(token, piece) for token, piece in pieces if not _DIGITS.isdisjoint(piece)]
        self._at: dict[State, _StateTokens] = {}
        self.nonzero_digits = np.zeros(table.num_words, dtype=np.uint32)
        digits = frozenset(bytes([digit]) for digit in b"123456789")
        set_tokens(self.nonzero_digits, [token for token, piece in self._with_digits if piece in digits])

    def at(self, state: State) -> _StateTokens:
        """Return the tokens that matter at a state."""
        found = self._at.get(state)
        if found is None:
            found = self._at[state] = self._found(state)
        return found

    def _found(self, state: State) -> _StateTokens:
        if state.num_digits != self.max_digits:  # within a number: blanks as after any value
            after = self.at(State(state.place, self.max_digits))
            words = after.words.copy()
            clear_tokens(words, [token for token, piece in self._with_digits if self.after(state, piece) is None])
            return replace(after, words=words)
        refused, pending = [], []
        for token, piece in self._candidates:
            after_piece = self.after(state, piece)
            text = piece.rstrip(_STRIPPED)
            if after_piece is None:
                refused.append(token)
            elif after_piece.place is Place.BLANK and not (state.place is Place.BLANK and not text):
                pending.append((token, text))
        words = np.full(self.table.num_words, 0xFFFFFFFF, dtype=np.uint32)
        clear_tokens(words, refused)
        ids = np.array([token for token, _ in pending], dtype=np.int64)
        return _StateTokens(words, ids, tuple(text for _, text in pending))

    def after(self, state: State, text: bytes) -> State | None:
        """Return the state after a text; None if the text may not come."""
        return state_after(state, text, self.max_digits)

    def endings(self, text: bytes) -> list[list[int]]:
        """Return the tokens of a text with each of the brackets that may follow blanks."""
        found = self._endings.get(text)
        if found is None:
            found = self._endings[text] = [self._index.split(text + bracket) for bracket in (b"}", b"]")]
        return found


class JsonConstraint(GrammarConstraint):
    """Follows the grammar of a JSON schema, and refuses blanks before `,` and `:` and too many digits; see `Constraint`."""

    def __init__(self, matcher: LLMatcher, tokens: JsonTokens, note_use: Callable[[], None]) -> None:
        super().__init__(matcher, note_use)
        self._tokens = tokens
        self._states = [tokens.start]  # after each token

    def fill_mask(self, words: TokenWords) -> bool:
        """See `Constraint`."""
        super().fill_mask(words)
        here = self._tokens.at(self._states[-1])
        if self._states[-1].num_digits == 0 and not (words & here.words).any():
            np.bitwise_and(words, self._tokens.nonzero_digits, out=words)
            return True
        np.bitwise_and(words, here.words, out=words)
        if here.pending.size:
            bits = (words[here.pending >> 5] >> (here.pending & 31).astype(np.uint32)) & 1
            (open_places,) = np.nonzero(bits)
            if open_places.size:
                self._check_pending(words, here, open_places.tolist())
        return True

    def _check_pending(self, words: TokenWords, here: _StateTokens, places: list[int]) -> None:
        """Clear the tokens that end with blanks after a value, unless a bracket may follow them."""
        clear_tokens(words, here.pending[places])
        checked = set[bytes]()
        for place in sorted(places, key=lambda number: len(here.texts[number])):
            text = here.texts[place]
            if text not in checked:
                checked.add(text)
                if len(checked) > _MAX_CHECKS or not self._may_close(text):  # longer texts end at the same place
                    return
            set_tokens(words, [int(here.pending[place])])

    def _may_close(self, text: bytes) -> bool:
        """Return whether a bracket may follow a text that comes next."""
        return any(self._matcher.validate_tokens(ids) == len(ids) for ids in self._tokens.endings(text))

    def _may_come(self, token_id: int) -> bool:
        words = np.zeros(self._tokens.table.num_words, dtype=np.uint32)
        self.fill_mask(words)
        return bool(words[token_id >> 5] >> np.uint32(token_id & 31) & 1)

    def accept(self, token_id: int) -> None:
        """See `Constraint`. Raises `InvalidParams` for a token that may not come, and does not advance."""
        piece = self._tokens.table.pieces[token_id]
        state = self._states[-1]
        after, text = self._tokens.after(state, piece), piece.rstrip(_STRIPPED)
        if after is None and state.num_digits == 0 and self._may_come(token_id):
            after = state
        if after is None:
            raise InvalidParams(
                f"token_id: the constraint does not allow token {token_id} here: no blanks may come there, or "
                f"no more than {self._tokens.max_digits} digits"
            )
        is_blank = state.place is Place.BLANK and not text
        if after.place is Place.BLANK and not is_blank and not self._may_close(text):
            raise InvalidParams(
                f"token_id: the constraint does not allow token {token_id} here: no blanks may come there"
            )
        super().accept(token_id)
        self._states.append(after)

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`."""
        super().rollback(num_tokens)
        del self._states[len(self._states) - num_tokens :]

    def copy(self) -> JsonConstraint:
        """See `Constraint`."""
        copied = JsonConstraint(self._matcher.deep_copy(), self._tokens, self._note_use)
        copied._num_accepted, copied._states = self._num_accepted, list(self._states)
        return copied
