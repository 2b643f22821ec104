"""Costs of drafting: the steps of a batch drafter, catching up with sequences, and the budget of trials. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence

from paceline.speculation.drafter import DrafterCalls

_NUM_KEPT = 5  # kept times; the median counts
_LEAST_S = 1e-7
_PAYBACK = 0.2  # part of the remaining time of a sequence that drafts save at least if they pay
_MOST_LEFT = 512  # most tokens that a sequence is expected to go on for
_FIRST_CHUNK = 32  # tokens of a tick, while nothing is known
_LEAST_CHUNK, _MOST_CHUNK = 16, 1024  # the least even if no time is left
_NUM_TELLING = 16  # fewer tokens say nothing about the time of a token
_SHARE = 0.003  # part of the time for trials
_FIRST_TICKS, _FIRST_SAVED_S = 8, 0.03  # of the budget at the beginning: the time of 8 ticks, at most 0.03 s
_USUALLY_SAVED_S, _MOST_SAVED_S = 0.1, 60.0


class DraftCost:
    """Seconds of a drafting step by its size. A step is free before the first proposal, so that one is made.

    A drafter with a small model computes one pass for the first draft of all sequences, one for the second of the sequences that
    have one, and so on; the size of a step is its number of sequences. Only the time of a whole proposal is seen, so the expected
    time of each of its steps is scaled by the same ratio. The median of a few times counts, so that a machine that was asleep
    once teaches nothing.

    drafts_blocks: whether a proposal is one step, the size of which is its number of rows: one for the newest token of each
    sequence and one for each draft. (If llama.cpp wants blocks of one size it computes more; the times contain that.)
    """

    def __init__(self, *, drafts_blocks: bool = False) -> None:
        self.drafts_blocks = drafts_blocks
        self._reach = 0  # most drafts of a sequence that were seen in one block
        self._is_reached = False  # whether more than that were asked for
        self._seen: dict[int, deque[float]] = {}
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []  # keys, ascending

    def seconds(self, size: int) -> float:
        """Return the seconds of a step of this size; between sizes that were seen they are interpolated.

        A smaller step takes as long as the smallest that was seen, or with blocks less in proportion to its rows. A larger step
        takes as long as the largest: the first such step shows its time.
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
        """Return the seconds of drafting to these depths, one for each sequence."""
        return sum([self.seconds(size) for size in self.steps(depths)])

    def steps(self, depths: Iterable[int]) -> list[int]:
        """Return the sizes of the steps that draft to these depths."""
        if not self.drafts_blocks:
            return step_sizes(depths)
        num_rows = sum([1 + (min(depth, self._reach) if self._is_reached else depth) for depth in depths if depth])
        return [num_rows] if num_rows else []

    def steps_taken(self, depths: Sequence[int], proposed: Sequence[int]) -> list[int]:
        """Return the sizes of the steps of a proposal, given the wanted and the proposed drafts of each sequence.

        A proposal that ended early took one step more, which proposed nothing. A block is computed to its end, the longest that
        was seen.
        """
        if not self.drafts_blocks:
            return step_sizes(map(min, [num_proposed + 1 for num_proposed in proposed], depths))
        if any(proposed):
            self._reach = max(self._reach, *proposed)
            self._is_reached = self._is_reached or max(depths) > self._reach
        return self.steps(depths)

    def observe(self, steps: Sequence[int], seconds: float) -> None:
        """Learn from a proposal: the sizes of its steps, and the seconds of all of them."""
        if not steps:
            return
        expected_s = sum([self.seconds(size) for size in steps])
        for size in set(steps):
            step_s = self.seconds(size) * seconds / expected_s if expected_s > 0 else seconds / len(steps)
            self._note(size, max(step_s, _LEAST_S))

    def _note(self, size: int, seconds: float) -> None:
        if size not in self._seen:
            self._seen[size] = deque(maxlen=_NUM_KEPT)
            insort(self._sizes, size)
        seen = self._seen[size]
        seen.append(seconds)
        self._seconds[size] = sorted(seen)[(len(seen) - 1) // 2]  # of two the lower one


def step_sizes(depths: Iterable[int]) -> list[int]:
    """Return the number of sequences of each step: with one draft or more, with two or more, and so on."""
    sizes: list[int] = []
    for depth in depths:
        sizes.extend([0] * (depth - len(sizes)))
        for step in range(depth):
            sizes[step] += 1
    return sizes


class CatchUp:
    """The cost of catching up with sequences that lag behind in a drafter's memory, and whether it pays.

    Catching up is an investment. It is made if drafts win it back in the rest of the sequence, and else only as a trial, as far
    as the budget of trials allows. The inter-token target limits the tokens of a tick.

    token_s: seconds of a token; 0 while nothing is known.
    """

    def __init__(self, calls: DrafterCalls, itl_target_s: float) -> None:
        self._calls, self._itl_target_s = calls, itl_target_s
        self.token_s = 0.0
        self._seen: deque[float] = deque(maxlen=_NUM_KEPT)

    def pays(self, lag: float, num_left: int, tick_s: float, num_decode: int) -> bool:
        """Return whether drafts, if they pay, win back the time of catching up with a sequence.

        lag: its missing tokens. num_left: most tokens that it still generates. tick_s: seconds of a tick without drafts in which
        `num_decode` sequences decode; 0 while not known.
        """
        if not tick_s:
            return True
        return self.cost_s(lag) <= _PAYBACK * min(num_left, _MOST_LEFT) * tick_s / num_decode

    def cost_s(self, lag: float) -> float:
        """Return the seconds of catching up with a sequence that misses `lag` tokens; 0 while nothing is known."""
        return lag * self.token_s if lag else 0.0

    def limit(self, tick_s: float) -> int:
        """Limit the drafter to the tokens for which a tick of tick_s has time; return their number.

        Raises `DrafterError` if the drafter fails.
        """
        left_s = self._itl_target_s - tick_s
        num_tokens = int(left_s / self.token_s) if self.token_s else _FIRST_CHUNK
        return self._calls.limit_catch_up(max(_LEAST_CHUNK, min(num_tokens, _MOST_CHUNK)))

    def observe(self, seconds: float) -> bool:
        """Learn from the last proposal, given its seconds beside its steps; return whether it caught up with sequences."""
        num_tokens = self._calls.num_caught_up
        if num_tokens < _NUM_TELLING:
            return False
        self._seen.append(max(0.0, seconds) / num_tokens)
        self.token_s = sorted(self._seen)[(len(self._seen) - 1) // 2]
        return True


class TrialBudget:
    """The time for drafts that are not known to pay: three thousandths of all time, put aside as it passes.

    Trials are drafts of sequences without any, and passes of sizes that were never seen; they show whether drafts pay. Their loss
    against passes without drafts is spent when it is known. While more was spent than put aside, there are no trials.

    saved_s: seconds put aside less seconds lost; negative if a trial took longer than expected. It is at most a tenth of a
    second, or the time of the dearest trial that waits for it, so that a long time without trials does not allow many at once.
    """

    def __init__(self) -> None:
        self.saved_s, self._most_s = 0.0, _USUALLY_SAVED_S
        self._is_new = True

    def pass_time(self, tick_s: float, num_ticks: int = 1) -> None:
        """Put aside a share of the time of `num_ticks` ticks. The first call adds the budget of the beginning."""
        if self._is_new and tick_s:
            self.saved_s += min(_FIRST_TICKS * tick_s, _FIRST_SAVED_S)
            self._is_new = False
        seconds = tick_s * num_ticks
        self.saved_s = min(max(self.saved_s, self._most_s), self.saved_s + _SHARE * seconds)

    def affords(self, expected_s: float) -> bool:
        """Return whether there is time for a trial that is expected to lose `expected_s`; if not, time is saved for it."""
        if expected_s <= self.saved_s:
            return True
        self._most_s = max(self._most_s, min(expected_s, _MOST_SAVED_S))
        return False

    def spend(self, lost_s: float) -> None:
        """Take out the loss of a trial; a trial that wins costs nothing."""
        self.saved_s -= max(0.0, lost_s)
        self._most_s = _USUALLY_SAVED_S
