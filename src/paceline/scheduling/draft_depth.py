"""How many tokens are worth proposing: by measured acceptance and by what a longer pass takes. Pure arithmetic.

A draft wins a token with a probability that is measured for each sequence, and only if all before it do: the j-th one is worth
p ** j tokens. Drafts go in by their worth, over all sequences, as many as make the most tokens in a second; 0 where a
pass without them does.

Where a wrong draft takes its whole row back, the next pass computes what was right of it again, without drafts. A sequence
whose drafts are all right with probability q has drafts in one of 2 - q passes then, and the mean of both kinds counts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_LEAST_WORTH = 0.02  # tokens; what is worth less is not looked at
_LEAST_GAIN = 1.04  # in speed, as estimates of what passes take are a few per cent off
_DEARER = 1.2  # as a size that was never seen may be than it is expected to be
_TRIED = 2  # drafts of a trial at least
_SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of drafts that are compared


@dataclass(frozen=True, slots=True)
class DraftingTimes:
    """What drafts take and may take, in seconds.

    pass_s: what decoding takes with so many drafts. step_s: what a step of drafting takes for so many candidates: one for the
    first draft of all that have one, one for the second, ... block_s: what drafting to such depths takes where it has no steps.
    limit_s: what decoding may take with drafts. is_known: whether it is known what a pass with so many drafts takes; None: it
    always is. trial_s: what one that is not known may lose if it is dearer than expected; less than 0: there is none.
    max_rollback: wrong drafts of a row beyond which all of it is computed again; None: that is never so.
    """

    pass_s: Callable[[int], float]
    step_s: Callable[[int], float] | None = None
    limit_s: float = math.inf
    is_known: Callable[[int], bool] | None = None
    max_rollback: int | None = None
    block_s: Callable[[Sequence[int]], float] | None = None
    trial_s: float = 0.0


def choose_depths(
    candidates: Sequence[tuple[float, int]], num_rows: float, times: DraftingTimes, most: int
) -> list[int]:
    """Return how many drafts each candidate gets.

    candidates: probability and most drafts of each. num_rows: that decode, each worth a token, and what other drafts win.
    most: drafts, all together.
    """
    best_rate, best = _LEAST_GAIN * num_rows / times.pass_s(0), [0] * len(candidates)
    for depths, gain, drafting_s in _growing(candidates, most, times):
        num_drafts = sum(depths)
        taken_s = times.pass_s(num_drafts) + drafting_s
        if taken_s > times.limit_s:
            continue
        if num_rows and times.is_known is not None and not times.is_known(num_drafts):
            lost_s = _DEARER * taken_s - times.pass_s(0) * (1 + gain / num_rows)
            if times.trial_s < max(0.0, lost_s):
                continue
        share, again_s = 1.0, 0.0
        if times.max_rollback is not None:
            share, again_s = _taken_back(candidates, depths, times.pass_s, times.max_rollback)
        rate = (num_rows + share * gain) / (share * taken_s + (1 - share) * again_s)
        if rate > best_rate:
            best_rate, best = rate, depths
    return best


def _taken_back(
    candidates: Sequence[tuple[float, int]], depths: Sequence[int], pass_s: Callable[[int], float], max_rollback: int
) -> tuple[float, float]:
    """Return in which share of the passes sequences have their drafts, and what the others take, which compute rows again.

    Exact for one sequence; of several these are taken to fall into the same passes.
    """
    share = num_again = 0.0
    drafting = [(worth, depth) for (worth, _), depth in zip(candidates, depths, strict=True) if depth]
    for worth, depth in drafting:
        num_needed = max(0, depth - max_rollback)  # right drafts without which the row is taken back
        right = [worth**number for number in range(num_needed + 1)]  # probabilities of so many
        share += 1 / (2 - right[-1])
        if right[-1] < 1:  # the newest token and the right drafts, given that there are fewer
            num_again += (sum(right[:-1]) - num_needed * right[-1]) / (1 - right[-1])
    low = math.floor(num_again)
    again_s = pass_s(low) + (num_again - low) * (pass_s(low + 1) - pass_s(low))
    return share / len(drafting), again_s


def _growing(
    candidates: Sequence[tuple[float, int]], most: int, times: DraftingTimes
) -> Iterator[tuple[list[int], float, float]]:
    """Yield the depths that are compared, with the tokens that the drafts are worth and what drafting them takes."""
    worths, step_s = _worths(candidates, most), times.step_s
    gain, drafting_s, step_sizes = 0.0, 0.0, [0] * (len(worths) + 1)
    depths, at = [0] * len(candidates), 0
    for size in _SIZES:
        size = min(size, len(worths))  # noqa: PLW2901 - the last one
        if size == at:
            return
        for worth, index, depth in worths[at:size]:
            gain += worth
            depths[index] += 1
            if step_s is not None:
                num_before = step_sizes[depth]
                step_sizes[depth] = num_before + 1
                drafting_s += step_s(num_before + 1) - (step_s(num_before) if num_before else 0.0)
        at = size
        yield list(depths), gain, drafting_s if times.block_s is None else times.block_s(depths)


def trial_depth(most: int, least: int) -> int:
    """Return how many drafts a trial has at least; 0 where `least` are more than it may have."""
    return min(max(_TRIED, least), most) if least <= most else 0


def _worths(candidates: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int, int]]:
    """Return the worth of single drafts, whose they are and which of these, the most valuable first."""
    heap = [(-one, index, 1) for index, (one, cap) in enumerate(candidates) if cap > 0]
    heapq.heapify(heap)
    found: list[tuple[float, int, int]] = []
    while heap and len(found) < min(most, _SIZES[-1]):
        worth, index, depth = heapq.heappop(heap)
        if -worth < _LEAST_WORTH:
            break
        found.append((-worth, index, depth))
        probability, cap = candidates[index]
        if depth < cap:
            heapq.heappush(heap, (worth * probability, index, depth + 1))
    return found
