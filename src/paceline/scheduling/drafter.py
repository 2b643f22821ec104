"""What proposes tokens ahead of decoding: a protocol, as a drafter of the user's own implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class Drafter(Protocol):
    """Proposes the next tokens of sequences, which the next pass verifies: wrong ones cost time, and change no output.

    Sequences go by keys. The engine's thread calls, between two passes, so that what a call takes delays every stream; what it
    raises ends the sequence that it was for with a `DrafterError`, or is logged where that has ended.

        begin ──> propose ──> rollback, if anything was wrong ──> observe ──> propose ──> ... ──> end
    """

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """Begin with a sequence that decodes: its prompt and what it has generated. To be copied, since it grows.

        Called again after `end` under the same key where a sequence goes on after a while without a slot.
        """

    def propose(self, key: int, max_tokens: int) -> Sequence[int]:
        """Return at most `max_tokens` token ids, at least 1 of them allowed, that may follow all that is known; or none."""

    def observe(self, key: int, token_ids: Sequence[int]) -> None:
        """Take what the sequence has got since `begin` or the last `observe`: accepted drafts, then tokens of its own."""

    def rollback(self, key: int, num_tokens: int) -> None:
        """Give up the last tokens of the newest proposal, at least 1: they were wrong, or not verified."""

    def end(self, key: int) -> None:
        """Forget a sequence, which has ended or lost its slot; also after a `begin` that raised. What this raises is logged."""
