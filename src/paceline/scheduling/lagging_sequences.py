"""Sequences that lag behind in a drafter's own memory: how far, and for which it pays to compute what is missing. Pure."""

from __future__ import annotations

import math

from paceline.errors import DrafterError
from paceline.scheduling.catch_up import CatchUp
from paceline.scheduling.depth_chooser import DepthChooser
from paceline.scheduling.drafter_calls import DrafterCalls
from paceline.scheduling.drafting_sequence import Candidates, DraftingSequence
from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import Row
from paceline.scheduling.sequence import Sequence

_USUAL_LAG = 2  # tokens that a tick brings, and that a lagging drafter computes with its first draft


class LaggingSequences:
    """Notes how far sequences lag behind, and decides what to catch up with. catch_up: what that takes.

    failed: where errors go that end the request of a sequence.
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
        """Begin with new sequences, to see how far the drafter is behind; leave out those for which it never can draft."""
        for row, known, _ in candidates:
            if not known.has_begun:
                try:
                    self._calls.inform(row.sequence, known)
                    self._note_lag(row.sequence, known)
                except DrafterError as error:
                    known.is_off = True
                    self._failed.setdefault(row.sequence, error)
        return [one for one in candidates if not one[1].is_off]

    def note_missing(self, candidates: Candidates) -> int:
        """Note what the drafter misses of each; return for how many that is more than it catches up with in this tick.

        Raises `DrafterError` where the drafter does not say how much that is.
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
        for known in sorted(missing, key=lambda one: one.num_missing):
            num_left -= known.num_missing
            known.is_late = num_left < 0
        return sum([known.is_late for known in missing])

    def pays(self, row: Row, known: DraftingSequence) -> bool:
        """Return whether the drafter is up to date with a sequence, or drafts may win back what catching up takes."""
        if known.is_catching_up or not known.num_missing:
            return True
        max_tokens, generated = row.sequence.request.params.max_tokens, row.sequence.output.num_generated
        num_left = self._limits.max_positions if max_tokens is None else max_tokens - generated
        return self.catch_up.pays(known.num_missing, num_left, self._chooser.plain_s, self._chooser.num_decode)

    def depths_later(self, candidates: Candidates, worths: list[tuple[float, int]], room: int) -> list[int]:
        """Return how many drafts there would be if nothing lagged behind, as far as catching up for them is worth it.

        For a pass of a size that was never seen it is a trial.
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
        """Take in how many tokens were proposed; return how many were asked for of those with which the drafter has caught up."""
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
