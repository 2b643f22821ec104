"""The pool of models under everything that can happen to it, in any order, on a loop of virtual time.

Held at each step: no more memory and models than there may be, and no model with users evicted. Held at the end: every user
got the model or an error, and when all have gone, any model can be loaded that fits at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.model_world import FakeRun, LoaderWorld, VirtualLoop, pool_of

from paceline.errors import ModelLoadError, NotEnoughMemory, PacelineError
from paceline.model_manager import ModelEntry
from paceline.model_manager.managed_model import ModelRun
from paceline.model_manager.model_pool import ModelPool

R = TypeVar("R")

BYTES = {"a": 4, "b": 6, "c": 3, "d": 10, "pinned": 1, "sleepy": 5, "brief": 2, "never": 99}
NAMES = st.sampled_from(sorted(BYTES))
OPTIONS: dict[str, dict[str, Any]] = {
    "pinned": {"pinned": True},
    "sleepy": {"options": {"sleep_idle_s": 3.0}},
    "brief": {"unload_idle_s": 4.0},
}


class PoolMachine(RuleBasedStateMachine):
    """Users, operators, failing loads, dying and sleeping engines."""

    pool: ModelPool[Any]

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.users: list[tuple[str, asyncio.Task[ModelRun[Any]]]] = []
        self.acts: list[asyncio.Task[None]] = []
        self.is_forced: set[int] = set()  # runs that may end under their users

    def now(self, work: Coroutine[Any, Any, R]) -> R:
        return self.loop.run_until_complete(work)

    @initialize(
        max_bytes=st.sampled_from([None, 11, 15]),
        max_loaded=st.sampled_from([None, 2, 3]),
        wait_timeout_s=st.sampled_from([None, 2.0, 30.0]),
        patience_s=st.sampled_from([0.0, 1.0, 8.0]),
    )
    def begin(
        self, max_bytes: int | None, max_loaded: int | None, wait_timeout_s: float | None, patience_s: float
    ) -> None:
        self.world = LoaderWorld(max_bytes=max_bytes, max_loaded=max_loaded, **BYTES)
        entries = [ModelEntry(name=name, **OPTIONS.get(name, {})) for name in BYTES]
        self.pool = pool_of(self.world, *entries, wait_timeout_s=wait_timeout_s, patience_s=patience_s)

    @rule(name=NAMES)
    def use(self, name: str) -> None:
        """Begin to use a model."""

        async def begin() -> None:
            if name in self.pool.names():
                self.users.append((name, asyncio.create_task(self.pool.acquire(name))))
                await asyncio.sleep(0)

        self.now(begin())

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """End a use, or the wait for it."""
        _, task = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))

        async def end() -> None:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is None:
                self.pool.release(task.result())

        self.now(end())

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def cancel_at_once(self, data: st.DataObject) -> None:
        """Cancel a wait while time goes on, which may meet the moment of its end."""
        _, task = self.users[data.draw(st.integers(0, len(self.users) - 1))]
        self.loop.call_later(data.draw(st.sampled_from([0.0, 0.1, 0.3, 1.0, 1.3])), task.cancel)

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.1, 0.3, 1.0, 2.0, 10.0]))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now(asyncio.sleep(seconds))

    @rule(name=NAMES, timeout_s=st.sampled_from([0.0, 1.0, 100.0]))
    def unload(self, name: str, timeout_s: float) -> None:
        """Unload a model, used or not."""

        async def begin() -> None:
            if name in self.pool.names():
                self.force(name)
                self.acts.append(asyncio.create_task(self.pool.unload(name, timeout_s=timeout_s)))
                await asyncio.sleep(0)

        self.now(begin())

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        """Load a model without a use."""

        async def begin() -> None:
            if name in self.pool.names():
                self.acts.append(asyncio.create_task(self.pool.load(name)))
                await asyncio.sleep(0)

        self.now(begin())

    @rule(name=st.sampled_from(["a", "b", "sleepy"]))
    def remove_or_add(self, name: str) -> None:
        """Forget a model, or have it again."""

        async def begin() -> None:
            if name not in self.pool.names():
                self.pool.add(ModelEntry(name=name, **OPTIONS.get(name, {})))
            else:
                self.force(name)
                self.acts.append(asyncio.create_task(self.pool.remove(name, timeout_s=1.0)))
                await asyncio.sleep(0)

        self.now(begin())

    @rule(name=st.sampled_from(["a", "c", "sleepy"]), n_ctx=st.integers(1, 3))
    def change(self, name: str, n_ctx: int) -> None:
        """Have other options for a model; its users may end."""

        async def begin() -> None:
            models = [self.pool.entry(name) for name in self.pool.names()]
            if name in self.pool.names():
                self.force(name)
                known = self.pool.entry(name)
                changed = dataclasses.replace(known, options={**known.options, "n_ctx": n_ctx})
                entries = [changed if model.name == name else model for model in models]
                self.acts.append(asyncio.create_task(self.pool.update(entries)))
                await asyncio.sleep(0)
                assert self.pool.entry(name) == changed

        self.now(begin())

    @rule(name=NAMES, is_memory=st.booleans())
    def fail_next_load(self, name: str, is_memory: bool) -> None:
        """Let the next load of a model fail."""
        error = NotEnoughMemory("short of memory") if is_memory else ModelLoadError("damaged")
        self.world.fail[name] = [error]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """End an engine by itself."""
        runs = [run for run in self.loaded() if not run.ended.done()]
        if runs:
            run = data.draw(st.sampled_from(sorted(runs, key=lambda run: run.entry.name)))
            self.is_forced.add(id(run))
            run.die()

    @rule()
    def sleep(self) -> None:
        """Let idle engines fall asleep that may."""
        for status in self.pool.statuses():
            if status.name == "sleepy" and not status.num_users and status.state == "loaded":
                for run in self.loaded():
                    run.is_asleep = run.is_asleep or run.entry.name == "sleepy"

    def loaded(self) -> list[FakeRun]:
        models = [*self.pool._models.values()]
        return [model.run.loaded for model in models if model.run is not None and model.unloading is None]

    def force(self, name: str) -> None:
        model = self.pool._models[name]
        if model.run is not None:
            self.is_forced.add(id(model.run.loaded))

    @invariant()
    def no_user_is_cut_off(self) -> None:
        """A run with users ends only if it was unloaded by name, or died."""
        for _, task in self.users:
            if task.done() and not task.cancelled() and task.exception() is None:
                run = task.result()
                assert not run.loaded.is_closed or id(run.loaded) in self.is_forced

    @invariant()
    def the_room_is_kept(self) -> None:
        """Checked by the loader at every load and wake as well."""
        if hasattr(self, "world"):
            self.world.check_room()

    @invariant()
    def states_are_true(self) -> None:
        """Loaded models have a run, and models without a run are not loaded."""
        if not hasattr(self, "pool"):
            return
        for model in self.pool._models.values():
            assert (model.run is not None) or model.state not in ("loaded", "sleeping", "unloading")
            assert not model.waiters or model.loading or model.unloading or model.yields, model.state
            assert model.reserved_bytes == 0 or model.takes_room or model.state == "queued", model.state

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.now(self.end())
        self.loop.close()

    async def end(self) -> None:
        self.world.fail.clear()
        waiting = [task for _, task in self.users] + self.acts
        while waiting:  # users that came in go, so that others come in
            done, pending = await asyncio.wait(waiting, timeout=200, return_when=asyncio.FIRST_COMPLETED)
            assert done, "no user gets in any more"
            for task in done:
                outcome = None if task.cancelled() else task.exception() or task.result()
                assert outcome is None or isinstance(outcome, (ModelRun, PacelineError)), repr(outcome)
                if isinstance(outcome, ModelRun):
                    self.pool.release(outcome)
            waiting = list(pending)
        assert all(status.num_users == 0 for status in self.pool.statuses())
        await self.pool.unload("pinned")
        for name in ("c", "d", "brief"):
            self.pool.release(await self.pool.acquire(name, timeout_s=200))
        await self.pool.aclose()
        assert not self.world.runs
        await asyncio.sleep(0)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


def test_the_pool_under_all_that_can_happen() -> None:
    """No model and no memory more than there may be, no lost wakeup, no user without an outcome."""
    gc.collect()
    gc.freeze()  # every unload collects garbage: not in what all other tests have left, which takes minutes
    try:
        run_state_machine_as_test(
            PoolMachine,
            settings=settings(
                max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        gc.unfreeze()
