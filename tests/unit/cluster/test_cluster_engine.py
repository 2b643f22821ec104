"""An engine over replicas: streams survive replicas, each token once, and every request ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.cluster_world import PATIENCE_S, ClusterWorld
from tests.polling import wait_until

from paceline.cluster.cluster_engine import ClusterEngine
from paceline.cluster.replica_calls import ReplicaGone
from paceline.engine import questions
from paceline.engine.adapters import LoraAdapter
from paceline.errors import Aborted, EngineDied, EngineStopped, QueueFull, Unsupported
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, SlotsSnapshot
from paceline.streaming import FinishReason, StreamChannel, StreamChunk
from paceline.testing.fake_backend import FakeBackend
from paceline.testing.fake_engine_client import FakeEngineClient, FakeFrontModel


@contextmanager
def cluster(*names: str, **options: Any) -> Iterator[tuple[ClusterWorld, ClusterEngine]]:
    world = ClusterWorld(*names)
    engine = world.engine(**options)
    wait_until(lambda: len(engine.replicas) == len(names))
    try:
        yield world, engine
    finally:
        engine.close()
        world.close()


def submit(engine: ClusterEngine, prompt: str, max_tokens: int = 20, **options: Any) -> StreamChannel:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7, n=options.pop("n", 1))
    return engine.accept(engine.prepare(prompt, params, RequestOptions(**options)))


def read(channel: StreamChannel) -> list[StreamChunk]:
    """Return all chunks; each token once, and one end."""
    chunks: list[StreamChunk] = []
    reader = threading.Thread(target=lambda: chunks.extend(channel), daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert not reader.is_alive(), "the stream has no end"
    for choice in {chunk.choice for chunk in chunks}:
        index = 0
        for chunk in (chunk for chunk in chunks if chunk.choice == choice):
            assert chunk.index == index
            index += len(chunk.token_ids)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return chunks


def tokens(chunks: list[StreamChunk], choice: int = 0) -> list[int]:
    return [token for chunk in chunks if chunk.choice == choice for token in chunk.token_ids]


def alone(prompt: str, max_tokens: int) -> list[int]:
    """Return a single engine's tokens."""
    engine = FakeEngineClient(backend=FakeBackend(eos_every=10**9))
    try:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=7)
        return tokens(list(engine.accept(engine.prepare(prompt, params, RequestOptions()))))
    finally:
        engine.close()


def test_requests_run_on_all_replicas_and_give_what_one_engine_gives() -> None:
    """Requests are spread over the replicas, and each gets the tokens of a single engine."""
    with cluster("a", "b") as (world, engine):
        for replica in world.replicas.values():
            replica.hold()
        channels = [submit(engine, f"prompt {index}") for index in range(4)]
        wait_until(lambda: all(replica.num_open == 2 for replica in world.replicas.values()))
        for replica in world.replicas.values():
            replica.allow()
        assert [tokens(read(channel)) for channel in channels] == [alone(f"prompt {index}", 20) for index in range(4)]


def test_a_stream_goes_on_where_its_replica_died() -> None:
    """A replica that dies in the middle of a stream costs no token, and none comes twice."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        world.replicas["a"].hold()
        world.replicas["a"].allow(8)
        channel = submit(engine, "a fox")
        wait_until(lambda: channel.num_buffered >= 5)
        world.kill("a")
        assert tokens(read(channel)) == alone("a fox", 20)
        states = world.replicas["b"].requests[0].states  # type: ignore[union-attr]
        assert states[0] is not None and len(states[0].token_ids) >= 5


def test_a_drained_replica_hands_its_streams_over() -> None:
    """A replica that is drained loses its streams to another one at once, and lets their slots go."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        world.replicas["a"].hold()
        world.replicas["a"].allow(8)
        channel = submit(engine, "a hare")
        wait_until(lambda: channel.num_buffered >= 5)
        world.drain("a")
        assert tokens(read(channel)) == alone("a hare", 20)
        world.replicas["a"].allow()
        wait_until(lambda: world.replicas["a"].num_open == 0)
        assert len(world.replicas["b"].requests) == 1


