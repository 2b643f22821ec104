"""Who waits, who is loaded and who is evicted: the pool of models, on a loop of virtual time and without models."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from tests.model_world import LoaderWorld, ended_with, hold, now, pool_of, run_virtual, settle, states, virtual

from paceline.errors import (
    EngineStopped,
    InvalidParams,
    ModelLoadError,
    ModelNotFound,
    ModelNotLoaded,
    ModelsBusy,
    ModelUnloaded,
    NotEnoughMemory,
)
from paceline.model_manager import ModelEntry


@virtual
async def test_a_model_is_loaded_once_for_all_that_wait_for_it() -> None:
    """Ten users at once are one load."""
    world = LoaderWorld()
    pool = pool_of(world, "a")
    runs = await asyncio.gather(*(pool.acquire("a") for _ in range(10)))
    assert world.loads == ["a"]
    assert len({id(run) for run in runs}) == 1
    assert pool.status("a").num_users == 10
    await pool.aclose()


@virtual
async def test_the_least_recently_used_idle_model_makes_room() -> None:
    """A model that was used later stays."""
    world = LoaderWorld(max_loaded=2)
    pool = pool_of(world, "a", "b", "c")
    for name in "aba":
        await hold(pool, name, 1)
    await hold(pool, "c", 1)
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    await pool.aclose()


@virtual
async def test_a_pinned_model_is_never_evicted() -> None:
    """Others are evicted, even if they were used later."""
    world = LoaderWorld(max_bytes=20, a=10, b=10, c=10)
    pool = pool_of(world, ModelEntry(name="a", pinned=True), "b", "c")
    for name in "abcbc":
        await hold(pool, name, 1)
    assert world.loads == ["a", "b", "c", "b", "c"]
    await pool.aclose()


@virtual
async def test_a_model_in_use_is_waited_for() -> None:
    """The wanted model is loaded when the last user of the other has gone, and not before."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=100)
    users = [asyncio.create_task(hold(pool, "a", seconds)) for seconds in (10, 20)]
    await asyncio.sleep(5)
    await hold(pool, "b", 0)
    assert now() == pytest.approx(20 + 1.3 + 0.2 + 1.0, abs=0.3)
    await asyncio.gather(*users)
    await pool.aclose()


@virtual
async def test_a_busy_model_cannot_starve_another_one() -> None:
    """After patience_s new users of the busy model wait after the other model."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=5)
    is_over = asyncio.Event()

    async def keep_busy() -> None:
        while not is_over.is_set():
            await hold(pool, "a", 3)

    busy = [asyncio.create_task(keep_busy()) for _ in range(3)]
    for delay_s in (0.0, 0.9, 1.1):
        await asyncio.sleep(delay_s)
    began = now()
    await hold(pool, "b", 1)
    assert now() - began < 5 + 3 + 3
    is_over.set()
    await asyncio.gather(*busy)
    assert world.loads == ["a", "b", "a"]
    await pool.aclose()


@virtual
async def test_users_are_let_in_again_where_the_one_that_waited_has_gone() -> None:
    """A waiter that leaves gives its claim up."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=1)
    first = asyncio.create_task(hold(pool, "a", 50))
    await asyncio.sleep(3)
    waiting = asyncio.create_task(pool.acquire("b"))
    await asyncio.sleep(3)
    late = asyncio.create_task(hold(pool, "a", 1))
    await asyncio.sleep(3)
    assert not late.done()
    waiting.cancel()
    await late
    assert now() < 12
    assert states(pool) == {"a": "loaded", "b": "unloaded"}
    first.cancel()
    await pool.aclose()


