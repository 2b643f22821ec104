"""What an engine over replicas needs of whatever connects it with them, such as Ray Serve. On the engine's event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol

from paceline.cluster import PromptBlocks

Call = Literal[
    "describe",
    "submit",
    "command",
    "events",
    "renew",
    "leave",
    "stats",
    "heartbeat",
    "load_lora",
    "unload_lora",
    "ask",
]
"""The methods of a `ReplicaService` that are called from elsewhere."""


class ReplicaGone(Exception):
    """A replica did not reply: it died, is gone or cannot be reached. replica_id: None where that is not known."""

    def __init__(self, why: str, replica_id: str | None = None) -> None:
        super().__init__(why)
        self.replica_id = replica_id


class ReplicaEnded(ReplicaGone):
    """A replica's engine has ended, while its process is there: it took in nothing, and what it had has to go on elsewhere."""


class ReplicaCalls(Protocol):
    """Calls to the replicas of one model. A call that is cancelled may have been made."""

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        """Call `changed`, on this loop, with the replicas that take requests: now, and whenever they are others.

        A replica that is missing was stopped, or is being drained: it may go on for a while with what it has.
        """

    async def route(self, prompt: PromptBlocks, avoid: frozenset[str], method: Call, *args: Any) -> Any:
        """Return what a method of the replica returns that is best for a prompt.

        Waits as long as there is none. avoid: replicas that are only chosen where there are no others. Raises `ReplicaGone`.
        """

    async def call(self, replica_id: str, method: Call, *args: Any) -> Any:
        """Return what a method of one replica returns. Raises `ReplicaGone`, and what the method raises."""

    def stream(self, replica_id: str, method: Call, *args: Any) -> AsyncIterator[bytes]:
        """Yield what a method of one replica yields; leaving it ends the method. Raises `ReplicaGone`."""

    def forget(self, replica_id: str) -> None:
        """Forget a replica that takes no requests any more: it will not be called again, unless it is back."""

    async def aclose(self) -> None:
        """End what is still open."""
