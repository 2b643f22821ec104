"""Counts of values by size: buckets, quantiles, and the error of a quantile."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from paceline.errors import InvalidParams
from paceline.observability.metric_table import Histogram
from paceline.observability.metrics import Tally

BOUNDS = (1.0, 2.0, 4.0)


def of(*values: float) -> Histogram:
    tally = Tally(BOUNDS)
    for value in values:
        tally.observe(value)
    return tally.histogram()


def test_a_value_counts_in_the_first_bucket_that_reaches_it() -> None:
    """Bounds are inclusive; values above all of them have a bucket of their own."""
    found = of(0.5, 1.0, 1.1, 4.0, 4.1, 100.0)
    assert (found.counts, found.count) == ((2, 1, 1, 2), 6)
    assert found.sum == pytest.approx(110.7)
    assert (found.smallest, found.largest, found.mean) == (0.5, 100.0, pytest.approx(18.45))


def test_a_value_can_count_several_times() -> None:
    """It equals observing the value that many times."""
    tally = Tally(BOUNDS)
    tally.observe(1.5, 3)
    assert tally.histogram() == of(1.5, 1.5, 1.5)


def test_an_empty_histogram_has_no_quantile() -> None:
    """Without values, mean and quantiles are None."""
    found = of()
    assert (found.quantile(0.5), found.mean, found.smallest, found.largest) == (None, None, 0.0, 0.0)


@pytest.mark.parametrize(("q", "value"), [(0, 1.2), (0.25, 1.6), (0.5, 2.0), (0.75, 2.5), (1, 3.0)])
def test_a_quantile_is_straight_between_the_bounds(q: float, value: float) -> None:
    """Half of the values lie in ]1, 2], beginning at the smallest, half in ]2, 4], ending at the largest."""
    assert of(1.2, 2.0, 2.5, 3.0).quantile(q) == pytest.approx(value)


def test_equal_values_have_that_value_at_every_quantile() -> None:
    """The smallest and the largest are known exactly."""
    found = of(3.0, 3.0, 3.0)
    assert [found.quantile(q) for q in (0, 0.1, 0.99, 1)] == [3.0] * 4


def test_beyond_the_last_bound_the_largest_value_stands() -> None:
    """No quantile is infinite."""
    assert of(5.0, 9.0).quantile(1) == 9.0


@pytest.mark.parametrize("q", [-0.1, 1.1, float("nan"), True])
def test_a_quantile_outside_of_the_unit_interval_is_refused(q: float) -> None:
    """A percentage is refused."""
    with pytest.raises(InvalidParams, match="q must be"):
        of(1.0).quantile(q)


def test_a_histogram_does_not_change() -> None:
    """A histogram stays as the tally was at that moment."""
    tally = Tally(BOUNDS)
    before = tally.histogram()
    tally.observe(1.0)
    assert before.count == 0
    with pytest.raises(FrozenInstanceError):
        before.sum = 1.0  # type: ignore[misc]
