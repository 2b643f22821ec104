"""The requests that are being answered, by their ids, so that they can be counted, and cancelled by whoever knows the id.

On the event loop. Ids are the clients' and need not differ: what is asked of an id is asked of all that have it.
"""

from __future__ import annotations

from typing import Protocol

from paceline.server.turnover import Turnover


class OpenRequest(Protocol):
    """What can be cancelled."""

    @property
    def request_id(self) -> str:
        """As in its X-Request-Id."""

    @property
    def tenant(self) -> str:
        """Of the key that it came with."""

    @property
    def num_parts(self) -> int:
        """How many requests it is to the engine."""

    def cancel(self) -> None:
        """Ends it, with a terminal event that says so."""


class OpenRequests:
    """Those that were accepted and have not been answered whole. turnover: is told of them."""

    def __init__(self, turnover: Turnover) -> None:
        self._by_id: dict[str, list[OpenRequest]] = {}
        self._turnover = turnover

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self._by_id.values()))

    def add(self, request: OpenRequest) -> None:
        """From now on it can be found."""
        self._by_id.setdefault(request.request_id, []).append(request)
        self._turnover.began(request.num_parts)

    def remove(self, request: OpenRequest) -> None:
        """Forgets it; one that is not there any more is no mistake."""
        same = self._by_id.get(request.request_id, [])
        if request in same:
            same.remove(request)
            self._turnover.ended(request.num_parts)
        if not same:
            self._by_id.pop(request.request_id, None)

    def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """Cancels all with this id, of this tenant where one is named; answers whether there was one."""
        found = [one for one in self._by_id.get(request_id, ()) if tenant is None or one.tenant == tenant]
        for one in found:
            one.cancel()
        return bool(found)

    def cancel_all(self) -> None:
        """Cancels every one."""
        for request_id in tuple(self._by_id):
            self.cancel(request_id)
