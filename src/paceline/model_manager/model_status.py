"""What a manager reports of a model, and the feed by which changes are followed."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

ModelState = Literal[
    "unloaded", "preparing", "queued", "loading", "loaded", "sleeping", "unloading", "failed", "removed"
]

_MOST_KEPT: Final = 1024  # events for a reader that does not read; older ones are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """The state of one model of a manager.

    Attributes:
        name: The model's name.
        aliases: Its other names.
        state: "unloaded"; "preparing" while its file is found or downloaded and its memory is planned; "queued" while it
            waits for room; "loading"; "loaded"; "sleeping", loaded without its process (`sleep_idle_s`); "unloading" while its
            requests end; "failed" if the last load failed or the engine gave up, until the next try; "removed", in events.
        progress: Of loading, from 0 to 1.
        error: Why it failed.
        needed_bytes: The memory that it will need, of all devices; None where that is not known.
        taken_bytes: The memory that its process has, where the system says so; None without a process.
        since_s: When this state began, in Unix seconds.
        last_used_s: When it was last in use, in Unix seconds; None: never.
        num_users: Users that it has.
        num_waiting: Users that wait for it.
        is_pinned: Whether it is never evicted.
        worker_pid: Its process; None without one.
    """

    name: str
    aliases: tuple[str, ...] = ()
    state: ModelState
    progress: float = 0.0
    error: Exception | None = None
    needed_bytes: int | None = None
    taken_bytes: int | None = None
    since_s: float = 0.0
    last_used_s: float | None = None
    num_users: int = 0
    num_waiting: int = 0
    is_pinned: bool = False
    worker_pid: int | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether a request is served without a load; a sleeping model's process is started by it."""
        return self.state in ("loaded", "sleeping")


class StatusReader:
    """The events for one subscriber, in order: an async iterator. On the event loop.

    Of a model whose state stays the same, only the newest event is kept.
    """

    def __init__(self) -> None:
        self._events: deque[ModelStatus] = deque(maxlen=_MOST_KEPT)
        self._changed = asyncio.Event()
        self._is_ended = False

    def put(self, status: ModelStatus) -> None:
        """Add an event."""
        last = next((one for one in reversed(self._events) if one.name == status.name), None)
        if last is not None and last.state == status.state:
            self._events[self._events.index(last)] = status
        else:
            self._events.append(status)
        self._changed.set()

    def end(self) -> None:
        """End the iteration after what is there."""
        self._is_ended = True
        self._changed.set()

    def __aiter__(self) -> StatusReader:
        return self

    async def __anext__(self) -> ModelStatus:
        while not self._events:
            if self._is_ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()
