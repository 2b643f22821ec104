"""Which request do replicas die of?"""

from __future__ import annotations

from paceline.cluster.routed_requests import Suspects
from paceline.engine.worker.open_requests import PROBATION_TICKS


def test_after_a_first_death_all_go_on_at_once() -> None:
    """One dead replica holds no request back."""
    suspects = Suspects()
    assert suspects.died([1, 2, 3]) is None
    assert all(suspects.may_go(key) for key in (1, 2, 3))


def test_after_a_second_death_they_go_one_at_a_time() -> None:
    """Requests that were on two dead replicas in a row are tried alone; the next one follows when one is cleared."""
    suspects = Suspects()
    suspects.died([1, 2])
    suspects.died([1, 2])
    assert suspects.may_go(1)
    assert not suspects.may_go(2)
    assert suspects.next() is None
    for _ in range(PROBATION_TICKS):
        suspects.brought(1)
    assert suspects.next() == 2
    assert suspects.may_go(2)


def test_the_one_that_was_alone_is_at_fault() -> None:
    """A third death in a row ends the request that was tried alone, and no other."""
    suspects = Suspects()
    suspects.died([1, 2])
    suspects.died([1, 2])
    assert suspects.may_go(1)
    assert suspects.died([1, 7]) == 1
    suspects.forget(1)
    assert suspects.may_go(7)


def test_tokens_clear_a_request() -> None:
    """A request that brought tokens on another replica is beyond the place of the death."""
    suspects = Suspects()
    for _ in range(10):  # replicas that are killed one after the other
        assert suspects.died([1]) is None
        for _ in range(PROBATION_TICKS):
            suspects.brought(1)
    assert suspects.may_go(1)


def test_a_request_that_ends_makes_room_for_the_next_suspect() -> None:
    """A suspect that ends while it is alone, or waits, is forgotten."""
    suspects = Suspects()
    for _ in range(2):
        suspects.died([1, 2, 3])
    assert suspects.may_go(1)
    assert not suspects.may_go(2)
    assert not suspects.may_go(3)
    suspects.forget(2)
    suspects.forget(1)
    assert suspects.next() == 3
