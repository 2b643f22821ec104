"""The records of a manager: each model with its state, and one run of it from load to unload. On the event loop."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.errors import EngineStopped, ModelNotLoaded
from paceline.model_manager.engine_loader import RunningModel
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.model_status import ModelState, ModelStatus

T = TypeVar("T")


class ModelRun(Generic[T]):
    """A loaded model and its users, until it is unloaded. revoked: why users were cut off; None while they are not."""

    def __init__(self, name: str, loaded: RunningModel[T]) -> None:
        self.name, self.loaded = name, loaded
        self.num_users = 0
        self.revoked: EngineStopped | None = None
        self.left = asyncio.Event()  # the last user has gone
        self.left.set()

    def enter(self) -> None:
        """Count a user."""
        self.num_users += 1
        self.left.clear()

    def why_revoked(self) -> EngineStopped:
        """Return the error for one of the users that were cut off."""
        return (
            EngineStopped("the engine was shut down") if self.revoked is None else type(self.revoked)(str(self.revoked))
        )

    def leave(self) -> None:
        """Count a user that is gone."""
        self.num_users -= 1
        if not self.num_users:
            self.left.set()


@dataclass(eq=False, slots=True)
class Waiter(Generic[T]):
    """A caller that waits for a model.

    is_user: whether it becomes a user; loads: whether the model is loaded for it; timeout_s: most that it waits for room;
    timer: of that, while it runs; result: the run.
    """

    result: asyncio.Future[ModelRun[T]]
    is_user: bool
    loads: bool = True
    timeout_s: float | None = None
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        """Stop the timer if it runs."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


@dataclass(eq=False, slots=True)
class ManagedModel(Generic[T]):
    """A model of a manager.

    reserved_bytes: what it counts for in the budget now. most_taken_bytes: what it was seen to take. drain: of the unload
    that runs, until drain_at_s on the loop's clock. room: done when a queued model may load. cancelled: why the load that
    runs is not wanted any more. yields: whether new users wait, since another model waits for its room. is_due: whether it
    is loaded when what runs of it has ended, although no caller waits. is_replaced: whether it was removed, and its name is
    another model's.
    """

    entry: ModelEntry
    state: ModelState = "unloaded"
    since_s: float = field(default_factory=time.time)
    progress: float = 0.0
    error: Exception | None = None
    needed_bytes: int | None = None
    reserved_bytes: int = 0
    most_taken_bytes: int = 0
    used_s: float = 0.0
    used_unix_s: float | None = None
    run: ModelRun[T] | None = None
    waiters: list[Waiter[T]] = field(default_factory=list)
    loading: asyncio.Task[None] | None = None
    unloading: asyncio.Task[None] | None = None
    drain: asyncio.Timeout | None = None
    drain_at_s: float = math.inf
    room: asyncio.Future[None] | None = None
    cancel: threading.Event = field(default_factory=threading.Event)
    cancelled: EngineStopped | None = None
    yields: bool = False
    is_due: bool = False
    is_removed: bool = False
    is_replaced: bool = False

    @property
    def num_users(self) -> int:
        """The number of users."""
        return 0 if self.run is None else self.run.num_users

    @property
    def is_wanted(self) -> bool:
        """Whether a caller waits for which it is loaded or woken."""
        return any(waiter.loads or self.run is not None for waiter in self.waiters)

    @property
    def is_at_rest(self) -> bool:
        """Whether it is not loaded, and nothing of it is on its way."""
        return self.run is None and self.loading is None and self.unloading is None

    @property
    def takes_room(self) -> bool:
        """Whether it counts among the loaded models: a sleeping one has no process."""
        return self.state in ("loading", "loaded", "unloading")

    @property
    def idle_until_s(self) -> float:
        """When it is unloaded since it is idle, on the loop's clock."""
        idle_s = self.entry.unload_idle_s
        is_idle = self.run is not None and not self.num_users and not self.waiters
        return math.inf if idle_s is None or not is_idle else self.used_s + idle_s

    def check_wanted(self) -> None:
        """Raise why its load was cancelled, if it was."""
        if self.cancelled is not None:
            raise self.cancelled

    def not_loaded(self) -> ModelNotLoaded:
        """Return the error for a caller for which it is not to be loaded."""
        return ModelNotLoaded(f"the model {self.entry.name!r} is not loaded; load it first")

    def end_waiters(self, error: BaseException) -> None:
        """Give all that wait for it the error that ended its load."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if waiter.result.done():
                continue
            if isinstance(error, Exception):
                waiter.result.set_exception(error)
            else:
                waiter.result.cancel()

    def change(self, entry: ModelEntry) -> None:
        """Make it another model of this name. What was planned, seen and wrong of the earlier one says nothing of it."""
        self.entry, self.error, self.needed_bytes, self.most_taken_bytes = entry, None, None, 0

    def used(self, now_s: float) -> None:
        """Note that it is in use, on the loop's clock."""
        self.used_s, self.used_unix_s = now_s, time.time()

    def status(self) -> ModelStatus:
        """Return its status."""
        loaded = None if self.run is None else self.run.loaded
        return ModelStatus(
            name=self.entry.name,
            aliases=tuple(self.entry.aliases),
            state=self.state,
            progress=self.progress,
            error=self.error,
            needed_bytes=self.needed_bytes,
            taken_bytes=None if loaded is None else loaded.taken_bytes,
            since_s=self.since_s,
            last_used_s=self.used_unix_s,
            num_users=self.num_users,
            num_waiting=sum(waiter.is_user for waiter in self.waiters),
            is_pinned=self.entry.pinned,
            worker_pid=None if loaded is None else loaded.worker_pid,
        )