def test_the_only_replica_goes_on_while_it_is_drained() -> None:
    """A replica that is drained while there is no other one keeps its streams, until there is one."""
    with cluster("a") as (world, engine):
        world.replicas["a"].hold()
        world.replicas["a"].allow(8)
        channel = submit(engine, "a wolf")
        wait_until(lambda: channel.num_buffered >= 5)
        world.drain("a")
        world.add("b")
        assert tokens(read(channel)) == alone("a wolf", 20)
        assert len(world.replicas["b"].requests) == 1


def test_a_request_waits_for_the_first_replica() -> None:
    """Requests that come while there is no replica run on the next one."""
    with cluster("a") as (world, engine):
        world.kill("a")
        channel = submit(engine, "a bear")
        world.add("b")
        assert tokens(read(channel)) == alone("a bear", 20)


def test_choices_go_on_where_they_were() -> None:
    """All choices of a request survive the death of its replica."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        expected = [tokens(read(submit(engine, "three", n=3)), choice) for choice in range(3)]
        world.replicas["a"].hold()
        world.replicas["a"].allow(9)
        channel = submit(engine, "three", n=3)
        wait_until(lambda: channel.num_buffered >= 6)
        world.kill("a")
        chunks = read(channel)
        assert [tokens(chunks, choice) for choice in range(3)] == expected


def test_a_cancel_frees_the_slot_where_it_is() -> None:
    """A caller that leaves its stream frees the slot of the replica that has it."""
    with cluster("a", "b") as (world, engine):
        channel = submit(engine, "endless", max_tokens=100_000)
        wait_until(lambda: channel.num_buffered >= 3)
        channel.cancel()
        assert read(channel)[-1].finish_reason is FinishReason.CANCELLED
        wait_until(lambda: all(replica.num_open == 0 for replica in world.replicas.values()))
        wait_until(lambda: engine.num_open == 0)


def test_a_cancel_ends_a_request_without_a_replica() -> None:
    """A request that waits for a replica ends at once when it is cancelled."""
    with cluster("a") as (world, engine):
        world.kill("a")
        channel = submit(engine, "unplaced")
        channel.cancel()
        assert read(channel)[-1].finish_reason is FinishReason.CANCELLED


def test_a_deadline_counts_while_there_is_no_replica() -> None:
    """A request's time runs while it waits for a replica, and it ends with DEADLINE."""
    with cluster("a") as (world, engine):
        world.kill("a")
        chunks = read(submit(engine, "late", timeout_s=0.05))
        assert chunks[-1].finish_reason is FinishReason.DEADLINE


def test_a_deadline_ends_a_request_of_a_replica_that_hangs() -> None:
    """A replica that does not end a request in time does not keep its caller."""
    with cluster("a") as (world, engine):
        world.replicas["a"].hold()
        chunks = read(submit(engine, "stuck", timeout_s=0.05))
        assert chunks[-1].finish_reason is FinishReason.DEADLINE


def test_a_request_that_replicas_die_of_ends() -> None:
    """A request on which three replicas died in a row ends with an error; others that were there with it go on."""
    with cluster("a", "b", "c", "d") as (world, engine):
        for name in ("a", "b", "c"):
            world.replicas[name].hold()
        world.preferred = ("a",)
        guilty, innocent = submit(engine, "guilty"), submit(engine, "innocent")
        for name, following in (("a", "b"), ("b", "c"), ("c", "d")):
            arrive(world, engine, name)
            world.preferred = (following,)
            world.kill(name)
        last = read(guilty)[-1]
        assert isinstance(last.error, EngineDied)
        assert "3 replicas died" in str(last.error)
        assert tokens(read(innocent)) == alone("innocent", 20)
        assert tokens(read(submit(engine, "after"))) == alone("after", 20)


def arrive(world: ClusterWorld, engine: ClusterEngine, name: str) -> None:
    """Wait until the guilty request is on a replica, as far as the engine knows."""
    requests = engine._dispatcher._requests

    def is_there() -> bool:
        there = [requests._replay_log.find(item.key) for item in requests._placements.on(name)]
        return any(find is not None and find.prompt == list(b"guilty") for find in there)

    wait_until(is_there)


