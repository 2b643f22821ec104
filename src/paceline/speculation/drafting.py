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
from paceline.speculation.depth_chooser import KEPT_FOR, Acceptance, DepthChooser, DraftCost, running_mean
from paceline.speculation.drafter import BatchDrafter, Candidates, Drafter, DrafterCalls, DraftingSequence

_USUAL_LAG = 2  # tokens that a tick brings, and that a lagging drafter computes with its first draft
_MOST_LEFT = 512  # most tokens that a sequence is expected to go on for
_FIRST_CHUNK = 32  # tokens of a tick, while nothing is known
_LEAST_CHUNK, _MOST_CHUNK = 16, 1024  # the least even if no time is left
_NUM_TELLING = 16  # fewer tokens say nothing about the time of a token


class LaggingSequences:
    """Sequences that lag behind in a drafter's own memory: their missing tokens, and whether computing those pays.

    failed: receives the errors that end the request of a sequence. token_s: running mean of the seconds of a missing token; 0
    while nothing is known. Of the first two times the shorter one counts, as in `DraftCost`.
    """

    def __init__(
        self,
        calls: DrafterCalls,
        chooser: DepthChooser,
        limits: Limits,
        failed: dict[Sequence, DrafterError],
    ) -> None:
        self._calls, self._chooser, self._limits, self._failed = calls, chooser, limits, failed
        self.token_s = 0.0
        self._is_seen_once = False

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

    def note_missing(self, candidates: Candidates) -> None:
        """Note the missing tokens of each sequence, and whether they fit into this tick, the fewest first.

        Raises `DrafterError` if the drafter does not say how many tokens fit.
        """
        missing = []
        for row, known, _ in candidates:
            num_since = row.sequence.num_tokens - known.num_observed - known.num_ahead - _USUAL_LAG
            known.num_missing, known.is_late = max(0.0, known.lag + num_since), False
            if known.num_missing:
                missing.append(known)
        if missing:
            num_left = float(self.limit(self._chooser.tick_s([])))
            for known in sorted(missing, key=lambda known: known.num_missing):
                num_left -= known.num_missing
                known.is_late = num_left < 0

    def cost_s(self, known: DraftingSequence) -> float:
        """Return the seconds of catching up with a sequence; 0 while nothing is known."""
        return known.num_missing * self.token_s

    def pays(self, row: Row, known: DraftingSequence, num_drafting: int) -> bool:
        """Return whether drafts win back the time of catching up with a sequence in the tokens that it has left.

        num_drafting: sequences that drafts are chosen for.
        """
        if known.is_catching_up or not known.num_missing:
            return True
        max_tokens, generated = row.sequence.request.params.max_tokens, row.sequence.output.num_generated
        num_left = _MOST_LEFT if max_tokens is None else min(max_tokens - generated, _MOST_LEFT)
        return self.cost_s(known) <= num_left * self._chooser.saved_s() / num_drafting

    def limit(self, tick_s: float) -> int:
        """Limit the drafter to the missing tokens for which a tick of tick_s has time; return their number.

        Raises `DrafterError` if the drafter fails.
        """
        left_s = self._limits.itl_target_s - tick_s
        num_tokens = int(left_s / self.token_s) if self.token_s else _FIRST_CHUNK
        return self._calls.limit_catch_up(max(_LEAST_CHUNK, min(num_tokens, _MOST_CHUNK)))

    def note_proposals(self, asked: Candidates, depths: list[int], proposed: list[int], taken_s: float) -> list[int]:
        """Note the numbers of proposed tokens; return the numbers asked for, 0 for sequences that still lag.

        taken_s: seconds of all proposals.
        """
        depths = list(depths)
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
        num_tokens = self._calls.num_caught_up
        if num_tokens >= _NUM_TELLING:
            token_s = max(0.0, taken_s - self._chooser.draft_cost.of_depths(depths)) / num_tokens
            if not self.token_s:
                self.token_s, self._is_seen_once = token_s, True
            elif self._is_seen_once:
                self.token_s, self._is_seen_once = min(self.token_s, token_s), False
            else:
                self.token_s = running_mean(self.token_s, token_s)
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
        chooser.draft_cost = DraftCost(
            is_batch=self._is_batch, drafts_blocks=bool(getattr(drafter, "drafts_blocks", False))
        )
        self._sequences: dict[Sequence, DraftingSequence] = {}
        self._usual = Acceptance()
        self._failed: dict[Sequence, DrafterError] = {}  # since the last tick, the first of each
        self._lagging: LaggingSequences | None = None
        if self._calls.lags:
            self._lagging = LaggingSequences(self._calls, chooser, limits, self._failed)
        self._resting_shape: _Shape | None = None  # of the last rows, if no drafts paid or none were allowed
        self._num_rested = self._rest_ticks = 0  # ticks since then, and until the next decision
        self._on_trial: Row | None = None  # of this tick
        self._has_warmed_up = False  # the first proposal reads weights or prompts that later ones find
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
            wanted = self._choose(candidates, rows, kv_cache.num_cells, int(room))
        except DrafterError as error:
            self._calls.abandon(candidates, error)
            return
        self._chooser.note_deciding(self._clock.now() - begin_s)
        if wanted:
            self._propose(wanted)
            if self._on_trial is not None and not any(row.num_drafts or depth == 0 for row, _, depth in wanted):
                self._rest(rows, self._chooser.rest_ticks())  # the drafter had nothing to try
            elif self._on_trial is not None and self._on_trial.num_drafts:
                self._chooser.note_trial()

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

        A draft that was left out of the pass counts as wrong, whether a constraint forbids it or its mask came too late: it won
        nothing.
        """
        known = self._sequences[row.sequence]
        num_accepted = output.num_accepted if output.computed else 0
        num_rejected, known.num_proposed, known.num_ahead = known.num_proposed - num_accepted, 0, num_accepted
        num_judged = min(row.num_drafts, len(output.token_ids)) if output.computed else 0
        if num_judged:
            known.acceptance.observe(num_judged, num_accepted)
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

    def _choose(self, candidates: Candidates, rows: list[Row], num_cells: int, room: int) -> Candidates:
        """Return the rows to ask the drafter for, with their number of drafts; 0 for a sequence that only catches up.

        Raises `DrafterError` if the drafter fails.
        """
        chooser, lagging = self._chooser, self._lagging
        num_ticks = 1 + self._num_rested
        if lagging is not None:
            lagging.note_missing(candidates)
        worths = [(known.acceptance.probability, cap) for _, known, cap in candidates]
        depths = chooser.choose(worths, rows, num_cells, room, num_ticks)
        num_drafting = max(1, sum([depth > 0 for depth in depths]))
        for index, (row, known, _) in enumerate(candidates):
            is_chosen = depths[index] >= max(1, self._limits.min_draft)
            pays = is_chosen and (lagging is None or lagging.pays(row, known, num_drafting))
            known.is_catching_up = known.is_late and (
                pays or known.is_on_trial or (chooser.is_comparing and known.is_catching_up)
            )
            if not pays or known.is_late:
                depths[index] = 0
            known.acceptance.since_s = 0.0 if depths[index] else known.acceptance.since_s + num_ticks * chooser.plain_s
        self._on_trial = None if chooser.is_comparing else self._try_one(candidates, depths, room - sum(depths))
        wanted = [
            (row, known, depth)
            for (row, known, _), depth in zip(candidates, depths, strict=True)
            if depth or known.is_catching_up
        ]
        self._rest(rows, 0 if wanted or chooser.is_comparing else chooser.rest_ticks())
        return wanted

    def _try_one(self, candidates: Candidates, depths: list[int], room: int) -> Row | None:
        """Give drafts that are not known to pay to a sequence, if there is time for their loss; return its row.

        A sequence comes first if the drafter caught up with it for this; the others in the order in which they last had drafts.
        """
        least = max(1, self._limits.min_draft)
        without = [index for index, depth in enumerate(depths) if not depth and not candidates[index][1].is_catching_up]
        without.sort(key=lambda index: candidates[index][1].acceptance.since_s, reverse=True)
        begun = [index for index in without if candidates[index][1].is_on_trial]
        for index in begun or without:
            row, known, cap = candidates[index]
            cap = min(cap, room)
            if cap < least:
                continue
            catching_up_s = 0.0 if self._lagging is None else self._lagging.cost_s(known)
            tried = self._chooser.trial(
                known.acceptance.probability, cap, depths, index, catching_up_s, is_begun=known.is_on_trial
            )
            if tried:
                known.is_on_trial = known.is_catching_up = known.is_late
                if known.is_late:
                    self._chooser.note_trial()
                else:
                    depths[index] = min(max(tried, least), cap)
                return row
        return None

    # ---- which

    def _propose(self, wanted: Candidates) -> None:
        """Ask for drafts of rows and add them."""
        begin_s, asked, lagging = self._clock.now(), [], self._lagging
        for row, known, depth in wanted:
            try:
                self._calls.inform(row.sequence, known)
                asked.append((row, known, depth))
            except DrafterError as error:
                self._failed.setdefault(row.sequence, error)
        depths, proposed = [depth for _, _, depth in asked], [0] * len(asked)
        try:
            if lagging is not None:
                lagging.limit(self._chooser.tick_s(depths))
        except DrafterError as error:
            self._calls.abandon(asked, error)
            return
        proposals = self._calls.propose_all(asked) if self._is_batch else None
        if self._is_batch and proposals is None:
            return
        taken_s = self._clock.now() - begin_s
        for index, (row, known, depth) in enumerate(asked):
            try:
                proposal = self._calls.propose(row.sequence, depth) if proposals is None else proposals[index]
                taken_s = self._clock.now() - begin_s if proposals is None else taken_s
                proposed[index] = self._add(row, known, proposal, depth)
            except DrafterError as error:
                self._failed.setdefault(row.sequence, error)
        if lagging is not None:
            depths = lagging.note_proposals(asked, depths, proposed, taken_s)
        if not self._has_warmed_up:
            self._has_warmed_up = True
        elif lagging is None or not self._calls.num_caught_up:
            self._chooser.draft_cost.observe(depths, proposed, taken_s)

    def _add(self, row: Row, known: DraftingSequence, proposed: Any, depth: int) -> int:
        """Add a proposal to a row if it is long enough; return its number of tokens."""
        drafts = self._calls.checked(proposed, depth)
        if len(drafts) >= max(1, self._limits.min_draft):
            known.num_proposed = row.num_drafts = len(drafts)
            self.num_expected += known.acceptance.expected(len(drafts))
            row.token_ids = row.token_ids + drafts  # a new list, as the row's may be the sequence's own
        elif drafts:
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
