"""Models and limits that change while models are in use: the pool of models, on a loop of virtual time."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from tests.model_world import LoaderWorld, ended_with, hold, now, pool_of, settle, states, virtual

from paceline.errors import InvalidParams, ModelLoadError, ModelNotFound, ModelsBusy
from paceline.model_manager import ModelEntry, PreparedModel


@virtual
async def test_remove_unloads_and_forgets() -> None:
    """Waiting callers get ModelNotFound; a model of that name can be added again."""
    world = LoaderWorld()
    pool = pool_of(world, ModelEntry(name="a", aliases=["x"]))
    waiting = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(0.1)
    await pool.remove("x")
    await ended_with(waiting, ModelNotFound, "was removed")
    await ended_with(pool.acquire("a"), ModelNotFound)
    assert not world.runs
    pool.add(ModelEntry(name="x", aliases=["a"]))
    await hold(pool, "a", 0)
    await pool.aclose()


@virtual
async def test_update_leaves_alone_what_is_the_same() -> None:
    """New models are added, missing models removed, changed models unloaded."""
    world = LoaderWorld()
    pool = pool_of(world, "a", "b", "c")
    for name in "abc":
        await hold(pool, name, 0)
    await pool.update([ModelEntry(name="a"), ModelEntry(name="b", options={"n_ctx": 1}), ModelEntry(name="d")])
    assert states(pool) == {"a": "loaded", "b": "unloaded", "d": "unloaded"}
    assert pool.entry("b").options == {"n_ctx": 1}
    await pool.aclose()


@virtual
async def test_lower_limits_evict_idle_models_at_once_and_others_when_they_are_idle() -> None:
    """The least recently used first, by number and by memory; nothing is taken from users."""
    world = LoaderWorld(a=10, b=10, c=10, d=10)
    pool = pool_of(world, *"abcd")
    for name in "abc":
        await hold(pool, name, 1)
    runs = [await pool.acquire(name) for name in "cd"]
    world.settings = replace(pool.settings, max_loaded=3)
    await pool.update(world.settings)
    await asyncio.sleep(1)
    assert states(pool) == {"a": "unloaded", "b": "loaded", "c": "loaded", "d": "loaded"}
    world.settings = replace(pool.settings, max_loaded=0, memory_budget=10)
    for run in runs:
        run.loaded.taken_bytes = 10
    await pool.update(world.settings)
    await asyncio.sleep(1)
    assert states(pool) == {"a": "unloaded", "b": "unloaded", "c": "loaded", "d": "loaded"}
    for run in runs:
        assert run.revoked is None
        pool.release(run)
        await asyncio.sleep(1)
    assert states(pool) == {"a": "unloaded", "b": "unloaded", "c": "unloaded", "d": "loaded"}
    assert pool.settings == world.settings
    await pool.aclose()


@virtual
async def test_a_lower_max_loaded_holds_while_a_model_waits_that_it_does_not_help() -> None:
    """A model beyond it is unloaded when its users have left, although that gives the waiting one no room yet."""
    world = LoaderWorld(max_loaded=3)
    pool = pool_of(world, *"abcd", patience_s=1000)
    runs = {name: await pool.acquire(name) for name in "abd"}
    waiting = asyncio.create_task(pool.load("c"))
    await asyncio.sleep(5)
    await pool.update(replace(pool.settings, max_loaded=1))
    pool.release(runs["d"])
    await asyncio.sleep(2)
    assert states(pool) == {"a": "loaded", "b": "loaded", "c": "queued", "d": "unloaded"}
    pool.release(runs["a"])
    pool.release(runs["b"])
    await waiting
    assert states(pool) == {"a": "unloaded", "b": "unloaded", "c": "loaded", "d": "unloaded"}
    await pool.aclose()


@virtual
async def test_a_lower_memory_budget_holds_while_a_model_waits_that_it_does_not_help() -> None:
    """An idle model beyond it is unloaded at once, and not kept since the model in use has to go anyway."""
    world = LoaderWorld(max_bytes=10, a=6, b=2, c=5)
    pool = pool_of(world, *"abc", patience_s=10)
    await hold(pool, "b", 0)
    run = await pool.acquire("a")
    waiting = asyncio.create_task(pool.load("c"))
    await asyncio.sleep(3)
    assert states(pool) == {"a": "loaded", "b": "loaded", "c": "queued"}
    await pool.update(replace(pool.settings, memory_budget=7))
    await asyncio.sleep(2)
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "queued"}
    await asyncio.sleep(20)
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "queued"}
    pool.release(run)
    await waiting
    await pool.aclose()


@pytest.mark.parametrize(("seconds", "state"), [(0.1, "preparing"), (3.0, "queued")])
@pytest.mark.parametrize("is_user", [True, False])
@virtual
async def test_a_budget_holds_for_a_model_that_is_on_its_way_to_its_room(
    seconds: float, state: str, is_user: bool
) -> None:
    """Its memory is planned then, also if it is loaded on startup and none waits for it."""
    world = LoaderWorld(max_loaded=1 if state == "queued" else None, a=6, b=6)
    pool = pool_of(world, "a", ModelEntry(name="b", load_on_startup=not is_user), patience_s=100)
    run = await pool.acquire("a")
    run.loaded.taken_bytes = 6
    waiting = asyncio.create_task(pool.acquire("b")) if is_user else asyncio.create_task(pool.start())
    await asyncio.sleep(seconds)
    assert states(pool)["b"] == state
    world.settings = replace(pool.settings, max_loaded=0, memory_budget=10)
    await pool.update(world.settings)
    await asyncio.sleep(5)
    assert (states(pool)["b"], pool.status("b").needed_bytes, world.loads) == ("queued", 6, ["a"])
    pool.release(run)
    await waiting
    await asyncio.sleep(5)
    assert states(pool) == {"a": "unloaded", "b": "loaded"}
    await pool.aclose()


@virtual
async def test_higher_limits_let_those_in_that_wait() -> None:
    """At once; the time-out is that of the moment, and with a budget memory is planned."""
    world = LoaderWorld(max_loaded=1, a=10, b=10)
    pool = pool_of(world, "a", "b", patience_s=100)
    run = await pool.acquire("a")
    assert pool.status("a").needed_bytes is None
    waiting = asyncio.create_task(pool.acquire("b"))
    await asyncio.sleep(5)
    began = now()
    world.settings = replace(pool.settings, max_loaded=2, wait_timeout_s=3.0)
    await pool.update(world.settings)
    pool.release(await waiting)
    assert now() - began < 2
    await pool.unload("b")
    run.loaded.taken_bytes = 10
    world.settings = replace(pool.settings, memory_budget=10)
    await pool.update(world.settings)
    await ended_with(pool.acquire("b"), ModelsBusy, "waited 3 s")
    pool.release(run)
    await hold(pool, "b", 0)
    assert pool.status("b").needed_bytes == 10
    await pool.aclose()


@virtual
async def test_a_changed_model_stays_known_while_the_old_one_drains() -> None:
    """Its users end in time, and later users get the new model."""
    world = LoaderWorld()
    pool = pool_of(world, ModelEntry(name="a", aliases=["x"], stop_timeout_s=100), "b")
    old = await pool.acquire("a")
    changed = ModelEntry(name="a", aliases=["y"], options={"n_ctx": 1})
    updating = asyncio.create_task(pool.update([changed, ModelEntry(name="c")]))
    await settle()
    assert pool.names() == ["a", "c"]
    assert states(pool) == {"a": "unloading", "c": "unloaded"}
    assert pool.entry("y") == changed
    await ended_with(pool.acquire("x"), ModelNotFound)
    await hold(pool, "c", 0)
    late = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(20)
    assert old.revoked is None and not late.done() and not updating.done()
    pool.release(old)
    await updating
    new = await late
    assert new.loaded.entry == changed
    assert world.loads == ["a", "c", "a"]
    pool.release(new)
    await pool.aclose()


@pytest.mark.parametrize(("seconds", "state"), [(0.1, "preparing"), (0.9, "loading"), (5.0, "queued")])
@virtual
async def test_those_that_wait_for_a_model_that_is_changed_get_the_new_one(seconds: float, state: str) -> None:
    """While it is prepared, queued or loaded; a load without waiters is not begun anew."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=100)
    holding = asyncio.create_task(hold(pool, "b", 20)) if state == "queued" else None
    await asyncio.sleep(3 if holding else 0)
    waiting = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(seconds)
    assert states(pool)["a"] == state
    changed = ModelEntry(name="a", options={"n_ctx": 1})
    await pool.update([changed, ModelEntry(name="b")])
    run = await waiting
    assert run.loaded.entry == changed
    pool.release(run)
    await pool.unload("a")
    loading = asyncio.create_task(pool.load("a"))
    await asyncio.sleep(0.1)
    loading.cancel()
    count = len(world.loads)
    await pool.update([ModelEntry(name="a"), ModelEntry(name="b")])
    await asyncio.sleep(20)
    assert len(world.loads) == count and states(pool)["a"] == "unloaded"
    await pool.aclose()


