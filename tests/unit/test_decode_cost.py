"""Times of decode passes by their number of rows: seen, between, below and above seen numbers."""

from __future__ import annotations

import math
from random import Random

import pytest

from paceline.cost_model import DecodeCost, MeasuredPass, TickCostModel

PASSES = [
    MeasuredPass(1, 0, 0.03, 1),
    MeasuredPass(8, 0, 0.1, 8),
    MeasuredPass(8, 0, 0.065, 1),
    MeasuredPass(64, 0, 0.345, 1),
    MeasuredPass(512, 0, 2.585, 1),
]
"""Of a machine that takes 20 ms for a pass, 5 for a token and 5 for its logits: n rows take 20 + 10 n ms."""


def decode_cost() -> DecodeCost:
    model = TickCostModel()
    model.calibrate(PASSES)
    return DecodeCost(model)


def test_nothing_seen_is_as_the_cost_model_expects() -> None:
    """Twenty milliseconds, and ten for each row."""
    assert decode_cost().seconds(8) == pytest.approx(0.1, rel=0.1)


def test_each_number_of_rows_has_its_own_time() -> None:
    """Seven rows may take longer than eight."""
    cost = decode_cost()
    for _ in range(20):
        cost.observe(7, 0, 0.15)
        cost.observe(8, 0, 0.13)
    assert cost.seconds(7) == pytest.approx(0.15, rel=0.01)
    assert cost.seconds(8) == pytest.approx(0.13, rel=0.01)


def test_between_two_numbers_it_is_interpolated() -> None:
    """Two of three parts of the way from 4 to 10 rows."""
    cost = decode_cost()
    cost.observe(4, 0, 0.06)
    cost.observe(10, 0, 0.12)
    assert cost.seconds(8) == pytest.approx(0.1, rel=1e-6)


def test_above_a_row_costs_no_more_than_a_prompt_token() -> None:
    """So that a larger batch looks worth trying: 5 ms for each further row, while rows cost 10."""
    cost = decode_cost()
    cost.observe(8, 0, 0.1)
    assert cost.seconds(32) == pytest.approx(0.1 + 24 * 0.005, rel=0.05)
    for _ in range(5):
        cost.observe(32, 0, 0.34)
    assert cost.seconds(32) == pytest.approx(0.34, rel=0.05)


def test_below_it_is_the_cost_model_by_what_was_seen() -> None:
    """A machine on which eight rows take twice as long as expected takes twice as long for one."""
    cost = decode_cost()
    before_s = cost.seconds(1)
    cost.observe(8, 0, 2 * cost.seconds(8))  # the first that is seen at all is taken as it is
    assert cost.seconds(1) == pytest.approx(2 * before_s)


def test_what_attention_adds_for_cells_is_taken_off() -> None:
    """The same rows over 10,000 cells are no dearer rows."""
    model = TickCostModel()
    for _ in range(100):
        for num_cells in (100, 10_000):
            for num_rows in (1, 4, 8):
                model.observe(num_rows, num_cells, 0.02 + 0.01 * num_rows + 2e-6 * num_rows * num_cells, num_rows)
    cost = DecodeCost(model)
    cost.observe(8, 10_000, 0.02 + 0.08 + 0.16)
    assert cost.seconds(8) == pytest.approx(0.1, rel=0.15)


def test_one_odd_pass_is_not_believed() -> None:
    """A pause of a second in the middle of a pass moves a time that is known well by a few per cent."""
    cost = decode_cost()
    for _ in range(10):
        cost.observe(8, 0, 0.1)
    cost.observe(8, 0, 1.0)
    assert cost.seconds(8) == pytest.approx(0.1 * math.exp(0.15 * math.log(1.5)), rel=0.01)


def test_a_slower_machine_is_slower_for_every_number() -> None:
    """After ten passes of eight rows that take twice as long, seven are expected to take nearly twice as long."""
    cost = decode_cost()
    for _ in range(10):
        cost.observe(7, 0, 0.09)
        cost.observe(8, 0, 0.1)
    for _ in range(15):
        cost.observe(8, 0, 0.2)
    assert cost.seconds(8) == pytest.approx(0.2, rel=0.05)
    assert cost.seconds(7) == pytest.approx(0.18, rel=0.3)


def test_a_first_odd_pass_moves_no_other_number() -> None:
    """A pass of seven rows that takes twice as long when it is first seen says nothing about the machine."""
    cost = decode_cost()
    for _ in range(10):
        for num_rows in (4, 6, 8):
            cost.observe(num_rows, 0, 0.02 + 0.01 * num_rows)
    cost.observe(7, 0, 0.18)
    for _ in range(20):
        cost.observe(7, 0, 0.09)
    assert [cost.seconds(num_rows) for num_rows in (4, 6, 8)] == pytest.approx([0.06, 0.08, 0.1], rel=0.05)
    assert cost.seconds(7) == pytest.approx(0.09, rel=0.1)


def test_a_first_time_is_believed_within_limits() -> None:
    """At most half as much again as expected from the others."""
    cost = decode_cost()
    cost.observe(4, 0, 0.06)
    cost.observe(10, 0, 0.12)
    cost.observe(8, 0, 10.0)
    assert cost.seconds(8) == pytest.approx(0.15)


def test_a_clock_that_stands_still_leaves_times_above_zero() -> None:
    """A pass without time counts as a microsecond."""
    cost = decode_cost()
    cost.observe(3, 0, 0.0)
    assert 0 < cost.seconds(3) < 1e-5


def test_sizes_that_are_not_seen_stay_in_proportion() -> None:
    """However long only others are seen, with times now and then far above the usual."""
    cost, random = decode_cost(), Random(7)
    for _ in range(20):
        for num_rows, seconds in ((1, 0.001), (2, 0.0012), (5, 0.002)):
            cost.observe(num_rows, 0, seconds)
    for number in range(20_000):
        spread = random.lognormvariate(0.0, 0.1) * (1.6 if random.random() < 0.15 else 1.0)
        cost.observe(1 + number // 50 % 2, 0, (0.001, 0.0012)[number // 50 % 2] * spread)
    assert cost.seconds(5) / cost.seconds(1) == pytest.approx(2.0, rel=0.35)
