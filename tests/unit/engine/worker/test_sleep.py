"""When an idle worker is stopped."""

from __future__ import annotations

import math

from paceline.engine.worker.lifecycle import LEAVE_S, Sleep


def test_a_worker_is_let_go_when_nothing_has_needed_it_for_so_long() -> None:
    """Every use counts; one that has not been ready is not idle."""
    sleep = Sleep(10.0)
    assert not sleep.is_due(1e9)
    assert sleep.next_s() == math.inf
    sleep.used(5.0)
    assert (sleep.is_due(14.9), sleep.is_due(15.0), sleep.next_s()) == (False, True, 15.0)
    sleep.used(12.0)
    assert (sleep.is_due(15.0), sleep.next_s()) == (False, 22.0)


def test_one_that_takes_too_long_to_leave_is_noticed_once() -> None:
    """The next worker starts with a new time limit."""
    sleep = Sleep(10.0)
    sleep.used(0.0)
    sleep.begin(10.0)
    assert (sleep.is_asleep, sleep.is_due(99.0), sleep.next_s()) == (True, False, 10.0 + LEAVE_S)
    assert (sleep.is_late(19.0), sleep.is_late(20.0)) == (False, True)
    sleep.left()
    assert (sleep.is_late(1e9), sleep.next_s(), sleep.is_asleep) == (False, math.inf, True)
    sleep.end()
    assert (sleep.is_asleep, sleep.is_due(1e9)) == (False, False)


def test_without_a_limit_it_stays() -> None:
    """For ever."""
    sleep = Sleep(None)
    sleep.used(0.0)
    assert not sleep.is_due(1e12)
    assert sleep.next_s() == math.inf
