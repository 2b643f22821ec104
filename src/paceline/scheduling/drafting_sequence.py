"""What speculation knows of a sequence that may have drafts."""

from __future__ import annotations

from typing import TypeAlias

from paceline.kv_cache import Namespace
from paceline.scheduling.acceptance import Acceptance
from paceline.scheduling.plan import Row


class DraftingSequence:
    """The state of a sequence that may have drafts.

    namespace: with which the sequence shares prefixes; None if it shares none. Kept here for after its request's end.
    has_begun: whether `begin` was called for it, though that may have failed. num_observed: tokens that the drafter was given.
    num_proposed: of the proposal that no pass has verified yet. is_off: whether it goes without drafts from now on.
    Of a lagging drafter: lag: tokens that it missed when it had those; num_ahead: of those behind them it has these already, as
    it proposed them; num_missing: tokens that it misses now beside those that every tick brings; is_late: whether these are more
    than it computes in this tick; is_catching_up: whether it is to compute them without drafts; is_on_trial: whether that is for
    a trial.
    """

    __slots__ = (
        "acceptance", "has_begun", "is_catching_up", "is_late", "is_off", "is_on_trial", "lag", "namespace",
        "num_ahead", "num_missing", "num_observed", "num_proposed",
    )  # fmt: skip

    def __init__(self, acceptance: Acceptance, namespace: Namespace | None = None) -> None:
        self.acceptance, self.namespace = acceptance, namespace
        self.has_begun = self.is_off = self.is_late = self.is_catching_up = self.is_on_trial = False
        self.lag = self.num_missing = 0.0
        self.num_observed = self.num_proposed = self.num_ahead = 0


Candidates: TypeAlias = list[tuple[Row, DraftingSequence, int]]
"""Rows that may have drafts, what is known of them, and how many they may have, or are to."""
