"""A pool of models without models: a loop with instant time, and a loader with set durations of loads."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import pytest

from paceline.errors import Aborted, EngineStopped, InvalidParams, NotEnoughMemory
from paceline.model_manager import ManagerSettings, ModelEntry, PreparedModel
from paceline.model_manager.managed_model import ModelRun
from paceline.model_manager.model_pool import ModelPool

P = ParamSpec("P")
R = TypeVar("R")

Pool = ModelPool[Any]

STEP_S = 0.1  # between two looks of a load whether it is cancelled


class Deadlock(AssertionError):
    """Nothing can happen any more, and the test still waits."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop without waiting: if nothing is ready, its time jumps to the next timer."""

    _ready: Any
    _scheduled: Any

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready:
            due = [handle._when for handle in self._scheduled if not handle._cancelled]
            if not due:
                raise Deadlock
            self._now_s = max(self._now_s, min(due))
        super()._run_once()  # type: ignore[misc] # private to asyncio


class FakeRun:
    """A running model. It counts as resident from the beginning of its load."""

    def __init__(self, world: LoaderWorld, entry: ModelEntry) -> None:
        self.llm = self
        self.entry, self._world = entry, world
        self.ended: Future[EngineStopped | None] = Future()
        self.is_asleep = False
        self.taken_bytes: int | None = None
        self.num_users = 0
        self.is_closed = False

    @property
    def worker_pid(self) -> int | None:
        return None

    def wake(self) -> None:
        assert not self.is_closed
        self.is_asleep = False
        self._world.check_room()

    def die(self) -> None:
        self._world.runs.discard(self)
        self.ended.set_result(EngineStopped("the engine gave up"))

    async def aclose(self) -> None:
        await asyncio.sleep(self._world.close_s)
        self.is_closed = True
        self._world.runs.discard(self)
        if not self.ended.done():
            self.ended.set_result(None)


class LoaderWorld:
    """A `ModelLoader`. bytes_of: memory of each model.

    fail: the errors of the next loads, by name; too_large: models that are too large for the machine
    """

    def __init__(self, *, max_bytes: int | None = None, max_loaded: int | None = None, **bytes_of: int) -> None:
        self.settings = ManagerSettings(memory_budget=max_bytes, max_loaded=max_loaded or 0)
        self.bytes_of = bytes_of
        self.prepare_s, self.load_s, self.close_s = 0.3, 1.0, 0.2
        self.runs: set[FakeRun] = set()
        self.fail: dict[str, list[Exception]] = {}
        self.loads: list[str] = []
        self.too_large: set[str] = set()

    def check(self, entry: ModelEntry) -> None:
        if "wrong" in entry.options:
            raise InvalidParams("wrong is wrong")

    async def prepare(self, entry: ModelEntry, cancel: threading.Event, *, budget: int | None) -> PreparedModel:
        await self._pass(self.prepare_s, cancel)
        if entry.name in self.too_large:
            raise NotEnoughMemory("1 MiB are all that there is")
        return PreparedModel(entry=entry, needed_bytes=self.bytes_of.get(entry.name, 1) if budget else None)

    async def load(
        self, prepared: PreparedModel, progress: Callable[[float], None], cancel: threading.Event
    ) -> FakeRun:
        run = FakeRun(self, prepared.entry)
        self.runs.add(run)
        self.loads.append(prepared.entry.name)
        self.check_room()
        try:
            progress(0.5)
            await self._pass(self.load_s, cancel)
            self._fail(prepared.entry.name)
        except BaseException:
            self.runs.discard(run)
            raise
        progress(1.0)
        return run

    def _fail(self, name: str) -> None:
        if errors := self.fail.get(name):
            raise errors.pop(0)

    async def _pass(self, seconds: float, cancel: threading.Event) -> None:
        until_s = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until_s:
            if cancel.is_set():
                raise Aborted("loading the model was cancelled")
            await asyncio.sleep(STEP_S)

    def check_room(self) -> None:
        """No more memory and no more models than there may be."""
        awake = [run for run in self.runs if not run.is_asleep]
        taken = sum(self.bytes_of.get(run.entry.name, 1) for run in awake)
        budget, most = self.settings.memory_budget, self.settings.max_loaded
        assert budget is None or taken <= budget, [run.entry.name for run in awake]
        assert not most or len(awake) <= most


def pool_of(
    world: LoaderWorld, *entries: ModelEntry | str, wait_timeout_s: float | None = None, patience_s: float = 5.0
) -> Pool:
    """A pool of these models."""
    listed = tuple(ModelEntry(name=entry) if isinstance(entry, str) else entry for entry in entries)
    world.settings = replace(world.settings, entries=listed, wait_timeout_s=wait_timeout_s, patience_s=patience_s)
    return ModelPool(world, world.settings)


def run_virtual(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine on a loop of virtual time; no task may be left."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def virtual(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on a loop of virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def now() -> float:
    return asyncio.get_running_loop().time()


async def hold(pool: Pool, name: str, seconds: float, **options: Any) -> ModelRun[Any]:
    """Use a model for that long."""
    run = await pool.acquire(name, **options)
    await asyncio.sleep(seconds)
    pool.release(run)
    return run


async def settle() -> None:
    """Let everything happen that needs no time."""
    for _ in range(20):
        await asyncio.sleep(0)


async def ended_with(work: Awaitable[Any], kind: type[Exception], match: str | None = None) -> None:
    with pytest.raises(kind, match=match):
        await work


def states(pool: Pool) -> dict[str, str]:
    return {status.name: status.state for status in pool.statuses()}
