"""Which request is suspected, which is on probation, which is at fault."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.worker.open_requests import Blame


def running(*keys: int) -> Blame:
    blame = Blame()
    for key in keys:
        blame.add(key)
    assert blame.take() == list(keys)
    return blame


def crash(blame: Blame, seen: set[int] | None, started: set[int]) -> int | None:
    return blame.died(is_crash=True, seen=seen, started=started)


def test_a_kill_from_outside_gives_everything_to_the_next_worker_at_once() -> None:
    """No request is blamed, and the order stays."""
    blame = running(1, 2, 3)
    assert blame.died(is_crash=False, seen={1, 2}, started={1, 2, 3}) is None
    blame.add(4)
    assert blame.take() == [1, 2, 3, 4]


def test_suspects_go_one_at_a_time_and_the_others_at_once() -> None:
    """The next request starts when the request on probation has brought tokens twice."""
    blame = running(1, 2, 3, 4)
    assert crash(blame, {1, 3}, {1, 2, 3, 4}) is None
    assert blame.take() == [1, 2, 4]
    assert blame.take() == []
    blame.brought(2)
    blame.brought(1)
    assert blame.take() == []
    blame.brought(1)
    assert blame.take() == [3]
    blame.add(5)
    assert blame.take() == []
    blame.brought(3)
    blame.brought(3)
    assert blame.take() == [5]


def test_a_request_that_kills_again_on_probation_is_at_fault() -> None:
    """It is held no longer; the others that were in the pass go on unsuspected."""
    blame = running(1, 2, 3)
    crash(blame, {1, 2}, {1, 2, 3})
    assert blame.take() == [1, 3]
    assert crash(blame, {1, 3}, {1, 2, 3}) == 1
    assert not blame.is_handed(1)
    assert 1 not in blame.held
    assert blame.take() == [2, 3]


def test_a_single_suspect_is_tried_again_before_it_is_blamed() -> None:
    """Once may be chance."""
    blame = running(1)
    assert crash(blame, {1}, {1}) is None
    assert blame.take() == [1]
    assert crash(blame, {1}, {1}) == 1
    assert blame.held == ()


def test_one_on_probation_is_spared_once_where_a_server_was_lost() -> None:
    """Somebody may have restarted it; its probation ended well gives it that chance back."""
    blame = running(1, 2)

    def lose() -> int | None:
        return blame.died(is_crash=True, seen={1}, started={1, 2}, lost_server=True)

    for _ in range(2):
        assert (lose(), blame.take()) == (None, [1, 2])
        assert (lose(), blame.take()) == (None, [1, 2])
        blame.brought(1)
        blame.brought(1)
    assert (lose(), blame.take()) == (None, [1, 2])
    assert (lose(), blame.take()) == (None, [1, 2])
    assert lose() == 1
    assert blame.take() == [2]


def test_one_that_was_spared_is_at_fault_for_another_crash() -> None:
    """Nobody restarts the engine's own process in the middle of a pass."""
    blame = running(1)
    for _ in range(2):
        assert blame.died(is_crash=True, seen={1}, started={1}, lost_server=True) is None
        assert blame.take() == [1]
    assert crash(blame, {1}, {1}) == 1


def test_a_crash_without_the_one_on_probation_makes_others_suspects_and_keeps_it_one() -> None:
    """It had no part in this one."""
    blame = running(1, 2)
    crash(blame, {1}, {1, 2})
    assert blame.take() == [1, 2]
    assert crash(blame, {2}, {1, 2}) is None
    assert blame.take() == [1]
    blame.ended(1)
    assert blame.take() == [2]


def test_new_requests_wait_until_no_request_is_suspected() -> None:
    """They may kill next, and the request on probation would be blamed. So do requests that had not started."""
    blame = running(1, 2)
    crash(blame, {1}, {1})
    blame.add(3)
    assert blame.take() == [1]
    assert blame.held == (2, 3)
    blame.ended(1)
    assert blame.take() == [2, 3]


def test_where_the_pass_is_unknown_all_that_ran_are_suspects() -> None:
    """If none had started, all requests sent to the worker are suspects."""
    blame = running(1, 2, 3)
    crash(blame, None, {2, 3})
    assert blame.take() == [2]
    blame = running(1, 2)
    crash(blame, None, set())
    assert blame.take() == [1]
    assert blame.held == (2,)


def test_one_that_sits_out_ticks_does_not_keep_the_others_waiting() -> None:
    """A paused request is cleared for now."""
    blame = running(1, 2)
    crash(blame, {1, 2}, {1, 2})
    assert blame.take() == [1]
    blame.clear(1)
    assert blame.take() == [2]


def test_an_outside_kill_keeps_the_suspicion() -> None:
    """The request on probation has not been through it."""
    blame = running(1, 2)
    crash(blame, {1, 2}, {1, 2})
    assert blame.take() == [1]
    assert blame.died(is_crash=False, seen={1}, started={1, 2}) is None
    assert blame.take() == [1]
    assert blame.held == (2,)


@settings(max_examples=200)
@given(
    count=st.integers(1, 12),
    poison=st.sets(st.integers(1, 12), max_size=3),
    batches=st.lists(st.sets(st.integers(1, 12), min_size=1), min_size=1, max_size=8),
)
def test_exactly_the_poisonous_ones_are_found(count: int, poison: set[int], batches: list[set[int]]) -> None:
    """Whatever passes there are: each one that kills its pass is blamed, and no other; all others end."""
    blame = Blame()
    keys = set(range(1, count + 1))
    for key in sorted(keys):
        blame.add(key)
    with_worker: set[int] = set()
    blamed: set[int] = set()
    ended: set[int] = set()
    good: dict[int, int] = {}
    started: set[int] = set()
    for turn in range(500):
        with_worker |= set(blame.take())
        if keys <= blamed | ended:
            break
        batch = (batches[turn % len(batches)] & with_worker) or with_worker
        assert batch, "no request may run, and some have not ended"
        started |= batch
        if batch & poison:
            guilty = crash(blame, batch, started)
            with_worker = set()
            if guilty is not None:
                blamed.add(guilty)
            continue
        for key in sorted(batch):
            blame.brought(key)
            good[key] = good.get(key, 0) + 1
            if good[key] == 3:
                blame.ended(key)
                ended.add(key)
                with_worker.discard(key)
    assert blamed == poison & keys
    assert ended == keys - poison