@virtual
async def test_models_that_wait_are_served_in_turn() -> None:
    """First come, first served, also if a later model would fit earlier."""
    world = LoaderWorld(max_bytes=10, big=10, small=1, held=5)
    pool = pool_of(world, "big", "small", "held", patience_s=100)
    holding = asyncio.create_task(hold(pool, "held", 20))
    await asyncio.sleep(5)
    big = asyncio.create_task(hold(pool, "big", 1))
    await asyncio.sleep(1)
    small = asyncio.create_task(hold(pool, "small", 1))
    await asyncio.gather(holding, big, small)
    assert world.loads == ["held", "big", "small"]
    await pool.aclose()


@virtual
async def test_a_wait_for_room_ends_with_its_time_out() -> None:
    """The error says which models are loaded; the wanted one is free for the next try."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", wait_timeout_s=4, patience_s=100)
    holding = asyncio.create_task(hold(pool, "a", 100))
    await asyncio.sleep(2)
    await ended_with(pool.acquire("b"), ModelsBusy, r"'b' waited 4 s for room.*\(a\)")
    assert now() == pytest.approx(6, abs=0.1)
    await ended_with(pool.acquire("b", timeout_s=1), ModelsBusy, "waited 1 s")
    await settle()
    assert states(pool) == {"a": "loaded", "b": "unloaded"}
    holding.cancel()
    await pool.aclose()


@virtual
async def test_a_time_out_that_is_over_before_the_queue_holds_there() -> None:
    """If planning its memory took longer, the time begins with the queue."""
    world = LoaderWorld(max_loaded=1)
    world.prepare_s = 3
    pool = pool_of(world, "a", "b", patience_s=100)
    run = await pool.acquire("a")
    await asyncio.sleep(10 - now())
    patient = asyncio.create_task(pool.acquire("b", timeout_s=1000))
    await ended_with(pool.acquire("b", timeout_s=1), ModelsBusy, "waited 1 s")
    assert now() == pytest.approx(14, abs=0.2)
    assert not patient.done()
    pool.release(run)
    pool.release(await patient)
    await pool.unload("b")
    await hold(pool, "b", 0, timeout_s=1)
    await pool.aclose()


@virtual
async def test_the_time_out_does_not_cut_a_load_short() -> None:
    """It is for room; a load may take longer."""
    world = LoaderWorld()
    world.load_s = 60
    pool = pool_of(world, "a", wait_timeout_s=1)
    await hold(pool, "a", 0)
    assert now() > 60
    await pool.aclose()


@virtual
async def test_what_can_never_fit_is_refused_with_figures() -> None:
    """At once, to all that wait, and without evicting anything."""
    world = LoaderWorld(max_bytes=100 << 20, large=200 << 20, small=60 << 20, half=50 << 20)
    pool = pool_of(world, "large", ModelEntry(name="small", pinned=True), "half")
    await hold(pool, "small", 0)
    await ended_with(pool.acquire("large"), NotEnoughMemory, r"'large' .*needs 200 MiB.*budget.* 100 MiB")
    await ended_with(pool.acquire("half"), NotEnoughMemory, r"pinned models take 60 MiB \(small\)")
    assert states(pool) == {"large": "failed", "small": "loaded", "half": "failed"}
    await pool.aclose()


@virtual
async def test_a_load_that_fails_is_reported_to_all_and_tried_again() -> None:
    """The next use loads anew."""
    world = LoaderWorld()
    world.fail["a"] = [ModelLoadError("the file is damaged")]
    pool = pool_of(world, "a")
    results = await asyncio.gather(*(pool.acquire("a") for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in results] == ["the file is damaged"] * 3
    assert str(pool.status("a").error) == "the file is damaged"
    await hold(pool, "a", 0)
    assert pool.status("a").error is None
    await pool.aclose()


@virtual
async def test_names_that_do_not_exist_come_with_the_nearest() -> None:
    """Aliases are among them."""
    pool = pool_of(LoaderWorld(), ModelEntry(name="gemma-3-1b", aliases=["default"]), "qwen")
    await ended_with(pool.acquire("gemma-3-1"), ModelNotFound, "'gemma-3-1b'")
    await ended_with(pool.unload("defualt"), ModelNotFound, "'default'")
    await ended_with(pool.load("x"), ModelNotFound, "there are gemma-3-1b, qwen")
    await hold(pool, "default", 0)
    assert pool.entry("default").name == "gemma-3-1b"
    await pool.aclose()


@virtual
async def test_names_are_unique_among_names_and_aliases() -> None:
    """Each refusal names the model that has the name."""
    pool = pool_of(LoaderWorld(), ModelEntry(name="a", aliases=["b"]))
    for entry in (ModelEntry(name="b"), ModelEntry(name="c", aliases=["a"])):
        with pytest.raises(InvalidParams, match="is taken by 'a'"):
            pool.add(entry)
    with pytest.raises(InvalidParams, match="stands twice"):
        pool.add(ModelEntry(name="c", aliases=["c"]))
    assert pool.names() == ["a"]


@virtual
async def test_unload_waits_for_users_and_then_cuts_them_off() -> None:
    """Users that leave in time are waited for; one that does not finds its run revoked."""
    world = LoaderWorld()
    pool = pool_of(world, "a")
    brief, long = await pool.acquire("a"), await pool.acquire("a")
    unloading = asyncio.create_task(pool.unload("a", timeout_s=10))
    await asyncio.sleep(3)
    pool.release(brief)
    assert pool.status("a").state == "unloading"
    await unloading
    assert now() == pytest.approx(1.3 + 10 + 0.2, abs=0.3)
    assert isinstance(long.revoked, ModelUnloaded)
    assert "'a' was unloaded while it was in use" in str(long.revoked)
    pool.release(long)
    assert states(pool) == {"a": "unloaded"}
    await pool.aclose()


@virtual
async def test_what_an_engine_leaves_in_cycles_is_freed_with_it() -> None:
    """A vocabulary takes tens of megabytes, and an automatic collection may be long in coming."""
    pool = pool_of(LoaderWorld(), "a")
    run = await pool.acquire("a")
    left = weakref.ref(run.loaded)
    pool.release(run)
    del run
    gc.disable()
    try:
        await pool.unload("a", timeout_s=0)
        await settle()
        assert left() is None
    finally:
        gc.enable()
    await pool.aclose()


@virtual
async def test_users_that_come_during_an_unload_load_the_model_again() -> None:
    """They wait; nothing is lost."""
    world = LoaderWorld()
    pool = pool_of(world, "a")
    run = await pool.acquire("a")
    unloading = asyncio.create_task(pool.unload("a", timeout_s=5))
    await settle()
    late = asyncio.create_task(hold(pool, "a", 0))
    await asyncio.sleep(1)
    pool.release(run)
    await unloading
    assert await late is not run
    assert world.loads == ["a", "a"]
    await pool.aclose()


@virtual
async def test_a_second_unload_shortens_the_first() -> None:
    """The smaller time-out counts."""
    pool = pool_of(LoaderWorld(), "a")
    await pool.acquire("a")
    patient = asyncio.create_task(pool.unload("a", timeout_s=1000))
    await asyncio.sleep(1)
    await pool.unload("a", timeout_s=0)
    await patient
    assert now() < 5
    await pool.aclose()


@virtual
async def test_a_second_unload_at_once_shortens_the_first() -> None:
    """Also before the first has begun to wait for users."""
    pool = pool_of(LoaderWorld(), "a")
    await pool.acquire("a")
    await asyncio.gather(pool.unload("a", timeout_s=1000), pool.unload("a", timeout_s=0))
    assert now() < 5
    await pool.aclose()


@virtual
async def test_unload_cancels_a_load() -> None:
    """Waiting users get a clear error; later users wait for a new load."""
    world = LoaderWorld()
    world.load_s = 1000
    pool = pool_of(world, "a")
    waiting = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(10)
    unloading = asyncio.create_task(pool.unload("a"))
    await settle()
    await ended_with(waiting, ModelUnloaded, "before it was loaded")
    world.load_s = 1
    late = asyncio.create_task(hold(pool, "a", 0))
    await unloading
    await late
    assert now() < 15
    await pool.aclose()


@virtual
async def test_a_load_goes_on_without_those_that_wanted_it() -> None:
    """A user that leaves while a model is read does not waste the work."""
    pool = pool_of(LoaderWorld(), "a")
    waiting = asyncio.create_task(pool.acquire("a"))
    await asyncio.sleep(0.8)
    waiting.cancel()
    await asyncio.sleep(2)
    assert states(pool) == {"a": "loaded"}
    assert pool.status("a").num_users == 0
    await pool.aclose()


@virtual
async def test_a_model_in_line_that_no_request_wants_leaves_it() -> None:
    """Its waiter gone, it takes no room from others."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", "c", patience_s=100)
    holding = asyncio.create_task(hold(pool, "a", 10))
    await asyncio.sleep(2)
    second = asyncio.create_task(pool.acquire("b"))
    await asyncio.sleep(1)
    third = asyncio.create_task(hold(pool, "c", 0))
    await asyncio.sleep(1)
    second.cancel()
    await asyncio.gather(holding, third)
    assert world.loads == ["a", "c"]
    await pool.aclose()


