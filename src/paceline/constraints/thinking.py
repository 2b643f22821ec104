"""A constraint that lets another one sleep while a model thinks, and that ends thinking at a budget of tokens.

    BEFORE ──start──> THINKING ──end──> AFTER ──> CONTENT        is_open begins with THINKING
      │                  │ budget          ^
      │                  └──> FORCED ──────┘                     message and end, token by token
      └──other text──> CONTENT

Tags are matched in bytes, since a token may hold part of a tag, or a tag and text after it.
"""

from __future__ import annotations

import copy
import enum
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.constraints.constraint import MAX_BLANKS, Constraint, PieceIndex, TokenWords, clear_tokens, set_tokens
from paceline.errors import InvalidParams
from paceline.params import ThinkingParams

_ALL = np.uint32(0xFFFFFFFF)
_MAX_ROLLBACK = 256
_UTF8_LENGTHS = ((0xF0, 4), (0xE0, 3), (0xC0, 2))


class _Phase(enum.Enum):
    BEFORE = enum.auto()
    THINKING = enum.auto()
    FORCED = enum.auto()
    AFTER = enum.auto()
    CONTENT = enum.auto()


class ThinkingTokens:
    """Which tokens matter to the tags of thinking, in one vocabulary. Constant; any thread."""

    def __init__(self, start: str, ends: Sequence[str], message: str, index: PieceIndex) -> None:
        self._index, self.table = index, index.table
        self.start = start.encode()
        self.ends = tuple(end.encode() for end in ends)
        self.message, self.end = index.encode(message), index.encode(ends[0])
        self.blanks, self.continuations = index.blanks, index.continuations
        rests = [self.start[at:] for at in range(len(self.start))]
        self.completing = [index.beginning_with(rest) for rest in rests]
        """Tokens that complete the start tag, by how many of its bytes have come."""
        size, pieces = len(self.start), self.table.pieces
        self.completing_first = [
            token
            for token in index.containing(self.start)
            if self.start in (pieces[token][:size], pieces[token].lstrip()[:size])
        ]
        """Tokens that are the start tag, after white space or none."""
        self.spelling = [
            [*index.of(rest[:end] for end in range(1, len(rest))), *completing]
            for rest, completing in zip(rests, self.completing, strict=True)
        ]
        """Tokens that continue or complete it."""
        self._passing = {(tag, at): self._passing_end(tag, at) for tag in self.ends for at in range(len(tag))}

    def passing(self, tail: bytes) -> list[int]:
        """Return the tokens that hold content after an end of thinking, if the text so far ends with `tail`."""
        found = [token_ids for (tag, at), token_ids in self._passing.items() if tail.endswith(tag[:at])]
        return list(itertools.chain.from_iterable(found))

    def rest_of_end(self, tail: bytes) -> list[int]:
        """Return the tokens that end thinking. The text so far may have begun the tag."""
        tag = self.ends[0]
        begun = next((at for at in range(len(tag) - 1, 0, -1) if tail.endswith(tag[:at])), 0)
        return self._index.split(tag[begun:]) if begun else self.end

    def _passing_end(self, tag: bytes, at: int) -> list[int]:
        pieces = self.table.pieces
        if at:
            rest = len(tag) - at
            return [token for token in self._index.beginning_with(tag[at:]) if not _is_blank(pieces[token][rest:])]
        return [token for token in self._index.containing(tag) if not _is_blank(pieces[token].partition(tag)[2])]


@dataclass(frozen=True, slots=True)
class _State:
    """The place in the text. num_matched: bytes of the start tag; num_thinking: tokens; tail: the last bytes of thinking."""

    phase: _Phase
    num_matched: int = 0
    num_thinking: int = 0
    tail: bytes = b""
    forced: tuple[int, ...] = ()
    is_limited: bool = True
    in_message: bool = False
    num_blanks: int = 0


