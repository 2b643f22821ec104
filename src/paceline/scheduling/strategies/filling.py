"""A tick while a strategy fills it: orders in which sequences may come, and what is left of the budget.

Pure. Knows no strategy, and keeps nothing of the sequences but keys and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from paceline.request import SECONDS_PER_PRIORITY
from paceline.scheduling.view import SequenceView, Share


class Filling:
    """Shares as they are given out. `left`: tokens of the budget that nobody has yet."""

    __slots__ = ("_given", "left")

    def __init__(self, budget: int) -> None:
        self._given: dict[int, int] = {}
        self.left = budget

    def give(self, sequences: Iterable[SequenceView], most: int) -> None:
        """At most `most` tokens together, in this order: each sequence as many as it may still have."""
        for sequence in sequences:
            room = min(most, self.left)
            if room <= 0:
                return
            most -= self._add(sequence, min(room, sequence.limit - self._given.get(sequence.key, 0)))

    def give_rows(self, decoders: Sequence[SequenceView], most: int) -> None:
        """At most `most` tokens together, in this order: one each as far as they go, drafts with what is left over.

        For sequences that have nothing yet.
        """
        room = min(most, self.left)
        for behind, decoder in zip(range(len(decoders) - 1, -1, -1), decoders, strict=True):
            if room <= 0:
                return
            room -= self._add(decoder, min(decoder.limit, max(1, room - behind)))

    def shares(self) -> list[Share]:
        """What was given, each sequence once."""
        return [Share(key, num_tokens) for key, num_tokens in self._given.items()]

    def _add(self, sequence: SequenceView, num_tokens: int) -> int:
        if num_tokens > 0:
            self._given[sequence.key] = self._given.get(sequence.key, 0) + num_tokens
            self.left -= num_tokens
        return num_tokens


def split(sequences: Iterable[SequenceView]) -> tuple[list[SequenceView], list[SequenceView]]:
    """Those that decode, and the others: prompts, or what a preemption made them compute again."""
    decoders: list[SequenceView] = []
    prompts: list[SequenceView] = []
    for sequence in sequences:
        (decoders if sequence.is_decoding else prompts).append(sequence)
    return decoders, prompts


def longest_waiting_first(sequences: Iterable[SequenceView]) -> list[SequenceView]:
    """By the tick of their last row, so that they take turns where not all of them fit."""
    return sorted(sequences, key=attrgetter("last_tick", "order"))


def most_urgent_first(sequences: Iterable[SequenceView]) -> list[SequenceView]:
    """By priority and then arrival, with ageing: by `submitted_s - 10 s * priority`.

    All grow older alike, so this order does not change while they wait, and only finitely many can come before one.
    """
    return sorted(sequences, key=lambda one: (one.submitted_s - SECONDS_PER_PRIORITY * one.priority, one.order))


def ticks_without_row(sequences: Sequence[SequenceView], tick: int) -> int:
    """How long ago any of them had a row (1: in the tick before, or just admitted: less); 0 where there are none."""
    return tick - max(sequence.last_tick for sequence in sequences) if sequences else 0


def num_wanted(sequences: Iterable[SequenceView]) -> int:
    """Tokens that they may have in this tick, all together."""
    return sum(sequence.limit for sequence in sequences)
