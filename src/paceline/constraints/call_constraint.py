"""A constraint that leaves text free until a tool call begins, and then holds the call to a grammar.

    WAITING ──trigger──> BEGUN        the grammar gets the text from the trigger on

The native sampler follows a GBNF grammar of the same calls, which begins at the same triggers. The GBNF grammar decides which
tokens may begin a call and how calls are spelt; this constraint adds the schemas of the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from paceline.constraints.constraint import Constraint, TokenTable, TokenWords
from paceline.errors import GrammarError, InvalidParams
from paceline.params import PatternTrigger

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
        self._patterns = [
            (_compiled(trigger.pattern), trigger) for trigger in triggers if isinstance(trigger, PatternTrigger)
        ]

    def start(self, text: bytearray, begin: int, token_id: int, *, is_whole: bool) -> int | None:
        """Return the position in the text at which a call begins; None if no call begins.

        Args:
            text: The free text, with the newest token at its end.
            begin: Position of the newest token.
            token_id: The newest token.
            is_whole: Whether the text has its beginning, which long texts lose.
        """
        if token_id in self._token_ids:
            return begin
        if is_whole and any(text.startswith(word) for word in self._first_words):
            return 0
        found = [text.find(word, max(0, begin - len(word) + 1)) for word in self._words]
        starts = [place for place in found if place >= 0]
        if starts:
            return min(starts)
        return next(
            (start for pattern in self._patterns if (start := _found(*pattern, text, begin, is_whole)) is not None),
            None,
        )


def _found(
    pattern: re.Pattern[bytes], trigger: PatternTrigger, text: bytearray, begin: int, is_whole: bool
) -> int | None:
    is_anchored = trigger.is_full or trigger.pattern.startswith("^")
    if is_anchored and (not is_whole or len(text) > _MAX_TEXT):
        return None
    match = (
        pattern.fullmatch(text)
        if trigger.is_full
        else pattern.search(text, 0 if is_anchored else max(0, begin - _TAIL))
    )
    if match is None:
        return None
    groups = (match.start(group) for group in range(1, pattern.groups + 1) if match[group])
    return next(groups, match.start())


def _compiled(pattern: str) -> re.Pattern[bytes]:
    """Compile a pattern of llama.cpp's triggers, whose $ matches only at the end of the text."""
    text = _END.sub(lambda match: r"\Z" if match["end"] else match[0], pattern)
    try:
        return re.compile(text.encode())
    except re.error as error:
        raise GrammarError(f"call_grammar.triggers: the pattern {pattern!r:.80} is malformed: {error}") from None


class CallConstraint:
    """Follows the free text of a choice, and the grammar of its calls from the first one on; see `Constraint`."""

    def __init__(
        self,
        triggers: CallTriggers,
        begin: Callable[[], Constraint],
        table: TokenTable,
        split: Callable[[bytes], list[int]],
    ) -> None:
        """Wait for a trigger.

        Args:
            triggers: Of the params' `CallGrammar`.
            begin: Returns a new constraint of calls.
            table: The vocabulary.
            split: Returns tokens that spell some bytes; raises `InvalidParams` if no tokens do.
        """
        self._triggers, self._begin, self._table, self._split = triggers, begin, table, split
        self._text, self._starts = bytearray(), list[int]()  # free text, and where each of its tokens begins
        self._token_ids = list[int]()
        self._is_whole = True
        self._calls: Constraint | None = None
        self._num_followed = 0  # tokens that the grammar got since it began

    @property
    def is_complete(self) -> bool:
        """See `Constraint`."""
        return self._calls is not None and self._calls.is_complete

    @property
    def may_end(self) -> bool:
        """See `Constraint`."""
        return self._calls is None or self._calls.may_end

    def fill_mask(self, words: TokenWords) -> bool:
        """See `Constraint`."""
        return self._calls is not None and self._calls.fill_mask(words)

    def accept(self, token_id: int) -> None:
        """See `Constraint`. Raises `InvalidParams` for a token that a call does not allow."""
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
        elif len(self._text) > 4 * _MAX_TEXT:
            self._shorten()

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

    def _shorten(self) -> None:
        """Drop the first half of the free text."""
        count = len(self._starts) // 2
        cut = self._starts[count]
        del self._text[:cut], self._token_ids[:count]
        self._starts = [begin - cut for begin in self._starts[count:]]
        self._is_whole = False

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`. Raises `InvalidParams` for more tokens than were accepted."""
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
        """See `Constraint`."""
        copied = CallConstraint(self._triggers, self._begin, self._table, self._split)
        copied._text, copied._starts = bytearray(self._text), list(self._starts)
        copied._token_ids, copied._is_whole = list(self._token_ids), self._is_whole
        copied._calls = None if self._calls is None else self._calls.copy()
        copied._num_followed = self._num_followed
        return copied