@virtual
async def test_a_model_whose_request_left_before_the_queue_evicts_none() -> None:
    """While its memory was planned; the plan is kept, the line is not joined."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=100)
    await hold(pool, "a", 0)
    waiting = asyncio.create_task(pool.acquire("b"))
    await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.sleep(5)
    assert world.loads == ["a"]
    assert states(pool) == {"a": "loaded", "b": "unloaded"}
    await pool.aclose()


@virtual
async def test_a_model_that_is_not_to_be_loaded_is_an_error() -> None:
    """Without load a model is used only if it is there, or on its way."""
    pool = pool_of(LoaderWorld(), "a")
    await ended_with(pool.acquire("a", load=False), ModelNotLoaded, "'a' is not loaded")
    await pool.load("a")
    await hold(pool, "a", 0, load=False)
    await pool.aclose()


@virtual
async def test_a_model_that_is_being_unloaded_is_not_loaded_again_without_load() -> None:
    """It raises at once; if another user waits for it, that user's load is waited for, and begun for that user alone."""
    world = LoaderWorld()
    pool = pool_of(world, "a")
    run = await pool.acquire("a")
    unloading = asyncio.create_task(pool.unload("a", timeout_s=50))
    await settle()
    began = now()
    await ended_with(pool.acquire("a", load=False), ModelNotLoaded, "'a' is not loaded")
    assert now() == began
    late = asyncio.create_task(pool.acquire("a"))
    await settle()
    others = [asyncio.create_task(pool.acquire("a", load=False)) for _ in range(2)]
    await settle()
    late.cancel()
    pool.release(run)
    await unloading
    for other in others:
        await ended_with(other, ModelNotLoaded)
    await asyncio.sleep(5)
    assert world.loads == ["a"] and states(pool) == {"a": "unloaded"}
    await pool.aclose()


