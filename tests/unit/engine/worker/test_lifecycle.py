"""When a worker that crashed is started again, when one hangs, and when an idle one is stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.engine.worker.black_box import Beat
from paceline.engine.worker.supervisor import LEAVE_S, HangWatch, RestartLimits, Restarts, ServersAway, Sleep
from paceline.errors import RpcServerUnavailable
from paceline.observability.heartbeat import Sign


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
    """From the first refused worker; they end once, and later requests at once, until a worker is ready."""
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


def beat(listened_s: float, *, beaten_s: float | None = None, state: str = "idle", allowed_s: float = 0.0) -> Beat:
    sign = Sign("ticking" if state == "ticking" else "idle", 1.0)
    return Beat(listened_s, sign, listened_s if beaten_s is None else beaten_s, allowed_s)


class Watched:
    """A `HangWatch` of a worker that gives the heartbeats of `at`, looked at each second of a clock."""

    def __init__(self, limit_s: float = 20.0, num_crashes: int = 0) -> None:
        self.watch, self.now_s = HangWatch(limit_s), 100.0
        self.watch.begin(self.now_s, num_crashes)
        self.is_excused, self.is_ready = False, True
        self.preparing: int | None = None

    def until_hung(self, at: Callable[[float], Beat | None], most_s: float = 5000.0) -> tuple[float, str] | None:
        """Return after how many seconds it counts as hung, and why; None if it does not within most_s."""
        begin_s = self.now_s
        while self.now_s < begin_s + most_s:
            self.now_s = self.watch.next_s()
            reason = self.watch.look(
                self.now_s, at(self.now_s), self.preparing, lambda: self.is_excused, is_ready=self.is_ready
            )
            if reason is not None:
                return self.now_s - begin_s, reason
        return None


def test_a_worker_that_gives_heartbeats_never_hangs() -> None:
    """Idle, or in ticks that end in time."""
    assert Watched().until_hung(beat) is None
    assert Watched().until_hung(lambda now_s: beat(now_s, beaten_s=now_s - now_s % 19, state="ticking")) is None


@pytest.mark.parametrize("last", [beat(99.0), beat(99.0, state="ticking", allowed_s=4000.0)])
def test_a_process_that_stopped_hangs_after_the_limit_whatever_its_pass_may_take(last: Beat) -> None:
    """Its listening thread gives heartbeats during a pass too."""
    found = Watched().until_hung(lambda _: last)
    assert found is not None
    assert 20.0 <= found[0] <= 22.0
    assert "no heartbeat for 20 s" in found[1]


def test_a_thread_that_does_not_come_back_hangs_though_another_one_gives_heartbeats() -> None:
    """Of the engine's thread only the request before the tick is seen."""
    found = Watched().until_hung(lambda now_s: beat(now_s, beaten_s=99.0, state="ticking"))
    assert found is not None
    assert 20.0 <= found[0] <= 22.0
    assert "in one tick for 20 s, and 20 s were allowed" in found[1]


def test_a_pass_that_is_expected_to_be_long_is_no_hang() -> None:
    """Of 407 s for instance; beyond the allowed time it is."""
    watched = Watched()
    in_pass = [beat(0.0, beaten_s=99.0, state="ticking", allowed_s=450.0)]
    assert watched.until_hung(lambda now_s: replace(in_pass[0], listened_s=now_s), most_s=407.0) is None
    found = watched.until_hung(lambda now_s: replace(in_pass[0], listened_s=now_s))
    assert found is not None
    assert 43.0 <= found[0] <= 46.0


def test_each_crash_in_a_row_makes_ticks_four_times_as_long() -> None:
    """A machine that is slower than expected comes to an end with its pass."""
    for num_crashes, limit_s in ((1, 80.0), (2, 320.0), (3, 1280.0), (50, 1280.0)):
        found = Watched(num_crashes=num_crashes).until_hung(
            lambda now_s: beat(now_s, beaten_s=99.0, state="ticking"), most_s=limit_s + 10
        )
        assert found is not None
        assert limit_s <= found[0] <= limit_s + 2


def test_a_worker_that_loads_may_be_silent_for_ten_times_as_long() -> None:
    """Before its first heartbeat as well; its engine has none yet."""
    for last in (None, Beat(99.0)):
        watched = Watched()
        watched.is_ready = False
        found = watched.until_hung(lambda _, last=last: last)  # type: ignore[misc]
        assert found is not None
        assert 200.0 <= found[0] <= 202.0
    loading = Watched()
    loading.is_ready = False
    assert loading.until_hung(Beat) is None


def test_a_request_that_is_prepared_for_too_long_is_a_hang() -> None:
    """The thread that prepares it serves all others too."""
    watched = Watched()
    watched.preparing = 7
    found = watched.until_hung(beat)
    assert found is not None
    assert 200.0 <= found[0] <= 202.0
    assert "prepared one request" in found[1]


def test_time_in_which_the_front_did_not_run_either_is_not_counted() -> None:
    """A machine that was suspended, or a process group that was stopped, goes on for two looks and is given the limit then."""
    watched = Watched()
    assert watched.until_hung(beat, most_s=10.0) is None
    last = beat(watched.now_s)
    for _ in range(5):
        watched.now_s += 3600.0
        looked = watched.watch.look(watched.now_s, last, None, lambda: False, is_ready=True)
        assert looked is None
    assert watched.watch.silent_s <= 10.0
    assert watched.until_hung(beat) is None


def test_silence_with_an_excuse_is_not_counted() -> None:
    """While a debugger holds the process or it reads pages from disk; later silence goes on counting."""
    watched = Watched()
    watched.is_excused = True
    last = beat(99.0)
    assert watched.until_hung(lambda _: last) is None
    watched.is_excused = False
    found = watched.until_hung(lambda _: last)
    assert found is not None
    assert 16.0 <= found[0] <= 20.0


def test_without_a_limit_nothing_hangs() -> None:
    """Its observed silence is known all the same."""
    watched = Watched(math.inf)
    assert watched.until_hung(lambda _: beat(99.0)) is None
    assert watched.watch.silent_s > 4000.0
