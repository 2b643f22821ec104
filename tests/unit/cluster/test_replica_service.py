"""A replica's side: sessions of fronts, and reports to routers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import msgspec
import pytest
from tests.cluster_world import PATIENCE_S, MemoryReplica

from paceline.cluster import ReplicaReport, Router, hash_prompt
from paceline.cluster.replica_calls import ReplicaEnded
from paceline.cluster.replica_service import LEASE_S, SNAPSHOT_EVERY, ReplicaService
from paceline.engine.core import Cancel
from paceline.engine.worker import messages
from paceline.errors import EngineStopped, PacelineError, WorkerUnresponsive
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, Failed, Released, RequestEvent
from paceline.streaming import FinishReason
from paceline.testing.fake_backend import ManualClock


def with_service(test: Callable[[ReplicaService, MemoryReplica, ManualClock], Awaitable[None]]) -> None:
    """Run a test on an event loop, with a service."""
    replica, clock = MemoryReplica(), ManualClock()

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test(ReplicaService(replica, "r", clock=clock), replica, clock)

    try:
        asyncio.run(run())
    finally:
        replica.close()


def generate(key: int, prompt: bytes = b"a prompt", **params: Any) -> bytes:
    return messages.encode(
        messages.EngineRequest(
            key=key,
            prompts=[list(prompt)],
            params={"max_tokens": 5, "ignore_eos": True, "seed": 1, **params},
            options={},
            submitted_s=-0.5,
            states=[None],
        )
    )


async def parts(frames: AsyncIterator[bytes]) -> list[RequestEvent]:
    """Return the next frame's parts."""
    message = messages.decode_up(await anext(frames))
    assert isinstance(message, messages.Happened)
    return message.events


async def until_freed(frames: AsyncIterator[bytes], key: int) -> list[RequestEvent]:
    found: list[RequestEvent] = []
    while not any(isinstance(item, Released) and item.key == key for item in found):
        found += [part for part in await parts(frames) if part.key == key]
    return found


def test_each_front_gets_the_parts_of_its_own_requests() -> None:
    """Two fronts may use the same keys."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        assert await service.submit("one", generate(1, b"first"), {}) == ("r", 1)
        await service.submit("two", generate(1, b"second"), {})
        for front in ("one", "two"):
            found = await until_freed(service.events(front), 1)
            drawn = [token for item in found if isinstance(item, Delta) for token in item.drawn]
            assert len(drawn) == 5
        assert service.num_open == 0

    with_service(test)


def test_times_travel_as_ages() -> None:
    """A request's age at its front is its age here, whatever the clocks say."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        clock.advance(1000)
        await service.submit("one", generate(1), {})
        assert replica.requests[0].submitted_s == pytest.approx(clock.now() - 0.5)

    with_service(test)


def test_an_error_in_a_request_is_its_last_part() -> None:
    """An engine that refuses a request says so to its front, and takes the next one."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        await service.submit("one", generate(1, temperature=-3.0), {})
        (failed,) = await parts(service.events("one"))
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, PacelineError)
        await service.submit("one", generate(2), {})
        assert await until_freed(service.events("one"), 2)

    with_service(test)


def test_a_cancel_may_overtake_its_request() -> None:
    """A request that was cancelled before it came does not begin."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        await service.command("one", [messages.encode(Cancel(1))])
        await service.submit("one", generate(1), {})
        assert replica.requests == []

    with_service(test)


def test_a_front_that_died_leaves_no_request_behind() -> None:
    """The requests of a front that does not renew its session are cancelled, its reader ends, and another front stays."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        replica.hold()
        await service.submit("dead", generate(1, max_tokens=100_000), {})
        first = await service.renew("dead")
        reading = asyncio.ensure_future(_all(service.events("dead")))
        await asyncio.sleep(0)
        clock.advance(LEASE_S + 1)
        await service.submit("alive", generate(1), {})
        await service.renew("alive")
        replica.allow()
        found = await until_freed(service.events("alive"), 1)
        assert [
            item.chunk.finish_reason for item in found if isinstance(item, Delta) and item.is_last and item.chunk
        ] == [FinishReason.LENGTH]
        await reading
        while replica.num_open:
            await asyncio.sleep(0.001)
        assert await service.renew("dead") != first

    with_service(test)


def test_a_second_reader_ends_the_first() -> None:
    """A front that reads its events anew gets all parts from there on: the reader that it has left takes none."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        left = asyncio.ensure_future(_all(service.events("one")))
        await asyncio.sleep(0)
        frames = service.events("one")
        reading = asyncio.ensure_future(until_freed(frames, 1))
        await asyncio.sleep(0)
        await service.submit("one", generate(1), {})
        drawn = [token for item in await reading if isinstance(item, Delta) for token in item.drawn]
        assert len(drawn) == 5
        assert await left == []

    with_service(test)


