"""The number of drafts of each sequence in a tick: the number that is expected to make the most tokens in a second.

    tokens/s with k drafts = (rows that decode + accepted(k)) / (seconds of drafting k + seconds of a pass over rows + k)

A draft is accepted if it is right and all drafts before it are, so the j-th draft of a sequence wins p ** j tokens, with p the
running share of the sequence's accepted drafts. A drafter may propose nothing: its drafts win tokens and lengthen the pass only
with its running share of proposals, and the time of asking is spent in any case. Both costs are running means of measured times
by their width. An unknown width is expected to be cheap, so it is tried, and then known.

Shares and costs change while they are not looked at. So a tick without drafts is made at times while drafts pay, and drafts of a
sequence are made at times while they do not. Such ticks may lose `COMPARING_SHARE` of the time. Pure arithmetic.
"""

from __future__ import annotations

import heapq
import math
import operator
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cost_model import DecodeCost, TickCostModel
from paceline.sequence import Row

FIRST_PROBABILITY = 0.7
"""Share of accepted drafts that is assumed before any is judged."""
COMPARING_SHARE = 0.005
"""Part of the time for ticks that only compare, and for decisions."""
GAIN = 1 / 16
"""Weight of a new verdict or time in a running mean."""

KEPT_FOR = 16
"""Fewest ticks for which a choice is kept while nothing else changes."""
_MOST_KEPT = 256
_PRIOR_VERDICTS = 4  # the weight of the share that a sequence begins with
_SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of drafts that are compared
_LEAST_WORTH = 0.02  # tokens; drafts worth less are ignored
_LEAST_S = 1e-9  # of a pass, on a clock that does not advance
_OUTLIER = 2.0  # a time counts as at most so many expected ones: the machine may have been asleep
_LITTLE_S = 0.0005  # and this, for times of a few microseconds