def test_a_replica_that_dies_while_it_takes_a_request_in_costs_nothing() -> None:
    """A request whose submission was the last call of a replica goes on elsewhere."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        world.dies_of = [("a", "submit")]
        assert tokens(read(submit(engine, "first"))) == alone("first", 20)


def test_a_full_queue_refuses_at_once() -> None:
    """The bound of the queue is that of all replicas together, and a request that finds no room is refused."""
    with cluster("a", "b", max_queue=2) as (world, engine):
        for replica in world.replicas.values():
            replica.hold()
        room = 2 * (world.replicas["a"].limits.num_slots + 2)
        channels = [submit(engine, str(index)) for index in range(room)]
        with pytest.raises(QueueFull):
            submit(engine, "one too many")
        for replica in world.replicas.values():
            replica.allow()
        assert all(read(channel) for channel in channels)
        assert tokens(read(submit(engine, "again"))) == alone("again", 20)


def test_a_closed_engine_ends_its_streams() -> None:
    """Closing ends open requests with SHUTDOWN."""
    with cluster("a") as (world, engine):
        world.replicas["a"].hold()
        channel = submit(engine, "long")
        closing = threading.Thread(target=engine.close)
        closing.start()
        assert read(channel)[-1].finish_reason is FinishReason.SHUTDOWN
        closing.join(PATIENCE_S)
        assert not closing.is_alive()


def test_draining_lets_streams_finish() -> None:
    """Closing with drain waits for open streams."""
    with cluster("a") as (_, engine):
        channel = submit(engine, "whole")
        engine.close(drain=True)
        assert tokens(read(channel)) == alone("whole", 20)


def test_slots_and_metrics_match_all_replicas() -> None:
    """Slots are listed in a row, and counters are sums over the replicas."""
    with cluster("a", "b") as (world, engine):
        for index in range(4):
            read(submit(engine, f"x{index}"))
        assert len(engine.slots()) == sum(replica.limits.num_slots for replica in world.replicas.values())
        assert engine.config.num_slots == len(engine.slots())
        assert set(engine.replica_slots()) == {"a", "b"}
        assert len(engine.ask_activity().result(PATIENCE_S).slots) == len(engine.slots())
        stats = engine.stats()
        assert stats.completed == 4
        assert stats.number("paceline_tokens_generated_total") == 80
        assert set(engine.replica_stats()) == {"a", "b"}


def test_a_replica_that_goes_while_metrics_are_read_counts_once() -> None:
    """Its last report counts; a reply that came just before it went is not added to it."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        read(submit(engine, "counted"))
        assert engine.stats().number("paceline_tokens_generated_total") == 20
        gate = world.late_in["b", "ask"] = threading.Event()
        replied = world.replied_in["a", "ask"] = threading.Event()
        reader = threading.Thread(target=engine.stats, daemon=True)
        reader.start()
        assert replied.wait(PATIENCE_S)
        world.kill("a")
        wait_until(lambda: engine.replicas == ("b",))
        gate.set()
        reader.join(PATIENCE_S)
        assert engine.stats().number("paceline_tokens_generated_total") == 20


def test_embeddings_survive_a_replica() -> None:
    """Texts to embed get their vectors from another replica if theirs died."""
    with cluster("a", "b") as (world, engine):
        expected = engine.embed(["one", "two"], None, RequestOptions()).result(PATIENCE_S)
        world.preferred = ("a",)
        world.dies_of = [("a", "submit")]
        found = engine.embed(["one", "two"], None, RequestOptions()).result(PATIENCE_S)
        assert [list(item) for item in found] == [list(item) for item in expected]


def test_questions_to_one_engine_are_refused() -> None:
    """The error says why or names the question, and requests go on."""
    with cluster("a") as (_, engine):
        with pytest.raises(Unsupported, match="files of one machine"):
            engine.save_prefix("x", "text", RequestOptions())
        with pytest.raises(Unsupported, match="prefix digest for each of its replicas"):
            engine.ask(questions.digest, 1, None)
        with pytest.raises(
            Unsupported, match="a cluster does not reply to free_adapter; ask the engines of its replicas"
        ):
            engine.ask(questions.free_adapter, "a")
        assert read(submit(engine, "fine"))