@virtual
async def test_a_model_that_was_evicted_is_not_loaded_again_without_load() -> None:
    """A user that waited behind another model, since this one made room for it."""
    world = LoaderWorld(max_loaded=1)
    pool = pool_of(world, "a", "b", patience_s=1)
    holding = asyncio.create_task(hold(pool, "a", 10))
    await asyncio.sleep(3)
    other = asyncio.create_task(hold(pool, "b", 1))
    await asyncio.sleep(3)
    late = asyncio.create_task(pool.acquire("a", load=False))
    await asyncio.gather(holding, other)
    await ended_with(late, ModelNotLoaded)
    assert world.loads == ["a", "b"]
    await pool.aclose()


@virtual
async def test_an_idle_model_is_unloaded_after_its_time() -> None:
    """From its last use on; a use begins the time anew."""
    pool = pool_of(LoaderWorld(), ModelEntry(name="a", unload_idle_s=30))
    await hold(pool, "a", 1)
    await asyncio.sleep(20)
    await hold(pool, "a", 40)
    ended = now()
    assert states(pool) == {"a": "loaded"}
    await asyncio.sleep(29)
    assert states(pool) == {"a": "loaded"}
    await asyncio.sleep(1.5)
    assert states(pool) == {"a": "unloaded"}
    assert now() - ended < 31
    await pool.aclose()


