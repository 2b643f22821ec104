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
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.cost_model import DecodeCost, TickCostModel
from paceline.sequence import Row
from paceline.speculation.acceptance import Acceptance, expected_tokens
from paceline.speculation.cost import CatchUp, DraftCost, TrialBudget

_LEAST_WORTH = 0.02  # tokens; what is worth less is not looked at
_LEAST_GAIN = 1.04  # in speed, as estimates of what passes take are a few per cent off
_DEARER = 1.2  # as a size that was never seen may be than it is expected to be
_TRIED = 2  # drafts of a trial at least
_SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of drafts that are compared

KEPT_FOR = 16
"""Ticks for which a choice of depths is kept while nothing else changes."""
_TRIED_DEPTHS = (3, 4, 5, 6, 7, 8, 12, 16)  # drafts of a trial, where two lose more
_LEAST_EVERY, _MOST_EVERY = 4, 64  # ticks with drafts until one without
_PLAIN_COST = 0.005  # of the speed, that ticks without drafts may cost where these pay
_GAIN = 0.1  # of a new measurement of what a proposal takes
_DECIDING_SHARE, _MOST_REST = 0.003, 256  # of the time, and most ticks without a decision
_ENOUGH = 16  # drafts of a sequence: where so many do not pay, more do not
_LITTLE_S = 0.001  # by which a measurement may be above twice the last estimate


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


@dataclass(frozen=True, slots=True)
class _Beside:
    """What the drafts of a tick stand beside.

    num_decode: rows that decode. num_tokens, num_outputs: of all rows, drafts that they have from other drafters left out;
    num_drafts: those. num_candidates: rows that may have drafts.
    """

    num_decode: int
    num_tokens: int
    num_outputs: int
    num_drafts: int
    num_cells: int
    num_candidates: int

    @property
    def only_decodes(self) -> bool:
        return self.num_tokens == self.num_decode


@dataclass(slots=True)
class _NonePaid:
    """A choice of no drafts, for which others need none of their own for num_left ticks.

    beside: rows that decode, tokens, and drafts in the rows; candidates: ascending; most: drafts, all together.
    """

    beside: tuple[int, int, int]
    candidates: list[tuple[float, int]]
    most: int
    num_left: int

    def covers(self, candidates: list[tuple[float, int]], most: int) -> bool:
        """Return whether none pay for these either: no draft is worth more, and no more could be made of those that count."""
        if len(candidates) != len(self.candidates) or most > self.most < _ENOUGH * len(candidates):
            return False
        pairs = zip(sorted(candidates), self.candidates, strict=True)
        return all(worth <= before and (cap <= had or had >= _ENOUGH) for (worth, cap), (before, had) in pairs)


