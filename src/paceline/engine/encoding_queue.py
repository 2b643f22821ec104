"""Requests that wait until their images are encoded, one after another on a thread of its own.

    put ──> waiting ──> encode ──> (whatever `encode` does with it, and `hold`) ──> let_go
               │ release, or the deadline
               └──────> give_up

    any thread         put, release, let_go, close: events for the watching thread; take no lock
    watching thread    which request is encoded next; gives up those that are cancelled or past their deadlines
    encoding thread    encode

A request that is given up while it is encoded is aborted, and still goes through `encode`, which returns early.

Encoding takes seconds of all cores, and passes of the engine tens of milliseconds: the encoding thread, and the threads of
llama.cpp that it starts, have a lower priority where threads have one (Linux), so that streams keep their pace.
"""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from paceline.clock import Clock

Job = TypeVar("Job")

MAX_HELD_BYTES: Final = 256 << 20
"""Bytes that requests which are encoded and wait may hold, before the next one is encoded; one is, whatever it takes."""

_NICE: Final = 10  # a tenth of the processor time of a thread of the engine, where both want all of a core


@dataclass(slots=True, eq=False)
class _Entry(Generic[Job]):
    """A request that waits or is encoded. is_given_up: whether it is not wanted any more."""

    key: int
    job: Job
    deadline_s: float
    turn_s: float
    tenant: str
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class _Release:
    key: int


class _Encoded:
    """The encoding thread has finished its entry."""


class _LetGo:
    """What was encoded is held no longer for a request that waits."""


class _Close:
    """No entry is encoded any more."""


class EncodingQueue(Generic[Job]):
    """Encodes requests in the order of their turns; tenants alternate.

    Its threads begin with the first request, and end with `close`.
    """

    def __init__(
        self,
        *,
        encode: Callable[[Job, Callable[[], bool]], object],
        give_up: Callable[[Job], object],
        abort: Callable[[int], object],
        clock: Clock,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """Begin empty.

        Args:
            encode: Called with a request, and what says whether it was given up, on the encoding thread; never raises.
            give_up: Called with a request that was cancelled or is past its deadline before it was encoded; never raises.
            abort: Called with the key of a request that is being encoded, to end that early.
            clock: Of the deadlines.
            max_held_bytes: See `hold`.
        """
        self._max_held_bytes = max_held_bytes
        self._held: dict[int, int] = {}
        self._encode, self._give_up, self._abort, self._clock = encode, give_up, abort, clock
        self._events: queue.SimpleQueue[_Entry[Job] | _Release | _Encoded | _LetGo | _Close] = queue.SimpleQueue()
        self._handed: queue.SimpleQueue[_Entry[Job] | None] = queue.SimpleQueue()
        self._waiting: dict[int, _Entry[Job]] = {}
        self._tenants: list[str] = []  # that waited last; the tenant whose turn it is comes first
        self._encoding: _Entry[Job] | None = None
        self._has_begun = False

    def put(self, key: int, job: Job, deadline_s: float, turn_s: float, tenant: str = "") -> None:
        """Add a request. One thread at a time.

        Args:
            key: Of the request.
            job: For `encode`.
            deadline_s: On the clock; infinite without one.
            turn_s: The lowest of a tenant is next.
            tenant: The owner of the request.
        """
        self._events.put(_Entry(key, job, deadline_s, turn_s, tenant))
        if not self._has_begun:
            self._has_begun = True
            for name, work in (("watching", self._watch), ("encoding", self._encode_all)):
                threading.Thread(target=work, name=f"paceline-{name}", daemon=True).start()

    def release(self, key: int) -> None:
        """Encode a request no further, since it was cancelled; does nothing for one that is not here."""
        self._events.put(_Release(key))

    def hold(self, key: int, num_bytes: int) -> None:
        """Note what a request holds that was encoded, until `let_go`. Encoding thread.

        While requests that wait hold more than max_held_bytes, no further one is encoded.
        """
        self._held[key] = num_bytes

    def let_go(self, key: int) -> None:
        """Note that a request waits no longer; does nothing for one that is not held."""
        if self._held.pop(key, None) is not None:
            self._events.put(_LetGo())

    def close(self) -> None:
        """End the threads: what is being encoded ends first, and what waits is never encoded."""
        self._events.put(_Close())

    # ---- the watching thread

    def _watch(self) -> None:
        while self._watch_once():
            pass

    def _watch_once(self) -> bool:
        """Wait for an event or a deadline, and do what is due; return whether there may be more. Nothing of it is kept."""
        with suppress(queue.Empty):
            event = self._events.get(timeout=self._timeout_s())
            if isinstance(event, _Close):
                self._handed.put(None)
                return False
            self._take(event)
        now_s = self._clock.now()
        self._drop_all(lambda one: one.deadline_s <= now_s)
        self._hand_next()
        return True

    def _take(self, event: _Entry[Job] | _Release | _Encoded | _LetGo) -> None:
        if isinstance(event, _Entry):
            self._waiting[event.key] = event
        elif isinstance(event, _Encoded):
            self._encoding = None
        elif isinstance(event, _Release):
            self._drop_all(lambda one: one.key == event.key)

    def _drop_all(self, is_over: Callable[[_Entry[Job]], bool]) -> None:
        for entry in filter(is_over, self._open()):
            self._drop(entry)

    def _open(self) -> list[_Entry[Job]]:
        """Return the requests that are still wanted."""
        running = [] if self._encoding is None or self._encoding.is_given_up else [self._encoding]
        return [*self._waiting.values(), *running]

    def _timeout_s(self) -> float | None:
        first_s = min((one.deadline_s for one in self._open()), default=math.inf)
        return None if first_s == math.inf else min(max(0.0, first_s - self._clock.now()), threading.TIMEOUT_MAX)

    def _drop(self, entry: _Entry[Job]) -> None:
        entry.is_given_up = True
        if entry is self._encoding:
            self._abort(entry.key)
        else:
            del self._waiting[entry.key]
            self._give_up(entry.job)

    def _hand_next(self) -> None:
        has_room = sum(list(self._held.values())) <= self._max_held_bytes
        if self._encoding is None and self._waiting and has_room:
            following = self._following()
            self._encoding = self._waiting.pop(following.key)
            self._handed.put(self._encoding)

    def _following(self) -> _Entry[Job]:
        """Return the next request of the tenant whose turn it is."""
        entries = sorted(self._waiting.values(), key=lambda entry: entry.turn_s)
        waiting = dict.fromkeys(entry.tenant for entry in entries)
        tenants = [
            *[tenant for tenant in self._tenants if tenant in waiting],
            *[tenant for tenant in waiting if tenant not in self._tenants],
        ]
        self._tenants = tenants[1:] + tenants[:1]
        return next(entry for entry in entries if entry.tenant == tenants[0])

    # ---- the encoding thread

    def _encode_all(self) -> None:
        _lower_priority()
        while self._encode_next():
            self._events.put(_Encoded())

    def _encode_next(self) -> bool:
        """Wait for a request and encode it; return whether there may be more. Nothing of it is kept."""
        entry = self._handed.get()  # while it waits, nothing of the last one is alive
        if entry is None:
            return False
        self._encode(entry.job, lambda: entry.is_given_up)
        return True


def _lower_priority() -> None:
    """Lower the priority of this thread and of those that it starts, where threads have one of their own."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may forbid it, and then encoding takes as much as streams do
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICE)
