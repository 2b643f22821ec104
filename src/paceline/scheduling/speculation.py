"""Speculation: adds drafts to the rows of a tick, behind everybody's decode row and what prefill is due. Pure.

Which sequences get how many drafts follows from their acceptance and from the costs (`draft_depth`); which tokens, from the
drafter. What a pass does with them is in `Row` and `RowOutput`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.clock import Clock
from paceline.errors import DrafterError
from paceline.kv_cache import KVCache
from paceline.scheduling.cost_model import TickCostModel
from paceline.scheduling.decode_cost import DecodeCost
from paceline.scheduling.draft_depth import FIRST_WORTH, Acceptance, choose_depths, trial_depth
from paceline.scheduling.drafter import Drafter
from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import Row
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.telemetry import TelemetrySink

_GAIN = 0.1  # of a new measurement of what a proposal takes
_LITTLE_S = 0.001  # by which a measurement may be above twice the last estimate
_SHARED_GAIN = 0.05  # of a sequence's verdicts for what later sequences are taken to have at first
_KEPT_FOR = 16  # ticks for which a choice of depths is kept while nothing else changes


class DraftingSequence:
    """What is known of a sequence that may have drafts.

    has_begun: whether the drafter was told of it, though that may have failed. num_observed: tokens that it knows then.
    num_proposed: of the proposal that no pass has verified yet.
    """

    __slots__ = ("acceptance", "has_begun", "num_observed", "num_proposed")

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self.has_begun = False
        self.num_observed = self.num_proposed = 0


class DepthChooser:
    """Chooses the depths of a tick, from what passes and proposals take. draft_s: seconds of a proposal.

    itl_target_s: while several sequences decode, drafts of one may not make a tick longer than that for the others.
    """

    def __init__(self, cost_model: TickCostModel, decode_cost: DecodeCost, itl_target_s: float) -> None:
        self._model, self._decode_cost, self._itl_target_s = cost_model, decode_cost, itl_target_s
        self.draft_s = 0.0
        self._seconds_with: Callable[[int], float] = float  # what decoding takes with so many drafts
        self._limit_s = math.inf  # what it may take
        self._key: object = None
        self._depths: list[int] = []
        self._num_left = 0

    def note_drafting(self, seconds: float) -> None:
        """Learn what a proposal takes. A single one that takes long says little: the machine may have been asleep."""
        credible_s = min(seconds, 2 * self.draft_s + _LITTLE_S)
        self.draft_s += _GAIN * (credible_s - self.draft_s)

    def choose(self, candidates: list[tuple[float, int]], rows: list[Row], num_cells: int, most: int) -> list[int]:
        """Return how many drafts each candidate gets beside these rows; `most`: all together."""
        num_decode = sum([row.sequence.is_decoding for row in rows])
        num_tokens = sum([len(row.token_ids) for row in rows])
        key = (num_decode, num_tokens, [int(100 * worth) for worth, _ in candidates])
        self._num_left -= 1
        if self._num_left < 0 or key != self._key or not self._fit(candidates, most):
            num_outputs = sum([row.num_outputs for row in rows])
            of_pass = partial(self._seconds, num_decode, num_tokens, num_outputs, num_cells)
            self._seconds_with = seconds = self._with_drafting(of_pass, len(candidates))
            self._limit_s = math.inf
            if num_decode > 1:
                rest_s = self._prefill_s(num_decode, num_tokens, num_outputs, num_cells)
                self._limit_s = max(self._itl_target_s - rest_s, seconds(0))
            self._depths = choose_depths(candidates, num_decode, seconds, most, self._limit_s)
            self._key, self._num_left = key, _KEPT_FOR
        return self._depths

    def allows(self, num_drafts: int) -> bool:
        """Return whether so many drafts, all together, keep the tick short enough for the sequences beside."""
        return self._limit_s == math.inf or self._seconds_with(num_drafts) <= self._limit_s

    def _fit(self, candidates: list[tuple[float, int]], most: int) -> bool:
        """Return whether the last choice is within bounds."""
        return sum(self._depths) <= most and all(map(operator.le, self._depths, [cap for _, cap in candidates]))

    def _with_drafting(self, seconds: Callable[[int], float], num_candidates: int) -> Callable[[int], float]:
        return lambda num_drafts: seconds(num_drafts) + self.draft_s * min(num_drafts, num_candidates)

    def _seconds(self, num_decode: int, num_tokens: int, num_outputs: int, num_cells: int, num_drafts: int) -> float:
        """Return what decoding takes of a pass with so many drafts; what the drafts add to a prompt's part is theirs."""
        model, total = self._model, num_tokens + num_drafts
        if num_tokens == num_decode and (seen_s := self._decode_cost.seen_seconds(total)) is not None:
            return seen_s + self._cells_s(total, num_cells)
        added_s = model.mean_seconds(total, num_cells, num_outputs + num_drafts)
        added_s -= model.mean_seconds(num_tokens, num_cells, num_outputs)
        return self._decode_cost.seconds(num_decode) + self._cells_s(num_decode, num_cells) + added_s

    def _prefill_s(self, num_decode: int, num_tokens: int, num_outputs: int, num_cells: int) -> float:
        """Return what a pass takes longer for the prompts in it."""
        if num_tokens == num_decode:
            return 0.0
        model = self._model
        decode_s = model.mean_seconds(num_decode, num_cells, num_decode)
        return max(0.0, model.mean_seconds(num_tokens, num_cells, num_outputs) - decode_s)

    def _cells_s(self, num_rows: int, num_cells: int) -> float:
        model = self._model
        return model.mean_seconds(num_rows, num_cells, num_rows) - model.mean_seconds(num_rows, 0, num_rows)


