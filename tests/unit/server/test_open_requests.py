"""The open requests by their ids."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.server.open_requests import OpenRequests


@dataclass(eq=False)
class One:
    request_id: str
    tenant: str = ""
    num_cancels: int = 0

    def cancel(self) -> None:
        self.num_cancels += 1


def test_only_the_tenants_own_are_cancelled() -> None:
    """All that have the id, and no others."""
    requests, ours, twin, theirs = OpenRequests(), One("a", "x"), One("a", "x"), One("a", "y")
    for one in (ours, twin, theirs):
        requests.add(one)
    assert requests.count == 3
    assert requests.cancel("a", "x")
    assert not requests.cancel("a", "z")
    assert not requests.cancel("b")
    assert [one.num_cancels for one in (ours, twin, theirs)] == [1, 1, 0]


def test_what_was_removed_is_not_found() -> None:
    """Removing it twice is no mistake."""
    requests, one = OpenRequests(), One("a")
    requests.add(one)
    requests.remove(one)
    requests.remove(one)
    assert requests.count == 0
    assert not requests.cancel("a")


def test_all_can_be_cancelled() -> None:
    """Whoever they are."""
    requests, several = OpenRequests(), [One("a"), One("a", "t"), One("b")]
    for one in several:
        requests.add(one)
    requests.cancel_all()
    assert [one.num_cancels for one in several] == [1, 1, 1]