class ThinkingConstraint:
    """Thinking before constrained or free text; see `Constraint`.

    `inner` is the constraint of the content, at its beginning; None: any content. With `separates` no token may end thinking and
    begin the content, also without an inner constraint. `calls` is the constraint of tool calls; it gets all text but thinking.
    Both constraints belong to this object from then on.
    """

    def __init__(
        self,
        params: ThinkingParams,
        tokens: ThinkingTokens,
        inner: Constraint | None,
        *,
        separates: bool = False,
        calls: Constraint | None = None,
    ) -> None:
        self._calls = calls
        self._separates = separates
        self._budget, self._tokens, self._inner = params.budget, tokens, inner
        self._longest = max(map(len, tokens.ends))
        # Text before thinking may be content: a copy follows it, and is dropped where thinking begins after all.
        self._content = inner if inner is None or params.is_open else inner.copy()
        self._is_content = not params.is_open  # whether the text so far can be content
        self._state = _State(_Phase.THINKING if params.is_open else _Phase.BEFORE)
        self._undo: deque[tuple[_State, Constraint | None, bool, tuple[Constraint, ...]]] = deque(maxlen=_MAX_ROLLBACK)
        has_any = inner is not None or calls is not None
        self._scratch = np.zeros(tokens.table.num_words, dtype=np.uint32) if has_any else None
        self._force_at_budget()

    # ---- what the engine looks at

    @property
    def is_thinking(self) -> bool:
        """Whether the next token belongs to thinking."""
        return self._state.phase in (_Phase.THINKING, _Phase.FORCED)

    @property
    def forced_token(self) -> int | None:
        """The only token that may come, at the end of the budget."""
        return self._state.forced[0] if self._state.phase is _Phase.FORCED else None

    def refuse_forced(self) -> None:
        """Do without the forced token, as something else forbids it: without the message, then without the budget."""
        state = self._state
        if state.in_message:
            self._state = replace(state, forced=tuple(self._tokens.end), in_message=False)
        else:
            self._state = replace(state, phase=_Phase.THINKING, forced=(), is_limited=False)

    @property
    def is_complete(self) -> bool:
        if self._calls is not None and self._calls.is_complete:
            return True
        return self._state.phase is _Phase.CONTENT and self._content is not None and self._content.is_complete

    @property
    def may_end(self) -> bool:
        if self._calls is not None and not self._calls.may_end:
            return False
        if self.is_thinking or self._content is None:
            return self._inner is None
        return self._is_content and self._content.may_end

    def fill_mask(self, words: TokenWords) -> bool:
        is_written = self._fill(words)
        if self._calls is None or self.is_thinking:
            return is_written
        scratch = self._scratch
        assert scratch is not None  # noqa: S101 - made with the calls
        if self._calls.fill_mask(scratch):
            words[:] = words & scratch if is_written else scratch
            return True
        return is_written

    def _fill(self, words: TokenWords) -> bool:
        match self._state.phase:
            case _Phase.BEFORE:
                return self._fill_before(words)
            case _Phase.THINKING:
                return self._fill_thinking(words)
            case _Phase.FORCED:
                words.fill(0)
                set_tokens(words, self._state.forced[:1])
                return True
            case _Phase.AFTER:
                assert self._content is not None  # noqa: S101 - else the phase is CONTENT
                if not self._content.fill_mask(words):
                    return False
                set_tokens(words, self._tokens.blanks)
                return True
            case _Phase.CONTENT:
                return self._content is not None and self._content.fill_mask(words)

    def _fill_before(self, words: TokenWords) -> bool:
        at, tokens = self._state.num_matched, self._tokens
        is_forbidden = self._budget == 0
        if self._content is None:
            if is_forbidden:
                words.fill(_ALL)
                clear_tokens(words, tokens.completing[at] if at else tokens.completing_first)
            return is_forbidden
        if not self._is_content:
            words.fill(0)
        elif not self._content.fill_mask(words):
            words.fill(_ALL)
        if is_forbidden:
            clear_tokens(words, tokens.completing[at])
        else:
            set_tokens(words, tokens.spelling[at])
        return True

    def _fill_thinking(self, words: TokenWords) -> bool:
        missing = _num_missing(self._state.tail) if self._is_used_up(self._state) else 0
        if missing:
            words.fill(0)
            set_tokens(words, self._tokens.continuations[missing])
            return True
        if self._inner is None and not self._separates:
            return False
        words.fill(_ALL)
        clear_tokens(words, self._tokens.passing(self._state.tail))
        if self._inner is not None:
            clear_tokens(words, sorted(self._tokens.table.eog_ids))
        return True

    # ---- advancing

    def accept(self, token_id: int) -> None:
        """Advance. Errors of the inner constraint are raised, and change nothing."""
        before = (self._state, self._content, self._is_content)
        calls = None if self.is_thinking else self._calls
        if calls is not None:
            calls.accept(token_id)
        try:
            advanced = self._advance(token_id)
        except Exception:
            if calls is not None:
                calls.rollback(1)
            raise
        self._undo.append((*before, tuple(constraint for constraint in (advanced, calls) if constraint is not None)))
        self._force_at_budget()

    def _advance(self, token_id: int) -> Constraint | None:
        """Advance, and return the constraint that accepted the token, if one did."""
        while self._state.phase is _Phase.FORCED:
            if token_id == self._state.forced[0]:
                self._advance_forced()
                return None
            self.refuse_forced()
        match self._state.phase:
            case _Phase.BEFORE:
                return self._advance_before(token_id)
            case _Phase.THINKING:
                self._think(self._tokens.table.pieces[token_id])
                return None
            case _Phase.AFTER:
                assert self._content is not None  # noqa: S101 - else the phase is CONTENT
                piece, state = self._tokens.table.pieces[token_id], self._state
                if not piece.isspace() or self._allows(self._content, token_id):
                    return self._advance_content(token_id)
                num_blanks = state.num_blanks + len(piece)
                phase = _Phase.CONTENT if num_blanks >= MAX_BLANKS else _Phase.AFTER
                self._state = replace(state, phase=phase, num_blanks=num_blanks)
                return None
            case _:
                return self._advance_content(token_id)

    def _advance_content(self, token_id: int) -> Constraint | None:
        if self._content is not None:
            self._content.accept(token_id)
        self._state = replace(self._state, phase=_Phase.CONTENT)
        return self._content

    def _advance_before(self, token_id: int) -> Constraint | None:
        tokens, state = self._tokens, self._state
        piece, rest = tokens.table.pieces[token_id], tokens.start[state.num_matched :]
        is_first = self._content is None and state.num_matched == 0
        if is_first and not (piece.isspace() or piece.startswith(rest) or rest.startswith(piece)):
            piece = piece.lstrip()  # white space before the tag is no content, also within one token
        is_start = piece.startswith(rest) and self._budget != 0
        if is_start:
            self._state = _State(_Phase.THINKING)
            self._content, self._is_content = self._inner, False
            self._think(piece[len(rest) :], counts=False)
            return None
        if self._content is None and state.num_matched == 0 and piece.isspace():
            return None
        spells = bool(piece) and rest.startswith(piece)
        if not spells:
            return self._advance_content(token_id)
        accepted = None
        if self._content is not None and self._is_content:
            self._is_content = self._allows(self._content, token_id)
            if self._is_content:
                self._content.accept(token_id)
                accepted = self._content
        self._state = replace(state, num_matched=state.num_matched + len(piece))
        return accepted

    def _think(self, data: bytes, *, counts: bool = True) -> None:
        state = self._state
        text = state.tail + data
        ends = [text.index(tag) + len(tag) for tag in self._tokens.ends if tag in text]
        if ends:
            self._end_thinking(len(text) - min(ends))
            return
        self._state = replace(
            state, num_thinking=state.num_thinking + counts, tail=text[-max(self._longest - 1, 3) :] if text else b""
        )

    def _end_thinking(self, num_blanks: int = 0) -> None:
        self._content, self._is_content = self._inner, True
        phase = _Phase.CONTENT if self._inner is None else _Phase.AFTER
        self._state = replace(self._state, phase=phase, forced=(), num_blanks=num_blanks)

    def _advance_forced(self) -> None:
        state = self._state
        rest = state.forced[1:]
        if rest:
            still = state.in_message and len(rest) > len(self._tokens.end)
            data = state.tail + self._tokens.table.pieces[state.forced[0]]  # for `refuse_forced`
            tail = data[-max(self._longest - 1, 3) :]
            self._state = replace(state, forced=rest, in_message=still, tail=tail)
        else:
            self._end_thinking()

    def _allows(self, constraint: Constraint, token_id: int) -> bool:
        words = self._scratch
        assert words is not None  # noqa: S101 - made with the inner constraint
        return not constraint.fill_mask(words) or bool(words[token_id >> 5] >> np.uint32(token_id & 31) & np.uint32(1))

    def _is_used_up(self, state: _State) -> bool:
        budget = self._budget
        return budget is not None and state.is_limited and state.num_thinking >= budget

    def _force_at_budget(self) -> None:
        """Begin to force the end when the budget is used up, but not in the middle of a character."""
        state, tokens = self._state, self._tokens
        if state.phase is not _Phase.THINKING or not self._is_used_up(state):
            return
        missing = _num_missing(state.tail)
        if missing and tokens.continuations[missing]:
            return
        forced = (*tokens.message, *tokens.end) if tokens.message else (*tokens.rest_of_end(state.tail),)
        self._state = replace(state, phase=_Phase.FORCED, forced=forced, in_message=bool(tokens.message))

    # ---- copies and rollback

    def rollback(self, num_tokens: int) -> None:
        """Raise `InvalidParams` for more tokens than were accepted, or more than 256."""
        if not 0 <= num_tokens <= len(self._undo):
            raise InvalidParams(f"num_tokens must be from 0 to {len(self._undo)}, not {num_tokens}")
        for _ in range(num_tokens):
            self._state, self._content, self._is_content, advanced = self._undo.pop()
            for constraint in advanced:
                constraint.rollback(1)

    def copy(self) -> ThinkingConstraint:
        """Return a copy, which cannot roll back tokens that were accepted before it was made."""
        copied: ThinkingConstraint = copy.copy(self)
        is_shared = self._content is self._inner
        copied._undo = deque(maxlen=_MAX_ROLLBACK)
        copied._inner = None if self._inner is None else self._inner.copy()
        copied._calls = None if self._calls is None else self._calls.copy()
        copied._content = copied._inner if is_shared else None if self._content is None else self._content.copy()
        copied._scratch = None if self._scratch is None else self._scratch.copy()
        return copied


def _is_blank(data: bytes) -> bool:
    """Return whether nothing comes after a tag, or a little white space."""
    return not data or (data.isspace() and len(data) <= MAX_BLANKS)


def _num_missing(tail: bytes) -> int:
    """Return how many bytes the character at the end of a text needs to be whole."""
    for back in range(1, min(3, len(tail)) + 1):
        byte = tail[-back]
        if byte >= 0xC0:
            length = next(length for low, length in _UTF8_LENGTHS if byte >= low)
            return max(0, length - back)
        if byte < 0x80:
            return 0
    return 0
