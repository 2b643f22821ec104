"""Loads and unloads of models: one task at a time for each of them. On the event loop.

unloaded ──> preparing ──> queued ──> loading ──> loaded <──> sleeping
   ^ <─────────── failed or cancelled ──┘           │
   └──────────────── unloading <────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from paceline.errors import EngineStopped, ModelUnloaded, NotEnoughMemory
from paceline.model_manager.engine_loader import ModelLoader, PreparedModel, RunningModel
from paceline.model_manager.freed_memory import give_back_freed_memory
from paceline.model_manager.managed_model import ManagedModel, ModelRun
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.room_queue import RoomQueue
from paceline.model_manager.status_feed import StatusFeed

T = TypeVar("T")

_log = logging.getLogger("paceline.model_manager")

_PROGRESS_STEP: Final = 0.01


class ModelRuns(Generic[T]):
    """Loads, wakes and unloads. changed: called when room or a model became free, or is wanted."""

    def __init__(
        self, loader: ModelLoader[T], rooms: RoomQueue[T], feed: StatusFeed, changed: Callable[[], None]
    ) -> None:
        self._loader, self._rooms, self._feed, self._changed = loader, rooms, feed, changed
        self._is_closed = False

    def close(self) -> None:
        """Begin no more loads."""
        self._is_closed = True

    # ---- loading

    def begin_load(self, model: ManagedModel[T]) -> None:
        """Load a model or wake it, unless it is on its way; one that is on its way out is loaded again afterwards."""
        is_there = model.state == "loaded"  # and takes no new users: when it was evicted, it is loaded again
        if is_there or model.loading is not None or model.unloading is not None or self._is_closed or model.is_removed:
            return
        model.cancel.clear()
        model.cancelled, model.is_due = None, False
        work = self._load(model) if model.run is None else self._wake(model, model.run)
        model.loading = asyncio.get_running_loop().create_task(work)

    def begin_due_load(self, model: ManagedModel[T]) -> None:
        """Load a model that no caller need wait for: now, or when what runs of it has ended."""
        model.is_due = True
        self.begin_load(model)

    def cancel_load(self, model: ManagedModel[T], error: EngineStopped) -> None:
        """Cancel a load and end those that wait for it; it is begun anew for those that come after."""
        model.end_waiters(error)
        _cancel(model, error)

    def plan_anew(self, model: ManagedModel[T]) -> None:
        """Prepare a model anew that waits for room to load, since a budget came; those that wait for it go on waiting."""
        if model.state == "queued" and model.run is None and model.cancelled is None:
            _cancel(model, ModelUnloaded(f"the model {model.entry.name!r} is planned anew under a memory budget"))
            model.is_due = model.entry.load_on_startup

    def leave_line(self, model: ManagedModel[T]) -> None:
        """Cancel the load of a model that waits for room, and that no caller wants any more."""
        if model.state == "queued" and model.cancelled is None and not (model.is_wanted or model.entry.load_on_startup):
            model.end_waiters(model.not_loaded())
            self.cancel_load(model, ModelUnloaded("no request waits for the model any more"))

    def _load_again(self, model: ManagedModel[T]) -> None:
        """Load for those that came while a load was cancelled, or the model unloaded, or since that is due."""
        if model.is_wanted or model.is_due:
            self.begin_load(model)
        else:
            model.end_waiters(model.not_loaded())

    async def _load(self, model: ManagedModel[T]) -> None:
        try:
            self._feed.change(model, "preparing")
            prepared = await self._prepared(model)
            await self._room(model)
            loaded = await self._loaded(model, prepared)
        except BaseException as error:
            self._load_failed(model, error)
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
            budget = self._rooms.budget
            prepared = await self._loader.prepare(model.entry, model.cancel, budget=budget)
            model.check_wanted()  # of a model that was changed meanwhile this is not the need
            if budget is not None or self._rooms.budget is None:
                model.needed_bytes = prepared.needed_bytes
                return prepared

    async def _wake(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Start the process of a sleeping model, when there is room for it."""
        try:
            await self._room(model)
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
            self.admit(model)
        finally:
            self._load_ended(model)

    async def _room(self, model: ManagedModel[T]) -> None:
        """Wait until the model has room."""
        model.check_wanted()
        room = self._rooms.join(model)
        self._feed.change(model, "queued")
        self._changed()
        try:
            await room
        finally:
            self._rooms.leave(model)
        model.check_wanted()

    async def _loaded(self, model: ManagedModel[T], prepared: PreparedModel) -> RunningModel[T]:
        """Load; where the machine is short of memory, evict idle models first."""
        loop = asyncio.get_running_loop()

        def progress(share: float) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._progressed, model, share)

        while True:
            try:
                loaded = await self._loader.load(prepared, progress, model.cancel)
            except NotEnoughMemory:
                victim = self._rooms.idle_victim()
                if victim is None:
                    raise
                _log.info("the model %s is unloaded to make room for %s", victim.entry.name, model.entry.name)
                await self.unload(victim, 0.0)
                model.check_wanted()
                continue
            if model.cancelled is not None:
                await loaded.aclose()
                raise model.cancelled
            return loaded

    def _progressed(self, model: ManagedModel[T], share: float) -> None:
        if model.state == "loading" and (share >= 1 or share - model.progress >= _PROGRESS_STEP):
            model.progress = share
            self._feed.report(model)

    def _start_run(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        loop = asyncio.get_running_loop()
        model.run, model.error = run, None
        self.note_memory(model)
        self._feed.change(model, "loaded")
        self.admit(model)

        running = weakref.ref(run)  # the future keeps its callbacks for as long as the run has its engine

        def ended(_: object) -> None:
            ended_run = running()
            if ended_run is not None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._run_ended, model, ended_run)

        run.loaded.ended.add_done_callback(ended)

    def note_memory(self, model: ManagedModel[T]) -> None:
        """Count what a loaded model takes, where that is more than was planned."""
        taken = None if model.run is None else model.run.loaded.taken_bytes
        if taken is not None:
            model.most_taken_bytes = max(model.most_taken_bytes, taken)
        model.reserved_bytes = self._rooms.reserved_bytes(model)

    def admit(self, model: ManagedModel[T]) -> None:
        """Let all in that wait for a loaded model."""
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
        model.used(asyncio.get_running_loop().time())
        self._feed.report(model)

    def _load_failed(self, model: ManagedModel[T], error: BaseException) -> None:
        model.reserved_bytes = 0
        if model.cancelled is not None or not isinstance(error, Exception):
            self._feed.change(model, "unloaded")
        else:
            _log.error("the model %s could not be loaded: %s", model.entry.name, error)
            model.error = error
            self._feed.change(model, "failed")
        if model.cancelled is None:
            model.end_waiters(error)

    def _load_ended(self, model: ManagedModel[T]) -> None:
        model.loading = None
        if model.unloading is None:
            self._load_again(model)
        self._changed()

    # ---- unloading

    async def unload(self, model: ManagedModel[T], drain_s: float) -> None:
        """Cancel a load, or unload; return when the memory is free. See `begin_stop`."""
        if tasks := self.begin_stop(model, drain_s):
            await asyncio.wait(tasks)

    def begin_stop(
        self, model: ManagedModel[T], drain_s: float, *, keeps_waiters: bool = False
    ) -> list[asyncio.Task[None]]:
        """Cancel a load, or begin to unload; return the tasks with whose end the memory is free.

        drain_s: for users to leave, then they are cut off. keeps_waiters: whether those that wait for a load that is
        cancelled wait for the next one; otherwise they get `ModelUnloaded`.
        """
        model.is_due = False
        if model.loading is not None:
            error = ModelUnloaded(f"the model {model.entry.name!r} was unloaded before it was loaded")
            if keeps_waiters:
                _cancel(model, error)
            else:
                self.cancel_load(model, error)
        elif model.state == "failed":
            model.error = None
            self._feed.change(model, "unloaded")
        if model.run is not None:  # also one that sleeps, and was to be woken
            self.begin_unload(model, drain_s)
        return [task for task in (model.loading, model.unloading) if task is not None]

    def begin_unload(self, model: ManagedModel[T], drain_s: float, failure: EngineStopped | None = None) -> None:
        """Begin to unload a loaded model; where that has begun, shorten the time for its users."""
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
            await _drain(model, run)
            if run.num_users and run.revoked is None:
                run.revoked = ModelUnloaded(f"the model {model.entry.name!r} was unloaded while it was in use")
            await run.loaded.aclose()
        except Exception:  # noqa: BLE001 - its memory is counted as free all the same
            _log.exception("the engine of the model %s did not end in order", model.entry.name)
        finally:
            if model.entry is not entry:  # it was changed meanwhile, so nothing has failed of what it is now
                failure = None
            model.unloading = model.run = None
            model.reserved_bytes, model.yields, model.error = 0, False, failure
            asyncio.get_running_loop().call_soon(give_back_freed_memory)  # when nothing here holds the run any more
            self._feed.change(model, "unloaded" if failure is None else "failed")
            self._load_again(model)
            self._changed()

    def _run_ended(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Clean up after an engine that gave up by itself, or that a user closed."""
        if model.run is not run or model.unloading is not None:
            return
        reason = run.loaded.ended.result()
        run.revoked = reason or ModelUnloaded(f"the engine of the model {model.entry.name!r} was closed by a user")
        _log.error("the model %s has ended: %s", model.entry.name, run.revoked)
        if model.loading is not None:
            self.cancel_load(model, run.revoked)
        self.begin_unload(model, 0.0, reason)


def _cancel(model: ManagedModel[Any], error: EngineStopped) -> None:
    """Cancel a load. error: why."""
    model.cancelled = error
    model.cancel.set()
    if model.room is not None and not model.room.done():
        model.room.set_exception(error)


def _finite(at_s: float) -> float | None:
    return None if math.isinf(at_s) else at_s


async def _drain(model: ManagedModel[T], run: ModelRun[T]) -> None:
    """Wait for the last user, until drain_at_s; another unload may shorten that."""
    with suppress(TimeoutError):
        async with asyncio.timeout_at(_finite(model.drain_at_s)) as drain:
            model.drain = drain
            try:
                await run.left.wait()
            finally:
                model.drain = None
