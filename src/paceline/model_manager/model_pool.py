"""The core of both managers: who waits for which model, what is loaded, evicted and unloaded, and when. On one event loop.

    acquire ──> waiters of a model ──> prepare ──> queue for room ──> load ──> users ──release──> idle ──> evicted
                                                       │ first come, first served; `room_plan` chooses victims

Loads and unloads are tasks, one a model; all else happens at once, in `_arrange`, whenever something has changed.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Generic, Literal, TypeVar

from paceline.errors import (
    EngineStopped,
    InvalidParams,
    ModelNotFound,
    ModelNotLoaded,
    ModelsBusy,
    ModelUnloaded,
    NotEnoughMemory,
)
from paceline.model_manager.engine_loader import ModelLoader, PreparedModel, RunningModel
from paceline.model_manager.managed_model import ManagedModel, ModelRun, Waiter
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.model_status import ModelState, ModelStatus, StatusReader
from paceline.model_manager.room_plan import Resident, RoomLimits, RoomPlan, plan_room

T = TypeVar("T")

_log = logging.getLogger("paceline.model_manager")

_LOOK_S: Final = 1.0  # between two looks whether engines have fallen asleep
_PROGRESS_STEP: Final = 0.01
_CLOSED: Final = "the model manager was closed"


class ModelPool(Generic[T]):
    """The models of a manager. All methods are for the event loop on which the first coroutine ran.

    wait_timeout_s: most that a user waits for room; None: no limit. patience_s: how long a model waits for room before
    others take no new users until it has got it.
    """

    def __init__(
        self,
        loader: ModelLoader[T],
        limits: RoomLimits,
        *,
        wait_timeout_s: float | None,
        patience_s: float,
    ) -> None:
        self._loader, self._limits = loader, limits
        self._wait_timeout_s, self._patience_s = wait_timeout_s, patience_s
        self._models: dict[str, ManagedModel[T]] = {}
        self._names: dict[str, ManagedModel[T]] = {}  # aliases too
        self._queue: list[ManagedModel[T]] = []  # wait for room, first come first served
        self._head: ManagedModel[T] | None = None  # the first of them, since _head_since_s
        self._head_since_s = 0.0
        self._readers: list[StatusReader] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    # ---- entries

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

    def add(self, entry: ModelEntry) -> None:
        """Add a model. Raises `InvalidParams` where a name is taken, or an option is wrong."""
        for name in entry.names:
            if name in self._names:
                raise InvalidParams(
                    f"model {entry.name!r}: the name {name!r} is taken by {self._names[name].entry.name!r}"
                )
        if len(set(entry.names)) < len(entry.names):
            raise InvalidParams(f"model {entry.name!r}: a name stands twice among name and aliases")
        self._loader.check(entry)
        model = ManagedModel[T](entry)
        self._models[entry.name] = model
        self._names.update(dict.fromkeys(entry.names, model))
        self._report(model)

    async def remove(self, name: str, timeout_s: float | None = None) -> None:
        """Unload a model and forget it. Raises `ModelNotFound`."""
        self._bind()
        model = self._find(name)
        model.is_removed = True
        for one in model.entry.names:
            del self._names[one]
        del self._models[model.entry.name]
        error = ModelNotFound(f"the model {model.entry.name!r} was removed")
        for waiter in model.waiters.copy():
            self._fail(model, waiter, error)
        await self._unload(model, timeout_s)
        self._set(model, "removed")

    async def update(self, entries: Iterable[ModelEntry]) -> None:
        """Make these the models: add the new ones, remove the missing, replace the changed, which are unloaded first."""
        wanted = {entry.name: entry for entry in entries}
        for entry in wanted.values():
            self._loader.check(entry)
        old = [name for name, model in self._models.items() if wanted.get(name) != model.entry]
        await asyncio.gather(*(self.remove(name) for name in old))
        for name, entry in wanted.items():
            if name not in self._models:
                self.add(entry)

    # ---- users

    async def acquire(self, name: str, *, load: bool = True, timeout_s: float | None = None) -> ModelRun[T]:
        """Count a user of a model and return its run, once it is loaded; `release` it.

        timeout_s: most that it waits for room; None: the pool's. Raises `ModelNotFound`, `ModelNotLoaded` without load,
        `ModelsBusy`, `ModelUnloaded`, `EngineStopped`, and what a load raises.
        """
        self._bind()
        model = self._find(name)
        self._look_after(model)
        run = model.run
        if run is not None and model.state == "loaded" and not model.yields:
            self._enter(model, run)
            return run
        if not load and model.state in ("unloaded", "failed"):
            raise ModelNotLoaded(f"the model {model.entry.name!r} is not loaded; load it first")
        return await self._wait(model, is_user=True, timeout_s=timeout_s)

    def release(self, run: ModelRun[T]) -> None:
        """Count a user's end."""
        run.leave()
        model = self._models.get(run.name)
        if model is not None and model.run is run:
            model.used(self._now())
            self._report(model)
        self._arrange()

    async def load(self, name: str, timeout_s: float | None = None) -> None:
        """Load a model unless it is. Raises as `acquire`."""
        self._bind()
        model = self._find(name)
        if model.state not in ("loaded", "sleeping"):
            await self._wait(model, is_user=False, timeout_s=timeout_s)

    async def unload(self, name: str, timeout_s: float | None = None) -> None:
        """Unload a model, or cancel its load; return when its memory is free.

        timeout_s: for its users to leave; then their requests end. None: the entry's stop_timeout_s. Raises `ModelNotFound`.
        """
        self._bind()
        await self._unload(self._find(name), timeout_s)

    async def start(self) -> None:
        """Begin to load the models with load_on_startup, without waiting for them."""
        self._bind()
        for model in self._models.values():
            if model.entry.load_on_startup:
                self._begin_load(model)

    def subscribe(self) -> StatusReader:
        """Return the events from now on: a status whenever a model's state, users or progress changed."""
        reader = StatusReader()
        self._readers.append(reader)
        if self._is_closed:
            reader.end()
        return reader

    def unsubscribe(self, reader: StatusReader) -> None:
        """End a reader."""
        if reader in self._readers:
            self._readers.remove(reader)
        reader.end()

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Unload everything, and refuse what comes. drain: whether users may leave first, within timeout_s. Idempotent."""
        drain_s = (math.inf if timeout_s is None else timeout_s) if drain else 0.0
        self._bind(is_closing=True)
        self._is_closed = True
        error = EngineStopped(_CLOSED)
        for model in self._models.values():
            for waiter in model.waiters.copy():
                self._fail(model, waiter, error)
        await asyncio.gather(*(self._unload(model, drain_s) for model in self._models.values()))
        if self._timer is not None:
            self._timer.cancel()
        for reader in self._readers.copy():
            self.unsubscribe(reader)

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
            near = difflib.get_close_matches(str(name)[:200], self._names, n=3)
            hint = (
                f"did you mean {', '.join(map(repr, near))}?"
                if near
                else f"there are {', '.join(self._models) or 'none'}"
            )
            raise ModelNotFound(f"there is no model {str(name)[:200]!r}; {hint}")
        return model

    # ---- waiting

    async def _wait(self, model: ManagedModel[T], *, is_user: bool, timeout_s: float | None) -> ModelRun[T]:
        loop = asyncio.get_running_loop()
        waiter = Waiter[T](loop.create_future(), is_user)
        model.waiters.append(waiter)
        self._begin_load(model)
        longest_s = self._wait_timeout_s if timeout_s is None else timeout_s
        timer = None if longest_s is None else loop.call_later(longest_s, self._give_up, model, waiter, longest_s)
        try:
            return await waiter.result
        except asyncio.CancelledError:
            self._forget(model, waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _forget(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        """Drop a waiter that was cancelled, or give back what it got at the same moment."""
        result = waiter.result
        if result.done() and not result.cancelled() and result.exception() is None:
            if waiter.is_user:
                self.release(result.result())
            return
        self._leave_queue(model, waiter)

    def _give_up(self, model: ManagedModel[T], waiter: Waiter[T], timeout_s: float) -> None:
        """End a waiter whose time is over, unless its model is on its way."""
        if waiter.result.done() or model.state in ("preparing", "loading"):
            return
        others = [one.entry.name for one in self._models.values() if one.takes_room and one is not model]
        busy = ", ".join(others) or "none"
        self._fail(
            model,
            waiter,
            ModelsBusy(
                f"the model {model.entry.name!r} waited {timeout_s:g} s for room, and the loaded models ({busy}) are in use or "
                "pinned; try later, unload one, or allow more memory or models"
            ),
        )

    def _fail(self, model: ManagedModel[T], waiter: Waiter[T], error: Exception) -> None:
        if not waiter.result.done():
            waiter.result.set_exception(error)
        self._leave_queue(model, waiter)

    def _leave_queue(self, model: ManagedModel[T], waiter: Waiter[T]) -> None:
        """Drop a waiter; a model that none waits for leaves the queue."""
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        if not model.waiters and model.state == "queued" and not model.entry.load_on_startup:
            self._cancel_load(model, ModelUnloaded("no request waits for the model any more"))
        self._arrange()

    def _admit(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Let all that wait for a model in."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.result.done():
                continue
            if waiter.is_user:
                run.enter()
            waiter.result.set_result(run)
        model.used(self._now())
        self._report(model)

    def _enter(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        run.loaded.wake()  # which counts as use, so that it does not fall asleep before the request comes
        run.enter()
        model.used(self._now())
        self._report(model)

    # ---- loading

    def _begin_load(self, model: ManagedModel[T]) -> None:
        """Start to load a model, unless it is on its way, or on its way out, after which it is loaded again."""
        if model.loading is not None or model.unloading is not None or self._is_closed or model.is_removed:
            return
        if model.state == "loaded":  # it yields: when it is evicted, it is queued again
            self._arrange()
            return
        model.cancel.clear()
        model.cancelled = None
        work = self._load(model) if model.run is None else self._wake(model, model.run)
        model.loading = asyncio.get_running_loop().create_task(work)

    async def _load(self, model: ManagedModel[T]) -> None:
        try:
            self._set(model, "preparing")
            prepared = await self._loader.prepare(model.entry, model.cancel)
            model.needed_bytes = prepared.needed_bytes
            loaded = await self._loaded(model, prepared)
        except BaseException as error:
            self._load_failed(model, error)
            if isinstance(error, asyncio.CancelledError):
                model.cancel.set()
                raise
        else:
            self._loaded_now(model, ModelRun(model.entry.name, loaded))
        finally:
            self._load_ended(model)

    async def _loaded(self, model: ManagedModel[T], prepared: PreparedModel) -> RunningModel[T]:
        self._check_wanted(model)
        await self._room(model)
        loop = asyncio.get_running_loop()

        def progress(share: float) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._progressed, model, share)

        loaded = await self._loader.load(prepared, progress, model.cancel)
        if model.cancelled is not None:
            await loaded.aclose()
            raise model.cancelled
        return loaded

    async def _wake(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Start the process of a sleeping model, when there is room for it."""
        try:
            await self._room(model)
            self._check_wanted(model)
        except BaseException as error:
            model.reserved_bytes = 0
            self._set(model, "sleeping")
            if model.cancelled is None:
                self._end_waiters(model, error)
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            run.loaded.wake()
            self._set(model, "loaded")
            self._admit(model, run)
        finally:
            self._load_ended(model)

    def _load_ended(self, model: ManagedModel[T]) -> None:
        model.loading = None
        if model.waiters and model.state in ("unloaded", "failed", "sleeping"):
            self._begin_load(model)  # they came after it was cancelled
        self._arrange()

    def _check_wanted(self, model: ManagedModel[T]) -> None:
        if model.cancelled is not None:
            raise model.cancelled

    async def _room(self, model: ManagedModel[T]) -> None:
        """Wait until the model has room. Raises `NotEnoughMemory` where it never has."""
        model.room = asyncio.get_running_loop().create_future()
        self._queue.append(model)
        self._set(model, "queued")
        self._arrange()
        try:
            await model.room
        finally:
            model.room = None
            if model in self._queue:
                self._queue.remove(model)

    def _progressed(self, model: ManagedModel[T], share: float) -> None:
        if model.state == "loading" and (share >= 1 or share - model.progress >= _PROGRESS_STEP):
            model.progress = share
            self._report(model)

    def _loaded_now(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        loop = asyncio.get_running_loop()
        model.run, model.progress, model.error = run, 1.0, None
        model.most_taken_bytes = max(model.most_taken_bytes, run.loaded.taken_bytes or 0)
        model.reserved_bytes = self._bytes_of(model)
        self._set(model, "loaded")
        self._admit(model, run)

        def ended(_: object) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._gave_up, model, run)

        run.loaded.ended.add_done_callback(ended)

    def _load_failed(self, model: ManagedModel[T], error: BaseException) -> None:
        model.reserved_bytes = 0
        if model.cancelled is not None or not isinstance(error, Exception):
            self._set(model, "unloaded")
        else:
            _log.error("the model %s could not be loaded: %s", model.entry.name, error)
            model.error = error
            self._set(model, "failed")
        if model.cancelled is None:
            self._end_waiters(model, error)

    def _end_waiters(self, model: ManagedModel[T], error: BaseException) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.result.done():
                continue
            if isinstance(error, asyncio.CancelledError):
                waiter.result.cancel()
            else:
                waiter.result.set_exception(error)

    def _cancel_load(self, model: ManagedModel[T], error: EngineStopped) -> None:
        """Cancel a load and end those that wait for it; it is begun anew for those that come after."""
        self._end_waiters(model, error)
        model.cancelled = error
        model.cancel.set()
        if model.room is not None and not model.room.done():
            model.room.set_exception(error)

    # ---- unloading

    async def _unload(self, model: ManagedModel[T], timeout_s: float | None) -> None:
        name = model.entry.name
        drain_s = model.entry.stop_timeout_s if timeout_s is None else timeout_s
        if model.loading is not None:
            self._cancel_load(model, ModelUnloaded(f"the model {name!r} was unloaded before it was loaded"))
            await asyncio.wait((model.loading,))
        if model.run is not None:
            self._begin_unload(model, model.run, drain_s)
        elif model.state == "failed":
            model.error = None
            self._set(model, "unloaded")
        if model.unloading is not None:
            await asyncio.wait((model.unloading,))

    def _begin_unload(
        self, model: ManagedModel[T], run: ModelRun[T], drain_s: float, failure: EngineStopped | None = None
    ) -> None:
        """Start to unload a model; where that has begun, shorten the time for its users."""
        loop = asyncio.get_running_loop()
        if model.unloading is not None:
            if model.drain is not None:
                model.drain.reschedule(min(loop.time() + drain_s, model.drain.when() or math.inf))
            return
        self._set(model, "unloading")
        model.unloading = loop.create_task(self._take_down(model, run, drain_s, failure))

    async def _take_down(
        self, model: ManagedModel[T], run: ModelRun[T], drain_s: float, failure: EngineStopped | None
    ) -> None:
        try:
            if model.loading is not None:
                await asyncio.wait((model.loading,))
            await self._drain(model, run, drain_s)
            if run.num_users and run.revoked is None:
                run.revoked = ModelUnloaded(f"the model {model.entry.name!r} was unloaded while the request ran")
            await run.loaded.aclose()
        except Exception:  # noqa: BLE001 - its memory is counted as free all the same
            _log.exception("the engine of the model %s did not end in order", model.entry.name)
        finally:
            model.unloading = model.run = None
            model.reserved_bytes, model.progress, model.yields = 0, 0.0, False
            model.error = failure
            self._set(model, "unloaded" if failure is None else "failed")
            if model.waiters:
                self._begin_load(model)
            self._arrange()

    async def _drain(self, model: ManagedModel[T], run: ModelRun[T], drain_s: float) -> None:
        """Wait for the last user, at most drain_s; another unload may shorten that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(drain_s) else drain_s) as drain:
                model.drain = drain
                try:
                    await run.left.wait()
                finally:
                    model.drain = None

    def _gave_up(self, model: ManagedModel[T], run: ModelRun[T]) -> None:
        """Clean up after an engine that ended by itself."""
        reason = run.loaded.ended.result()
        if reason is None or model.run is not run or model.unloading is not None:
            return
        _log.error("the model %s has ended: %s", model.entry.name, reason)
        run.revoked = reason
        if model.loading is not None:
            self._cancel_load(model, reason)
        self._begin_unload(model, run, 0.0, reason)

    # ---- room

    def _arrange(self) -> None:
        """Do what is due: note sleepers, unload idle models, give room to the first in the queue."""
        if self._is_closed:
            return
        for model in self._models.values():
            self._look_after(model)
        while self._queue and self._help(self._queue[0]):
            pass
        if not self._queue:
            self._stop_yielding()
        self._set_timer()

    def _look_after(self, model: ManagedModel[T]) -> None:
        """Note whether an idle model sleeps, and unload it when its time is over."""
        run = model.run
        if run is None or run.num_users or model.loading is not None or model.unloading is not None:
            return
        is_asleep = run.loaded.is_asleep
        if is_asleep != (model.state == "sleeping"):
            model.reserved_bytes = 0 if is_asleep else self._bytes_of(model)
            self._set(model, "sleeping" if is_asleep else "loaded")
        due_s = self._idle_until_s(model)
        if due_s is not None and self._now() >= due_s:
            self._begin_unload(model, run, 0.0)

    def _idle_until_s(self, model: ManagedModel[T]) -> float | None:
        """Return when a model is unloaded since it is idle."""
        idle_s = model.entry.unload_idle_s
        return None if idle_s is None or model.num_users or model.waiters else model.used_s + idle_s

    def _help(self, head: ManagedModel[T]) -> bool:
        """Give the first in the queue its room, or see that it gets it; return whether it has left the queue."""
        now = self._now()
        if self._head is not head:
            self._stop_yielding()
            self._head, self._head_since_s = head, now
        plan = self._plan(head, may_interrupt=now >= self._head_since_s + self._patience_s)
        if plan.fits or plan.refusal:
            self._queue.pop(0)
            self._give_room(head, plan)
            return True
        for name in plan.victims:
            victim = self._models[name]
            if victim.num_users:
                victim.yields = True
            elif victim.run is not None:
                self._begin_unload(victim, victim.run, 0.0)
        return False

    def _give_room(self, head: ManagedModel[T], plan: RoomPlan) -> None:
        room = head.room
        if room is None or room.done():  # its load was cancelled
            return
        if plan.fits:
            head.reserved_bytes = self._bytes_of(head)
            self._set(head, "loading")
            room.set_result(None)
        else:
            room.set_exception(NotEnoughMemory(f"the model {head.entry.name!r} cannot be loaded: {plan.refusal}"))

    def _plan(self, head: ManagedModel[T], *, may_interrupt: bool) -> RoomPlan:
        others = [_resident(one) for one in self._models.values() if one is not head and one.takes_room]
        return plan_room(self._bytes_of(head), others, self._limits, may_interrupt=may_interrupt)

    def _bytes_of(self, model: ManagedModel[T]) -> int:
        return max(model.needed_bytes or 0, model.most_taken_bytes)

    def _stop_yielding(self) -> None:
        """Let users in again where they waited for another model's sake."""
        self._head = None
        for model in self._models.values():
            if model.yields:
                model.yields = False
                if model.run is not None and model.state == "loaded":
                    self._admit(model, model.run)

    def _set_timer(self) -> None:
        """Look again when something is due without any other cause."""
        now = self._now()
        times = [
            due_s for model in self._models.values() if model.run and (due_s := self._idle_until_s(model)) is not None
        ]
        if self._queue:
            times.append(self._head_since_s + self._patience_s)
        if any(model.state == "loaded" and model.entry.options.get("sleep_idle_s") for model in self._models.values()):
            times.append(now + _LOOK_S)
        if self._timer is not None:
            self._timer.cancel()
        later = [time for time in times if time > now]
        self._timer = asyncio.get_running_loop().call_at(min(later), self._arrange) if later else None

    # ---- reporting

    def _set(self, model: ManagedModel[T], state: ModelState) -> None:
        if model.state != state:
            model.state, model.since_s = state, time.time()
            if state == "loading":
                model.progress = 0.0
        self._report(model)

    def _report(self, model: ManagedModel[T]) -> None:
        if self._readers:
            status = model.status()
            for reader in self._readers:
                reader.put(status)


def _resident(model: ManagedModel[T]) -> Resident:
    kind: Literal["idle", "busy", "coming", "leaving", "pinned"]
    if model.state == "unloading":
        kind = "leaving"
    elif model.entry.pinned:
        kind = "pinned"
    elif model.state == "loading" or model.run is None:
        kind = "coming"
    else:
        kind = "busy" if model.num_users else "idle"
    used_s = -math.inf if model.yields else model.used_s  # one that has stopped taking users is the first to go
    return Resident(name=model.entry.name, num_bytes=model.reserved_bytes, kind=kind, used_s=used_s)