@virtual
async def test_a_sleeping_model_that_is_changed_is_not_woken() -> None:
    """Neither by the change, nor if a user has begun to wake it: that user gets the new model."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, ModelEntry(name="a", options={"sleep_idle_s": 5}), "b", patience_s=100)
    run = await hold(pool, "a", 0)
    run.loaded.is_asleep = True
    await asyncio.sleep(2)
    holding = asyncio.create_task(hold(pool, "b", 20))
    await asyncio.sleep(5)
    waking = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(1)
    assert states(pool) == {"a": "queued", "b": "loaded"}
    await pool.update([ModelEntry(name="a"), ModelEntry(name="b")])
    assert run.loaded.is_closed and run.loaded.is_asleep
    new = await waking
    assert new is not run and world.loads == ["a", "b", "a"]
    await holding
    await pool.aclose()


@pytest.mark.parametrize("seconds", [0.1, 0.9, 5.0])
@virtual
async def test_an_update_loads_new_and_changed_models_with_load_on_startup(seconds: float) -> None:
    """A changed one whether it was prepared, loading or loaded; not the same one that was unloaded, nor a removed one."""
    world = LoaderWorld()
    pool = pool_of(world, *(ModelEntry(name=name, load_on_startup=True) for name in "abc"))
    await pool.start()
    await asyncio.sleep(seconds)
    await pool.unload("b")
    first = len(world.loads)
    changed = [ModelEntry(name=name, load_on_startup=True, options={"n_ctx": 1}) for name in "ad"]
    await pool.update([*changed, pool.entry("b"), ModelEntry(name="e")])
    await asyncio.sleep(5)
    assert states(pool) == {"a": "loaded", "d": "loaded", "b": "unloaded", "e": "unloaded"}
    assert {run.entry.name for run in world.runs} == {"a", "d"} and sorted(world.loads[first:]) == ["a", "d"]
    updating = asyncio.create_task(pool.update([ModelEntry(name="a", load_on_startup=True)]))
    await settle()
    await pool.unload("a")
    await updating
    await asyncio.sleep(5)
    assert states(pool) == {"a": "unloaded"}
    await pool.aclose()


@virtual
async def test_a_changed_model_has_no_error_of_the_earlier_one() -> None:
    """Neither of a load that failed before the load that the change cancels, nor of an engine that dies meanwhile."""
    world = LoaderWorld()
    pool = pool_of(world, ModelEntry(name="a", stop_timeout_s=100))
    world.fail["a"] = [ModelLoadError("the file is broken")]
    await ended_with(pool.load("a"), ModelLoadError)
    loading = asyncio.create_task(pool.load("a"))
    await asyncio.sleep(0.5)
    loading.cancel()
    await pool.update([ModelEntry(name="a", options={"n_ctx": 1})])
    await asyncio.sleep(5)
    assert (pool.status("a").state, pool.status("a").error) == ("unloaded", None)
    run = await hold(pool, "a", 0)
    run.loaded.die()
    await settle()
    assert states(pool) == {"a": "unloading"}
    await pool.update([ModelEntry(name="a", options={"n_ctx": 2})])
    assert (pool.status("a").state, pool.status("a").error) == ("unloaded", None)
    await pool.aclose()


@virtual
async def test_what_the_earlier_model_needs_is_not_noted_of_a_changed_one() -> None:
    """Not even if its preparation ends all the same after it was cancelled."""

    class Hurried(LoaderWorld):
        async def prepare(self, entry: ModelEntry, cancel: threading.Event, *, budget: int | None) -> PreparedModel:
            return await super().prepare(entry, threading.Event(), budget=budget)

    world = Hurried(max_bytes=10, a=7)
    pool = pool_of(world, "a")
    loading = asyncio.create_task(pool.load("a"))
    await asyncio.sleep(0.1)
    loading.cancel()
    await pool.update([ModelEntry(name="a", options={"n_ctx": 1})])
    assert (pool.status("a").state, pool.status("a").needed_bytes) == ("unloaded", None)
    await pool.aclose()


@virtual
async def test_a_model_is_gone_also_where_its_removal_is_awaited_by_none() -> None:
    """The wait was cancelled; it takes no room any more, and that it was removed is reported."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=100)
    reader = pool._feed.subscribe()
    run = await pool.acquire("a")
    removing = asyncio.create_task(pool.remove("a", timeout_s=100))
    await asyncio.sleep(1)
    removing.cancel()
    await asyncio.sleep(1)
    pool.release(run)
    await hold(pool, "b", 0)
    assert world.loads == ["a", "b"]
    pool._feed.unsubscribe(reader)
    assert [status.state async for status in reader if status.name == "a"][-2:] == ["unloaded", "removed"]
    await pool.aclose()


