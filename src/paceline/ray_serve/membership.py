"""The replicas of a deployment as this process's request router knows them. Any thread.

Serve makes request routers by itself, on a thread of its own; this is how they meet the engine that calls their replicas.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


class Membership:
    """The replicas that take requests, and those that have done so until lately. sample: of a request, once there was one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._replicas: Mapping[str, RunningReplica] = {}
        self._listeners: list[Callable[[frozenset[str]], None]] = []
        self._known: dict[str, RunningReplica] = {}
        self.sample: PendingRequest | None = None

    def set(self, replicas: Mapping[str, RunningReplica]) -> None:
        """Replace the replicas, and tell the listeners if there are others."""
        with self._lock:
            is_same = replicas.keys() == self._replicas.keys()
            self._replicas = dict(replicas)
            self._known.update(replicas)
            if not is_same:
                self._tell(*self._listeners)

    def remove(self, replica_id: str) -> None:
        """Take out a replica that has died."""
        with self._lock:
            self.set({name: one for name, one in self._replicas.items() if name != replica_id})

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call a listener now, and whenever the replicas change: on whatever thread, with all others waiting, so it must not."""
        with self._lock:
            self._listeners.append(listener)
            self._tell(listener)

    def unlisten(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call a listener no more; one that does not listen stays so."""
        with self._lock, suppress(ValueError):
            self._listeners.remove(listener)

    def _tell(self, *listeners: Callable[[frozenset[str]], None]) -> None:
        """Call listeners under the lock, so that the newest report is the last one that each gets."""
        for listener in listeners:
            listener(frozenset(self._replicas))

    def find(self, replica_id: str) -> RunningReplica | None:
        """Return a replica, also one that takes no requests any more; None where it was forgotten."""
        return self._known.get(replica_id)

    def name_of_actor(self, actor_id: str | None) -> str | None:
        """Return the replica that is an actor, by the hexadecimal id that errors have; None where it is not known."""
        found = (name for name, one in list(self._known.items()) if one.actor_id.hex() == actor_id)
        return None if actor_id is None else next(found, None)

    def forget(self, replica_id: str) -> None:
        """Forget a replica that takes no requests any more."""
        with self._lock:
            if replica_id not in self._replicas:
                self._known.pop(replica_id, None)


@cache
def membership_of(app: str, deployment: str) -> Membership:
    """Return the one of a deployment in this process."""
    del app, deployment  # they are the key
    return Membership()
