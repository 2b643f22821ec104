"""Serve's request router and its rankings of calls, on fake replicas."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paceline.cluster import DigestPublisher, PromptBlocks, ReplicaLoad, ReplicaReport, hash_prompt
from paceline.cluster.replica_calls import ReplicaEnded, ReplicaGone
from paceline.request import RequestOptions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, at its import
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'paceline[ray]'")
    from ray.exceptions import ActorDiedError, RayTaskError
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID

    from paceline.ray_serve.ray_calls import Membership, RayCalls, RoutedPrompt
    from paceline.ray_serve.request_router import PrefixRequestRouter

pytestmark = pytest.mark.ray

LOAD = ReplicaLoad(
    num_slots=4,
    num_running=0,
    num_waiting=0,
    waiting_tokens=0,
    free_cells=None,
    prefill_token_s=0.001,
    tick_s=0.01,
    slot_s=1.0,
)


@dataclass(frozen=True)
class _ReplicaId:
    unique_id: str


def replica(name: str, stats: ReplicaReport | bytes | None = None) -> Any:
    encoded = stats if isinstance(stats, bytes) or stats is None else msgspec.msgpack.encode(stats)
    return SimpleNamespace(
        replica_id=_ReplicaId(name),
        routing_stats={} if encoded is None else {"paceline": encoded},
        multiplexed_model_ids=set(),
        max_ongoing_requests=100,
        actor_id=SimpleNamespace(hex=lambda: f"actor-{name}"),
        get_queue_len=_no_queue,
    )


async def _no_queue(**_: Any) -> int:
    return 0


def cached(tokens: list[int], made_at: float) -> ReplicaReport:
    """Return a report of a replica that has a prompt cached."""
    from paceline.engine.prompts import prefix_hash
    from paceline.kv_cache import HashedPrefix, PrefixDigest

    prefixes = tuple(
        HashedPrefix(prefix_hash(tokens[:end], RequestOptions()), end) for end in range(64, len(tokens) + 1, 64)
    )
    update = DigestPublisher(1).publish(PrefixDigest(prefixes))
    return ReplicaReport(state="ready", load=LOAD, updates=(update,), made_at=made_at)


def with_router(test: Callable[[Any], Awaitable[None]]) -> None:
    """Run a test with a router on an event loop."""

    async def run() -> None:
        router = PrefixRequestRouter(
            DeploymentID(name=f"model-{time.monotonic_ns()}", app_name="app"), DeploymentHandleSource.REPLICA
        )
        router.initialize_state()
        await test(router)

    asyncio.run(run())


def pending(*args: Any) -> Any:
    return SimpleNamespace(args=list(args), metadata=SimpleNamespace(), routing_context=SimpleNamespace())


def names(ranks: list[list[Any]]) -> list[list[str]]:
    return [[item.replica_id.unique_id for item in rank] for rank in ranks]


def test_the_replica_that_has_the_prompt_comes_first() -> None:
    """Each replica is a rank by itself, the replica with the cached prefix before the others."""

    async def test(router: Any) -> None:
        tokens = list(range(256))
        replicas = [replica("a"), replica("b", cached(tokens, time.time())), replica("c")]
        router.update_replicas(replicas)
        prompt = RoutedPrompt(hash_prompt(tokens, RequestOptions()))
        ranks = names(await router.choose_replicas(replicas, pending(prompt)))
        assert ranks[0] == ["b"]
        assert sorted(ranks) == [["a"], ["b"], ["c"]]

    with_router(test)


def test_a_replica_to_avoid_is_left_out_where_there_is_another() -> None:
    """Avoided replicas are chosen if there is no other."""

    async def test(router: Any) -> None:
        replicas = [replica("a"), replica("b")]
        router.update_replicas(replicas)
        prompt = RoutedPrompt(PromptBlocks(10), avoid=frozenset({"a"}))
        assert names(await router.choose_replicas(replicas, pending(prompt))) == [["b"]]
        assert names(await router.choose_replicas(replicas[:1], pending(prompt))) == [["a"]]

    with_router(test)


def test_reports_that_make_no_sense_are_left_out() -> None:
    """A replica of another version is routed to by the reports of the others."""

    async def test(router: Any) -> None:
        replicas = [replica("a", b"\xc1"), replica("b", msgspec.msgpack.encode({"state": "ready"}))]
        router.update_replicas(replicas)
        ranks = names(await router.choose_replicas(replicas, pending(RoutedPrompt(PromptBlocks(10)))))
        assert sorted(ranks) == [["a"], ["b"]]

    with_router(test)


def test_other_calls_are_serves_own_business() -> None:
    """A call without a prompt may go to any replica."""

    async def test(router: Any) -> None:
        replicas = [replica("a"), replica("b")]
        router.update_replicas(replicas)
        assert names(await router.choose_replicas(replicas, pending())) == [["a", "b"]]
        assert names(await router.choose_replicas(replicas)) == [["a", "b"]]

    with_router(test)


def test_the_engine_hears_of_replicas_that_come_and_go() -> None:
    """Listeners get the set whenever it is another one; a replica that left is found until it is forgotten."""
    membership, heard = Membership(), []
    membership.listen(heard.append)
    first, second = replica("a"), replica("b")
    membership.set({"a": first})
    membership.set({"a": first})
    membership.set({"a": first, "b": second})
    membership.remove("a")
    assert heard == [frozenset(), {"a"}, {"a", "b"}, {"b"}]
    assert membership.find("a") is first
    assert membership.name_of_actor("actor-a") == "a"
    membership.forget("a")
    membership.forget("b")  # it takes requests: it stays
    assert (membership.find("a"), membership.find("b")) == (None, second)
    membership.unlisten(heard.append)
    membership.set({})
    assert len(heard) == 4


def test_listeners_hear_the_newest_last() -> None:
    """A set that is reported during a call of a listener comes after it; a second `unlisten` does nothing."""
    membership, heard = Membership(), []

    def listen(names: frozenset[str]) -> None:
        if names == {"a"}:
            other = threading.Thread(target=membership.set, args=({"a": replica("a"), "b": replica("b")},))
            other.start()
            other.join(0.05)  # it waits for this call
            others.append(other)
        heard.append(names)

    others: list[threading.Thread] = []
    membership.set({"a": replica("a")})
    membership.listen(listen)
    for other in others:
        other.join()
    assert heard == [{"a"}, {"a", "b"}]
    membership.unlisten(listen)
    membership.unlisten(listen)


def test_the_first_call_is_made_until_one_is_returned() -> None:
    """A replica that is being stopped cancels the call that finds the replicas, and the next one finds them."""

    class Handle:
        app_name, deployment_name, num_calls = "app", f"model-{time.monotonic_ns()}", 0

        def options(self, **_: Any) -> Handle:
            return self

        async def remote(self, _: Any) -> str:
            self.num_calls += 1
            if self.num_calls == 1:
                raise asyncio.CancelledError
            return "a"

    async def run() -> None:
        handle = Handle()
        calls, heard = RayCalls(handle), asyncio.Event()  # type: ignore[arg-type]
        calls.watch(lambda _: heard.set())
        async with asyncio.timeout(10):
            await heard.wait()
        assert handle.num_calls == 2
        await calls.aclose()

    asyncio.run(run())


def test_what_a_replica_says_of_itself_is_known_here() -> None:
    """A replica's own `ReplicaEnded` comes as it is; that of a dead actor has the replica's name."""

    async def fail(error: BaseException) -> None:
        raise error

    async def run() -> None:
        handle = SimpleNamespace(app_name="app", deployment_name=f"model-{time.monotonic_ns()}")
        handle.options = lambda **_: handle
        calls: Any = RayCalls(handle)  # type: ignore[arg-type]
        calls._membership.set({"a": replica("a")})
        own = pickle.loads(pickle.dumps(ReplicaEnded("its engine has ended", "a")))
        with pytest.raises(ReplicaEnded, match="its engine") as raised:
            await calls._replied(fail(RayTaskError("submit", "traceback", own).as_instanceof_cause()))
        assert (type(raised.value), raised.value.replica_id) == (ReplicaEnded, "a")
        died = ActorDiedError()
        died.actor_id = "actor-a"
        with pytest.raises(ReplicaGone) as gone:
            await calls._replied(fail(died))
        assert gone.value.replica_id == "a"
        await calls.aclose()

    asyncio.run(run())
