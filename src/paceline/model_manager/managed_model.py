"""The models of a manager: the state, users and waiters of each, the events about them, and the room that they share.

A model takes room while it is loading, loaded or unloading. Models that want room wait in a `RoomQueue`, first come, first
served. On the event loop.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, Self, TypeVar

from paceline.errors import EngineStopped, ModelNotLoaded, NotEnoughMemory
from paceline.model_manager.engine_loader import RunningModel
from paceline.model_manager.model_settings import ManagerSettings, ModelEntry
from paceline.runtime.memory import mebibytes

T = TypeVar("T")

_MOST_KEPT: Final = 1024  # events for a reader that does not read; older events are dropped

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
        needed_bytes: The memory that it will need, of all devices; None if that is not known.
        taken_bytes: The memory that its process has, if the system says so; None without a process.
        since_s: When this state began, in Unix seconds.
        last_used_s: When it was last in use, in Unix seconds; None: never.
        num_users: Users that it has.
        num_waiting: Users that wait for it.
        is_pinned: Whether it is never evicted.
        worker_pid: Its process; None without a process.
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


class ModelRun(Generic[T]):
    """A loaded model and its users, until it is unloaded. revoked: why its users were cut off; None if they were not."""

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

    def leave(self) -> None:
        """Count a user that is gone."""
        self.num_users -= 1
        if not self.num_users:
            self.left.set()

    @contextmanager
    def errors_of_a_user(self) -> Iterator[None]:
        """Raise why the users were cut off in place of the error of an engine that has stopped."""
        try:
            yield
        except EngineStopped as error:
            if self.revoked is None:
                raise
            raise type(self.revoked)(str(self.revoked)) from error


@dataclass(eq=False, slots=True)
class Waiter(Generic[T]):
    """A caller that waits for a model.

    Attributes:
        result: The run.
        is_user: Whether the caller becomes a user.
        loads: Whether the model is loaded for it.
        timeout_s: The longest that it waits for room.
        timer: The timer of timeout_s, while it runs.
    """

    result: asyncio.Future[ModelRun[T]]
    is_user: bool
    loads: bool = True
    timeout_s: float | None = None
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class ManagedModel(Generic[T]):
    """A model of a manager.

    Attributes:
        entry: Its name, file and options.
        state: Its state, since since_s in Unix seconds.
        progress: Of loading.
        error: Why it failed.
        needed_bytes: Its planned memory.
        reserved_bytes: The bytes that it counts for in the budget now; 0 while it sleeps.
        most_taken_bytes: The most memory that it was seen to take.
        used_s: When it was last used, on the loop's clock; used_unix_s is the same in Unix seconds.
        run: While it is loaded.
        loading: The task of its load; unloading: that of its unload.
        drain: The time-out of the unload, which ends at drain_at_s on the loop's clock.
        room: Done when it may load; None if it is not in the queue.
        cancel: Ends its load.
        cancelled: Why its load was cancelled.
        yields: Whether new users wait, since another model waits for its room.
        is_due: Whether it is loaded after its present run or load has ended, although no caller waits.
        is_removed: Whether it was removed.
        is_replaced: Whether another model has its name since.
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
        """Whether a caller waits for it to be loaded or woken."""
        return any(waiter.loads or self.run is not None for waiter in self.waiters)

    @property
    def is_at_rest(self) -> bool:
        """Whether it is not loaded, and is neither being loaded nor unloaded."""
        return self.run is None and self.loading is None and self.unloading is None

    @property
    def takes_room(self) -> bool:
        """Whether it counts among the loaded models. A sleeping model has no process, so it does not."""
        return self.state in ("loading", "loaded", "unloading")

    @property
    def room_kind(self) -> Literal["idle", "busy", "coming", "leaving", "pinned"]:
        """How it holds its room: an idle model can be evicted, a coming one is being loaded, a leaving one unloaded."""
        if self.state == "unloading":
            return "leaving"
        if self.entry.pinned:
            return "pinned"
        if self.state == "loading":
            return "coming"
        return "busy" if self.num_users else "idle"

    @property
    def idle_until_s(self) -> float:
        """When it is unloaded because it is idle, on the loop's clock."""
        idle_s = self.entry.unload_idle_s
        is_idle = self.run is not None and not self.num_users and not self.waiters
        return math.inf if idle_s is None or not is_idle else self.used_s + idle_s

    def check_wanted(self) -> None:
        """Raise the reason if its load was cancelled."""
        if self.cancelled is not None:
            raise self.cancelled

    def not_loaded(self) -> ModelNotLoaded:
        """Return the error for a caller that does not want it to be loaded."""
        return ModelNotLoaded(f"the model {self.entry.name!r} is not loaded; load it first")

    def cancel_load(self, error: EngineStopped) -> None:
        """Cancel its load, also in the queue for room."""
        self.cancelled = error
        self.cancel.set()
        if self.room is not None and not self.room.done():
            self.room.set_exception(error)

    def end_waiters(self, error: BaseException) -> None:
        """End all waiters with the error that ended its load."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if waiter.result.done():
                continue
            if isinstance(error, Exception):
                waiter.result.set_exception(error)
            else:
                waiter.result.cancel()

    def change(self, entry: ModelEntry) -> None:
        """Make it another model of this name, of which no memory or error is known."""
        self.entry, self.error, self.needed_bytes, self.most_taken_bytes = entry, None, None, 0

    def used(self, now_s: float) -> None:
        """Record that it is in use, on the loop's clock."""
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