def test_a_session_that_ends_while_an_adapter_loads_begins_no_request() -> None:
    """Nobody would read it, or cancel it: its front sees by the session's number that it has to send it again."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        may_load = threading.Event()
        replica.load_lora = lambda *_: may_load.wait(PATIENCE_S)  # type: ignore[method-assign,assignment]
        submitting = asyncio.ensure_future(service.submit("one", generate(1), {"pirate": "/pirate.gguf"}))
        await asyncio.sleep(0.01)
        await service.leave("one")
        may_load.set()
        assert await submitting == ("r", 1)
        assert await service.renew("one") == 2
        assert replica.requests == [] and service.num_open == 0

    with_service(test)


def test_a_cancelled_call_does_not_cut_off_the_adapter_that_others_wait_for() -> None:
    """It is loaded once, and the request behind it finds it loaded."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        may_load, num_loads = threading.Event(), []

        def load(name: str, path: str, *, in_place: bool = False) -> None:
            num_loads.append(name)
            assert may_load.wait(PATIENCE_S)
            replica.adapters = [*replica.adapters, name]

        replica.load_lora = load  # type: ignore[method-assign]
        first = asyncio.ensure_future(service.submit("one", generate(1), {"pirate": "/pirate.gguf"}))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(service.submit("one", generate(2), {"pirate": "/pirate.gguf"}))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        may_load.set()
        assert await second == ("r", 1)
        assert num_loads == ["pirate"]
        assert len(replica.requests) == 1

    with_service(test)


async def _all(frames: AsyncIterator[bytes]) -> list[bytes]:
    return [frame async for frame in frames]


def test_health_is_the_engines() -> None:
    """A replica with an ended engine is not healthy."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        await service.check_health()
        replica.close()
        with pytest.raises(EngineStopped, match="is ended"):
            await service.check_health()

    with_service(test)


def test_routers_that_miss_reports_catch_up() -> None:
    """A router that sees every third report, or begins late, soon knows the cached prefixes."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        often, late = Router(Random(1)), Router(Random(1))
        frames = service.events("one")
        for number in range(3 * SNAPSHOT_EVERY):
            prompt = bytes(97 + number % 26 for _ in range(130))
            await service.submit("one", generate(number, prompt), {})
            await until_freed(frames, number)
            report = msgspec.msgpack.decode(msgspec.msgpack.encode(await service.routing_stats()), type=ReplicaReport)
            for router, sees in ((often, number % 3 == 0), (late, number >= 2 * SNAPSHOT_EVERY)):
                if sees:
                    router.observe("r", report, float(number))
        last = hash_prompt(list(prompt), RequestOptions())
        for router in (often, late):
            assert router.rank(last, ["r"], 1e6)[0].num_cached == 128

    with_service(test)


def test_scaling_depends_on_what_came_since_the_last_look() -> None:
    """Waiting and latency are means of the moment; an idle replica reports none."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        await service.submit("one", generate(1, max_tokens=20), {})
        await until_freed(service.events("one"), 1)
        first = await service.scaling_stats()
        assert first["itl_s"] > 0
        assert await service.scaling_stats() == {"queue_s": 0.0, "itl_s": 0.0, "busy": 0.0}

    with_service(test)


def test_a_replica_whose_worker_does_not_respond_is_unhealthy_and_keeps_its_pressure() -> None:
    """Routers send requests elsewhere; the number of replicas does not follow from missing facts."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        await service.submit("one", generate(1, max_tokens=20), {})
        await until_freed(service.events("one"), 1)
        pressure = await service.scaling_stats()

        def fail(*_args: Any, **_options: Any) -> Any:
            raise WorkerUnresponsive("no reply within 10 s")

        replica.slots = fail  # type: ignore[method-assign]
        assert (await service.routing_stats()).state == "unhealthy"
        assert await service.scaling_stats() == pressure
        await service.check_health()

    with_service(test)


def test_an_engine_that_ends_does_not_end_requests() -> None:
    """Its fronts get no end that is none of theirs, but hear that the replica's engine is gone; routers hear so, too."""

    async def test(service: ReplicaService, replica: MemoryReplica, clock: ManualClock) -> None:
        before = await service.routing_stats()
        replica.hold()
        await service.submit("one", generate(1, max_tokens=100_000), {})
        frames = service.events("one")
        reading = asyncio.ensure_future(_all(frames))
        await asyncio.sleep(0)
        await asyncio.to_thread(replica.end)
        with pytest.raises(ReplicaEnded, match="engine of replica r has ended"):
            await reading
        for call in (service.submit("one", generate(2), {}), service.renew("one"), _all(service.events("one"))):
            with pytest.raises(ReplicaEnded) as raised:
                await call
            assert raised.value.replica_id == "r"
        stats = await service.routing_stats()
        assert (before.state, stats.state) == ("ready", "unhealthy")

    with_service(test)
