"""What proposes tokens ahead of decoding: protocols, as a drafter of the user's own implements them."""

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

        Negative numbers among them stand for cells of images or sound, and are no tokens to propose.
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


@runtime_checkable
class BatchDrafter(Drafter, Protocol):
    """A drafter that proposes for all sequences of a tick at once, as one with a model of its own does: one pass for all.

    `propose_all` is called instead of `propose`, after `begin` or `observe` of each of its sequences. What it raises is logged,
    and ends no request: its sequences go on without drafts, and the drafter gets `end` for each.
    """

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> Sequence[Sequence[int]]:
        """Return a proposal for each key and most tokens in `wanted`, in that order; an empty one where there is none.

        It is taken to go in steps: one for the first draft of all sequences, one for the second of those that have one, ...
        From the time of each call it is learned what a step takes by the number of its sequences.
        """


@runtime_checkable
class PlacedDrafter(BatchDrafter, Protocol):
    """A batch drafter whose memory is the backend's, under the same sequence ids: draft heads."""

    def begin_at(self, key: int, token_ids: Sequence[int], seq_id: int) -> None:
        """As `begin`, which it stands for. seq_id: of the sequence in memory, until `end`."""


@runtime_checkable
class LaggingDrafter(BatchDrafter, Protocol):
    """A batch drafter with a memory of its own, in which sequences lag behind until they are asked for: a draft model's.

    It catches up in `propose_all`, a part at a time; what is not caught up with gets no drafts. There `wanted` also has
    sequences with 0 as most tokens, which are only to be caught up with. What that takes is learned and weighed apart from
    drafting.
    """

    @property
    def num_caught_up(self) -> int:
        """Tokens that the last `propose_all` computed of sequences that lagged behind."""

    def lag(self, key: int) -> float:
        """Return how many tokens have to be computed before a sequence can have drafts; infinite where it never can."""

    def limit_catch_up(self, num_tokens: int) -> int:
        """Set how many tokens, at least 1, `propose_all` may compute from now on of sequences that lag behind.

        Returns how many it will compute, which may be fewer.
        """


Drafters = tuple[Drafter, ...]
"""Several drafters, which are asked in this order."""


@runtime_checkable
class SharingDrafter(Protocol):
    """A `Drafter` whose proposals for a sequence may come from what it has seen in others.

    What is proposed shows in times and in usage, so a sequence may be given only what others of its namespace have left:
    requests of the same tenant, cache salt and adapters, as with prefix caching.
    """

    def begin_shared(self, key: int, token_ids: Sequence[int], namespace: tuple[object, ...] | None) -> None:
        """Begin with a sequence, in place of `Drafter.begin`.

        namespace: hashable, equal for sequences that may learn from each other; None for one that shares nothing, so that it
        may neither leave anything nor find anything. For a sequence that could have had drafts it is called behind the last
        token, too, if it was not before, and `observe` with what is left, so that a drafter has seen all of it by `end`.
        """
