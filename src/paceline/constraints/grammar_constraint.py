"""A constraint that llguidance matches."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from paceline.constraints.constraint import Constraint, PieceIndex, TokenTable, TokenWords, clear_tokens, set_tokens
from paceline.errors import GrammarError, InvalidParams
from paceline.params import PatternTrigger

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ERROR_CHARS = 300


class GrammarConstraint:
    """Follows a compiled grammar; see `Constraint`. No other object may use the matcher. Each accepted token calls `note_use`."""

    def __init__(self, matcher: LLMatcher, note_use: Callable[[], None]) -> None:
        self._matcher, self._note_use = matcher, note_use
        self._num_accepted = 0

    def fill_mask(self, words: TokenWords) -> bool:
        """Fill the mask without the GIL. Raises `GrammarError` if following the grammar exceeds the limits on grammars."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if is_dead(self._matcher):
            raise GrammarError("the constraint cannot be followed here: no text that goes on from here satisfies it")
        if self._matcher.is_error():
            raise GrammarError(f"the constraint cannot be followed here: {short_message(self._matcher.get_error())}")
        return True

    def accept(self, token_id: int) -> None:
        """Raise `InvalidParams` for a token that may not come, and does not advance."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            reason = f": {short_message(self._matcher.get_error())}" if self._matcher.is_error() else ""
            raise InvalidParams(f"token_id: the constraint does not allow token {token_id} here{reason}")
        self._num_accepted += 1
        self._note_use()

    def rollback(self, num_tokens: int) -> None:
        """Raise `InvalidParams` for more tokens than were accepted."""
        if not 0 <= num_tokens <= self._num_accepted or not self._matcher.rollback(num_tokens):
            raise InvalidParams(
                f"num_tokens must be from 0 to {self._num_accepted}, which were accepted, not {num_tokens}"
            )
        self._num_accepted -= num_tokens

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    @property
    def may_end(self) -> bool:
        return self._matcher.is_accepting()

    def copy(self) -> GrammarConstraint:
        copied: GrammarConstraint = copy.copy(self)
        copied._matcher = self._matcher.deep_copy()
        return copied


def is_dead(matcher: LLMatcher) -> bool:
    """Return whether nothing may follow although the text is not whole; llguidance would let it end all the same."""
    if matcher.is_error():
        return matcher.get_error().startswith("NoExtension")
    return matcher.is_stopped() and not matcher.is_accepting()


def short_message(message: str) -> str:
    """Return a message of llguidance in one line, without its dump of states and the place in its source."""
    if message.startswith("panic:") or " panic:" in message[:40]:
        return "the grammar is larger than its compiler can take; write a smaller one"
    return " ".join(message.partition("<state>")[0].split())[:_ERROR_CHARS]


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
    """The end of a text in JSON: the kind of place, and how many digits may follow in its number."""

    place: Place
    num_digits: int


def state_after(state: State, text: bytes, max_digits: int) -> State | None:
    """Return the state after a text; None if it has blanks before `,` or `:`, or more than `max_digits` digits in a row."""
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

    def accept(self, token_id: int) -> None:
        """Raise `InvalidParams` for a token that may not come, and does not advance."""
        piece = self._tokens.table.pieces[token_id]
        state = self._states[-1]
        after, text = self._tokens.after(state, piece), piece.rstrip(_STRIPPED)
        if after is None and state.num_digits == 0:
            words = np.zeros(self._tokens.table.num_words, dtype=np.uint32)
            self.fill_mask(words)
            if words[token_id >> 5] >> np.uint32(token_id & 31) & 1:
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
        super().rollback(num_tokens)
        del self._states[len(self._states) - num_tokens :]

    def copy(self) -> JsonConstraint:
        copied: JsonConstraint = copy.copy(self)
        copied._matcher, copied._states = self._matcher.deep_copy(), list(self._states)
        return copied


_MAX_TEXT = 2**16
"""Bytes at the beginning of the free text that are searched for a pattern that begins with ^."""
_TAIL = 512
"""Bytes before the newest token that are searched for other patterns."""
_END = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<end>\$)", re.DOTALL)


class CallTriggers:
    """The triggers of the calls of a request. Constant; any thread."""

    def __init__(self, triggers: Sequence[object]) -> None:
        """Compile the triggers. Raises `GrammarError` for a pattern that is malformed."""
        words = [trigger.encode() for trigger in triggers if isinstance(trigger, str)]
        self._token_ids = frozenset(trigger for trigger in triggers if isinstance(trigger, int))
        self._first_words = [word[1:] for word in words if word.startswith(b"^") and len(word) > 1]
        self._words = [word for word in words if not word.startswith(b"^") or len(word) == 1]
        self._patterns = list[tuple[re.Pattern[bytes], PatternTrigger]]()
        for trigger in (trigger for trigger in triggers if isinstance(trigger, PatternTrigger)):
            # In llama.cpp's triggers $ matches only the end of the text.
            text = _END.sub(lambda match: r"\Z" if match["end"] else match[0], trigger.pattern)
            try:
                self._patterns.append((re.compile(text.encode()), trigger))
            except re.error as error:
                raise GrammarError(
                    f"call_grammar.triggers: the pattern {trigger.pattern!r:.80} is malformed: {error}"
                ) from None

    def start(self, text: bytearray, begin: int, token_id: int, *, is_whole: bool) -> int | None:
        """Return the position in the text at which a call begins; None if no call begins.

        The newest token is at the end of the text, from `begin` on. With `is_whole` the text has its beginning, which long texts
        lose.
        """
        if token_id in self._token_ids:
            return begin
        if is_whole and any(text.startswith(word) for word in self._first_words):
            return 0
        found = [text.find(word, max(0, begin - len(word) + 1)) for word in self._words]
        starts = [place for place in found if place >= 0]
        if starts:
            return min(starts)
        for pattern, trigger in self._patterns:
            is_anchored = trigger.is_full or trigger.pattern.startswith("^")
            if is_anchored and (not is_whole or len(text) > _MAX_TEXT):
                continue
            search_from = 0 if is_anchored else max(0, begin - _TAIL)
            match = pattern.fullmatch(text) if trigger.is_full else pattern.search(text, search_from)
            if match is not None:
                groups = (match.start(group) for group in range(1, pattern.groups + 1) if match[group])
                return next(groups, match.start())
        return None


class CallConstraint:
    """Follows the free text of a choice, and the grammar of its calls from the first one on; see `Constraint`."""

    def __init__(
        self,
        triggers: CallTriggers,
        begin: Callable[[], Constraint],
        table: TokenTable,
        split: Callable[[bytes], list[int]],
    ) -> None:
        """Wait for a trigger. `begin` returns a new constraint of calls; `split` returns tokens that spell some bytes."""
        self._triggers, self._begin, self._table, self._split = triggers, begin, table, split
        self._text, self._starts = bytearray(), list[int]()  # free text, and where each of its tokens begins
        self._token_ids = list[int]()
        self._is_whole = True
        self._calls: Constraint | None = None
        self._num_followed = 0  # tokens that the grammar got since it began

    @property
    def is_complete(self) -> bool:
        return self._calls is not None and self._calls.is_complete

    @property
    def may_end(self) -> bool:
        return self._calls is None or self._calls.may_end

    def fill_mask(self, words: TokenWords) -> bool:
        return self._calls is not None and self._calls.fill_mask(words)

    def accept(self, token_id: int) -> None:
        """Raise `InvalidParams` for a token that a call does not allow."""
        if self._calls is not None:
            self._calls.accept(token_id)
            self._num_followed += 1
            return
        begin = len(self._text)
        self._text += self._table.pieces[token_id]
        self._starts.append(begin)
        self._token_ids.append(token_id)
        start = self._triggers.start(self._text, begin, token_id, is_whole=self._is_whole)
        if start is not None:
            self._calls = self._begun(start)
        elif len(self._text) > 4 * _MAX_TEXT:  # the first half is dropped
            count = len(self._starts) // 2
            cut = self._starts[count]
            del self._text[:cut], self._token_ids[:count]
            self._starts = [begin - cut for begin in self._starts[count:]]
            self._is_whole = False

    def _begun(self, start: int) -> Constraint | None:
        """Return the constraint of calls after the text from `start` on; None if no call begins with this text."""
        calls = self._begin()
        ends = [*self._starts[1:], len(self._text)]
        try:
            for token_id, begin, end in zip(self._token_ids, self._starts, ends, strict=True):
                if end > start:
                    for piece_id in [token_id] if begin >= start else self._split(bytes(self._text[start:end])):
                        calls.accept(piece_id)
        except InvalidParams:  # the native grammar refuses such a token where it would begin a call
            return None
        self._num_followed = 0
        return calls

    def rollback(self, num_tokens: int) -> None:
        """Raise `InvalidParams` for more tokens than were accepted."""
        if not 0 <= num_tokens <= self._num_followed + len(self._token_ids):
            raise InvalidParams(f"num_tokens must not be more than were accepted, not {num_tokens}")
        if self._calls is not None:
            if num_tokens <= self._num_followed:
                self._calls.rollback(num_tokens)
                self._num_followed -= num_tokens
                return
            num_tokens -= self._num_followed
            self._calls, self._num_followed = None, 0
        if num_tokens:
            del self._text[self._starts[-num_tokens] :], self._starts[-num_tokens:], self._token_ids[-num_tokens:]

    def copy(self) -> CallConstraint:
        copied: CallConstraint = copy.copy(self)
        copied._text, copied._starts, copied._token_ids = bytearray(self._text), [*self._starts], [*self._token_ids]
        copied._calls = None if self._calls is None else self._calls.copy()
        return copied