class StatusReader:
    """The events for one subscriber, in order: an async iterator. Of events of one model and state only the newest is kept."""

    def __init__(self) -> None:
        self._events: deque[ModelStatus] = deque(maxlen=_MOST_KEPT)
        self._changed = asyncio.Event()
        self._is_ended = False

    def put(self, status: ModelStatus) -> None:
        """Add an event."""
        for place in range(len(self._events) - 1, -1, -1):
            if self._events[place].name == status.name:
                if self._events[place].state == status.state:
                    self._events[place] = status
                    return
                break
        self._events.append(status)
        self._changed.set()

    def end(self) -> None:
        """End the iteration after the events that are there."""
        self._is_ended = True
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ModelStatus:
        while not self._events:
            if self._is_ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


class StatusFeed:
    """Changes the states of models, and reports every change to the readers."""

    def __init__(self) -> None:
        self._readers: list[StatusReader] = []
        self._is_ended = False

    def subscribe(self) -> StatusReader:
        """Return a reader of the events from now on."""
        reader = StatusReader()
        self._readers.append(reader)
        if self._is_ended:
            reader.end()
        return reader

    def unsubscribe(self, reader: StatusReader) -> None:
        """End a reader."""
        if reader in self._readers:
            self._readers.remove(reader)
        reader.end()

    def change(self, model: ManagedModel[Any], state: ModelState) -> None:
        """Set a model's state, and report it."""
        if model.state != state:
            model.state, model.since_s = state, time.time()
            model.progress = 1.0 if state in ("loaded", "sleeping") else 0.0
        self.report(model)

    def report(self, model: ManagedModel[Any]) -> None:
        """Report a change of a model, unless another model has its name now."""
        if self._readers and not model.is_replaced:
            status = model.status()
            for reader in self._readers:
                reader.put(status)

    def end(self) -> None:
        """End all readers, now and later."""
        self._is_ended = True
        for reader in self._readers.copy():
            self.unsubscribe(reader)


# ---- room


def plan_room(
    num_bytes: int, models: Sequence[ManagedModel[T]], limits: ManagerSettings, *, may_interrupt: bool = False
) -> list[ManagedModel[T]] | None:
    """Return the models to evict before another model may load, least recently used first; None if it has to wait. Pure.

    Models that are being unloaded are waited for before others are evicted. Raises `NotEnoughMemory` if it never fits.

    Args:
        num_bytes: The memory that it needs.
        models: The models that take room.
        limits: Their memory_budget and max_loaded.
        may_interrupt: Whether models with users may be evicted after the idle models: it has waited long enough.
    """
    _check_can_fit(num_bytes, models, limits)
    gone: set[ManagedModel[T]] = set()

    def fits() -> bool:
        return _is_within([model for model in models if model not in gone], limits, num_bytes, 1)

    if fits():
        return []
    gone.update(model for model in models if model.room_kind == "leaving")
    victims: list[ManagedModel[T]] = []
    for model in (*_of_kind("idle", models), *(_of_kind("busy", models) if may_interrupt else ())):
        if fits():
            break
        gone.add(model)
        victims.append(model)
    for model in reversed(victims.copy()):  # a large model that came later may have made a small one needless
        gone.discard(model)
        if fits():
            victims.remove(model)
        else:
            gone.add(model)
    return victims if victims and fits() else None


def plan_relief(models: Sequence[ManagedModel[T]], limits: ManagerSettings) -> list[ManagedModel[T]]:
    """Return which idle models to evict, least recently used first, because the models take more than they may. Pure."""
    staying = [model for model in models if model.room_kind != "leaving"]
    victims: list[ManagedModel[T]] = []
    for model in _of_kind("idle", staying):
        if _is_within([other for other in staying if other not in victims], limits):
            break
        victims.append(model)
    return victims


def _is_within(
    models: Sequence[ManagedModel[Any]], limits: ManagerSettings, more_bytes: int = 0, num_more: int = 0
) -> bool:
    if limits.max_loaded and len(models) + num_more > limits.max_loaded:
        return False
    taken = sum(model.reserved_bytes for model in models)
    return limits.memory_budget is None or taken + more_bytes <= limits.memory_budget


def _of_kind(kind: str, models: Sequence[ManagedModel[T]]) -> list[ManagedModel[T]]:
    """Return the models of a kind in the order of their eviction: a model that takes no new users goes first."""
    found = [model for model in models if model.room_kind == kind]
    return sorted(found, key=lambda model: -math.inf if model.yields else model.used_s)


