"""Who waits for which model, and which models are loaded or unloaded: `ModelPool`, the core of both managers.

    acquire ──> waiters of a model ──> its load ──> room (`RoomQueue`) ──> users ──release──> idle

    unloaded ──> preparing ──> queued ──> loading ──> loaded <──> sleeping
       ^ <─────────── failed or cancelled ──┘           │
       └──────────────── unloading <────────────────────┘

Each model has at most one task that loads or wakes it and one that unloads it. All else happens at once, in `_arrange`, whenever
something has changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import math
import weakref
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from paceline import validation
from paceline.async_llm import AsyncLLM
from paceline.errors import EngineStopped, InvalidParams, ModelNotFound, ModelsBusy, ModelUnloaded, NotEnoughMemory
from paceline.model_manager.engine_loader import AsyncLLMLoader, ModelLoader, PreparedModel, RunningModel
from paceline.model_manager.managed_model import (
    ManagedModel,
    ModelRun,
    ModelStatus,
    RoomQueue,
    StatusFeed,
    StatusReader,
    Waiter,
)
from paceline.model_manager.model_settings import (
    ManagerSettings,
    ModelEntry,
    Models,
    changed_settings,
    manager_settings,
)
from paceline.runtime import trim_heap

T = TypeVar("T")

_log = logging.getLogger("paceline.model_manager")

_LOOK_S: Final = 1.0  # between two checks whether engines have fallen asleep
_PROGRESS_STEP: Final = 0.01
_CLOSED: Final = "the model manager was closed"


class ModelPool(Generic[T]):
    """The models of a manager. All methods are for the event loop on which the first coroutine ran.

    A method has the arguments, result and errors of the method of `ModelManager` with the same name, unless stated otherwise.
    """

    def __init__(self, loader: ModelLoader[T], models: Models, **options: Any) -> None:
        """Add the models. options: those of `ModelManager`. Raises `InvalidParams` if a name or an option is wrong."""
        self.options = options
        self._loader, self._settings = loader, (settings := manager_settings(models, **options))
        self._models: dict[str, ManagedModel[T]] = {}
        self._names: dict[str, ManagedModel[T]] = {}  # by aliases, too
        self._all: list[ManagedModel[T]] = []  # also models that are being removed, as long as they take room
        self._feed = StatusFeed()
        self._rooms = RoomQueue(self._all, settings)
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self.add(*settings.entries)

    # ---- entries

    @property
    def settings(self) -> ManagerSettings:
        """The present options, with the entries of all models."""
        return dataclasses.replace(self._settings, entries=tuple(model.entry for model in self._models.values()))

    def names(self) -> list[str]:
        """Return the names of all models, without aliases."""
        return list(self._models)

    def entry(self, name: str) -> ModelEntry:
        """Return the entry of a model."""
        return self._find(name).entry

    def status(self, name: str) -> ModelStatus:
        """Return the status of a model."""
        return self._find(name).status()

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every model."""
        return [model.status() for model in self._models.values()]

    def add(self, *entries: ModelEntry) -> None:
        """Add models; if an entry is wrong, none is added."""
        self._check([model.entry for model in self._models.values()], entries)
        for entry in entries:
            self._add(entry)

    async def remove(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model and forget it."""
        self._bind()
        model = self._find(name)
        for known in model.entry.names:
            del self._names[known]
        del self._models[model.entry.name]
        await self._stopped(self._begin_removal(model, timeout_s))

    async def update(self, models: Models) -> None:
        """Replace the models, as `ModelManager.update` does. All of them are replaced before it first waits for unloads."""
        changed = changed_settings(models, self.options)
        self._bind()
        models = (
            changed
            if isinstance(changed, ManagerSettings)
            else dataclasses.replace(self._settings, entries=tuple(changed))
        )
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
                tasks += self._begin_stop(known, known.entry.stop_timeout_s, keeps_waiters=True)
                known.change(entry)
            self._add(entry, known)
            if entry.load_on_startup and not is_same:  # now, or after its present run or load has ended
                self._models[name].is_due = True
                self._begin_load(self._models[name])
        await self._stopped(tasks)

    def _set_limits(self, settings: ManagerSettings) -> None:
        gets_budget = self._rooms.limits.memory_budget is None and settings.memory_budget is not None
        self._settings = self._rooms.limits = settings
        for model in self._all:
            if model.state == "loaded":
                self._note_memory(model)
            if gets_budget and model.state == "queued" and model.run is None and model.cancelled is None:
                # Its memory was not planned: it is prepared again, and its waiters go on waiting.
                name = model.entry.name
                model.cancel_load(ModelUnloaded(f"the model {name!r} is planned anew under a memory budget"))
                model.is_due = model.entry.load_on_startup

    def _begin_removal(self, model: ManagedModel[T], timeout_s: float | None) -> list[asyncio.Task[None]]:
        """Begin to unload a model without names. Returns the tasks after which it is gone."""
        model.is_removed = True
        model.end_waiters(ModelNotFound(f"the model {model.entry.name!r} was removed"))
        return self._begin_stop(model, model.entry.stop_timeout_s if timeout_s is None else timeout_s)

    async def _stopped(self, tasks: Collection[asyncio.Task[None]]) -> None:
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
        """Add a model under its names. known: the model, if it was there before."""
        model = ManagedModel[T](entry) if known is None else known
        if known is None:
            for other in self._all:
                other.is_replaced = other.is_replaced or other.entry.name == entry.name
            self._all.append(model)
        self._models[entry.name] = model
        self._names.update(dict.fromkeys(entry.names, model))
        self._feed.report(model)

    def _bind(self, *, is_closing: bool = False) -> None:
        """Check that this is the pool's loop, and that the pool is open."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("a model manager belongs to one event loop; make another one for this loop")
        if self._is_closed and not is_closing:
            raise EngineStopped(_CLOSED)

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

    # ---- users

    @asynccontextmanager
    async def use(self, name: str, *, load: bool = True, timeout_s: float | None = None) -> AsyncIterator[T]:
        """Use a model: an async context manager with its `AsyncLLM`."""
        run = await self.acquire(name, load=load, timeout_s=timeout_s)
        try:
            with run.errors_of_a_user():
                yield run.loaded.llm
        finally:
            self.release(run)

    async def acquire(self, name: str, *, load: bool = True, timeout_s: float | None = None) -> ModelRun[T]:
        """Count a user of a model and return its run when it is loaded; `release` it. Raises as entering `use`."""
        self._bind()
        model = self._find(name)
        self._look_after(model)
        run = model.run
        if run is not None and model.state == "loaded" and not model.yields:
            run.loaded.wake()  # counts as use, so that it does not fall asleep before the request comes
            run.enter()
            model.used(self._now())
            self._feed.report(model)
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
                self._note_memory(model)
            self._feed.report(model)
        self._arrange()

    async def load(self, name: str, *, timeout_s: float | None = None) -> None:
        """Load a model unless it is loaded."""
        self._bind()
        model = self._find(name)
        if model.state not in ("loaded", "sleeping"):
            await self._wait(model, is_user=False, loads=True, timeout_s=timeout_s)

    async def unload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model, or cancel its load; return when its memory is free."""
        self._bind()
        model = self._find(name)
        await self._unload(model, model.entry.stop_timeout_s if timeout_s is None else timeout_s)

    async def reload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model and load it again."""
        await self.unload(name, timeout_s=timeout_s)
        await self.load(name)

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[StatusReader]:
        """Follow the models: a context manager with an async iterator of `ModelStatus`.

        An event comes whenever the state, the progress or the users of a model change. A reader that is slow gets the newest
        of several events of one state. The iteration ends when the manager is closed.

            async with models.subscribe() as events:
                async for status in events:
                    print(status.name, status.state, status.progress)
        """
        reader = self._feed.subscribe()
        try:
            yield reader
        finally:
            self._feed.unsubscribe(reader)

    async def start(self) -> Self:
        """Begin to load the models with load_on_startup, without waiting for them.

        Returns:
            This object.
        """
        self._bind()
        for model in self._models.values():
            if model.entry.load_on_startup:
                self._begin_load(model)
        return self

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Unload everything, as `ModelManager.close` does, without blocking the loop."""
        self._bind(is_closing=True)
        self._is_closed = True
        drain_s = (math.inf if timeout_s is None else timeout_s) if drain else 0.0
        for model in self._all:
            model.end_waiters(EngineStopped(_CLOSED))
        await asyncio.gather(*(self._unload(model, drain_s) for model in self._all))
        if self._timer is not None:
            self._timer.cancel()
        self._feed.end()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- waiting

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _wait(
        self, model: ManagedModel[T], *, is_user: bool, loads: bool, timeout_s: float | None
    ) -> ModelRun[T]:
        longest_s = self._settings.wait_timeout_s if timeout_s is None else timeout_s
        waiter = Waiter[T](asyncio.get_running_loop().create_future(), is_user, loads, longest_s)
        model.waiters.append(waiter)
        self._begin_load(model)
        self._start_timer(model, waiter)
        self._arrange()
        result = waiter.result
        try:
            return await result
        except asyncio.CancelledError:
            # It may have got the run at the same moment.
            if is_user and result.done() and not result.cancelled() and result.exception() is None:
                self.release(result.result())
            self._drop(model, waiter)
            raise
        finally:
            if waiter.timer is not None:
                waiter.timer.cancel()

    def _start_timer(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        if waiter.timer is None and waiter.timeout_s is not None:
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(waiter.timeout_s, self._give_up, model, waiter, waiter.timeout_s)

    def _give_up(self, model: ManagedModel[T], waiter: Waiter[T], timeout_s: float) -> None:
        """End a waiter after its time, unless its model is being loaded; the time begins again if the model then queues."""
        waiter.timer = None
        if waiter.result.done() or model.state in ("preparing", "loading"):
            return
        others = [other.entry.name for other in self._models.values() if other.takes_room and other is not model]
        waiter.result.set_exception(
            ModelsBusy(
                f"the model {model.entry.name!r} waited {timeout_s:g} s for room, and the loaded models "
                f"({', '.join(others) or 'none'}) are in use or pinned; try later, unload one, or allow more memory or models"
            )
        )
        self._drop(model, waiter)

    def _drop(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        self._arrange()

    def _arrange(self) -> None:
        """Do what is due: note sleeping models, unload idle models, give room to the first models in the queue."""
        if self._is_closed:
            return
        for model in self._models.values():
            self._look_after(model)
            is_needed = model.is_wanted or model.entry.load_on_startup
            if model.state == "queued" and model.cancelled is None and not is_needed:
                model.end_waiters(model.not_loaded())
                model.cancel_load(ModelUnloaded("no request waits for the model any more"))
        for model in [model for model in self._all if model.is_removed and model.is_at_rest]:
            self._all.remove(model)
            self._feed.change(model, "removed")
        evicted, admitted = self._rooms.serve(self._now(), self._feed)
        for model in admitted:
            self._admit(model)
        for model in evicted:
            self._begin_unload(model, 0.0)
        for model in [model for model in self._models.values() if model.state == "queued"]:
            for waiter in model.waiters:
                self._start_timer(model, waiter)
        self._set_timer()

    def _look_after(self, model: ManagedModel[T]) -> None:
        """Note whether an idle model sleeps, and unload it after its idle time."""
        run = model.run
        if run is None or run.num_users or model.loading is not None or model.unloading is not None:
            return
        is_asleep = run.loaded.is_asleep
        if is_asleep != (model.state == "sleeping"):
            model.reserved_bytes = 0 if is_asleep else self._rooms.reserved_bytes(model)
            self._feed.change(model, "sleeping" if is_asleep else "loaded")
        if self._now() >= model.idle_until_s:
            self._begin_unload(model, 0.0)

    def _set_timer(self) -> None:
        """Call `_arrange` again when something is due without any other cause."""
        now, models = self._now(), self._models.values()
        times = [self._rooms.next_s(), *(model.idle_until_s for model in models)]
        if any(model.state == "loaded" and model.entry.options.get("sleep_idle_s") for model in models):
            times.append(now + _LOOK_S)
        if self._timer is not None:
            self._timer.cancel()
        at = min((time for time in times if time > now), default=math.inf)
        self._timer = None if math.isinf(at) else asyncio.get_running_loop().call_at(at, self._arrange)

    # ---- loading

    def _begin_load(self, model: ManagedModel[T]) -> None:
        """Load or wake a model, unless that has begun. A model that is being unloaded is loaded again afterwards."""
        is_there = model.state == "loaded"  # and takes no new users: after its eviction it is loaded again
        if is_there or model.loading is not None or model.unloading is not None or self._is_closed or model.is_removed:
            return
        model.cancel.clear()
        model.cancelled, model.is_due = None, False
        work = self._load(model) if model.run is None else self._wake(model, model.run)
        model.loading = asyncio.get_running_loop().create_task(work)

    async def _load(self, model: ManagedModel[T]) -> None:
        try:
            self._feed.change(model, "preparing")
            prepared = await self._prepared(model)
            await self._wait_for_room(model)
            loaded = await self._loaded(model, prepared)
        except BaseException as error:
            model.reserved_bytes = 0
            if model.cancelled is not None or not isinstance(error, Exception):
                self._feed.change(model, "unloaded")
            else:
                _log.error("the model %s could not be loaded: %s", model.entry.name, error)
                model.error = error
                self._feed.change(model, "failed")
            if model.cancelled is None:
                model.end_waiters(error)
            if not isinstance(error, Exception):
                model.cancel.set()
                raise
        else:
            self._start_run(model, ModelRun(model.entry.name, loaded))
        finally:
            self._load_ended(model)

    async def _prepared(self, model: ManagedModel[T]) -> PreparedModel:
        """Prepare the model; prepare it again if a budget was set meanwhile, since a budget needs the model's memory."""
        while True:
            budget = self._rooms.limits.memory_budget
            prepared = await self._loader.prepare(model.entry, model.cancel, budget=budget)
            model.check_wanted()  # if the model was changed meanwhile, its need is another
            if budget is not None or self._rooms.limits.memory_budget is None:
                model.needed_bytes = prepared.needed_bytes
                return prepared

    async def _wait_for_room(self, model: ManagedModel[T]) -> None:
        model.check_wanted()
        room = self._rooms.join(model)
        self._feed.change(model, "queued")
        self._arrange()
        try:
            await room
        finally:
            self._rooms.leave(model)
        model.check_wanted()

    async def _loaded(self, model: ManagedModel[T], prepared: PreparedModel) -> RunningModel[T]:
        """Load the model. If the machine is short of memory, evict idle models and try again."""
        loop = asyncio.get_running_loop()

        def note(share: float) -> None:
            if model.state == "loading" and (share >= 1 or share - model.progress >= _PROGRESS_STEP):
                model.progress = share
                self._feed.report(model)

        def progress(share: float) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(note, share)

        while True:
            try:
                loaded = await self._loader.load(prepared, progress, model.cancel)
            except NotEnoughMemory:
                victim = self._rooms.idle_victim()
                if victim is None:
                    raise
                _log.info("the model %s is unloaded to make room for %s", victim.entry.name, model.entry.name)
                await self._unload(victim, 0.0)
                model.check_wanted()
                continue
            if model.cancelled is not None:
                await loaded.aclose()
                raise model.cancelled
            return loaded

    def _start_run(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        loop = asyncio.get_running_loop()
        model.run, model.error = run, None
        self._note_memory(model)
        self._feed.change(model, "loaded")
        self._admit(model)

        running = weakref.ref(run)  # the future keeps its callbacks as long as the run has its engine

        def ended(_: object) -> None:
            ended_run = running()
            if ended_run is not None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._run_ended, model, ended_run)

        run.loaded.ended.add_done_callback(ended)

    async def _wake(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Start the process of a sleeping model when there is room for it."""
        try:
            await self._wait_for_room(model)
        except BaseException as error:
            model.reserved_bytes = 0
            self._feed.change(model, "sleeping" if model.unloading is None else "unloading")
            if model.cancelled is None:
                model.end_waiters(error)
            if not isinstance(error, Exception):
                raise
        else:
            run.loaded.wake()
            self._feed.change(model, "loaded")
            self._admit(model)
        finally:
            self._load_ended(model)

    def _load_ended(self, model: ManagedModel[T]) -> None:
        model.loading = None
        if model.unloading is None:
            self._load_again(model)
        self._arrange()

    def _load_again(self, model: ManagedModel[T]) -> None:
        """Load for callers that came while a load was cancelled or the model unloaded, or because a load is due."""
        if model.is_wanted or model.is_due:
            self._begin_load(model)
        else:
            model.end_waiters(model.not_loaded())

    def _note_memory(self, model: ManagedModel[T]) -> None:
        """Reserve the memory that a loaded model takes, if that is more than its plan."""
        taken = None if model.run is None else model.run.loaded.taken_bytes
        if taken is not None:
            model.most_taken_bytes = max(model.most_taken_bytes, taken)
        model.reserved_bytes = self._rooms.reserved_bytes(model)

    def _admit(self, model: ManagedModel[T]) -> None:
        """End the wait of all callers of a loaded model."""
        run = model.run
        if run is None or model.state != "loaded":
            return
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.result.done():
                continue
            if waiter.is_user:
                run.enter()
            waiter.result.set_result(run)
        model.used(self._now())
        self._feed.report(model)

    # ---- unloading

    async def _unload(self, model: ManagedModel[T], drain_s: float) -> None:
        if tasks := self._begin_stop(model, drain_s):
            await asyncio.wait(tasks)

    def _begin_stop(
        self, model: ManagedModel[T], drain_s: float, *, keeps_waiters: bool = False
    ) -> list[asyncio.Task[None]]:
        """Cancel a load, or begin to unload. Returns the tasks after which the memory is free.

        Args:
            model: The model.
            drain_s: Seconds for its users to leave; then they are cut off.
            keeps_waiters: Whether waiters of a cancelled load wait for the next load, in place of getting `ModelUnloaded`.
        """
        model.is_due = False
        if model.loading is not None:
            error = ModelUnloaded(f"the model {model.entry.name!r} was unloaded before it was loaded")
            if not keeps_waiters:
                model.end_waiters(error)
            model.cancel_load(error)
        elif model.state == "failed":
            model.error = None
            self._feed.change(model, "unloaded")
        if model.run is not None:  # also if it sleeps and was to be woken
            self._begin_unload(model, drain_s)
        return [task for task in (model.loading, model.unloading) if task is not None]

    def _begin_unload(self, model: ManagedModel[T], drain_s: float, failure: EngineStopped | None = None) -> None:
        """Begin to unload a loaded model; if that has begun, shorten the time for its users."""
        loop, run = asyncio.get_running_loop(), model.run
        drain_at_s = loop.time() + drain_s
        if model.unloading is not None:
            model.drain_at_s = min(model.drain_at_s, drain_at_s)
            if model.drain is not None and not model.drain.expired():
                model.drain.reschedule(_finite(model.drain_at_s))
        elif run is not None:
            model.drain_at_s = drain_at_s
            self._feed.change(model, "unloading")
            model.unloading = loop.create_task(self._take_down(model, run, model.entry, failure))

    async def _take_down(
        self, model: ManagedModel[T], run: ModelRun[T], entry: ModelEntry, failure: EngineStopped | None
    ) -> None:
        try:
            if model.loading is not None:  # a sleeping model was to be woken
                await asyncio.wait((model.loading,))
            with suppress(TimeoutError):
                async with asyncio.timeout_at(_finite(model.drain_at_s)) as drain:
                    model.drain = drain  # another unload may shorten it
                    try:
                        await run.left.wait()
                    finally:
                        model.drain = None
            if run.num_users and run.revoked is None:
                run.revoked = ModelUnloaded(f"the model {model.entry.name!r} was unloaded while it was in use")
            await run.loaded.aclose()
        except Exception:  # noqa: BLE001 - its memory is counted as free all the same
            _log.exception("the engine of the model %s did not end in order", model.entry.name)
        finally:
            if model.entry is not entry:  # it was changed meanwhile, and the new model has not failed
                failure = None
            model.unloading = model.run = None
            model.reserved_bytes, model.yields, model.error = 0, False, failure
            asyncio.get_running_loop().call_soon(_return_freed_memory)  # when nothing here holds the run any more
            self._feed.change(model, "unloaded" if failure is None else "failed")
            self._load_again(model)
            self._arrange()

    def _run_ended(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Clean up after an engine that gave up by itself, or that a user closed."""
        if model.run is not run or model.unloading is not None:
            return
        reason = run.loaded.ended.result()
        run.revoked = reason or ModelUnloaded(f"the engine of the model {model.entry.name!r} was closed by a user")
        _log.error("the model %s has ended: %s", model.entry.name, run.revoked)
        if model.loading is not None:
            model.end_waiters(run.revoked)
            model.cancel_load(run.revoked)
        self._begin_unload(model, 0.0, reason)


def _finite(at_s: float) -> float | None:
    return None if math.isinf(at_s) else at_s


def _return_freed_memory() -> None:
    """Collect cycles, and return freed memory to the system: the heaps of the loading threads keep freed blocks."""
    gc.collect()
    trim_heap()


class AsyncModelManager(ModelPool[AsyncLLM]):
    """Several models by name in one event loop: `ModelManager`, with awaitable methods.

    Unless stated otherwise, a method has the arguments, result and errors of the method of `ModelManager` with the same name.

        async with AsyncModelManager("models.toml") as models:
            async with models.use("small") as llm:
                print((await llm.generate("Once upon a time", max_tokens=40)).text)
    """

    def __init__(
        self,
        models: Models = (),
        *,
        memory_budget: int | str | None = None,
        max_loaded: int | None = None,
        wait_timeout_s: float | None = None,
        patience_s: float | None = None,
        loader: ModelLoader[AsyncLLM] | None = None,
    ) -> None:
        """Read the models; nothing is loaded yet.

        Args:
            models: Entries, or the path of a TOML file with entries and options, or a result of `read_models_file`.
            memory_budget: See `ModelManager`.
            max_loaded: See `ModelManager`.
            wait_timeout_s: See `ModelManager`.
            patience_s: See `ModelManager`.
            loader: Loads in place of `AsyncLLM`, for tests of code that holds a manager.

        Raises:
            InvalidParams: An option is invalid; of a file, the message names table and key.
        """
        super().__init__(
            AsyncLLMLoader() if loader is None else loader,
            models,
            memory_budget=memory_budget,
            max_loaded=max_loaded,
            wait_timeout_s=wait_timeout_s,
            patience_s=patience_s,
        )
