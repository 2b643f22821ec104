"""Catching up as an investment: the gain, the size of a trial, the share of a tick."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cost_model import DecodeCost, TickCostModel
from paceline.observability.metrics import Instruments
from paceline.speculation.acceptance import Acceptance, UsualAcceptance
from paceline.speculation.cost import CatchUp
from paceline.speculation.depth_chooser import DepthChooser
from paceline.speculation.drafter import DrafterCalls, DraftingSequence
from paceline.speculation.drafting import LaggingSequences

COSTS = (TickCostModel(), DecodeCost(TickCostModel()))


class Lagging:
    """Computed a number of tokens in its last proposal. limits: its arguments."""

    def __init__(self) -> None:
        self.num_caught_up = 0
        self.limits: list[int] = []

    def lag(self, key: int) -> float:
        raise AssertionError(key)

    def limit_catch_up(self, num_tokens: int) -> int:
        self.limits.append(num_tokens)
        return min(num_tokens, 1000)


def catching_up(token_s: float = 0.0, itl_target_s: float = 0.05) -> tuple[CatchUp, Lagging]:
    drafter: Any = Lagging()
    made = CatchUp(drafter, itl_target_s)
    if token_s:
        drafter.num_caught_up = 100
        assert made.observe(100 * token_s)
        assert made.token_s == pytest.approx(token_s)
    return made, drafter


def test_it_pays_as_far_as_a_fifth_of_the_rest_wins_it_back() -> None:
    """200 tokens are left, of 10 ms each: 0.4 s, which are 400 tokens of 1 ms; a quarter of them among four sequences."""
    one, _ = catching_up(0.001)
    assert one.pays(399, 200, 0.01, 1)
    assert not one.pays(401, 200, 0.01, 1)
    assert one.pays(99, 200, 0.01, 4)
    assert not one.pays(101, 200, 0.01, 4)


def test_nobody_knows_that_a_long_rest_is_used() -> None:
    """A sequence without a limit is taken to go on for 512 tokens."""
    one, _ = catching_up(0.001)
    assert one.pays(1000, 100_000, 0.01, 1) is one.pays(1000, 512, 0.01, 1) is True
    assert one.pays(1030, 100_000, 0.01, 1) is one.pays(1030, 512, 0.01, 1) is False


def test_what_is_not_known_yet_is_tried() -> None:
    """Neither a tick's cost, nor a token's; but if there can be no drafts nothing pays."""
    known, _ = catching_up(0.001)
    assert known.pays(10_000, 10, 0.0, 1)
    unknown, _ = catching_up()
    assert unknown.pays(10_000, 10, 0.01, 1)
    assert unknown.cost_s(10_000) == 0.0
    assert not known.pays(math.inf, 512, 0.01, 1)
    assert known.cost_s(math.inf) == math.inf


def test_a_chunk_is_what_the_target_leaves_time_for() -> None:
    """Of 50 ms a tick takes 20: 30 tokens of 1 ms; 16 at least, 1024 at most, 32 while a token's time is not known."""
    one, drafter = catching_up(0.001)
    assert [one.limit(tick_s) for tick_s in (0.02, 0.04, 0.2)] == [30, 16, 16]
    assert drafter.limits == [30, 16, 16]
    fast, drafter = catching_up(0.000001)
    assert fast.limit(0.02) == 1000  # as the drafter says
    assert drafter.limits == [1024]
    unknown, drafter = catching_up()
    unknown.limit(0.02)
    assert drafter.limits == [32]


def test_a_tokens_time_is_the_median_of_five_proposals_that_tell() -> None:
    """Few tokens teach nothing, one odd time nothing either; lasting changes are learned."""
    one, drafter = catching_up()
    drafter.num_caught_up = 15
    assert not one.observe(1.0)
    assert one.token_s == 0.0
    drafter.num_caught_up = 16
    for seconds in (0.016, 0.016, 9.0):
        assert one.observe(seconds)
    assert one.token_s == pytest.approx(0.001)
    for _ in range(3):
        one.observe(0.032)
    assert one.token_s == pytest.approx(0.002)
    for _ in range(5):
        one.observe(-0.001)  # steps were taken to take longer than all of it
    assert one.token_s == 0.0
    assert one.cost_s(10) == 0.0


def test_a_trial_that_gets_no_further_makes_room_for_others() -> None:
    """A sequence without cells in the drafter may not hold up the trials of others for good."""
    drafter: Any = Lagging()
    limits: Any = SimpleNamespace(itl_target_s=0.05)
    lagging = LaggingSequences(
        DrafterCalls(drafter, 10, Instruments().drafter_failed), DepthChooser(*COSTS, 0.05), limits, {}
    )
    known = DraftingSequence(Acceptance(UsualAcceptance()))
    row: Any = SimpleNamespace(sequence=SimpleNamespace(num_tokens=2))
    known.lag = 100.0
    assert lagging.note_missing([(row, known, 8)]) == 1
    assert known.is_late
    for missing, goes_on in ((70.0, True), (40.0, True), (41.0, False)):
        known.is_on_trial, known.lag = True, missing
        lagging.note_missing([(row, known, 8)])
        assert known.is_on_trial is goes_on