@virtual
async def test_a_sleeping_model_takes_no_room_and_wakes_in_turn() -> None:
    """Its memory is another one's, and it is woken when there is room."""
    world = LoaderWorld(max_bytes=10, a=10, b=10)
    pool = pool_of(world, ModelEntry(name="a", options={"sleep_idle_s": 5}), "b", patience_s=100)
    run = await hold(pool, "a", 1)
    run.loaded.is_asleep = True
    await asyncio.sleep(1.5)
    assert states(pool)["a"] == "sleeping"
    holding = asyncio.create_task(hold(pool, "b", 10))
    await asyncio.sleep(5)
    assert states(pool) == {"a": "sleeping", "b": "loaded"}
    assert await hold(pool, "a", 1) is run
    await holding
    assert world.loads == ["a", "b"]
    assert states(pool)["b"] == "unloaded"
    await pool.aclose()


@virtual
async def test_an_engine_that_gives_up_is_a_failure_of_its_model_alone() -> None:
    """Its users are cut off with the reason, and the next use loads it again."""
    world = LoaderWorld()
    pool = pool_of(world, "a", "b")
    run, other = await pool.acquire("a"), await pool.acquire("b")
    run.loaded.die()
    await asyncio.sleep(1)
    assert states(pool) == {"a": "failed", "b": "loaded"}
    assert str(run.revoked) == "the engine gave up"
    assert str(pool.status("a").error) == "the engine gave up"
    assert await pool.acquire("a") is not run
    assert other.revoked is None
    await pool.aclose()


@virtual
async def test_an_engine_that_a_user_closed_is_replaced() -> None:
    """It is unloaded, which is no failure, and the next use loads it again."""
    world = LoaderWorld()
    pool = pool_of(world, "a")
    run = await pool.acquire("a")
    await run.loaded.aclose()
    await settle()
    pool.release(run)
    again = await pool.acquire("a")
    assert again is not run and not again.loaded.is_closed
    assert pool.status("a").error is None
    await pool.aclose()


@virtual
async def test_closing_ends_loads_waits_and_models() -> None:
    """Every waiter is woken, nothing stays loaded, and nothing is accepted any more."""
    world = LoaderWorld(max_loaded=2)
    world.load_s = 30
    pool = pool_of(world, "a", "b", "c", patience_s=1000)
    await pool.load("a")
    run = await pool.acquire("a")
    others = [asyncio.create_task(pool.acquire(name)) for name in "bbc"]
    await asyncio.sleep(10)
    assert states(pool) == {"a": "loaded", "b": "loading", "c": "queued"}
    reader = pool._feed.subscribe()
    await pool.aclose()
    for task in others:
        await ended_with(task, EngineStopped, "closed")
    assert not world.runs
    assert run.revoked is not None
    assert now() < 45
    await ended_with(pool.acquire("a"), EngineStopped, "closed")
    events = [(status.name, status.state) async for status in reader]
    assert events[-1][1] == "unloaded"
    await pool.aclose()


@virtual
async def test_closing_may_wait_for_users() -> None:
    """With drain current users may end."""
    pool = pool_of(LoaderWorld(), "a")
    holding = asyncio.create_task(hold(pool, "a", 30))
    await asyncio.sleep(5)
    await pool.aclose(drain=True)
    assert now() == pytest.approx(31.5, abs=0.3)
    assert (await holding).revoked is None


