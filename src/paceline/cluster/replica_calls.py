"""Calls of a replica's methods, which Ray Serve or another carrier makes. On the dispatcher's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol

from paceline.cluster.prefix_digest import PromptBlocks

Method = Literal["describe", "submit", "command", "events", "renew", "leave", "ask"]
"""The methods of a `ReplicaService` that fronts call."""


class ReplicaGone(Exception):
    """A replica did not reply: it died, is gone or cannot be reached. replica_id: None if that is not known."""

    def __init__(self, why: str, replica_id: str | None = None) -> None:
        super().__init__(why)
        self.replica_id = replica_id


class ReplicaEnded(ReplicaGone):
    """A replica's engine has ended while its process is there. It has begun no request, and its requests continue elsewhere."""


class ReplicaCalls(Protocol):
    """Calls to the replicas of one model. A call that is cancelled may have been made."""

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed`, on this loop, with the replicas that take requests: now, and at each change.

        A replica that is missing was stopped, or is being drained: it may go on with its requests for a while.
        """

    async def route(self, prompt: PromptBlocks, avoid: frozenset[str], method: Method, *args: Any) -> Any:
        """Return the result of a method of the best replica for a prompt. Waits while there is none. Raises `ReplicaGone`.

        avoid: replicas that are chosen only if there are no others.
        """

    async def call(self, replica_id: str, method: Method, *args: Any) -> Any:
        """Return the result of a method of one replica. Raises `ReplicaGone`, and the errors of the method."""

    def stream(self, replica_id: str, method: Method, *args: Any) -> AsyncIterator[bytes]:
        """Yield the items of a method of one replica; leaving it ends the method. Raises `ReplicaGone`."""

    def forget(self, replica_id: str) -> None:
        """Forget a replica that takes no more requests: it will not be called again, unless it comes back."""

    async def aclose(self) -> None:
        """End the calls that are open."""