@virtual
async def test_nothing_is_reported_of_a_removed_model_whose_name_is_another_ones() -> None:
    """Neither its unload nor its removal: readers would take it for the model that has the name now."""
    world = LoaderWorld()
    pool = pool_of(world, "a")
    run = await pool.acquire("a")
    reader = pool._feed.subscribe()
    removing = asyncio.create_task(pool.remove("a", timeout_s=100))
    await asyncio.sleep(1)
    pool.add(ModelEntry(name="a"))
    await hold(pool, "a", 0)
    pool.release(run)
    await removing
    pool._feed.unsubscribe(reader)
    seen = [status.state async for status in reader]
    assert seen == ["unloading", "unloaded", "preparing", "queued", "loading", "loaded"]
    await pool.remove("a")
    assert pool.names() == []
    await pool.aclose()


@pytest.mark.parametrize(
    "entries",
    [
        [ModelEntry(name="d"), ModelEntry(name="e", aliases=["d"])],
        [ModelEntry(name="d"), ModelEntry(name="d")],
        [ModelEntry(name="d"), ModelEntry(name="e", options={"wrong": 1})],
    ],
)
@virtual
async def test_an_update_that_is_wrong_changes_nothing(entries: list[ModelEntry]) -> None:
    """It is checked as a whole before anything is removed."""
    pool = pool_of(LoaderWorld(), "a", "b")
    await hold(pool, "a", 0)
    await ended_with(pool.update(entries), InvalidParams)
    assert states(pool) == {"a": "loaded", "b": "unloaded"}
    await pool.aclose()
