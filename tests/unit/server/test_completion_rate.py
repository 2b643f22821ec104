"""Retry-After for requests beyond the limits."""

from __future__ import annotations

import pytest

from paceline.server.in_flight import CompletionRate, estimate_remaining_s


class Time:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


def test_where_nothing_is_open_a_second_is_enough(time: Time) -> None:
    """Before the first request and after the last one."""
    completion_rate = CompletionRate(time)
    assert completion_rate.estimate_wait_s(100) == 1
    completion_rate.start(1)
    time.now_s += 50
    completion_rate.finish(1)
    assert completion_rate.estimate_wait_s(100) == 1


def test_the_wait_follows_the_rate_at_which_requests_end(time: Time) -> None:
    """Of several at once each counts; seconds are rounded up."""
    completion_rate = CompletionRate(time)
    completion_rate.start(20)
    time.now_s += 2
    completion_rate.finish(1)
    time.now_s += 2
    completion_rate.finish(3)
    assert completion_rate.estimate_wait_s(8) == 8
    assert completion_rate.estimate_wait_s(9) == 9
    time.now_s += 0.1
    assert completion_rate.estimate_wait_s(8) == 9


def test_where_nothing_has_ended_yet_the_wait_grows_with_the_time_that_is_so(time: Time) -> None:
    """However many wait; up to a minute."""
    completion_rate = CompletionRate(time)
    completion_rate.start(10)
    assert completion_rate.estimate_wait_s(5) == 1
    time.now_s += 7.5
    assert completion_rate.estimate_wait_s(5) == 8
    time.now_s += 500
    assert completion_rate.estimate_wait_s(5) == 60


def test_what_is_over_for_a_minute_or_was_before_an_idle_moment_is_forgotten(time: Time) -> None:
    """Rates change."""
    completion_rate = CompletionRate(time)
    completion_rate.start(100)
    time.now_s += 1
    completion_rate.finish(50)
    time.now_s += 61
    completion_rate.finish(6)
    assert completion_rate.estimate_wait_s(3) == 30
    completion_rate.finish(44)
    time.now_s += 1000
    completion_rate.start(10)
    time.now_s += 2
    completion_rate.finish(1)
    assert completion_rate.estimate_wait_s(4) == 8


def test_very_many_endings_are_counted_by_the_latest(time: Time) -> None:
    """Their number does not fill memory."""
    completion_rate = CompletionRate(time)
    completion_rate.start(100_000)
    for _ in range(100):
        time.now_s += 0.1
        completion_rate.finish(512)
    assert completion_rate.estimate_wait_s(51_000) == 10


def test_the_wait_is_a_second_at_least_and_a_minute_at_most(time: Time) -> None:
    """Whatever the rate says."""
    completion_rate = CompletionRate(time)
    completion_rate.start(10)
    time.now_s += 10
    completion_rate.finish(1)
    assert completion_rate.estimate_wait_s(1_000) == 60
    completion_rate.finish(8)
    time.now_s += 0.001
    assert completion_rate.estimate_wait_s(0) == 1


@pytest.mark.parametrize(
    ("share", "elapsed_s", "expected"),
    [(0.0, 0.0, 1), (0.0, 5.0, 5), (0.25, 2.0, 6), (0.99, 2.0, 1), (0.01, 30.0, 60), (1.0, 9.0, 1)],
)
def test_what_is_left_of_loading_follows_its_progress(share: float, elapsed_s: float, expected: int) -> None:
    """The rest is estimated at the same pace."""
    assert estimate_remaining_s(share, elapsed_s) == expected
