"""What is lost to small batches while prompts wait: of a pass, and summed up over passes."""

from __future__ import annotations

import math

import pytest

from paceline.scheduling.cost_model import TickCostModel
from paceline.scheduling.lost_time import LostTime

SAMPLES = [(1, 0, 0.03, 1), (8, 0, 0.1, 8), (8, 0, 0.065, 1), (64, 0, 0.345, 1), (512, 0, 2.585, 1)]
"""Passes of a machine that takes 20 ms for a pass, 5 for a token and 5 for its logits: n rows take 20 + 10 n ms."""


def lost_time() -> LostTime:
    model = TickCostModel()
    model.calibrate(SAMPLES)
    return LostTime(model)


def test_rows_are_compared_with_rows_of_the_whole_batch() -> None:
    """Two of eight that could decode take 40 ms, and 2 of 8 parts of 100 ms in a whole batch."""
    assert lost_time().of_pass(2, 6, 0) == pytest.approx(0.015, rel=0.2)
    assert lost_time().of_pass(7, 1, 0) == pytest.approx(0.0025, abs=0.002)


def test_odd_sizes_are_learnt_from_passes_that_only_decode() -> None:
    """Seven rows that take as long as nine lose more beside a prompt than the cost model expects."""
    lost = lost_time()
    for _ in range(40):
        lost.observe_decoding(7, 0, 0.11)
        lost.observe_decoding(8, 0, 0.1)
    assert lost.of_pass(7, 1, 0) == pytest.approx(0.11 - 0.1 * 7 / 8, rel=0.05)
    assert lost.of_pass(2, 6, 0) == pytest.approx(0.015, rel=0.2)


def test_one_odd_pass_is_not_believed() -> None:
    """A pause of a second in the middle of a pass moves the expectation by a few per cent."""
    lost, before = lost_time(), lost_time().of_pass(7, 1, 0)
    lost.observe_decoding(7, 0, 1.0)
    assert lost.of_pass(7, 1, 0) == pytest.approx(before + 0.09 * (math.exp(0.15 * math.log(1.5)) - 1), rel=0.1)


def test_the_share_is_of_all_passes() -> None:
    """A pass that lost a fifth beside one of the same length that lost nothing: a tenth."""
    lost = lost_time()
    assert (lost.share, lost.mean_s) == (0, 0)
    lost.observe(0.01, 0.002)
    lost.observe(0.01, None)
    assert lost.share == pytest.approx(0.1, rel=0.01)
    assert lost.mean_s == pytest.approx(0.002, rel=0.01)


def test_a_pass_may_make_up_for_another_and_no_more() -> None:
    """Where a small batch is cheaper than a large one, that counts against what was lost before."""
    lost = lost_time()
    lost.observe(0.02, 0.01)
    lost.observe(0.01, -0.004)
    assert lost.share == pytest.approx(0.006 / 0.03, rel=0.01)
    lost.observe(0.01, -0.1)
    assert lost.share == 0
    lost.observe(0.01, 0.005)
    assert lost.share == pytest.approx(0.1, rel=0.01)


def test_what_is_long_ago_fades() -> None:
    """After half a minute of passes that lose nothing a twentieth is left of what was lost."""
    lost = lost_time()
    for _ in range(10):
        lost.observe(1.0, 0.5)
    assert lost.share == pytest.approx(0.5, rel=0.1)
    for _ in range(30):
        lost.observe(1.0, None)
    assert 0 < lost.share < 0.05 * 0.5
    assert lost.mean_s == pytest.approx(0.5, rel=0.1)
