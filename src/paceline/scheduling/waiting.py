"""The sequences that wait for a slot, in the order of their turn."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from paceline.scheduling.sequence import Sequence


class Waiting:
    """First come first served within a priority; waiting makes up for priority, so nobody starves."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def add(self, sequence: Sequence) -> None:
        """Puts it in its place; a preempted one comes before all that arrived later."""
        insort(self._sequences, sequence, key=lambda one: one.turn_key)

    def discard(self, sequence: Sequence) -> None:
        """Takes one out, if it is there."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)