class DepthChooser:
    """Chooses the depths of a tick, from what passes and proposals take.

    Passes without drafts are what drafts are measured by: they are seen first, and again after a while. Passes of sizes that
    were never seen are trials, as long as the budget has time for them.

    budget: what trials may cost. is_measuring: whether the last choice is a pass without drafts, to see what that takes.
    num_decode: sequences that decoded at the last choice. draft_s: seconds of a proposal for one sequence. draft_cost: where a
    batch drafter proposes, what its steps take. deciding_s: seconds that a tick with drafts takes to decide on them.
    itl_target_s: while several sequences decode, drafts of one may not make a tick longer than that for the others.
    expected_beside: tokens that drafts which are in the rows already are expected to win.
    max_rollback: wrong drafts of a row beyond which all of it is computed again; None: that is never so.
    """

    def __init__(
        self,
        cost_model: TickCostModel,
        decode_cost: DecodeCost,
        itl_target_s: float,
        max_rollback: int | None = None,
    ) -> None:
        self._model, self._decode_cost, self._itl_target_s = cost_model, decode_cost, itl_target_s
        self._max_rollback = max_rollback
        self.budget = TrialBudget()
        self.draft_s = self.expected_beside = self.deciding_s = 0.0
        self.draft_cost: DraftCost | None = None
        self.num_decode = 0
        self.is_measuring = False
        self._num_without_plain: dict[
            int, int
        ] = {}  # ticks with drafts since one without, by the sequences that decode
        self._beside = _Beside(0, 0, 0, 0, 0, 0)
        self._pass_times: dict[int, float] = {}  # by drafts, beside those rows, since the last choice
        self._limit_s = math.inf  # what decoding may take
        self._prompts_s = 0.0  # what prompts add to it
        self._trial: tuple[list[int], float] | None = None  # depths, and the tokens that were expected of them
        self._key: object = None
        self._depths: list[int] = []
        self._num_left = 0
        self._none_paid: _NonePaid | None = None
        self._plain_every = _LEAST_EVERY

    def note_drafting(self, seconds: float) -> None:
        """Learn what a proposal takes. A single one that takes long says little: the machine may have been asleep."""
        credible_s = min(seconds, 2 * self.draft_s + _LITTLE_S)
        self.draft_s += _GAIN * (credible_s - self.draft_s)

    def note_deciding(self, seconds: float) -> None:
        """Learn what it takes to decide on drafts, their proposals left out: much, beside passes of a tiny model."""
        credible_s = min(seconds, 2 * self.deciding_s + _LITTLE_S)
        self.deciding_s += _GAIN * (credible_s - self.deciding_s)

    def rest_ticks(self, *, has_room: bool = True) -> int:
        """Return for how many ticks nothing is decided where no drafts paid: so many that deciding takes little of the time.

        has_room: for all drafts that might be made; what has none may have some soon.
        """
        share_s = _DECIDING_SHARE * (self.plain_s + self._prompts_s)
        return max(KEPT_FOR, min(int(self.deciding_s / share_s), _MOST_REST)) if share_s and has_room else KEPT_FOR

    def note_batch(self, depths: list[int], proposed: list[int], seconds: float, catch_up: CatchUp | None) -> None:
        """Learn what a proposal for several sequences takes, by what was asked for, 0 of those that lag behind, and what came."""
        if self.draft_cost is None:
            return
        steps = self.draft_cost.steps_taken(depths, proposed)
        steps_s = sum([self.draft_cost.seconds(one) for one in steps])
        if catch_up is None or not catch_up.observe(seconds - steps_s):
            self.draft_cost.observe(steps, seconds)

    def choose(
        self, candidates: list[tuple[float, int]], rows: list[Row], num_cells: int, most: int, num_ticks: int = 1
    ) -> list[int]:
        """Return how many drafts each candidate gets beside these rows, some of which may have drafts.

        most: all together. num_ticks: since the last call.
        """
        self._pass_times.clear()
        self._settle()
        num_decode = sum(map(_is_decode_row, rows))
        num_beside = sum([row.num_drafts for row in rows])
        num_tokens = sum([len(row.token_ids) for row in rows]) - num_beside
        key = (num_decode, num_tokens, num_beside, [(int(100 * worth), cap.bit_length()) for worth, cap in candidates])
        self._num_left -= num_ticks
        if self._still_none_pays(key[:3], candidates, most, num_ticks):
            self._key, self._depths, self._num_left = key, [0] * len(candidates), 0
        elif self._num_left < 0 or key != self._key or not self._fit(candidates, most):
            num_outputs = sum([row.num_outputs for row in rows]) - num_beside
            self._stand_beside(_Beside(num_decode, num_tokens, num_outputs, num_beside, num_cells, len(candidates)))
            self._prompts_s = self._prefill_s()
            self._limit_s = math.inf if num_decode == 1 else max(self._itl_target_s - self._prompts_s, self.plain_s)
            if not self._beside.only_decodes:
                most = min(most, self._most_without_prompts(candidates, len(rows), most))
            self._depths = choose_depths(candidates, num_decode + self.expected_beside, self._times(), most)
            self._plain_every = self._ticks_until_plain(candidates)
            self._key, self._num_left, self.num_decode = key, KEPT_FOR, num_decode
            if not any(self._depths):
                self._none_paid = _NonePaid(key[:3], sorted(candidates), most, self.rest_ticks())
        self.is_measuring = any(self._depths) and self._is_plain_wanted()
        return [0] * len(candidates) if self.is_measuring else self._depths

    def would_choose(self, candidates: list[tuple[float, int]], most: int) -> list[int]:
        """Return how many drafts other candidates would get in the tick of the last choice."""
        return choose_depths(candidates, self._beside.num_decode + self.expected_beside, self._times(), most)

    def allows(self, depths: list[int]) -> bool:
        """Return whether drafts to these depths keep the tick short enough for the sequences beside."""
        return self._limit_s == math.inf or self._decoding_s(depths) <= self._limit_s

    def tick_s(self, depths: list[int]) -> float:
        """Return what the tick takes with drafts to these depths, as far as that is known."""
        return self._decoding_s(depths) + self._prompts_s

    @property
    def plain_s(self) -> float:
        """What decoding takes without drafts; 0 while nothing was chosen."""
        return self._seconds_with(0) if self._beside.num_decode else 0.0

    def lost_s(self, depths: Sequence[int], num_expected: float) -> float:
        """Return what drafts to these depths lose that win so many tokens; less than 0 where they pay."""
        return self._decoding_s(depths) - self.plain_s * (1 + num_expected / max(1, self._beside.num_decode))

    def trial(
        self, depths: list[int], index: int, acceptance: Acceptance, bounds: tuple[int, int]
    ) -> tuple[int, float]:
        """Return how many drafts of a candidate lose least beside these depths where none pay, and what they lose.

        bounds: fewest and most drafts. 0 where there is no room, or no time for the sequences beside.
        """
        least, most = bounds
        first = trial_depth(most, least)
        plain_s, best, best_s = self.lost_s(depths, 0.0), 0, math.inf
        for tried in [
            first,
            *[one for one in _TRIED_DEPTHS if first < one <= most and self.is_known(sum(depths) + one)],
        ]:
            with_trial = [*depths[:index], tried, *depths[index + 1 :]]
            lost_s = self.lost_s(with_trial, acceptance.expected(tried)) - plain_s
            if tried and lost_s < best_s and self.allows(with_trial):
                best, best_s = tried, lost_s
        return best, best_s

    def note_drafts(self, depths: Sequence[int], num_expected: float, *, is_trial: bool) -> None:
        """Note the drafts of a tick, and how many tokens they are expected to win.

        is_trial: whether they are there though they are not known to pay. Those of a size that was never seen are trials, too.
        What a trial has lost is spent with the next choice.
        """
        if is_trial or not self.is_known(sum(depths)):
            self._trial = list(depths), num_expected
            self._num_left, self._none_paid = 0, None  # what is seen now counts at once

    def _most_without_prompts(self, candidates: list[tuple[float, int]], num_rows: int, most: int) -> int:
        """Return how many drafts would pay if all rows decoded, as far as such passes were seen; `most` where none was.

        Soon they do, so that a token that drafts win now saves what it would take then. What more of them would take beside
        prompts is known too badly to bet on it. But where prompts are never away no such pass is ever seen, and the cost model
        has to do.
        """
        beside = self._beside
        knows, num_others = self._decode_cost.knows, num_rows + beside.num_drafts
        reach = min(most, sum([cap for _, cap in candidates]))
        if not any(knows(num_others + num_drafts) for num_drafts in range(1, reach + 1)):
            return most
        self._stand_beside(replace(beside, num_decode=num_rows, num_tokens=num_rows, num_outputs=num_rows))
        try:
            times = replace(
                self._times(),
                is_known=lambda num_drafts: knows(num_others + num_drafts),
                trial_s=-1.0,
            )
            return sum(choose_depths(candidates, num_rows + self.expected_beside, times, most))
        finally:
            self._stand_beside(beside)

    def _still_none_pays(
        self, beside: tuple[int, int, int], candidates: list[tuple[float, int]], most: int, num_ticks: int
    ) -> bool:
        """Return whether no drafts pay since a while ago none did for candidates that were as good, or better.

        So a request that follows another is not worth the time of a choice.
        """
        none_paid = self._none_paid
        if none_paid is None:
            return False
        none_paid.num_left -= num_ticks
        if none_paid.num_left < 0 or none_paid.beside != beside:
            self._none_paid = None
            return False
        return none_paid.covers(candidates, most)

    # ---- trials, and passes to compare with

    def _settle(self) -> None:
        """Spend what the last trial has lost, of which the size has been seen since."""
        if self._trial is not None:
            self.budget.spend(self.lost_s(*self._trial))
            self._trial = None

    def is_known(self, num_drafts: int) -> bool:
        """Return whether a pass with so many drafts was seen; beside prompts nothing is, and the cost model has to do."""
        beside = self._beside
        num_rows = beside.num_tokens + beside.num_drafts + num_drafts
        return not beside.only_decodes or self._decode_cost.seen_seconds(num_rows) is not None

    def _ticks_until_plain(self, candidates: list[tuple[float, int]]) -> int:
        """Return after how many ticks with drafts one without is made: the less they win, the less that costs."""
        won = sum([expected_tokens(worth, depth) for (worth, _), depth in zip(candidates, self._depths, strict=True)])
        taken_s = self._decoding_s(self._depths)
        lost_s = -self.lost_s(self._depths, won) * self.plain_s / taken_s  # of the time of such a tick
        return max(_LEAST_EVERY, min(int(lost_s / (_PLAIN_COST * taken_s)), _MOST_EVERY))

    def _is_plain_wanted(self) -> bool:
        """Return whether this tick with drafts is to be one without, to see what that takes: the first, and later ones.

        Passes of as many rows with other drafts may have shown it, but not for as many cells.
        """
        if not self._beside.only_decodes or self._beside.num_drafts:
            return False
        num_decode = self._beside.num_decode
        num_ticks = self._num_without_plain.get(num_decode)
        is_wanted = num_ticks is None or num_ticks >= self._plain_every
        self._num_without_plain[num_decode] = 0 if num_ticks is None or is_wanted else num_ticks + 1
        return is_wanted

    def _fit(self, candidates: list[tuple[float, int]], most: int) -> bool:
        """Return whether the last choice is within bounds."""
        return sum(self._depths) <= most and all(map(operator.le, self._depths, [cap for _, cap in candidates]))

    # ---- what it takes

    def _stand_beside(self, beside: _Beside) -> None:
        self._beside = beside
        self._pass_times.clear()

    def _times(self) -> DraftingTimes:
        cost = self.draft_cost
        return DraftingTimes(
            pass_s=self._seconds_with,
            step_s=None if cost is None or cost.drafts_blocks else cost.seconds,
            block_s=None if cost is None or not cost.drafts_blocks else cost.of_depths,
            limit_s=self._limit_s,
            is_known=self.is_known,
            trial_s=self.budget.saved_s,
            max_rollback=self._max_rollback,
        )

    def _decoding_s(self, depths: Sequence[int]) -> float:
        drafting_s = 0.0 if self.draft_cost is None else self.draft_cost.of_depths(depths)
        return self._seconds_with(sum(depths)) + drafting_s

    def _seconds_with(self, num_drafts: int) -> float:
        """Return what decoding takes with so many drafts, deciding on them, and their proposals where made one by one."""
        pass_s = self._pass_times.get(num_drafts)
        if pass_s is None:
            pass_s = self._pass_times[num_drafts] = self._pass_s(self._beside.num_drafts + num_drafts)
        if not num_drafts:
            return pass_s
        return pass_s + self.deciding_s + self.draft_s * min(num_drafts, self._beside.num_candidates)

    def _pass_s(self, num_drafts: int) -> float:
        """Return what decoding takes of a pass with so many drafts; what the drafts add to a prompt's part is theirs."""
        model, beside = self._model, self._beside
        total, num_decode = beside.num_tokens + num_drafts, beside.num_decode
        if beside.only_decodes and (least_s := self._decode_cost.least_seconds(total)) is not None:
            return least_s * self._with_cells(total)
        added_s = model.mean_seconds(total, beside.num_cells, beside.num_outputs + num_drafts)
        added_s -= model.mean_seconds(beside.num_tokens, beside.num_cells, beside.num_outputs)
        return self._decode_cost.seconds(num_decode) * self._with_cells(num_decode) + added_s

    def _prefill_s(self) -> float:
        """Return what a pass takes longer for the prompts in it."""
        model, beside = self._model, self._beside
        if beside.only_decodes:
            return 0.0
        decode_s = model.mean_seconds(beside.num_decode, beside.num_cells, beside.num_decode)
        return max(0.0, model.mean_seconds(beside.num_tokens, beside.num_cells, beside.num_outputs) - decode_s)

    def _with_cells(self, num_rows: int) -> float:
        """Return how many times as long a decoding pass takes with the cells in use; `DecodeCost` takes out the same."""
        model = self._model
        return model.mean_seconds(num_rows, self._beside.num_cells, num_rows) / model.mean_seconds(
            num_rows, 0, num_rows
        )


def _is_decode_row(row: Row) -> bool:
    """Return whether a row costs what a decoding sequence's does, and wins a token: so does the last token of a cached prompt."""
    return row.sequence.is_decoding or (row.draws and len(row.token_ids) == 1)