def test_events_are_read_on_after_a_stream_of_them_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of events ends after some frames, and the next begins at its end."""
    monkeypatch.setattr("paceline.cluster.replica_service.STREAM_FRAMES", 3)
    with cluster("a") as (_, engine):
        assert tokens(read(submit(engine, "a long one", max_tokens=200))) == alone("a long one", 200)


def test_a_replica_that_is_gone_is_forgotten() -> None:
    """Records of calls to a dead or drained replica are dropped."""
    with cluster("a", "b", "c") as (world, engine):
        world.kill("a")
        world.drain("b")
        assert read(submit(engine, "on the last one"))
        wait_until(lambda: set(world.forgotten) == {"a", "b"})


def test_waiting_for_a_first_replica_can_be_cancelled() -> None:
    """An engine that finds no replica ends when waiting is cancelled."""
    world, cancel = ClusterWorld(), threading.Event()
    threading.Timer(0.05, cancel.set).start()
    with pytest.raises(Aborted):
        ClusterEngine([], {}, world._make_calls, cancel=cancel, front_model=FakeFrontModel())


def test_a_replica_that_began_later_loads_the_adapters_of_its_requests() -> None:
    """An adapter that was loaded by all replicas is there for requests on the next one, too."""
    with cluster("a") as (world, engine):
        engine._adapters.add(LoraAdapter("pirate", "/somewhere/pirate.gguf", "pirate"))
        world.add("b")
        world.kill("a")
        chunks = read(submit(engine, "ahoy", lora={"pirate": 1.0}))
        assert world.replicas["b"].adapters == ["pirate"]
        assert "pirate" in str(chunks[-1].error)  # which the fake backend of this replica does not know


def test_a_replica_that_takes_requests_again_is_one_of_them() -> None:
    """A replica that was to be drained, and is not after all, counts again and gets requests, while it has some and after."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        world.replicas["a"].hold()
        held = submit(engine, "held")
        wait_until(lambda: world.replicas["a"].num_open == 1)
        world.drain("a")
        wait_until(lambda: set(engine.replicas) == {"b"})
        world.take_back("a")
        wait_until(lambda: set(engine.replicas) == {"a", "b"})
        world.replicas["a"].allow()
        assert tokens(read(held)) == alone("held", 20)
        num_before = len(world.replicas["a"].requests)
        assert tokens(read(submit(engine, "again"))) == alone("again", 20)
        assert len(world.replicas["a"].requests) == num_before + 1