@virtual
async def test_a_model_to_load_on_startup_is_loaded() -> None:
    """Without a user, and without waiting for it."""
    pool = pool_of(LoaderWorld(), ModelEntry(name="a", load_on_startup=True), "b")
    await pool.start()
    assert now() == 0
    await asyncio.sleep(3)
    assert states(pool) == {"a": "loaded", "b": "unloaded"}
    await pool.aclose()


@virtual
async def test_what_a_model_was_seen_to_take_counts() -> None:
    """If it is more than planned, idle models are evicted, and less is left for others."""
    world = LoaderWorld(max_bytes=25, a=10, b=10, c=10)
    pool = pool_of(world, "a", "b", "c")
    await hold(pool, "b", 0)
    run = await pool.acquire("a")
    run.loaded.taken_bytes = 18
    pool.release(run)
    await asyncio.sleep(1)
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
    await hold(pool, "c", 0)
    assert states(pool) == {"a": "unloaded", "b": "unloaded", "c": "loaded"}
    await pool.aclose()


@virtual
async def test_a_model_alone_is_not_evicted_for_what_it_takes() -> None:
    """A model planned to fit is loaded, for any memory it takes then."""
    pool = pool_of(LoaderWorld(max_bytes=25, a=20), "a")
    for _ in range(3):
        run = await pool.acquire("a")
        run.loaded.taken_bytes = 30
        pool.release(run)
        await asyncio.sleep(1)
        assert states(pool) == {"a": "loaded"}
        await pool.unload("a")
    await pool.aclose()


@virtual
async def test_a_model_that_is_too_large_for_the_machine_evicts_none() -> None:
    """It is refused when its memory is planned, also if the number of models alone would evict another."""
    world = LoaderWorld(max_loaded=2)
    pool = pool_of(world, "a", "b", "huge")
    for name in "ab":
        await hold(pool, name, 1)
    world.too_large.add("huge")
    await ended_with(pool.acquire("huge"), NotEnoughMemory, "all that there is")
    await asyncio.sleep(5)
    assert states(pool) == {"a": "loaded", "b": "loaded", "huge": "failed"}
    await pool.aclose()


@virtual
async def test_idle_models_make_room_where_the_machine_is_short() -> None:
    """Without a budget, the load that fails for want of memory is tried again after each eviction."""
    world = LoaderWorld()
    pool = pool_of(world, "a", "b", "c", "d")
    for name in "abc":
        await hold(pool, name, 1)
    busy = await pool.acquire("a")
    world.fail["d"] = [NotEnoughMemory("the machine has too little memory")] * 2
    await hold(pool, "d", 0)
    assert states(pool) == {"a": "loaded", "b": "unloaded", "c": "unloaded", "d": "loaded"}
    await pool.unload("d")
    world.fail["d"] = [NotEnoughMemory("the machine has too little memory")] * 2
    await ended_with(pool.acquire("d"), NotEnoughMemory, "the machine")
    assert busy.revoked is None
    await pool.aclose()


@virtual
async def test_events_tell_states_progress_and_users() -> None:
    """In order; of one state only the newest is kept for a slow reader."""
    pool = pool_of(LoaderWorld(), "a")
    reader = pool._feed.subscribe()
    await hold(pool, "a", 1)
    await pool.unload("a")
    pool._feed.unsubscribe(reader)
    seen = [(status.state, status.progress, status.num_users) async for status in reader]
    assert seen == [
        ("preparing", 0.0, 0),
        ("queued", 0.0, 0),
        ("loading", 0.5, 0),
        ("loaded", 1.0, 0),
        ("unloading", 0.0, 0),
        ("unloaded", 0.0, 0),
    ]
    await pool.aclose()


def test_a_pool_belongs_to_one_loop() -> None:
    """Another loop is refused instead of hanging."""
    pool = pool_of(LoaderWorld(), "a")
    run_virtual(hold(pool, "a", 0))
    with pytest.raises(RuntimeError, match="one event loop"):
        run_virtual(hold(pool, "a", 0))