def _check_can_fit(num_bytes: int, models: Sequence[ManagedModel[Any]], limits: ManagerSettings) -> None:
    pinned = [model for model in models if model.room_kind == "pinned"]
    names = ", ".join(model.entry.name for model in pinned)
    of_pinned, budget = sum(model.reserved_bytes for model in pinned), limits.memory_budget
    if budget is not None and num_bytes > budget:
        raise NotEnoughMemory(
            f"it needs {mebibytes(num_bytes)}, and the memory budget of all models is {mebibytes(budget)}; "
            "use a smaller quantisation or n_ctx, or a larger budget"
        )
    if budget is not None and num_bytes + of_pinned > budget:
        raise NotEnoughMemory(
            f"it needs {mebibytes(num_bytes)}, and the memory budget is {mebibytes(budget)}, of which pinned "
            f"models take {mebibytes(of_pinned)} ({names}); unload one of these, or use a larger budget"
        )
    if limits.max_loaded and len(pinned) >= limits.max_loaded:
        raise NotEnoughMemory(
            f"max_loaded={limits.max_loaded} models are pinned ({names}); unload one of these, or allow more"
        )


class RoomQueue(Generic[T]):
    """The models that wait for room, first come, first served. It evicts nothing itself.

    Attributes:
        limits: memory_budget, max_loaded and patience_s: how long the first model waits before models in use take no new
            users until it has its room.
    """

    def __init__(self, models: Collection[ManagedModel[T]], limits: ManagerSettings) -> None:
        self._models, self.limits = models, limits
        self._waiting: list[ManagedModel[T]] = []
        self._head: ManagedModel[T] | None = None  # the first of them, since _head_since_s
        self._head_since_s = 0.0

    def join(self, model: ManagedModel[T]) -> asyncio.Future[None]:
        """Return a future that is done when the model may load, and fails with `NotEnoughMemory` if it never may."""
        model.room = asyncio.get_running_loop().create_future()
        self._waiting.append(model)
        return model.room

    def leave(self, model: ManagedModel[T]) -> None:
        """Remove a model that has its room, or does not want it any more."""
        model.room = None
        if model in self._waiting:
            self._waiting.remove(model)

    def serve(self, now_s: float, feed: StatusFeed) -> tuple[list[ManagedModel[T]], list[ManagedModel[T]]]:
        """Give the first models their room. Returns the models to evict, and the models with waiting users that may enter."""
        evicted: list[ManagedModel[T]] = []
        admitted: list[ManagedModel[T]] = []
        while self._waiting and self._serve_head(self._waiting[0], now_s, feed, evicted, admitted):
            self._waiting.pop(0)
        if not self._waiting:
            self._stop_yielding(admitted)
        staying = [model for model in self._models if model.takes_room and model not in evicted]
        return evicted + plan_relief(staying, self.limits), admitted

    def next_s(self) -> float:
        """Return when the patience of the first model ends."""
        return self._head_since_s + self.limits.patience_s if self._waiting else math.inf

    def idle_victim(self) -> ManagedModel[T] | None:
        """Return the model to evict first; None if all are in use or pinned."""
        idle = [model for model in self._models if model.takes_room and model.room_kind == "idle"]
        return min(idle, key=lambda model: model.used_s, default=None)

    def reserved_bytes(self, model: ManagedModel[T]) -> int:
        """Return the bytes to reserve for a model with a process: its plan, or its highest use up to the budget.

        A model that was planned to fit is not refused because it takes more than the budget.
        """
        budget = self.limits.memory_budget
        taken = model.most_taken_bytes if budget is None else min(model.most_taken_bytes, budget)
        return max(model.needed_bytes or 0, taken)

    def _serve_head(
        self,
        head: ManagedModel[T],
        now_s: float,
        feed: StatusFeed,
        evicted: list[ManagedModel[T]],
        admitted: list[ManagedModel[T]],
    ) -> bool:
        """Give the first model its room, or begin to free it. Returns whether the model waits no more."""
        if self._head is not head:
            self._stop_yielding(admitted)
            self._head, self._head_since_s = head, now_s
        room = head.room
        if room is None or room.done():  # its load was cancelled
            return True
        num_bytes = self.reserved_bytes(head)
        others = [model for model in self._models if model.takes_room]
        try:
            victims = plan_room(num_bytes, others, self.limits, may_interrupt=now_s >= self.next_s())
        except NotEnoughMemory as refusal:
            room.set_exception(NotEnoughMemory(f"the model {head.entry.name!r} cannot be loaded: {refusal}"))
            return True
        if victims == []:
            head.reserved_bytes = num_bytes
            feed.change(head, "loading")
            room.set_result(None)
            return True
        for victim in victims or ():
            if victim.num_users:
                victim.yields = True
            else:
                evicted.append(victim)
        return False

    def _stop_yielding(self, admitted: list[ManagedModel[T]]) -> None:
        self._head = None
        for model in self._models:
            if model.yields:
                model.yields = False
                admitted.append(model)
