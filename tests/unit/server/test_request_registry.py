"""The open requests by their ids."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.server.in_flight import CompletionRate, RequestRegistry


@dataclass(eq=False)
class One:
    request_id: str
    tenant: str = ""
    num_cancels: int = 0
    num_parts: int = 1

    def cancel(self) -> None:
        self.num_cancels += 1


def test_only_the_tenants_own_are_cancelled() -> None:
    """All that have the id, and no others."""
    requests, ours, twin, theirs = RequestRegistry(CompletionRate()), One("a", "x"), One("a", "x"), One("a", "y")
    for item in (ours, twin, theirs):
        requests.add(item)
    assert requests.count == 3
    assert requests.cancel("a", "x")
    assert not requests.cancel("a", "z")
    assert not requests.cancel("b")
    assert [item.num_cancels for item in (ours, twin, theirs)] == [1, 1, 0]


def test_what_was_removed_is_not_found() -> None:
    """Removing it twice is no mistake."""
    requests, one = RequestRegistry(CompletionRate()), One("a")
    requests.add(one)
    requests.remove(one)
    requests.remove(one)
    assert requests.count == 0
    assert not requests.cancel("a")


def test_all_can_be_cancelled() -> None:
    """The requests of every tenant are cancelled."""
    requests, several = RequestRegistry(CompletionRate()), [One("a"), One("a", "t"), One("b")]
    for item in several:
        requests.add(item)
    requests.cancel_all()
    assert [item.num_cancels for item in several] == [1, 1, 1]


def test_the_completion_rate_counts_every_part_once() -> None:
    """Each part is counted once at its start and once at its end."""

    class Heard(CompletionRate):
        def __init__(self) -> None:
            self.counted: list[int] = []

        def start(self, number: int) -> None:
            self.counted.append(number)

        def finish(self, number: int) -> None:
            self.counted.append(-number)

    heard, one = Heard(), One("a", num_parts=3)
    requests = RequestRegistry(heard)
    requests.add(one)
    requests.remove(one)
    requests.remove(one)
    assert heard.counted == [3, -3]
