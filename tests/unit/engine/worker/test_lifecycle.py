"""When a worker that crashed is started again, and when an idle one is stopped."""

from __future__ import annotations

import math

from paceline.engine.worker.lifecycle import LEAVE_S, RestartLimits, Restarts, ServersAway, Sleep
from paceline.errors import RpcServerUnavailable


def waits(restarts: Restarts, crashes: list[tuple[float, float | None]]) -> list[float | None]:
    """Of each crash (now, ready) the back-off."""
    found = [(now, restarts.crashed(now, ready)) for now, ready in crashes]
    return [None if at is None else round(at - now, 6) for now, at in found]


def test_each_restart_in_a_row_waits_twice_as_long_up_to_the_longest_wait() -> None:
    """From 0.1 to 10 seconds, and at 10 it stays, however often it crashes."""
    restarts = Restarts(RestartLimits())
    assert waits(restarts, [(1.0, None)] * 9) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert set(waits(restarts, [(1.0, 0.5)] * 5000)) == {10.0}
    assert restarts.num_all == restarts.num_in_row(1.0, None) == 5009


def test_a_worker_that_ran_long_enough_ends_the_row() -> None:
    """Counted from when it was ready, not from when it was started; one that never was ends nothing."""
    restarts = Restarts(RestartLimits(stable_s=60.0))
    assert waits(restarts, [(0.0, None), (1.0, 0.5), (100.0, 40.1), (1000.0, None)]) == [0.1, 0.2, 0.4, 0.8]
    assert restarts.num_in_row(1059.9, 1000.0) == 4
    assert restarts.num_in_row(1060.0, 1000.0) == 0
    assert waits(restarts, [(1060.0, 1000.0), (1061.0, None)]) == [0.1, 0.2]
    assert restarts.num_all == 6


def test_one_crash_more_than_max_restarts_is_the_end() -> None:
    """In a row: a stable worker gives all of them back."""
    restarts = Restarts(RestartLimits(max_restarts=2, first_wait_s=0.0))
    assert waits(restarts, [(1.0, 0.5), (2.0, None), (70.0, 2.0), (71.0, None), (72.0, None)]) == [0, 0, 0, 0, None]
    assert restarts.num_all == 4
    assert waits(Restarts(RestartLimits(max_restarts=0)), [(1.0, 0.5)]) == [None]


def test_a_worker_that_left_when_idle_ends_the_row_only_where_it_was_stable() -> None:
    """A crash loop with pauses between its requests stays one."""
    restarts = Restarts(RestartLimits(stable_s=60.0))
    restarts.crashed(0.0, None)
    restarts.left(50.0, 1.0)
    assert restarts.num_in_row(1000.0, None) == 1
    restarts.left(100.0, 1.0)
    assert restarts.num_in_row(1000.0, None) == 0


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


def test_requests_wait_so_long_for_servers_that_are_away() -> None:
    """From the first worker that was refused; they end once, and later ones at once, until a worker is ready."""
    away, error = ServersAway(30.0), RpcServerUnavailable("10.0.0.2:50052 is away")
    assert math.isinf(away.next_s()) and away.give_up(1e9) is None
    away.lost(100.0, RpcServerUnavailable("earlier"))
    away.lost(120.0, error)
    assert (away.next_s(), away.give_up(129.9), away.error) == (130.0, None, None)
    assert away.give_up(130.0) is away.error is error
    assert math.isinf(away.next_s()) and away.give_up(140.0) is None
    later = RpcServerUnavailable("it hangs")
    away.lost(150.0, later)
    assert away.error is later and away.give_up(200.0) is None
    away.back()
    assert away.error is None and away.give_up(1e9) is None
    away.lost(300.0, error)
    assert away.next_s() == 330.0
