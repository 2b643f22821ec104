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

from paceline.speculation.drafter import DrafterCalls

_NUM_KEPT = 5  # times of each number of sequences, of which the median counts
_LEAST_S = 1e-7
_PAYBACK = 0.2  # of what the rest of a sequence takes, that drafts are taken to save at least where they pay
_MOST_LEFT = 512  # tokens that a sequence is taken to go on for
_FIRST_CHUNK = 32  # tokens of a tick, while nothing is known
_LEAST_CHUNK, _MOST_CHUNK = 16, 1024  # the least also where no time is left
_NUM_TELLING = 16  # tokens from which on a time says what one of them takes
_SHARE = 0.003  # of the time
_FIRST_TICKS, _FIRST_SAVED_S = 8, 0.03  # what is there at the beginning: so many ticks, but no more
_USUALLY_SAVED_S, _MOST_SAVED_S = 0.1, 60.0


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


class CatchUp:
    """What catching up takes, and whether it is worth it. token_s: seconds of a token; 0 while nothing is known."""

    def __init__(self, calls: DrafterCalls, itl_target_s: float) -> None:
        self._calls, self._itl_target_s = calls, itl_target_s
        self.token_s = 0.0
        self._seen: deque[float] = deque(maxlen=_NUM_KEPT)

    def pays(self, lag: float, num_left: int, tick_s: float, num_decode: int) -> bool:
        """Return whether drafts, where they pay, win back what catching up with a sequence takes.

        lag: tokens that it misses. num_left: most tokens that it still generates. tick_s: of a tick without drafts, in which
        so many sequences decode; 0 while that is not known.
        """
        if not tick_s:
            return True
        return self.cost_s(lag) <= _PAYBACK * min(num_left, _MOST_LEFT) * tick_s / num_decode

    def cost_s(self, lag: float) -> float:
        """Return what it takes to catch up with a sequence that misses so many tokens; 0 while nothing is known."""
        return lag * self.token_s if lag else 0.0

    def limit(self, tick_s: float) -> int:
        """Have the drafter compute no more than a tick has time for that takes so long without it; return how much that is.

        Raises `DrafterError` where the drafter fails.
        """
        left_s = self._itl_target_s - tick_s
        num_tokens = int(left_s / self.token_s) if self.token_s else _FIRST_CHUNK
        return self._calls.limit_catch_up(max(_LEAST_CHUNK, min(num_tokens, _MOST_CHUNK)))

    def observe(self, seconds: float) -> bool:
        """Learn from the last proposal, which took so long beside its steps; return whether catching up was a part of it."""
        num_tokens = self._calls.num_caught_up
        if num_tokens < _NUM_TELLING:
            return False
        self._seen.append(max(0.0, seconds) / num_tokens)
        self.token_s = sorted(self._seen)[(len(self._seen) - 1) // 2]
        return True


class TrialBudget:
    """Seconds put aside, less those lost.

    saved_s: negative where a trial took longer than was known; no more than a tenth of a second, or what the dearest trial takes
    that waits for it, so that much time without trials does not allow many of them at once.
    """

    def __init__(self) -> None:
        self.saved_s, self._most_s = 0.0, _USUALLY_SAVED_S
        self._is_new = True

    def pass_time(self, tick_s: float, num_ticks: int = 1) -> None:
        """Put a share of the time that so many ticks take aside. The first one brings what there is at the beginning."""
        if self._is_new and tick_s:
            self.saved_s += min(_FIRST_TICKS * tick_s, _FIRST_SAVED_S)
            self._is_new = False
        seconds = tick_s * num_ticks
        self.saved_s = min(max(self.saved_s, self._most_s), self.saved_s + _SHARE * seconds)

    def affords(self, expected_s: float) -> bool:
        """Return whether there is enough for a trial that is expected to lose so much; if not, it is saved for."""
        if expected_s <= self.saved_s:
            return True
        self._most_s = max(self._most_s, min(expected_s, _MOST_SAVED_S))
        return False

    def spend(self, lost_s: float) -> None:
        """Take out what a trial loses; where it wins, nothing."""
        self.saved_s -= max(0.0, lost_s)
        self._most_s = _USUALLY_SAVED_S
