"""The number of drafts of each sequence in a tick, by measured acceptance and measured costs. Pure arithmetic.

A draft wins a token with a probability that is measured for each sequence, and only if all drafts before it do: the j-th draft is
worth p ** j tokens. Drafts are added by their worth, over all sequences, as many as make the most tokens in a second; none if a
pass without drafts makes more.

If a wrong draft takes its whole row back, the next pass computes the right part of it again, without drafts. A sequence whose
drafts are all right with probability q has drafts in one of 2 - q passes then, and the mean of both kinds of pass counts.
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

_LEAST_WORTH = 0.02  # tokens; drafts worth less are ignored
_LEAST_GAIN = 1.04  # in speed, as estimates of passes are a few per cent off
_DEARER = 1.2  # possible cost of a size that was never seen, in expected ones
_TRIED = 2  # fewest drafts of a trial
_SIZES = (*range(1, 9), 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # numbers of drafts that are compared

KEPT_FOR = 16
"""Ticks for which a choice of depths is kept while nothing else changes."""
_TRIED_DEPTHS = (3, 4, 5, 6, 7, 8, 12, 16)  # drafts of a trial, if two lose more
_LEAST_EVERY, _MOST_EVERY = 4, 64  # ticks with drafts before a tick without
_PLAIN_COST = 0.005  # of the speed: allowed cost of ticks without drafts while drafts pay
_GAIN = 0.1  # weight of a new measurement of a proposal
_DECIDING_SHARE, _MOST_REST = 0.003, 256  # of the time, for decisions; most ticks without a decision
_ENOUGH = 16  # drafts of a sequence; if these do not pay, more do not
_LITTLE_S = 0.001  # a measurement may be twice the last estimate and this


@dataclass(frozen=True, slots=True)
class DraftingTimes:
    """The costs of drafts and their limits, in seconds.

    pass_s: of decoding with a number of drafts. step_s: of a step of drafting by its candidates: one step for the first draft of
    all candidates that have one, one for the second, ... block_s: of drafting to these depths, if it has no steps. limit_s: most
    seconds of decoding with drafts. is_known: whether the cost of a pass with a number of drafts is known; None: always. trial_s:
    seconds that a pass of unknown cost may lose if it is dearer than expected; less than 0: no such pass. max_rollback: wrong
    drafts of a row beyond which all of it is computed again; None: never.
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
    """Return the number of drafts of each candidate.

    candidates: probability and most drafts of each. num_rows: rows that decode, each worth a token, and tokens that other drafts
    win. most: drafts of all candidates together.
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
    """Return the share of passes with drafts, and the seconds of the other passes, which compute rows again.

    Exact for one sequence; several sequences are assumed to have drafts in the same passes.
    """
    share = num_again = 0.0
    drafting = [(worth, depth) for (worth, _), depth in zip(candidates, depths, strict=True) if depth]
    for worth, depth in drafting:
        num_needed = max(0, depth - max_rollback)  # with fewer right drafts the row is taken back
        right = [worth**number for number in range(num_needed + 1)]  # probabilities of 0, 1, ... right drafts
        share += 1 / (2 - right[-1])
        if right[-1] < 1:  # the newest token and the right drafts, if there are too few
            num_again += (sum(right[:-1]) - num_needed * right[-1]) / (1 - right[-1])
    low = math.floor(num_again)
    again_s = pass_s(low) + (num_again - low) * (pass_s(low + 1) - pass_s(low))
    return share / len(drafting), again_s


def _growing(
    candidates: Sequence[tuple[float, int]], most: int, times: DraftingTimes
) -> Iterator[tuple[list[int], float, float]]:
    """Yield the depths that are compared, with the expected tokens of the drafts and the seconds of drafting them."""
    worths, step_s = _worths(candidates, most), times.step_s
    gain, drafting_s, step_sizes = 0.0, 0.0, [0] * (len(worths) + 1)
    depths, at = [0] * len(candidates), 0
    for size in _SIZES:
        size = min(size, len(worths))  # noqa: PLW2901 - the last size
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
    """Return the fewest drafts of a trial; 0 if `least` is more than it may have."""
    return min(max(_TRIED, least), most) if least <= most else 0


def _worths(candidates: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int, int]]:
    """Return single drafts as worth, candidate and depth, the most valuable first."""
    heap = [(-probability, index, 1) for index, (probability, cap) in enumerate(candidates) if cap > 0]
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
    """The rows of a tick beside which drafts are chosen.

    num_decode: rows that decode. num_tokens, num_outputs: of all rows, without drafts of other drafters; num_drafts: those
    drafts. num_candidates: rows that may have drafts.
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
    """A choice of no drafts, which holds for similar candidates for num_left ticks.

    beside: rows that decode, tokens, and drafts in the rows; candidates: ascending; most: drafts, all together.
    """

    beside: tuple[int, int, int]
    candidates: list[tuple[float, int]]
    most: int
    num_left: int

    def covers(self, candidates: list[tuple[float, int]], most: int) -> bool:
        """Return whether drafts of these candidates pay no more: none is worth more, and no more of them would count."""
        if len(candidates) != len(self.candidates) or most > self.most < _ENOUGH * len(candidates):
            return False
        pairs = zip(sorted(candidates), self.candidates, strict=True)
        return all(worth <= before and (cap <= had or had >= _ENOUGH) for (worth, cap), (before, had) in pairs)


