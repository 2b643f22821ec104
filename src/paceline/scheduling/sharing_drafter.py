"""What a drafter implements beside `Drafter` that learns from one sequence for another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


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
