"""A constraint that llguidance matches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.constraints.constraint import TokenWords
from paceline.errors import GrammarError, InvalidParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

_ERROR_CHARS = 300


class GrammarConstraint:
    """Follows a compiled grammar; see `Constraint`.

    Args:
        matcher: No other object may use it.
        note_use: Called for each token that is accepted.
    """

    def __init__(self, matcher: LLMatcher, note_use: Callable[[], None]) -> None:
        self._matcher, self._note_use = matcher, note_use
        self._num_accepted = 0

    def fill_mask(self, words: TokenWords) -> bool:
        """See `Constraint`. Releases the GIL. Raises `GrammarError` if following the grammar exceeds the limits on grammars."""
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if is_dead(self._matcher):
            raise GrammarError("the constraint cannot be followed here: no text that goes on from here satisfies it")
        if self._matcher.is_error():
            raise GrammarError(f"the constraint cannot be followed here: {short_error(self._matcher)}")
        return True

    def accept(self, token_id: int) -> None:
        """See `Constraint`. Raises `InvalidParams` for a token that may not come, and does not advance."""
        if self._matcher.try_consume_tokens([token_id]) != 1:
            reason = f": {short_error(self._matcher)}" if self._matcher.is_error() else ""
            raise InvalidParams(f"token_id: the constraint does not allow token {token_id} here{reason}")
        self._num_accepted += 1
        self._note_use()

    def rollback(self, num_tokens: int) -> None:
        """See `Constraint`. Raises `InvalidParams` for more tokens than were accepted."""
        if not 0 <= num_tokens <= self._num_accepted or not self._matcher.rollback(num_tokens):
            raise InvalidParams(
                f"num_tokens must be from 0 to {self._num_accepted}, which were accepted, not {num_tokens}"
            )
        self._num_accepted -= num_tokens

    @property
    def is_complete(self) -> bool:
        """See `Constraint`."""
        return self._matcher.is_stopped() and self._matcher.is_accepting()

    @property
    def may_end(self) -> bool:
        """See `Constraint`."""
        return self._matcher.is_accepting()

    def copy(self) -> GrammarConstraint:
        """See `Constraint`."""
        copied = GrammarConstraint(self._matcher.deep_copy(), self._note_use)
        copied._num_accepted = self._num_accepted
        return copied


def is_dead(matcher: LLMatcher) -> bool:
    """Return whether nothing may follow although the text is not whole; llguidance would let it end all the same."""
    if matcher.is_error():
        return matcher.get_error().startswith("NoExtension")
    return matcher.is_stopped() and not matcher.is_accepting()


def short_error(matcher: LLMatcher) -> str:
    """Return what llguidance says is wrong, without its dump of states."""
    return short_message(matcher.get_error())


def short_message(message: str) -> str:
    """Return a message of llguidance in one line, without its dump of states or the place in its source where it gave up."""
    if message.startswith("panic:") or " panic:" in message[:40]:
        return "the grammar is larger than its compiler can take; write a smaller one"
    return " ".join(message.partition("<state>")[0].split())[:_ERROR_CHARS]