class Speculation:
    """Asks the drafter for drafts, and tells it what came of them. On the engine's thread."""

    def __init__(
        self, drafter: Drafter, limits: Limits, chooser: DepthChooser, clock: Clock, sink: TelemetrySink
    ) -> None:
        self._drafter, self._limits, self._chooser, self._clock, self._sink = drafter, limits, chooser, clock, sink
        self._sequences: dict[Sequence, DraftingSequence] = {}
        self._usual = FIRST_WORTH  # acceptance of all sequences
        self._failed: dict[Sequence, DrafterError] = {}  # since the last tick, the first of each
        self._resting_shape: tuple[int, int, int] | None = None  # of the last rows, where nothing paid
        self._num_rested = 0  # ticks since then

    def add_drafts(self, rows: list[Row], kv_cache: KVCache) -> list[tuple[Sequence, DrafterError]]:
        """Add drafts to these rows of a pass; return the open sequences for which the drafter failed, and how."""
        if not self._rests(rows):
            self._add_all(rows, kv_cache)
        if not self._failed:
            return []
        failed = [(sequence, error) for sequence, error in self._failed.items() if sequence.reason is None]
        for sequence, _ in failed:
            del self._failed[sequence]
        return failed

    def _rests(self, rows: list[Row]) -> bool:
        """Return whether nothing paid a few ticks ago beside rows like these: then drafters are not called again so soon."""
        if self._resting_shape is None or self._resting_shape != _shape(rows) or self._num_rested >= _KEPT_FOR:
            return False
        self._num_rested += 1
        return True

    def _add_all(self, rows: list[Row], kv_cache: KVCache) -> None:
        limits, num_tokens = self._limits, sum([len(row.token_ids) for row in rows])
        room = min(limits.max_drafted, limits.n_batch - num_tokens, kv_cache.num_free - num_tokens)
        least = max(1, limits.min_draft)
        if room < least:
            return
        candidates = [
            (row, self._known(row.sequence), cap)
            for row in rows
            if row.draws and row.sequence.is_decoding and (cap := self._cap(row.sequence)) >= least
        ]
        if not candidates:
            return
        for (row, known, _), depth in zip(
            candidates, self._depths(candidates, rows, kv_cache.num_cells, int(room)), strict=True
        ):
            try:
                if depth:
                    self._add(row, known, depth)
            except DrafterError as error:
                self._failed.setdefault(row.sequence, error)

    def note(self, row: Row, num_accepted: int | None) -> None:
        """Take in how many drafts of a row were accepted; None: no pass verified them.

        One that was left out of the pass counts like a wrong one: it won nothing, whatever was drawn in its place.
        """
        known = self._sequences[row.sequence]
        num_wrong, known.num_proposed = known.num_proposed - (num_accepted or 0), 0
        if num_accepted is not None:
            known.acceptance.observe(row.num_drafts, num_accepted)
            is_right = num_accepted == row.num_drafts
            self._usual += _SHARED_GAIN * (num_accepted / (num_accepted + (not is_right)) - self._usual)
        try:
            if num_wrong:
                self._call("rollback", row.sequence.key, num_wrong)
        except DrafterError as error:
            self._failed[row.sequence] = error

    def forget_gone(self) -> None:
        """Forget the sequences that have no slot any more; one that is only preempted begins anew."""
        for sequence in [one for one in self._failed if one.reason is not None]:
            self._sink.drafter_failed(self._failed.pop(sequence))
        self._forget([one for one in self._sequences if one.slot is None])

    def reset(self) -> None:
        """Forget all sequences."""
        self._forget(list(self._sequences))

    def _cap(self, sequence: Sequence) -> int:
        """Return how many drafts a sequence may have now: one drawn token follows them, which may be its last."""
        limits, max_tokens = self._limits, sequence.request.params.max_tokens
        most = min(sequence.max_draft, limits.max_draft, limits.max_positions - sequence.num_tokens)
        return most if max_tokens is None else min(most, max_tokens - sequence.output.num_generated - 1)

    def _depths(
        self, candidates: list[tuple[Row, DraftingSequence, int]], rows: list[Row], num_cells: int, room: int
    ) -> list[int]:
        """Return how many drafts to ask for, for each row with what is known and its cap: as many as pay, or a trial's."""
        worths = [(known.acceptance.probability, cap) for _, known, cap in candidates]
        depths = list(self._chooser.choose(worths, rows, num_cells, room))
        num_left, least = room - sum(depths), self._limits.min_draft
        for index, (_, known, cap) in enumerate(candidates):
            if depths[index] >= max(1, least):
                known.acceptance.has_drafts()
                continue
            num_left, depths[index] = num_left + depths[index], 0
            tried = trial_depth(min(cap, num_left), least)
            if tried and self._chooser.allows(sum(depths) + tried) and known.acceptance.is_due(1 + self._num_rested):
                depths[index] = tried
                num_left -= tried
        self._resting_shape, self._num_rested = None if any(depths) else _shape(rows), 0
        return depths

    def _known(self, sequence: Sequence) -> DraftingSequence:
        known = self._sequences.get(sequence)
        if known is None:
            known = self._sequences[sequence] = DraftingSequence(Acceptance(self._usual))
        return known

    def _add(self, row: Row, known: DraftingSequence, depth: int) -> None:
        """Ask for drafts of a row and add them."""
        sequence, begin_s = row.sequence, self._clock.now()
        if not known.has_begun:
            known.has_begun = True
            self._call("begin", sequence.key, sequence.token_ids)
        elif known.num_observed < sequence.num_tokens:
            self._call("observe", sequence.key, sequence.token_ids[known.num_observed :])
        known.num_observed = sequence.num_tokens
        drafts = self._checked(self._call("propose", sequence.key, depth), depth)
        self._chooser.note_drafting(self._clock.now() - begin_s)
        if len(drafts) < self._limits.min_draft:
            if drafts:
                self._call("rollback", sequence.key, len(drafts))
            return
        known.num_proposed = row.num_drafts = len(drafts)
        row.token_ids = row.token_ids + drafts  # a new list: the other may be the sequence's own

    def _checked(self, proposed: Any, depth: int) -> list[int]:
        try:
            drafts = [operator.index(token_id) for token_id in proposed]
        except TypeError:
            raise self._error(f"must propose token ids, not {proposed!r:.80}") from None
        if len(drafts) > depth:
            raise self._error(f"proposed {len(drafts)} tokens where {depth} were asked for")
        wrong = [one for one in drafts if not 0 <= one < self._limits.n_vocab]
        if wrong:
            raise self._error(f"proposed token {wrong[0]}, and the vocabulary has {self._limits.n_vocab}")
        return drafts

    def _forget(self, sequences: list[Sequence]) -> None:
        """Forget sequences. What the drafter raises belongs to no open request: the sink logs it."""
        for sequence in sequences:
            if not self._sequences.pop(sequence).has_begun:
                continue
            try:
                self._call("end", sequence.key)
            except DrafterError as error:
                self._sink.drafter_failed(error)

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._drafter, name)(*arguments)
        except Exception as error:
            raise self._error(f"failed to {name}: {error!r:.500}") from error

    def _error(self, message: str) -> DrafterError:
        return DrafterError(f"drafter {type(self._drafter).__name__} {message}")


def _shape(rows: list[Row]) -> tuple[int, int, int]:
    """Return what changes where sequences or prompts come and go, and is quick to say."""
    return (len(rows), len(rows[0].token_ids), len(rows[-1].token_ids))
