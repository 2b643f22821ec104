"""A clock that a test advances."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidParams
from paceline.testing.fake_backend import ManualClock


def test_it_goes_as_far_as_it_is_advanced() -> None:
    """From its start, by added time, and never by itself."""
    clock = ManualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(1.5)
    clock.advance(0)
    assert clock.now() == 6.5


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "1"])
def test_it_does_not_go_back(seconds: float) -> None:
    """Time that is negative or no number is refused and changes nothing."""
    clock = ManualClock()
    with pytest.raises(InvalidParams, match="seconds"):
        clock.advance(seconds)
    assert clock.now() == 0.0
