"""The core of both managers: the models, who waits for which, and what is due. On one event loop.

    acquire ──> waiters of a model ──> its load (`ModelRuns`) ──> room (`RoomQueue`) ──> users ──release──> idle

Loads and unloads are tasks; all else happens at once, in `_arrange`, whenever something has changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Generic, TypeVar

from paceline import validation
from paceline.errors import EngineStopped, InvalidParams, ModelNotFound, ModelsBusy
from paceline.model_manager.engine_loader import ModelLoader
from paceline.model_manager.managed_model import ManagedModel, ModelRun, Waiter
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.model_runs import ModelRuns
from paceline.model_manager.model_status import ModelStatus
from paceline.model_manager.models_file import ManagerSettings
from paceline.model_manager.room_queue import RoomQueue
from paceline.model_manager.status_feed import StatusFeed

T = TypeVar("T")

_LOOK_S: Final = 1.0  # between two looks whether engines have fallen asleep
_CLOSED: Final = "the model manager was closed"


class ModelPool(Generic[T]):
    """The models of a manager. All methods are for the event loop on which the first coroutine ran."""

    def __init__(self, loader: ModelLoader[T], settings: ManagerSettings) -> None:
        """Add the models of the settings. Raises `InvalidParams` where a name is taken twice, or an option is wrong."""
        self._loader, self._settings = loader, settings
        self._models: dict[str, ManagedModel[T]] = {}
        self._names: dict[str, ManagedModel[T]] = {}  # aliases too
        self._all: list[ManagedModel[T]] = []  # those that are being removed, too, as long as they take room
        self.feed = StatusFeed()
        self._rooms = RoomQueue(self._all)
        self._rooms.set_limits(settings.room_limits, settings.patience_s)
        self._runs = ModelRuns(loader, self._rooms, self.feed, self._arrange)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self.add(*settings.entries)

    # ---- entries

    @property
    def settings(self) -> ManagerSettings:
        """The limits, and the entries of the models that there are."""
        entries = tuple(model.entry for model in self._models.values())
        return dataclasses.replace(self._settings, entries=entries)

    def names(self) -> list[str]:
        """Return the names of all models, without aliases."""
        return list(self._models)

    def entry(self, name: str) -> ModelEntry:
        """Return the entry of a model. Raises `ModelNotFound`."""
        return self._find(name).entry

    def status(self, name: str) -> ModelStatus:
        """Return the status of a model. Raises `ModelNotFound`."""
        return self._find(name).status()

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every model."""
        return [model.status() for model in self._models.values()]

    def add(self, *entries: ModelEntry) -> None:
        """Add models. Raises `InvalidParams` where a name is taken, or an option is wrong; then none is added."""
        self._check([model.entry for model in self._models.values()], entries)
        for entry in entries:
            self._add(entry)

    async def remove(self, name: str, timeout_s: float | None = None) -> None:
        """Unload a model and forget it. Raises `ModelNotFound`."""
        self._bind()
        model = self._find(name)
        for one in model.entry.names:
            del self._names[one]
        del self._models[model.entry.name]
        await self._stopped(self._begin_removal(model, timeout_s))

    async def update(self, models: Iterable[ModelEntry] | ManagerSettings) -> None:
        """Make these the models: add the new ones, remove the missing, unload the changed, whose names stay known.

        Of settings the limits hold from now on, too. All that is the case before it first waits: for the end of what was
        unloaded. Those that wait for a changed model get the new one. New and changed ones with
        load_on_startup begin to load. Raises `InvalidParams`; then nothing is changed.
        """
        self._bind()
        if not isinstance(models, ManagerSettings):
            models = dataclasses.replace(self._settings, entries=tuple(models))
        self._check((), models.entries)
        self._set_limits(models)
        wanted = {entry.name: entry for entry in models.entries}
        before, self._models, self._names = self._models, {}, {}
        tasks: list[asyncio.Task[None]] = []
        for name, model in before.items():
            if name not in wanted:
                tasks += self._begin_removal(model, None)
        for name, entry in wanted.items():
            known = before.get(name)
            is_same = known is not None and known.entry == entry
            if known is not None and not is_same:
                tasks += self._runs.begin_stop(known, known.entry.stop_timeout_s, keeps_waiters=True)
                known.change(entry)
            self._add(entry, known)
            if entry.load_on_startup and not is_same:
                self._runs.begin_due_load(self._models[name])
        await self._stopped(tasks)

    def _set_limits(self, settings: ManagerSettings) -> None:
        self._settings = settings
        had_budget = self._rooms.budget is not None
        self._rooms.set_limits(settings.room_limits, settings.patience_s)
        for model in self._all:
            if model.state == "loaded":
                self._runs.note_memory(model)
            if self._rooms.budget is not None and not had_budget:
                self._runs.plan_anew(model)

    def _begin_removal(self, model: ManagedModel[T], timeout_s: float | None) -> list[asyncio.Task[None]]:
        """Begin to unload a model whose names are unknown now; return the tasks with whose end it is gone."""
        model.is_removed = True
        model.end_waiters(ModelNotFound(f"the model {model.entry.name!r} was removed"))
        return self._runs.begin_stop(model, model.entry.stop_timeout_s if timeout_s is None else timeout_s)

    async def _stopped(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait for the end of loads and unloads."""
        self._arrange()
        if tasks:
            await asyncio.wait(tasks)

    def _check(self, known: Sequence[ModelEntry], new: Sequence[ModelEntry]) -> None:
        owners = {name: entry.name for entry in known for name in entry.names}
        for entry in new:
            if len(set(entry.names)) < len(entry.names):
                raise InvalidParams(f"model {entry.name!r}: a name stands twice among name and aliases")
            for name in entry.names:
                if name in owners:
                    raise InvalidParams(f"model {entry.name!r}: the name {name!r} is taken by {owners[name]!r}")
                owners[name] = entry.name
            self._loader.check(entry)

    def _add(self, entry: ModelEntry, known: ManagedModel[T] | None = None) -> None:
        """Make a model known by its names. known: it, where there is one already."""
        model = ManagedModel[T](entry) if known is None else known
        if known is None:
            for one in self._all:
                one.is_replaced = one.is_replaced or one.entry.name == entry.name
            self._all.append(model)
        self._models[entry.name] = model
        self._names.update(dict.fromkeys(entry.names, model))
        self.feed.report(model)

    # ---- users

    async def acquire(self, name: str, *, load: bool = True, timeout_s: float | None = None) -> ModelRun[T]:
        """Count a user of a model and return its run, once it is loaded; `release` it.

        timeout_s: most that it waits for room; None: wait_timeout_s of the settings. Raises `ModelNotFound`, `ModelNotLoaded`
        without load, `ModelsBusy`, `ModelUnloaded`, `EngineStopped`, and what a load raises.
        """
        self._bind()
        model = self._find(name)
        self._look_after(model)
        run = model.run
        if run is not None and model.state == "loaded" and not model.yields:
            run.loaded.wake()  # which counts as use, so that it does not fall asleep before the request comes
            run.enter()
            model.used(self._now())
            self.feed.report(model)
            return run
        needs_load = model.state in ("unloaded", "failed") or model.unloading is not None
        if not load and needs_load and not any(waiter.loads for waiter in model.waiters):
            raise model.not_loaded()
        return await self._wait(model, is_user=True, loads=load, timeout_s=timeout_s)

    def release(self, run: ModelRun[T]) -> None:
        """Count a user's end."""
        run.leave()
        model = self._models.get(run.name)
        if model is not None and model.run is run:
            model.used(self._now())
            if not run.num_users and model.state == "loaded":
                self._runs.note_memory(model)
            self.feed.report(model)
        self._arrange()

    async def load(self, name: str, timeout_s: float | None = None) -> None:
        """Load a model unless it is. Raises as `acquire`."""
        self._bind()
        model = self._find(name)
        if model.state not in ("loaded", "sleeping"):
            await self._wait(model, is_user=False, loads=True, timeout_s=timeout_s)

    async def unload(self, name: str, timeout_s: float | None = None) -> None:
        """Unload a model, or cancel its load; return when its memory is free.

        timeout_s: for its users to leave; then their requests end. None: the entry's stop_timeout_s. Raises `ModelNotFound`.
        """
        self._bind()
        model = self._find(name)
        await self._runs.unload(model, model.entry.stop_timeout_s if timeout_s is None else timeout_s)

    async def start(self) -> None:
        """Begin to load the models with load_on_startup, without waiting for them."""
        self._bind()
        for model in self._models.values():
            if model.entry.load_on_startup:
                self._runs.begin_load(model)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Unload everything, and refuse what comes. drain: whether users may leave first, within timeout_s. Idempotent."""
        self._bind(is_closing=True)
        self._is_closed = True
        self._runs.close()
        drain_s = (math.inf if timeout_s is None else timeout_s) if drain else 0.0
        for model in self._all:
            model.end_waiters(EngineStopped(_CLOSED))
        await asyncio.gather(*(self._runs.unload(model, drain_s) for model in self._all))
        if self._timer is not None:
            self._timer.cancel()
        self.feed.end()

    # ---- finding

    def _bind(self, *, is_closing: bool = False) -> None:
        """Check that this is the pool's loop, and that it is open."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("a model manager belongs to one event loop; make another one for this loop")
        if self._is_closed and not is_closing:
            raise EngineStopped(_CLOSED)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _find(self, name: str) -> ManagedModel[T]:
        model = self._names.get(name)
        if model is None:
            shown = str(name)[:200]
            near = validation.nearest_names(shown, self._names, most=3)
            hint = (
                f"did you mean {', '.join(map(repr, near))}?"
                if near
                else f"there are {', '.join(self._models) or 'none'}"
            )
            raise ModelNotFound(f"there is no model {shown!r}; {hint}")
        return model

    # ---- waiting

    async def _wait(
        self, model: ManagedModel[T], *, is_user: bool, loads: bool, timeout_s: float | None
    ) -> ModelRun[T]:
        longest_s = self._settings.wait_timeout_s if timeout_s is None else timeout_s
        waiter = Waiter[T](asyncio.get_running_loop().create_future(), is_user, loads, longest_s)
        model.waiters.append(waiter)
        self._runs.begin_load(model)
        self._start_timer(model, waiter)
        self._arrange()
        try:
            return await waiter.result
        except asyncio.CancelledError:
            self._forget(model, waiter)
            raise
        finally:
            waiter.stop_timer()

    def _start_timer(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        if waiter.timer is None and waiter.timeout_s is not None:
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(waiter.timeout_s, self._give_up, model, waiter, waiter.timeout_s)

    def _forget(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        """Drop a waiter that was cancelled, or give back what it got at the same moment."""
        result = waiter.result
        if waiter.is_user and result.done() and not result.cancelled() and result.exception() is None:
            self.release(result.result())
        self._drop(model, waiter)

    def _give_up(self, model: ManagedModel[T], waiter: Waiter[T], timeout_s: float) -> None:
        """End a waiter whose time is over, unless its model is on its way; the time begins anew if it then queues."""
        waiter.timer = None
        if waiter.result.done() or model.state in ("preparing", "loading"):
            return
        others = [one.entry.name for one in self._models.values() if one.takes_room and one is not model]
        waiter.result.set_exception(
            ModelsBusy(
                f"the model {model.entry.name!r} waited {timeout_s:g} s for room, and the loaded models "
                f"({', '.join(others) or 'none'}) are in use or pinned; try later, unload one, or allow more memory or models"
            )
        )
        self._drop(model, waiter)

    def _drop(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        """Drop a waiter; a model that none waits for leaves the queue for room."""
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        self._arrange()

    # ---- what is due

    def _arrange(self) -> None:
        """Do what is due: note sleepers, unload idle models, give room to the first in the queue."""
        if self._is_closed:
            return
        for model in self._models.values():
            self._look_after(model)
            self._runs.leave_line(model)
        self._drop_removed()
        changes = self._rooms.serve(self._now(), self.feed)
        for model in changes.admit:
            self._runs.admit(model)
        for model in changes.evict:
            self._runs.begin_unload(model, 0.0)
        for model in self._models.values():
            if model.state == "queued":
                for waiter in model.waiters:
                    self._start_timer(model, waiter)
        self._set_timer()

    def _drop_removed(self) -> None:
        """Forget the removed models of which nothing runs any more."""
        for model in [one for one in self._all if one.is_removed and one.is_at_rest]:
            self._all.remove(model)
            self.feed.change(model, "removed")

    def _look_after(self, model: ManagedModel[T]) -> None:
        """Note whether an idle model sleeps, and unload it when its time is over."""
        run = model.run
        if run is None or run.num_users or model.loading is not None or model.unloading is not None:
            return
        is_asleep = run.loaded.is_asleep
        if is_asleep != (model.state == "sleeping"):
            model.reserved_bytes = 0 if is_asleep else self._rooms.reserved_bytes(model)
            self.feed.change(model, "sleeping" if is_asleep else "loaded")
        if self._now() >= model.idle_until_s:
            self._runs.begin_unload(model, 0.0)

    def _set_timer(self) -> None:
        """Look again when something is due without any other cause."""
        now, models = self._now(), self._models.values()
        times = [self._rooms.next_s(), *(model.idle_until_s for model in models)]
        if any(model.state == "loaded" and model.entry.options.get("sleep_idle_s") for model in models):
            times.append(now + _LOOK_S)
        if self._timer is not None:
            self._timer.cancel()
        at = min((time for time in times if time > now), default=math.inf)
        self._timer = None if math.isinf(at) else asyncio.get_running_loop().call_at(at, self._arrange)
