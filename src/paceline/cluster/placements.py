"""Which replica has which request. Pure.

Each time that a request is sent to a replica it gets a number, the key that it has there: parts of an earlier place belong to
no request, though the replica may send some until it gets the cancel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.engine.worker import messages


@dataclass(slots=True)
class ReplicaPlacement:
    """A request on its way to a replica, or there. early: parts that came before it was known that they should, by replica.

    session: of this front there, as `ReplicaService` numbers them. has_begun: whether it has left the replica's queue.
    """

    key: int
    number: int
    replica_id: str | None = None
    session: int = 0
    has_begun: bool = False
    early: list[tuple[str, messages.Part]] = field(default_factory=list)


class Placements:
    """All that are open, by number and by request."""

    def __init__(self) -> None:
        self._next = 0
        self._by_number: dict[int, ReplicaPlacement] = {}
        self._by_key: dict[int, ReplicaPlacement] = {}

    def begin(self, key: int) -> ReplicaPlacement:
        """Return a new placement of a request; the one before is over."""
        self.end(key)
        self._next += 1
        placement = ReplicaPlacement(key, self._next)
        self._by_number[placement.number] = self._by_key[key] = placement
        return placement

    def find(self, key: int) -> ReplicaPlacement | None:
        """Return the placement of a request; None where it is on no way to a replica."""
        return self._by_key.get(key)

    def numbered(self, number: int) -> ReplicaPlacement | None:
        """Return the placement with a number; None where it is over."""
        return self._by_number.get(number)

    def end(self, key: int) -> ReplicaPlacement | None:
        """Forget the placement of a request, and return it."""
        placement = self._by_key.pop(key, None)
        if placement is not None:
            del self._by_number[placement.number]
        return placement

    def on(self, replica_id: str) -> list[ReplicaPlacement]:
        """Return the placements on a replica, the earliest first."""
        return [one for one in self._by_number.values() if one.replica_id == replica_id]