class Acceptance:
    """The running share of accepted drafts of a sequence, which begins at the share of all sequences of its drafter.

    A draft is judged if all drafts before it were accepted: a proposal gives a verdict for each accepted draft, and one for
    the draft after them. The first verdicts count more, until `GAIN` is their weight.

    usual: of all sequences; it follows more slowly. since_s: seconds of ticks since the sequence last had drafts.
    """

    __slots__ = ("_num_verdicts", "_usual", "probability", "since_s")

    def __init__(self, usual: Acceptance | None = None) -> None:
        self._usual, self._num_verdicts = usual, _PRIOR_VERDICTS
        self.probability: float = FIRST_PROBABILITY if usual is None else usual.probability
        self.since_s = 0.0

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a proposal whose first `num_accepted` drafts were accepted."""
        gain = GAIN / 4 if self._usual is None else GAIN
        for number in range(min(num_accepted + 1, num_drafts)):
            self._num_verdicts += 1
            self.probability += max(gain, 1 / self._num_verdicts) * ((number < num_accepted) - self.probability)
        if self._usual is not None:
            self._usual.observe(num_drafts, num_accepted)

    def expected(self, num_drafts: int) -> float:
        """Return the expected accepted drafts of `num_drafts`."""
        return _expected(self.probability, num_drafts)


def _expected(probability: float, num_drafts: int) -> float:
    if probability >= 1:
        return float(num_drafts)
    return probability * (1 - probability**num_drafts) / (1 - probability)


class DraftCost:
    """Running means of the seconds of drafting, by the size of a step.

    A batch drafter computes a pass for the first draft of all sequences, a pass for the second draft of the sequences that have
    one, and so on: the size of a step is its number of sequences. With `drafts_blocks` a proposal is one step, and its size is
    the number of its rows: the newest token of each sequence, and the drafts. A drafter that is asked for one sequence after
    the other takes a step of size 1 for each. Before the first proposal a step is free, so that one is made.

    answered: running share of the sequences for which something was proposed when it was asked for.
    """

    def __init__(self, *, is_batch: bool, drafts_blocks: bool = False) -> None:
        self._is_batch, self.drafts_blocks, self.answered = is_batch, drafts_blocks, 1.0
        self._seconds: dict[int, float] = {}
        self._sizes: list[int] = []  # keys, ascending
        self._seen_once: set[int] = set()
        self._reach = math.inf  # drafts of a sequence that a block has at most, once it had fewer than were asked for

    def seconds(self, size: int) -> float:
        """Return the seconds of a step; between measured sizes they are interpolated, beyond them they are as at the last.

        A block of fewer rows than any measured one takes less in proportion.
        """
        known = self._seconds.get(size)
        if known is not None:
            return known
        index = bisect_left(self._sizes, size)
        if not self._sizes:
            return 0.0
        if index == 0:
            least = self._sizes[0]
            return self._seconds[least] * (size / least if self.drafts_blocks else 1.0)
        below = self._sizes[index - 1]
        if index == len(self._sizes):
            return self._seconds[below]
        above = self._sizes[index]
        share = (size - below) / (above - below)
        return self._seconds[below] * (1 - share) + self._seconds[above] * share

    def of_depths(self, depths: Sequence[int]) -> float:
        """Return the seconds of drafting to these depths, one for each sequence."""
        return sum([self.seconds(size) for size in self._steps(depths)])

    def observe(self, depths: Sequence[int], proposed: Sequence[int], seconds: float) -> None:
        """Learn from proposals: the wanted drafts of each sequence, the proposed ones, and the seconds of all of them.

        A proposal that ended early took one step more, which proposed nothing. A block is computed to its end. Of the first two
        times the shorter one counts: after a long first one nothing would be drafted that shows the usual time.
        """
        if num_asked := sum([depth > 0 for depth in depths]):
            num_answered = sum([num > 0 for num, depth in zip(proposed, depths, strict=True) if depth])
            self.answered += GAIN / 4 * (num_answered / num_asked - self.answered)
        if not self.drafts_blocks:
            taken = [min(num_proposed + 1, depth) for num_proposed, depth in zip(proposed, depths, strict=True)]
        else:
            if any(proposed) and max(depths) > max(proposed):
                self._reach = max(proposed)
            taken = list(depths)
        steps = self._steps(taken)
        expected_s = sum([self.seconds(size) for size in steps])
        for size in set(steps):
            step_s = self.seconds(size) * seconds / expected_s if expected_s > 0 else seconds / len(steps)
            if size not in self._seconds:
                insort(self._sizes, size)
                self._seconds[size] = step_s
                self._seen_once.add(size)
            elif size in self._seen_once:
                self._seconds[size] = min(self._seconds[size], step_s)
                self._seen_once.remove(size)
            else:
                self._seconds[size] = running_mean(self._seconds[size], step_s)

    def _steps(self, depths: Sequence[int]) -> list[int]:
        """Return the sizes of the steps that draft to these depths."""
        if not self._is_batch:
            return [1 for depth in depths if depth]
        if self.drafts_blocks:
            num_rows = sum([1 + int(min(depth, self._reach)) for depth in depths if depth])
            return [num_rows] if num_rows else []
        sizes: list[int] = []
        for depth in depths:
            sizes.extend([0] * (depth - len(sizes)))
            for step in range(depth):
                sizes[step] += 1
        return sizes


def running_mean(mean: float, value: float) -> float:
    """Return a running mean of seconds with a new value; an outlier counts as twice the mean."""
    return mean + GAIN * (min(value, _OUTLIER * mean + _LITTLE_S) - mean)


@dataclass(frozen=True, slots=True)
class _Beside:
    """The rows of a tick beside which drafts are chosen.

    num_decode: rows that decode. num_tokens, num_outputs: of all rows, without the drafts of other drafters, num_drafts.
    """

    num_decode: int
    num_tokens: int
    num_outputs: int
    num_drafts: int
    num_cells: int

    @property
    def only_decodes(self) -> bool:
        return self.num_tokens == self.num_decode


class DepthChooser:
    """Chooses the drafts of a tick; one chooser for each drafter.

    draft_cost: of the drafter. deciding_s: running mean of the seconds of deciding. expected_beside: tokens that the drafts of
    other drafters in the rows are expected to win. is_comparing: whether the last choice is a tick without drafts that only
    compares. max_rollback: wrong drafts of a row beyond which all of it is computed again; None: never. itl_target_s: while
    several sequences decode, drafts do not make a tick longer.
    """

    def __init__(
        self, cost_model: TickCostModel, decode_cost: DecodeCost, itl_target_s: float, max_rollback: int | None = None
    ) -> None:
        self._model, self._decode_cost, self._itl_target_s = cost_model, decode_cost, itl_target_s
        self._max_rollback = max_rollback
        self.draft_cost = DraftCost(is_batch=False)
        self.deciding_s = self.expected_beside = 0.0
        self.is_comparing = False
        self._beside = _Beside(0, 0, 0, 0, 0)
        self._pass_times: dict[int, float] = {}  # by drafts, beside those rows
        self._limit_s = math.inf  # of decoding, drafting included
        self._prompts_s = 0.0  # seconds that prompts add
        self._answered = 1.0  # share of proposals; 1 if asking is so cheap that it need not be known
        self._since_plain_s: dict[
            int, float
        ] = {}  # seconds of ticks with drafts since a tick without, by rows that decode
        self._since_trial_s = 0.0
        self._key: object = None
        self._depths: list[int] = []
        self._rate = 0.0  # of the last choice, in tokens/s
        self._num_left = 0  # ticks for which it is kept

    # ---- the choice

    def choose(
        self, candidates: list[tuple[float, int]], rows: list[Row], num_cells: int, most: int, num_ticks: int = 1
    ) -> list[int]:
        """Return the number of drafts of each candidate beside these rows, some of which may have drafts of other drafters.

        Args:
            candidates: The probability and the most drafts of each.
            rows: The rows of the tick.
            num_cells: Cells in use.
            most: Drafts of all candidates together.
            num_ticks: Ticks since the last call.
        """
        num_decode = sum([_decodes(row) for row in rows])
        num_drafts = sum([row.num_drafts for row in rows])
        num_tokens = sum([len(row.token_ids) for row in rows]) - num_drafts
        key = (num_decode, num_tokens, num_drafts, [(int(50 * p), cap.bit_length()) for p, cap in candidates])
        self._num_left -= num_ticks
        if self._num_left < 0 or key != self._key or not self._fits(candidates, most):
            num_outputs = sum([row.num_outputs for row in rows]) - num_drafts
            self._stand_beside(_Beside(num_decode, num_tokens, num_outputs, num_drafts, num_cells))
            self._depths, self._rate = self._best(candidates, most)
            self._key, self._num_left = key, KEPT_FOR
        self._since_trial_s += self.plain_s * num_ticks
        self.is_comparing = any(self._depths) and self._is_plain_due()
        return [0] * len(candidates) if self.is_comparing else list(self._depths)

    def _best(self, candidates: Sequence[tuple[float, int]], most: int) -> tuple[list[int], float]:
        """Return the depths that make the most tokens in a second, and their tokens/s."""
        num_rows, best = self._beside.num_decode + self.expected_beside, [0] * len(candidates)
        best_rate = num_rows / self.plain_s
        depths, gain, worths = list(best), 0.0, _worths(candidates, most)
        for size in _SIZES:
            for worth, index in worths[sum(depths) : size]:
                gain += worth
                depths[index] += 1
            if sum(depths) < size and depths == best:
                break
            taken_s = self._decoding_s(depths)
            if taken_s <= self._limit_s:
                share, again_s = self._taken_back(candidates, depths)
                taken_s -= self._unanswered_s(sum(depths))
                rate = (num_rows + share * self._answered * gain) / (share * taken_s + (1 - share) * again_s)
                if rate > best_rate:
                    best_rate, best = rate, list(depths)
            if sum(depths) < size:
                break
        return best, best_rate

    def _taken_back(self, candidates: Sequence[tuple[float, int]], depths: Sequence[int]) -> tuple[float, float]:
        """Return the share of passes with drafts, and the seconds of the passes that compute rows again.

        If wrong drafts take their whole row back, the next pass computes its right part again, without drafts. A sequence
        whose drafts are all right with probability q then has drafts in one of 2 - q passes. Exact for one sequence; several
        sequences are assumed to have drafts in the same passes.
        """
        if self._max_rollback is None or not any(depths):
            return 1.0, 0.0
        share = num_again = 0.0
        drafting = [(p, depth) for (p, _), depth in zip(candidates, depths, strict=True) if depth]
        for p, depth in drafting:
            num_needed = max(0, depth - self._max_rollback)  # with fewer right drafts the row is taken back
            right = [p**number for number in range(num_needed + 1)]  # probabilities of 0, 1, ... right drafts
            share += 1 / (2 - right[-1])
            if right[-1] < 1:
                num_again += (sum(right[:-1]) - num_needed * right[-1]) / (1 - right[-1])
        low = math.floor(num_again)
        again_s = self._pass_s(low) + (num_again - low) * (self._pass_s(low + 1) - self._pass_s(low))
        return share / len(drafting), again_s

    def _fits(self, candidates: list[tuple[float, int]], most: int) -> bool:
        """Return whether the last choice is within bounds."""
        return sum(self._depths) <= most and all(map(operator.le, self._depths, [cap for _, cap in candidates]))

    # ---- ticks that compare

    def _is_plain_due(self) -> bool:
        """Return whether this tick goes without drafts, to see its cost.

        That is so if no such tick was seen, or if the time since the last such tick allows its loss. Beside prompts it would
        show nothing.
        """
        beside = self._beside
        if not beside.only_decodes or beside.num_drafts:
            return False
        since_s = self._since_plain_s.get(beside.num_decode, math.inf)
        lost_s = self.plain_s - beside.num_decode / self._rate
        is_due = lost_s <= COMPARING_SHARE * since_s
        self._since_plain_s[beside.num_decode] = 0.0 if is_due else since_s + self._decoding_s(self._depths)
        return is_due

    def trial(
        self,
        probability: float,
        cap: int,
        depths: list[int],
        index: int,
        catching_up_s: float,
        *,
        is_begun: bool = False,
    ) -> int:
        """Return drafts for a sequence that has none, if the time since the last trial allows their loss; else 0.

        Their number is the best for a sequence with `FIRST_PROBABILITY`.

        Args:
            probability: Of the sequence.
            cap: Most drafts of the sequence.
            depths: The drafts of all candidates.
            index: The sequence's index in them.
            catching_up_s: Seconds of catching up with the sequence.
            is_begun: Whether the time was spent on catching up with it already.
        """
        if not self._beside.num_decode:  # nothing was chosen yet, so nothing can be compared
            return 0
        (tried,), _ = self._best([(max(probability, FIRST_PROBABILITY), cap)], cap)
        tried = tried or 1
        before_s, taken_s = self._decoding_s(depths), self._decoding_s([*depths[:index], tried, *depths[index + 1 :]])
        won_s = self._answered * _expected(probability, tried) * before_s / max(1, self._beside.num_decode)
        lost_s = catching_up_s + taken_s - self._unanswered_s(tried) - before_s - won_s
        is_allowed = is_begun or lost_s <= COMPARING_SHARE * self._since_trial_s
        return tried if is_allowed and taken_s <= self._limit_s else 0

    def note_trial(self) -> None:
        """Note that a sequence got the drafts of a trial."""
        self._since_trial_s, self._num_left = 0.0, 0  # its outcome counts at once

    # ---- costs

    def note_deciding(self, seconds: float) -> None:
        """Learn the seconds of deciding on drafts, without their proposals: much, beside the passes of a tiny model."""
        self.deciding_s = running_mean(self.deciding_s, seconds)

    def rest_ticks(self) -> int:
        """Return the ticks without a decision after no drafts paid, so that deciding takes little of the time."""
        share_s = COMPARING_SHARE * (self.plain_s + self._prompts_s)
        return max(KEPT_FOR, min(int(self.deciding_s / share_s), _MOST_KEPT)) if share_s else KEPT_FOR

    def saved_s(self) -> float:
        """Return the seconds that the drafts of the last choice save for each token of a sequence."""
        return max(0.0, self.plain_s - self._beside.num_decode / self._rate) if self._rate else 0.0

    def tick_s(self, depths: Sequence[int]) -> float:
        """Return the expected seconds of the tick with drafts to these depths."""
        return self._decoding_s(depths) + self._prompts_s

    @property
    def plain_s(self) -> float:
        """Seconds of decoding without drafts; 0 before the first choice."""
        return self._pass_s(0) if self._beside.num_decode else 0.0

    def _decoding_s(self, depths: Sequence[int]) -> float:
        num_drafts = sum(depths)
        if not num_drafts:
            return self._pass_s(0)
        return self._pass_s(num_drafts) + self.draft_cost.of_depths(depths) + self.deciding_s

    def _unanswered_s(self, num_drafts: int) -> float:
        """Return the expected seconds by which a pass is shorter because the drafter proposes nothing at times."""
        return (1 - self._answered) * (self._pass_s(num_drafts) - self._pass_s(0))

    def _stand_beside(self, beside: _Beside) -> None:
        self._beside = beside
        self._pass_times.clear()
        model = self._model
        self._prompts_s = 0.0
        if not beside.only_decodes:
            decode_s = model.mean_seconds(beside.num_decode, beside.num_cells, beside.num_decode)
            all_s = model.mean_seconds(beside.num_tokens, beside.num_cells, beside.num_outputs)
            self._prompts_s = max(0.0, all_s - decode_s)
        self._limit_s = math.inf
        asking_s = self.draft_cost.of_depths([1] * beside.num_decode)
        self._answered = 1.0 if asking_s <= COMPARING_SHARE * self.plain_s else self.draft_cost.answered
        if beside.num_decode > 1:
            self._limit_s = max(self._itl_target_s - self._prompts_s, self.plain_s)

    def _pass_s(self, num_drafts: int) -> float:
        """Return the seconds of decoding in a pass; the time that drafts add to a prompt's part counts as theirs."""
        seconds = self._pass_times.get(num_drafts)
        if seconds is None:
            seconds = max(_LEAST_S, self._new_pass_s(self._beside.num_drafts + num_drafts))
            self._pass_times[num_drafts] = seconds
        return seconds

    def _new_pass_s(self, num_drafts: int) -> float:
        model, beside = self._model, self._beside
        total = beside.num_tokens + num_drafts
        if beside.only_decodes:
            return self._with_cells(total)
        added_s = model.mean_seconds(total, beside.num_cells, beside.num_outputs + num_drafts)
        added_s -= model.mean_seconds(beside.num_tokens, beside.num_cells, beside.num_outputs)
        return self._with_cells(beside.num_decode) + added_s

    def _with_cells(self, num_rows: int) -> float:
        """Return the seconds of a decoding pass with the cells in use; `DecodeCost` takes out the same factor."""
        model = self._model
        factor = model.mean_seconds(num_rows, self._beside.num_cells, num_rows) / model.mean_seconds(
            num_rows, 0, num_rows
        )
        return self._decode_cost.seconds(num_rows) * factor


def _decodes(row: Row) -> bool:
    """Return whether a row costs as much as a decoding row and wins a token: also the last token of a cached prompt."""
    return row.sequence.is_decoding or (row.draws and len(row.token_ids) == 1)


def _worths(candidates: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Return single drafts as worth and candidate, the most valuable first."""
    heap = [(-p, index, 1) for index, (p, cap) in enumerate(candidates) if cap > 0]
    heapq.heapify(heap)
    worths: list[tuple[float, int]] = []
    while heap and len(worths) < min(most, _SIZES[-1]):
        worth, index, depth = heapq.heappop(heap)
        if -worth < _LEAST_WORTH:
            break
        worths.append((-worth, index))
        p, cap = candidates[index]
        if depth < cap:
            heapq.heappush(heap, (worth * p, index, depth + 1))
    return worths