@pytest.mark.parametrize("how", ["hangs", "raises"])
def test_a_replica_that_cannot_report_hides_no_other(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and metrics of the others are shown, soon."""
    monkeypatch.setattr("paceline.cluster.cluster_engine._STATE_S", 0.2)
    with cluster("a", "b") as (world, engine):
        if how == "hangs":
            world.hangs_in.add(("a", "ask"))
        else:
            world.fails_in["a", "ask"] = ValueError("ask")
        assert set(engine.replica_slots()) == {"b"}
        assert len(engine.slots()) == world.replicas["b"].limits.num_slots
        assert set(engine.replica_stats()) == {"b"}
        assert len(engine.ask_activity().result(PATIENCE_S).slots) == world.replicas["b"].limits.num_slots
        assert tokens(read(submit(engine, "goes on"))) == alone("goes on", 20)


def test_slots_of_replicas_have_keys_of_their_own() -> None:
    """Two replicas count their requests alike; together they are shown apart, with the waiting requests."""
    with cluster("a", "b") as (world, engine):
        num_slots = world.replicas["a"].limits.num_slots
        channels = []
        for name, num_waiting in (("a", 1), ("b", 2)):
            world.preferred = (name,)
            world.replicas[name].pass_s = 0.005  # none is at the end of its context before all are there
            count = num_slots + num_waiting
            channels += [submit(engine, f"{name} {index}", max_tokens=100_000) for index in range(count)]
            wait_until(lambda: world.replicas[name].num_open == count)
        seen: list[SlotsSnapshot] = []

        def are_all_taken() -> bool:
            seen[:] = [engine.ask_slots().result(PATIENCE_S)]
            return (seen[0].num_processing, seen[0].num_waiting) == (2 * num_slots, 3)

        wait_until(are_all_taken)
        assert len({event.key for event in seen[0]}) == 2 * num_slots
        for channel in channels:
            channel.cancel()
        assert all(read(channel)[-1].finish_reason is FinishReason.CANCELLED for channel in channels)


def test_waiting_tokens_are_bounded_over_all_replicas() -> None:
    """The bound is that of one replica times their number, and each of several fronts has its share."""
    with cluster("a", "b", max_queue_tokens=10) as (world, engine):
        for replica in world.replicas.values():
            replica.hold()
        assert engine.config.max_queue_tokens == 20
        channels = [submit(engine, "12345678") for _ in range(2)]
        with pytest.raises(QueueFull, match=r"16 prompt tokens are queued.*max_queue_tokens \(20\)"):
            submit(engine, "12345")
        for replica in world.replicas.values():
            replica.allow()
        assert all(read(channel) for channel in channels)


def test_a_replica_that_is_lost_and_back_ends_what_it_had() -> None:
    """A replica that could not be read for a moment does not compute requests that go on elsewhere."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        for replica in world.replicas.values():
            replica.hold()
        channel = submit(engine, "moved", max_tokens=100_000)
        wait_until(lambda: world.replicas["a"].num_open == 1)
        world.preferred = ("b",)
        world.break_events("a")
        wait_until(lambda: world.replicas["b"].num_open == 1)
        wait_until(lambda: set(engine.replicas) == {"a", "b"})
        world.replicas["a"].allow()
        wait_until(lambda: world.replicas["a"].num_open == 0)
        assert world.replicas["a"].num_passes < 1000
        assert channel.finish_reason is None
        world.replicas["b"].allow()
        channel.cancel()
        assert read(channel)[-1].finish_reason is FinishReason.CANCELLED


def test_a_request_that_no_replica_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries are bounded, and the error has the last reason."""
    monkeypatch.setattr("paceline.cluster.routed_requests._MAX_TRIES", 3)
    with cluster("a") as (world, engine):
        world.fails_in["a", "submit"] = ReplicaGone("the network is down")
        last = read(submit(engine, "nowhere"))[-1]
        assert "in 3 tries, so try again later; the last one: the network is down" in str(last.error)
        world.fails_in.clear()
        assert tokens(read(submit(engine, "after"))) == alone("after", 20)


def test_a_stream_goes_on_where_the_engine_of_its_replica_ended() -> None:
    """An engine that ends by itself, in a replica that is there still, ends no stream: another replica continues it."""
    with cluster("a", "b") as (world, engine):
        world.preferred = ("a",)
        world.replicas["a"].hold()
        world.replicas["a"].allow(8)
        channel = submit(engine, "a lynx", max_tokens=1000)
        wait_until(lambda: channel.num_buffered >= 5)
        world.replicas["a"].end()
        assert tokens(read(channel)) == alone("a lynx", 1000)
        wait_until(lambda: engine.replicas == ("b",))
        assert tokens(read(submit(engine, "the next"))) == alone(
            "the next", 20
        )  # though the first is preferred, as before


def test_a_request_does_not_end_since_the_only_engine_has() -> None:
    """A request that comes to a replica with a just ended engine waits for another replica, and is not suspected."""
    with cluster("a") as (world, engine):
        world.replicas["a"].end()
        channel = submit(engine, "patient")
        world.add("b")
        assert tokens(read(channel)) == alone("patient", 20)
        assert not engine._dispatcher._requests._suspects._num_deaths


def test_a_question_ends_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question to a replica that does not reply is over when the engine is closed."""
    monkeypatch.setattr("paceline.cluster.cluster_engine._STATE_S", 3600.0)
    with cluster("a") as (world, engine):
        world.hangs_in.add(("a", "ask"))
        asked = engine.ask_slots()
        engine.close()
        with pytest.raises(EngineStopped, match="shut down"):
            asked.result(PATIENCE_S)
        with pytest.raises(EngineStopped, match="shut down"):
            engine.ask_slots()
        assert engine.stats().completed == 0


def test_a_cancel_reaches_a_request_on_its_way_to_a_replica_that_leaves() -> None:
    """A request that a replica has not confirmed is cancelled there, though it takes no more, and goes on with another one."""
    with cluster("a") as (world, engine):
        world.replicas["a"].hold()
        world.replicas["a"].pass_s = 0.002  # so that it is there for long
        stays = submit(engine, "stays", max_tokens=100_000)
        wait_until(lambda: bool(engine._dispatcher._requests._placements.on("a")))
        world.late_in["a", "submit"] = threading.Event()
        channel = submit(engine, "endless", max_tokens=100_000)
        wait_until(lambda: world.replicas["a"].num_open == 2)
        world.drain("a")
        wait_until(lambda: engine.replicas == ())
        channel.cancel()
        assert read(channel)[-1].finish_reason is FinishReason.CANCELLED
        world.replicas["a"].allow()
        wait_until(lambda: world.replicas["a"].num_open == 1)
        assert stays.finish_reason is None
        assert world.replicas["a"].num_passes < 1000
        stays.cancel()
        wait_until(lambda: world.replicas["a"].num_open == 0)


def test_a_cancel_reaches_a_replica_that_is_connected_later() -> None:
    """A request that comes to a replica long after it was given up, in another session, does not run there."""
    with cluster("a", "b") as (world, engine):
        gate = world.held_in["a", "submit"] = threading.Event()
        world.preferred = ("a",)
        channel = submit(engine, "endless", max_tokens=100_000)
        wait_until(lambda: bool(engine._dispatcher._requests._sending))
        channel.cancel()
        assert read(channel)[-1].finish_reason is FinishReason.CANCELLED
        world.break_events("a")
        wait_until(lambda: engine.replicas == ("b",))
        wait_until(lambda: set(engine.replicas) == {"a", "b"})
        wait_until(lambda: any(session.cancelled for session in world._known._services["a"]._sessions.values()))
        gate.set()
        del world.held_in["a", "submit"]
        assert tokens(read(submit(engine, "after"))) == alone("after", 20)
        assert [bytes(request.prompts[0]) for request in world.replicas["a"].requests] == [b"after"]


def test_what_changes_while_a_request_is_on_its_way_counts() -> None:
    """A replica gets the interval that a reader set before the replica had confirmed the request."""
    with cluster("a") as (world, engine):
        gate = world.late_in["a", "submit"] = threading.Event()
        world.replicas["a"].hold()
        channel = submit(engine, "in sevens")
        wait_until(lambda: world.replicas["a"].num_open == 1)
        channel.interval = 7
        requests = engine._dispatcher._requests
        wait_until(lambda: all(requests._replay_log.find(key).options.interval == 7 for key in requests._replay_log))
        gate.set()
        wait_until(lambda: not requests._sending and not requests._commands._tasks)
        world.replicas["a"].allow()
        read(channel)  # which may join chunks
        deltas = [event for event in world.replicas["a"].events if isinstance(event, Delta)]
        counts = [len(delta.chunk.token_ids) for delta in deltas if delta.chunk is not None and delta.chunk.token_ids]
        assert counts in ([7, 7, 6], [1, 7, 7, 5])  # the first token may have been drawn before


def test_a_replica_that_was_lost_before_it_left_is_forgotten() -> None:
    """Nothing is kept of a replica that could not be followed any more, and then was no member."""
    with cluster("a", "b") as (world, engine):
        world.fails_in["a", "leave"] = ReplicaGone("unreachable", "a")
        world.break_events("a")
        wait_until(lambda: engine.replicas == ("b",))
        connections = engine._dispatcher._connections
        world.kill("a")
        wait_until(lambda: "a" in world.forgotten)
        wait_until(lambda: not connections._lost and set(connections._tasks) == {"b"})
        assert tokens(read(submit(engine, "goes on"))) == alone("goes on", 20)