class DepthChooser:
    """Chooses the depths of a tick from the costs of passes and proposals.

    Passes without drafts are the measure for drafts: they are seen first, and again after a while. Passes of sizes that were
    never seen are trials, as long as the budget has time for them.

    budget: of trials. is_measuring: whether the last choice is a pass without drafts, to see its cost. num_decode: sequences
    that decoded at the last choice. draft_s: seconds of a proposal for one sequence. draft_cost: of the steps of a batch
    drafter. deciding_s: seconds that a tick with drafts takes to decide on them. itl_target_s: while several sequences
    decode, drafts of one may not make a tick longer than that. expected_beside: tokens that drafts in the rows already are
    expected to win. max_rollback: wrong drafts of a row beyond which all of it is computed again; None: never.
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
        self._num_without_plain: dict[int, int] = {}  # ticks with drafts since a tick without, by rows that decode
        self._beside = _Beside(0, 0, 0, 0, 0, 0)
        self._pass_times: dict[int, float] = {}  # by drafts, beside those rows, since the last choice
        self._limit_s = math.inf  # most seconds of decoding
        self._prompts_s = 0.0  # seconds that prompts add
        self._trial: tuple[list[int], float] | None = None  # depths, and their expected tokens
        self._key: object = None
        self._depths: list[int] = []
        self._num_left = 0
        self._none_paid: _NonePaid | None = None
        self._plain_every = _LEAST_EVERY

    def note_drafting(self, seconds: float) -> None:
        """Learn the seconds of a proposal. A single long one says little: the machine may have been asleep."""
        credible_s = min(seconds, 2 * self.draft_s + _LITTLE_S)
        self.draft_s += _GAIN * (credible_s - self.draft_s)

    def note_deciding(self, seconds: float) -> None:
        """Learn the seconds of deciding on drafts, without their proposals: much, beside passes of a tiny model."""
        credible_s = min(seconds, 2 * self.deciding_s + _LITTLE_S)
        self.deciding_s += _GAIN * (credible_s - self.deciding_s)

    def rest_ticks(self, *, has_room: bool = True) -> int:
        """Return the ticks without a decision after no drafts paid: enough that deciding takes little of the time.

        has_room: whether there is room for all possible drafts; without it there may be room soon.
        """
        share_s = _DECIDING_SHARE * (self.plain_s + self._prompts_s)
        return max(KEPT_FOR, min(int(self.deciding_s / share_s), _MOST_REST)) if share_s and has_room else KEPT_FOR

    def note_batch(self, depths: list[int], proposed: list[int], seconds: float, catch_up: CatchUp | None) -> None:
        """Learn the cost of a batched proposal from the wanted drafts, 0 of sequences that lag, and the proposed ones."""
        if self.draft_cost is None:
            return
        steps = self.draft_cost.steps_taken(depths, proposed)
        steps_s = sum([self.draft_cost.seconds(size) for size in steps])
        if catch_up is None or not catch_up.observe(seconds - steps_s):
            self.draft_cost.observe(steps, seconds)

    def choose(
        self, candidates: list[tuple[float, int]], rows: list[Row], num_cells: int, most: int, num_ticks: int = 1
    ) -> list[int]:
        """Return the number of drafts of each candidate beside these rows, some of which may have drafts.

        most: drafts of all candidates together. num_ticks: since the last call.
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
        """Return the number of drafts of other candidates in the tick of the last choice."""
        return choose_depths(candidates, self._beside.num_decode + self.expected_beside, self._times(), most)

    def allows(self, depths: list[int]) -> bool:
        """Return whether drafts to these depths keep the tick short enough for the sequences beside."""
        return self._limit_s == math.inf or self._decoding_s(depths) <= self._limit_s

    def tick_s(self, depths: list[int]) -> float:
        """Return the expected seconds of the tick with drafts to these depths."""
        return self._decoding_s(depths) + self._prompts_s

    @property
    def plain_s(self) -> float:
        """Seconds of decoding without drafts; 0 before the first choice."""
        return self._seconds_with(0) if self._beside.num_decode else 0.0

    def lost_s(self, depths: Sequence[int], num_expected: float) -> float:
        """Return the seconds that drafts to these depths lose if they win `num_expected` tokens; less than 0 if they pay."""
        return self._decoding_s(depths) - self.plain_s * (1 + num_expected / max(1, self._beside.num_decode))

    def trial(
        self, depths: list[int], index: int, acceptance: Acceptance, bounds: tuple[int, int]
    ) -> tuple[int, float]:
        """Return the number of drafts of a candidate that loses least beside these depths, and the seconds it loses.

        bounds: fewest and most drafts. The number is 0 without room, or without time for the sequences beside.
        """
        least, most = bounds
        first = trial_depth(most, least)
        plain_s, best, best_s = self.lost_s(depths, 0.0), 0, math.inf
        for tried in [
            first,
            *[depth for depth in _TRIED_DEPTHS if first < depth <= most and self.is_known(sum(depths) + depth)],
        ]:
            with_trial = [*depths[:index], tried, *depths[index + 1 :]]
            lost_s = self.lost_s(with_trial, acceptance.expected(tried)) - plain_s
            if tried and lost_s < best_s and self.allows(with_trial):
                best, best_s = tried, lost_s
        return best, best_s

    def note_drafts(self, depths: Sequence[int], num_expected: float, *, is_trial: bool) -> None:
        """Note the drafts of a tick and their expected tokens.

        is_trial: whether they are not known to pay. Drafts of a size that was never seen are trials, too. The next choice
        spends the loss of a trial.
        """
        if is_trial or not self.is_known(sum(depths)):
            self._trial = list(depths), num_expected
            self._num_left, self._none_paid = 0, None  # the outcome counts at once

    def _most_without_prompts(self, candidates: list[tuple[float, int]], num_rows: int, most: int) -> int:
        """Return the number of drafts that would pay if all rows decoded; `most` if no such pass was seen.

        Soon all rows decode, so a token that drafts win now saves its time then. The cost of more drafts beside prompts is
        known too badly to bet on it. But while prompts are always there no such pass is ever seen, and the cost model has to
        do.
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
        """Return whether no drafts pay because none paid a while ago for candidates that were as good or better.

        So a request that follows another does not cost the time of a choice.
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
        """Spend the loss of the last trial, as its size has been seen since."""
        if self._trial is not None:
            self.budget.spend(self.lost_s(*self._trial))
            self._trial = None

    def is_known(self, num_drafts: int) -> bool:
        """Return whether a pass with so many drafts was seen. Beside prompts none is, and the cost model has to do."""
        beside = self._beside
        num_rows = beside.num_tokens + beside.num_drafts + num_drafts
        return not beside.only_decodes or self._decode_cost.seen_seconds(num_rows) is not None

    def _ticks_until_plain(self, candidates: list[tuple[float, int]]) -> int:
        """Return the ticks with drafts before a tick without: the less they win, the less that tick costs."""
        won = sum([expected_tokens(worth, depth) for (worth, _), depth in zip(candidates, self._depths, strict=True)])
        taken_s = self._decoding_s(self._depths)
        lost_s = -self.lost_s(self._depths, won) * self.plain_s / taken_s  # as a part of the tick
        return max(_LEAST_EVERY, min(int(lost_s / (_PLAIN_COST * taken_s)), _MOST_EVERY))

    def _is_plain_wanted(self) -> bool:
        """Return whether this tick goes without drafts, to see its cost: the first tick with drafts, and later ones.

        Passes of as many rows with other drafts may have shown the cost, but not for as many cells.
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

    # ---- costs

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
        """Return the seconds of decoding with `num_drafts` drafts, with deciding on them and single proposals."""
        pass_s = self._pass_times.get(num_drafts)
        if pass_s is None:
            pass_s = self._pass_times[num_drafts] = self._pass_s(self._beside.num_drafts + num_drafts)
        if not num_drafts:
            return pass_s
        return pass_s + self.deciding_s + self.draft_s * min(num_drafts, self._beside.num_candidates)

    def _pass_s(self, num_drafts: int) -> float:
        """Return the seconds of decoding in a pass; the time that drafts add to a prompt's part counts as theirs."""
        model, beside = self._model, self._beside
        total, num_decode = beside.num_tokens + num_drafts, beside.num_decode
        if beside.only_decodes and (least_s := self._decode_cost.least_seconds(total)) is not None:
            return least_s * self._with_cells(total)
        added_s = model.mean_seconds(total, beside.num_cells, beside.num_outputs + num_drafts)
        added_s -= model.mean_seconds(beside.num_tokens, beside.num_cells, beside.num_outputs)
        return self._decode_cost.seconds(num_decode) * self._with_cells(num_decode) + added_s

    def _prefill_s(self) -> float:
        """Return the seconds that prompts add to a pass."""
        model, beside = self._model, self._beside
        if beside.only_decodes:
            return 0.0
        decode_s = model.mean_seconds(beside.num_decode, beside.num_cells, beside.num_decode)
        return max(0.0, model.mean_seconds(beside.num_tokens, beside.num_cells, beside.num_outputs) - decode_s)

    def _with_cells(self, num_rows: int) -> float:
        """Return the factor of a decoding pass for the cells in use; `DecodeCost` takes out the same factor."""
        model = self._model
        return model.mean_seconds(num_rows, self._beside.num_cells, num_rows) / model.mean_seconds(
            num_rows, 0, num_rows
        )


def _is_decode_row(row: Row) -> bool:
    """Return whether a row costs as much as a decoding row and wins a token: also the last token of a cached prompt."""
    return row.sequence.is_decoding or (row.draws and len(row.token_ids) == 1)
