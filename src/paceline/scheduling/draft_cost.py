"""What the steps of a batch drafter take, by the sequences that a step is for. Pure arithmetic.

A drafter with a small model computes one pass for the first draft of all sequences, one for the second of those that have
a second, and so on. What is seen is the time of a proposal as a whole, so each of its steps is taken to be off by the same
ratio. The median of a few times is what counts, so that a machine that was asleep once teaches nothing.

A drafter of blocks computes all drafts in one step, with a row for the newest token of each sequence and one for each draft: what
that takes goes by its rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

_NUM_KEPT = 5  # times of each number of sequences, of which the median counts
_LEAST_S = 1e-7


class DraftCost:
    """Seconds of a drafting step. Before the first proposal it is taken to be free, so that one is made.

    drafts_blocks: whether a proposal is one step, the size of which is its rows, as of a drafter that computes all drafts in one
    pass. (Where llama.cpp wants blocks of one size it computes more, which the times that are seen of such depths contain.)
    """

    def __init__(self, *, drafts_blocks: bool = False) -> None:
        self.drafts_blocks = drafts_blocks
        self._reach = 0  # most drafts of a sequence in one block that were seen
        self._is_reached = False  # whether more were asked for
        self._seen: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []  # keys, ascending

    def seconds(self, size: int) -> float:
        """Return what a step of this size takes, in sequences or rows; between sizes that were seen it is interpolated.

        Below them it is no less than the least, of blocks as much less as it has fewer rows; above them no more than the
        largest: the first such step shows it.
        """
        known = self._seconds.get(size)
        if known is not None:
            return known
        if not self._sizes or not size:
            return 0.0
        index = bisect_left(self._sizes, size)
        if index == 0:
            least = self._sizes[0]
            return self._seconds[least] * (size / least if self.drafts_blocks else 1.0)
        if index == len(self._sizes):
            return self._seconds[self._sizes[-1]]
        below, above = self._sizes[index - 1], self._sizes[index]
        share = (size - below) / (above - below)
        return self._seconds[below] * (1 - share) + self._seconds[above] * share

    def of_depths(self, depths: Iterable[int]) -> float:
        """Return what it takes to draft to these depths, one for each sequence."""
        return sum([self.seconds(size) for size in self.steps(depths)])

    def steps(self, depths: Iterable[int]) -> list[int]:
        """Return the sizes of the steps that draft to these depths."""
        if not self.drafts_blocks:
            return step_sizes(depths)
        num_rows = sum([1 + (min(one, self._reach) if self._is_reached else one) for one in depths if one])
        return [num_rows] if num_rows else []

    def steps_taken(self, depths: Sequence[int], proposed: Sequence[int]) -> list[int]:
        """Return the sizes of the steps of a proposal: the drafts that were asked for, and those that came.

        A proposal that ended early took a step more, which proposed nothing. A block is computed to its end, which is the
        longest that was seen.
        """
        if not self.drafts_blocks:
            return step_sizes(map(min, [one + 1 for one in proposed], depths))
        if any(proposed):
            self._reach = max(self._reach, *proposed)
            self._is_reached = self._is_reached or max(depths) > self._reach
        return self.steps(depths)

    def observe(self, steps: Sequence[int], seconds: float) -> None:
        """Learn from a proposal: the size of each of its steps, and what all of them took."""
        if not steps:
            return
        expected_s = sum([self.seconds(one) for one in steps])
        for size in set(steps):
            one_s = self.seconds(size) * seconds / expected_s if expected_s > 0 else seconds / len(steps)
            self._note(size, max(one_s, _LEAST_S))

    def _note(self, size: int, seconds: float) -> None:
        if size not in self._seen:
            self._seen[size] = deque(maxlen=_NUM_KEPT)
            insort(self._sizes, size)
        seen = self._seen[size]
        seen.append(seconds)
        self._seconds[size] = sorted(seen)[(len(seen) - 1) // 2]  # of two the lower one


def step_sizes(depths: Iterable[int]) -> list[int]:
    """Return how many sequences each step is for: those with one draft or more, with two or more, and so on."""
    sizes: list[int] = []
    for depth in depths:
        sizes.extend([0] * (depth - len(sizes)))
        for step in range(depth):
            sizes[step] += 1
    return sizes
