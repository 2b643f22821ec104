"""Adds drafts to the rows of a tick, after everybody's decode row and the prefill that is due. Pure.

How many drafts each sequence gets follows from their acceptance and from the costs (`depth_chooser`); the drafter proposes the
tokens. `Row` and `RowOutput` say how a pass treats drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, TypeAlias

from paceline.clock import Clock
from paceline.errors import DrafterError, PacelineError
from paceline.kv_cache import KVCache
from paceline.sequence import Limits, Row, RowOutput, Sequence
from paceline.speculation.acceptance import Acceptance, UsualAcceptance
from paceline.speculation.cost import CatchUp, DraftCost
from paceline.speculation.depth_chooser import KEPT_FOR, DepthChooser
from paceline.speculation.drafter import BatchDrafter, Candidates, Drafter, DrafterCalls, DraftingSequence

_USUAL_LAG = 2  # tokens that a tick brings, and that a lagging drafter computes with its first draft


class LaggingSequences:
    """Sequences that lag behind in a drafter's own memory: their missing tokens, and whether computing those pays.

    catch_up: the cost of computing them. failed: receives the errors that end the request of a sequence.
    """

    def __init__(
        self,
        calls: DrafterCalls,
        chooser: DepthChooser,
        limits: Limits,
        failed: dict[Sequence, DrafterError],
    ) -> None:
        self.catch_up = CatchUp(calls, limits.itl_target_s)
        self._calls, self._chooser, self._limits, self._failed = calls, chooser, limits, failed

    def begin(self, candidates: Candidates) -> Candidates:
        """Begin with new sequences, to learn their lag; leave out sequences for which the drafter never can draft."""
        for row, known, _ in candidates:
            if not known.has_begun:
                try:
                    self._calls.inform(row.sequence, known)
                    self._note_lag(row.sequence, known)
                except DrafterError as error:
                    known.is_off = True
                    self._failed.setdefault(row.sequence, error)
        return [candidate for candidate in candidates if not candidate[1].is_off]

    def note_missing(self, candidates: Candidates) -> int:
        """Note the missing tokens of each sequence; return the number of sequences with more than fit this tick.

        Raises `DrafterError` if the drafter does not say how many tokens fit.
        """
        missing = []
        for row, known, _ in candidates:
            num_since = row.sequence.num_tokens - known.num_observed - known.num_ahead - _USUAL_LAG
            num_before, known.num_missing, known.is_late = known.num_missing, max(0.0, known.lag + num_since), False
            if known.is_on_trial and known.num_missing >= num_before:
                known.is_on_trial = False  # it has no room, and others may have a trial
            if known.num_missing:
                missing.append(known)
        if not missing:
            return 0
        num_left = float(self.catch_up.limit(self._chooser.tick_s([])))
        for known in sorted(missing, key=lambda known: known.num_missing):
            num_left -= known.num_missing
            known.is_late = num_left < 0
        return sum([known.is_late for known in missing])

    def pays(self, row: Row, known: DraftingSequence) -> bool:
        """Return whether the drafter is up to date with a sequence, or drafts may win back the time of catching up."""
        if known.is_catching_up or not known.num_missing:
            return True
        max_tokens, generated = row.sequence.request.params.max_tokens, row.sequence.output.num_generated
        num_left = self._limits.max_positions if max_tokens is None else max_tokens - generated
        return self.catch_up.pays(known.num_missing, num_left, self._chooser.plain_s, self._chooser.num_decode)

    def depths_later(self, candidates: Candidates, worths: list[tuple[float, int]], room: int) -> list[int]:
        """Return the number of drafts of each candidate if no sequence lagged, as far as catching up for them pays.

        Catching up for a pass of a size that was never seen is a trial.
        """
        depths = self._chooser.would_choose(worths, room)
        if any(depths) and not self._chooser.is_known(sum(depths)):
            new = [known for _, known, _ in candidates if known.is_late and not known.is_catching_up]
            taken_s = sum([self.catch_up.cost_s(known.num_missing) for known in new])
            if not self._chooser.budget.affords(taken_s):
                return [0] * len(depths)
            self._chooser.budget.spend(taken_s)
        return depths

    def note_proposals(self, asked: Candidates, proposed: list[int]) -> list[int]:
        """Note the numbers of proposed tokens; return the numbers asked for, 0 for sequences that still lag."""
        depths = [depth for _, _, depth in asked]
        for index, (row, known, _) in enumerate(asked):
            known.lag = known.num_ahead = 0
            if proposed[index]:
                continue
            try:
                self._note_lag(row.sequence, known)
            except DrafterError as error:
                self._failed.setdefault(row.sequence, error)
            if known.lag > 0:
                depths[index] = 0  # it took no step
        return depths

    def _note_lag(self, sequence: Sequence, known: DraftingSequence) -> None:
        known.lag = self._calls.lag(sequence)
        if known.lag == math.inf:
            known.is_off = True
            self._calls.end(sequence, known)


class Speculation:
    """Asks the drafter for drafts and reports their outcome to it. On the engine's thread.

    num_expected: tokens that the last added drafts are expected to win.
    """

    def __init__(
        self,
        drafter: Drafter,
        limits: Limits,
        chooser: DepthChooser,
        clock: Clock,
        report: Callable[[PacelineError], None],
    ) -> None:
        self._limits, self._chooser, self._clock, self._report = limits, chooser, clock, report
        self._calls = DrafterCalls(drafter, limits.n_vocab, report)
        self._is_batch = isinstance(drafter, BatchDrafter)
        if self._is_batch:
            chooser.draft_cost = DraftCost(drafts_blocks=bool(getattr(drafter, "drafts_blocks", False)))
        self._sequences: dict[Sequence, DraftingSequence] = {}
        self._usual = UsualAcceptance()
        self._failed: dict[Sequence, DrafterError] = {}  # since the last tick, the first of each
        self._lagging: LaggingSequences | None = None
        if self._calls.lags:
            self._lagging = LaggingSequences(self._calls, chooser, limits, self._failed)
        self._resting_shape: _Shape | None = None  # of the last rows, if no drafts paid or none were allowed
        self._num_rested = self._rest_ticks = 0  # ticks since then, and until the next decision
        self.num_expected = 0.0

    def add_drafts(
        self, rows: list[Row], kv_cache: KVCache, expected_beside: float = 0.0
    ) -> list[tuple[Sequence, DrafterError]]:
        """Add drafts to the rows of a pass; return the open sequences for which the drafter failed, with the errors.

        expected_beside: tokens that drafts of other drafters are expected to win; the rows with these get no more.
        """
        self._chooser.expected_beside, self.num_expected = expected_beside, 0.0
        if not self._rests(rows):
            self._add_all(rows, kv_cache)
        if not self._failed:
            return []
        failed = [(sequence, error) for sequence, error in self._failed.items() if sequence.reason is None]
        for sequence, _ in failed:
            del self._failed[sequence]
        return failed

    def _rests(self, rows: list[Row]) -> bool:
        """Return whether to skip this tick: a few ticks ago no drafts paid beside rows like these, or none were allowed."""
        if self._resting_shape is None or self._num_rested >= self._rest_ticks or self._resting_shape != _shape(rows):
            return False
        self._num_rested += 1
        return True

    def _rest(self, rows: list[Row], num_ticks: int) -> None:
        """Skip `num_ticks` ticks as long as the rows are like these."""
        self._resting_shape = _shape(rows) if num_ticks else None
        self._num_rested, self._rest_ticks = 0, num_ticks

    def _add_all(self, rows: list[Row], kv_cache: KVCache) -> None:
        limits, num_tokens = self._limits, sum([len(row.token_ids) for row in rows])
        n_batch = limits.n_batch if limits.n_verify is None else limits.n_verify
        num_drafted = sum([row.num_drafts for row in rows])
        room = min(limits.max_drafted - num_drafted, n_batch - num_tokens, kv_cache.num_free - num_tokens)
        if room < max(1, limits.min_draft):
            return
        candidates = self._candidates(rows)
        if not candidates:
            if num_tokens == len(rows) and all([row.sequence.is_decoding for row in rows]):  # noqa: C419 - the faster way
                self._rest(rows, KEPT_FOR)
            return
        begin_s = self._clock.now()
        try:
            wanted, is_trial = self._choose(candidates, rows, kv_cache.num_cells, int(room))
        except DrafterError as error:
            self._calls.abandon(candidates, error)
            return
        self._chooser.note_deciding(self._clock.now() - begin_s)
        if not wanted:
            return
        if self._is_batch:
            self._propose_all(wanted)
        else:
            for row, known, depth in wanted:
                self._propose(row, known, depth)
        num_drafts = [row.num_drafts for row, _, _ in wanted]
        if any(num_drafts):
            self._chooser.note_drafts(num_drafts, self.num_expected, is_trial=is_trial)

    def _candidates(self, rows: list[Row]) -> Candidates:
        """Return the rows that may have drafts, with their state and maximum of drafts."""
        least = max(1, self._limits.min_draft)
        candidates = [
            (row, known, cap)
            for row in rows
            if row.draws
            and row.sequence.is_decoding
            and len(row.token_ids)
            == 1  # else tokens that were taken back come first, so that they are not taken back again
            and (cap := self._cap(row.sequence)) >= least
            and not (known := self._known(row.sequence)).is_off
            and not row.num_drafts
        ]
        return candidates if self._lagging is None else self._lagging.begin(candidates)

    def has_proposed(self, sequence: Sequence) -> bool:
        """Return whether it proposed drafts of a sequence that are in the pass."""
        known = self._sequences.get(sequence)
        return known is not None and known.num_proposed > 0

    def note(self, row: Row, output: RowOutput) -> None:
        """Take the outcome of a row's drafts.

        A draft that was left out of the pass is right if the same token was drawn in its place. A forbidden draft is the
        drafter's mistake, a mask that came too late is not. The draft won nothing either way.
        """
        known = self._sequences[row.sequence]
        num_accepted = output.num_accepted if output.computed else 0
        num_rejected, known.num_proposed, known.num_ahead = known.num_proposed - num_accepted, 0, num_accepted
        num_judged = min(row.num_drafts, len(output.token_ids)) if output.computed else 0
        if num_judged:
            known.acceptance.observe(num_judged, row.num_right(output.token_ids), num_accepted)
        try:
            if num_rejected:
                self._calls.rollback(row.sequence, num_rejected)
        except DrafterError as error:
            self._failed[row.sequence] = error

    def forget_gone(self) -> None:
        """Forget the sequences without a slot; a preempted sequence begins anew."""
        for sequence in [sequence for sequence in self._failed if sequence.reason is not None]:
            self._report(self._failed.pop(sequence))
        self._forget([sequence for sequence in self._sequences if sequence.slot is None])

    def reset(self) -> None:
        """Forget all sequences."""
        self._forget(list(self._sequences))

    def _forget(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._calls.forget(sequence, self._sequences.pop(sequence))

    def _cap(self, sequence: Sequence) -> int:
        """Return the most drafts that a sequence may have now: one drawn token follows them, which may be its last."""
        limits, max_tokens = self._limits, sequence.request.params.max_tokens
        most = min(sequence.max_draft, limits.max_draft, limits.max_positions - sequence.num_tokens)
        return most if max_tokens is None else min(most, max_tokens - sequence.output.num_generated - 1)

    def _known(self, sequence: Sequence) -> DraftingSequence:
        known = self._sequences.get(sequence)
        if known is None:
            namespace = sequence.namespace if sequence.writes_cache else None
            known = self._sequences[sequence] = DraftingSequence(Acceptance(self._usual), namespace)
        return known

    # ---- how many

    def _choose(self, candidates: Candidates, rows: list[Row], num_cells: int, room: int) -> tuple[Candidates, bool]:
        """Return the number of drafts to ask for, and whether a trial is among them.

        These are as many as pay, or a trial's; 0 for a sequence that only catches up. Raises `DrafterError` if the drafter fails.
        """
        chooser, lagging, least = self._chooser, self._lagging, max(1, self._limits.min_draft)
        num_late = 0 if lagging is None else lagging.note_missing(candidates)
        worths = [known.acceptance.worth for _, known, _ in candidates]
        caps = [cap if lagging is None or lagging.pays(row, known) else 0 for row, known, cap in candidates]
        in_time = [0 if known.is_late else cap for (_, known, _), cap in zip(candidates, caps, strict=True)]
        num_ticks = 1 + self._num_rested
        depths = later = list(chooser.choose(list(zip(worths, in_time, strict=True)), rows, num_cells, room, num_ticks))
        if num_late and lagging is not None:
            later = lagging.depths_later(candidates, list(zip(worths, caps, strict=True)), room)
        chooser.budget.pass_time(chooser.plain_s, num_ticks)
        for index, (_, known, _) in enumerate(candidates):
            known.is_catching_up = known.is_late and later[index] >= least
            if depths[index] >= least:
                known.acceptance.note_drafts()
                known.is_on_trial = False
            else:
                depths[index] = 0
                known.acceptance.note_plain(num_ticks)
        is_trial = not chooser.is_measuring and self._try_one(candidates, depths, room - sum(depths))
        wanted = [
            (row, known, depth)
            for (row, known, _), depth in zip(candidates, depths, strict=True)
            if depth or known.is_catching_up
        ]
        has_rest = not (chooser.is_measuring or wanted)
        self._rest(rows, chooser.rest_ticks(has_room=room >= max(caps)) if has_rest else 0)
        return wanted, is_trial

    def _try_one(self, candidates: Candidates, depths: list[int], room: int) -> bool:
        """Give drafts that are not known to pay to a sequence without any; return whether one got some.

        A sequence comes first if its trial began while the drafter caught up with it, else the first sequence that is due, as
        soon as there is room and time. A sequence that takes more time to catch up with than the budget holds up no other.
        """
        without = [
            index for index, (_, known, _) in enumerate(candidates) if not depths[index] and not known.is_catching_up
        ]
        begun = [index for index in without if candidates[index][1].is_on_trial]
        for index in begun or without:
            _, known, cap = candidates[index]
            if not begun and not (known.acceptance.is_due and self._affords_catching_up(known)):
                continue
            tried, lost_s = self._chooser.trial(
                depths, index, known.acceptance, (self._limits.min_draft, min(cap, room))
            )
            if not tried:
                continue
            if not begun and not self._begin_trial(known, lost_s):
                if not known.num_missing:
                    return False  # the others lose about as much
                continue
            known.is_on_trial = known.is_catching_up = known.is_late
            if not known.is_late:
                depths[index] = tried
            return not known.is_late
        return False

    def _affords_catching_up(self, known: DraftingSequence) -> bool:
        return self._chooser.budget.affords(self._catching_up_s(known))

    def _catching_up_s(self, known: DraftingSequence) -> float:
        return 0.0 if self._lagging is None else self._lagging.catch_up.cost_s(known.num_missing)

    def _begin_trial(self, known: DraftingSequence, lost_s: float) -> bool:
        """Spend the time of catching up for a trial if the budget has time for all of it; return whether it has."""
        catching_up_s = self._catching_up_s(known)
        if not self._chooser.budget.affords(catching_up_s + max(0.0, lost_s)):
            return False
        self._chooser.budget.spend(catching_up_s)
        known.acceptance.note_trial()
        return True

    # ---- which

    def _propose(self, row: Row, known: DraftingSequence, depth: int) -> None:
        """Ask for drafts of a row and add them."""
        begin_s = self._clock.now()
        try:
            self._calls.inform(row.sequence, known)
            proposed = self._calls.propose(row.sequence, depth)
            self._chooser.note_drafting(self._clock.now() - begin_s)
            self._add(row, known, proposed, depth)
        except DrafterError as error:
            self._failed.setdefault(row.sequence, error)

    def _propose_all(self, wanted: Candidates) -> None:
        """Ask for drafts of several rows at once and add them."""
        begin_s, asked, lagging = self._clock.now(), [], self._lagging
        for row, known, depth in wanted:
            try:
                self._calls.inform(row.sequence, known)
                asked.append((row, known, depth))
            except DrafterError as error:
                self._failed.setdefault(row.sequence, error)
        depths = [depth for _, _, depth in asked]
        try:
            if lagging is not None:
                lagging.catch_up.limit(self._chooser.tick_s(depths))
        except DrafterError as error:
            self._calls.abandon(asked, error)
            return
        proposals = self._calls.propose_all(asked)
        if proposals is None:
            return
        taken_s, proposed = self._clock.now() - begin_s, [0] * len(asked)
        for index, (row, known, depth) in enumerate(asked):
            try:
                proposed[index] = self._add(row, known, proposals[index], depth)
            except DrafterError as error:
                self._failed.setdefault(row.sequence, error)
        if lagging is not None:
            depths = lagging.note_proposals(asked, proposed)
        self._chooser.note_batch(depths, proposed, taken_s, None if lagging is None else lagging.catch_up)

    def _add(self, row: Row, known: DraftingSequence, proposed: Any, depth: int) -> int:
        """Add a proposal to a row if it is long enough; return its number of tokens."""
        drafts = self._calls.checked(proposed, depth)
        if not drafts:
            if depth:  # with 0 the sequence only catches up
                known.acceptance.note_no_proposal()
        elif len(drafts) >= self._limits.min_draft:
            known.num_proposed = row.num_drafts = len(drafts)
            self.num_expected += known.acceptance.expected(len(drafts))
            row.token_ids = row.token_ids + drafts  # a new list, as the row's may be the sequence's own
        else:
            self._calls.rollback(row.sequence, len(drafts))
        return len(drafts)


_Shape: TypeAlias = tuple[list[int], int, int]


def _shape(rows: list[Row]) -> _Shape:
    """Return a value that changes when sequences or prompts come and go, and is quick to compute.

    A new sequence in the place of an ended one counts: the ended one had no room for drafts before its end.
    """
    first, last = rows[0], rows[-1]
    keys = [row.sequence.key for row in rows]
    return (keys, len(first.token_ids) - first.num_drafts, len(last.token_ids) - last.num_drafts)


class DraftChain:
    """The speculation of several drafters, in the order in which they are asked: the first proposal for a sequence counts.

    Each drafter has its own acceptance and costs, so that a drafter that is right nine times of ten does not make another look
    good, and its own state of each sequence, which it brings up to date when it is asked.
    """

    def __init__(self, links: SequenceOf[Speculation]) -> None:
        self._links = tuple(links)

    def add_drafts(self, rows: list[Row], kv_cache: KVCache) -> list[tuple[Sequence, DrafterError]]:
        """Add drafts as `Speculation` does. Rows with drafts, or with a failed drafter, do not go to the next drafters."""
        failed: list[tuple[Sequence, DrafterError]] = []
        num_expected = 0.0
        for link in self._links:
            found = link.add_drafts(rows, kv_cache, num_expected)
            if found:
                failed += found
                ended = {sequence for sequence, _ in found}
                rows = [row for row in rows if row.sequence not in ended]
                if not rows:
                    break
            num_expected += link.num_expected
        return failed

    def note(self, row: Row, output: RowOutput) -> None:
        """Report the outcome of a row's drafts to the drafter that proposed them."""
        next(link for link in self._links if link.has_proposed(row.sequence)).note(row, output)

    def forget_gone(self) -> None:
        """Forget the sequences without a slot."""
        for link in self._links:
            link.forget_gone()

    def reset(self) -> None:
        """Forget all sequences."""
        for link in self._links:
            link.reset()
