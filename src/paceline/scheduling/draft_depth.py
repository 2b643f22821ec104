"""How many tokens are worth proposing: by measured acceptance and by what a longer pass takes. Pure arithmetic.

A draft is right with a probability that is measured for each sequence, and only counts if all before it are right: the j-th one
is worth p ** j tokens. Drafts go in by their worth, over all sequences, as many as make the most tokens in a second; 0 where a
pass without them does. A sequence without drafts is tried again after a while, and less and less often where that fails.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

FIRST_WORTH = 0.7
"""Probability that a draft is right, before anything is known."""

_MEMORY = 0.9  # of verdicts: what is older fades, so that about ten count
_PRIOR_WEIGHT = 2.0  # verdicts that a new sequence is taken to have, as all sequences have fared
_LEAST_WORTH = 0.02  # tokens; what is worth less is not looked at
_LEAST_GAIN = 1.02  # in speed, as an estimate is no better
_FIRST_WAIT, _LAST_WAIT = 64, 1024  # rows without drafts before a trial
_TRIED = 2  # drafts of a trial
_SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of drafts that are compared


class Acceptance:
    """How the drafts of one sequence have fared, and when it is tried again. initial: probability that is assumed at first."""

    __slots__ = ("_num_right", "_num_verdicts", "_num_without", "_wait")

    def __init__(self, initial: float = FIRST_WORTH) -> None:
        self._num_right, self._num_verdicts = initial * _PRIOR_WEIGHT, _PRIOR_WEIGHT
        self._num_without, self._wait = 0, _FIRST_WAIT

    @property
    def probability(self) -> float:
        """That a draft is right whose predecessors are."""
        return self._num_right / self._num_verdicts

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Take in a verified proposal: drafts behind the first wrong one say nothing."""
        num_verdicts = num_accepted + (num_accepted < num_drafts)
        fade = _MEMORY**num_verdicts
        self._num_right = self._num_right * fade + num_accepted
        self._num_verdicts = self._num_verdicts * fade + num_verdicts
        if num_accepted == num_drafts:
            self._wait = max(_FIRST_WAIT // 8, self._wait // 8)

    def is_due(self, num_rows: int = 1) -> bool:
        """Count rows that got no drafts; return whether it is time to try some all the same."""
        self._num_without += num_rows
        if self._num_without < self._wait:
            return False
        self._num_without, self._wait = 0, min(_LAST_WAIT, 2 * self._wait)
        return True

    def has_drafts(self) -> None:
        """Note a row that gets drafts since they pay."""
        self._num_without, self._wait = 0, _FIRST_WAIT


def choose_depths(
    candidates: Sequence[tuple[float, int]],
    num_rows: int,
    seconds: Callable[[int], float],
    most: int,
    limit_s: float = math.inf,
) -> list[int]:
    """Return how many drafts each candidate gets.

    candidates: probability and most drafts of each. num_rows: that decode, each worth a token. seconds: what decoding takes
    with so many drafts. most: drafts, all together. limit_s: what decoding may take with drafts.
    """
    worths = _worths(candidates, most)
    best_rate, best = _LEAST_GAIN * num_rows / seconds(0), 0
    total, at = float(num_rows), 0
    for size in _SIZES:
        size = min(size, len(worths))  # noqa: PLW2901 - the last one
        if size == at:
            break
        total += sum(worth for worth, _ in worths[at:size])
        at = size
        taken_s = seconds(size)
        rate = total / taken_s
        if rate > best_rate and taken_s <= limit_s:
            best_rate, best = rate, size
    depths = [0] * len(candidates)
    for _, index in worths[:best]:
        depths[index] += 1
    return depths


def trial_depth(most: int, least: int) -> int:
    """Return how many drafts a trial has; 0 where `least` are more than it may have."""
    return min(max(_TRIED, least), most) if least <= most else 0


def _worths(candidates: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Return the worth of single drafts and whose they are, the most valuable first."""
    heap = [(-one, index, 1) for index, (one, cap) in enumerate(candidates) if cap > 0]
    heapq.heapify(heap)
    found: list[tuple[float, int]] = []
    while heap and len(found) < min(most, _SIZES[-1]):
        worth, index, depth = heapq.heappop(heap)
        if -worth < _LEAST_WORTH:
            break
        found.append((-worth, index))
        probability, cap = candidates[index]
        if depth < cap:
            heapq.heappush(heap, (worth * probability, index, depth + 1))
    return found
