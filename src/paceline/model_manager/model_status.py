"""What a manager reports of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelState = Literal[
    "unloaded", "preparing", "queued", "loading", "loaded", "sleeping", "unloading", "failed", "removed"
]


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
