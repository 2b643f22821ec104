"""Builds the allocations of a tick within a budget, and the orders in which sequences may come.

Pure. Knows no strategy, and keeps nothing of the sequences but keys and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from paceline.request import SECONDS_PER_PRIORITY
from paceline.scheduling.view import SequenceView, TokenAllocation


class BatchBuilder:
    """Token allocations as they are added. tokens_left: of the budget."""

    __slots__ = ("_allocated", "tokens_left")

    def __init__(self, budget: int) -> None:
        self._allocated: dict[int, int] = {}
        self.tokens_left = budget

    def add_prefill(self, sequences: Iterable[SequenceView], most: int) -> None:
        """Add at most `most` tokens together, in this order: each sequence as many as it may still have."""
        for sequence in sequences:
            room = min(most, self.tokens_left)
            if room <= 0:
                return
            most -= self._add(sequence, min(room, sequence.limit - self._allocated.get(sequence.key, 0)))

    def add_decode(self, decoders: Sequence[SequenceView], most: int) -> None:
        """Add at most `most` tokens together, in this order: one each as far as they go, drafts with what is left.

        For sequences that have no allocation yet.
        """
        room = min(most, self.tokens_left)
        for behind, decoder in zip(range(len(decoders) - 1, -1, -1), decoders, strict=True):
            if room <= 0:
                return
            room -= self._add(decoder, min(decoder.limit, max(1, room - behind)))

    def allocations(self) -> list[TokenAllocation]:
        """Return the allocations, one a sequence."""
        return [TokenAllocation(key, num_tokens) for key, num_tokens in self._allocated.items()]

    def _add(self, sequence: SequenceView, num_tokens: int) -> int:
        if num_tokens > 0:
            self._allocated[sequence.key] = self._allocated.get(sequence.key, 0) + num_tokens
            self.tokens_left -= num_tokens
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
