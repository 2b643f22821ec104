"""An engine's activity for observers: its log of ticks, its queue, the radix tree by tenant."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.engine_world import World

from paceline.engine import questions
from paceline.scheduling import telemetry
from paceline.scheduling.records import Answered, EngineActivity, Mark
from paceline.scheduling.telemetry import LEASE_S, MOST_TICKS, MOST_WAITING
from paceline.streaming import FinishReason

ENDLESS = 10**9


def observe(world: World, after: int = 0, max_nodes: int | None = None) -> EngineActivity:
    """Tick once, and return the engine's activity after it."""
    world.commands.queue.append(questions.activity.command(10**6, (after, max_nodes)))
    (found,) = replies(world)
    return found


def replies(world: World) -> list[EngineActivity]:
    """Tick once, and return the replies that come then."""
    world.num_ticks += 1
    events = world.engine.tick()
    world.take([event for event in events if not isinstance(event, Answered)])
    found = [event.result for event in events if isinstance(event, Answered)]
    return [item for item in found if isinstance(item, EngineActivity)]


def what(marks: tuple[Mark, ...]) -> list[tuple[str, int | None]]:
    return [(mark.what, mark.slot) for mark in marks]


def test_nothing_is_recorded_before_someone_asks() -> None:
    """The first reply has the current state, and later ticks come with later replies."""
    world = World(eos_every=ENDLESS)
    world.submit("abc", max_tokens=None)
    world.tick(5)
    first = observe(world)
    assert len(first.ticks) == 1  # of the question itself
    assert first.marks == ()
    assert first.slots.num_processing == 1
    world.tick(3)
    second = observe(world, first.last_number)
    assert [tick.record.index for tick in second.ticks] == [7, 8, 9, 10]
    assert observe(world, second.last_number).ticks[0].number == second.last_number + 1


def test_a_reply_may_be_of_a_later_tick() -> None:
    """Of the first that ends when it is due, or finds nothing to do; other questions do not wait for it."""
    world = World(eos_every=ENDLESS)
    key = world.submit("abc", max_tokens=None)
    now_s = world.clock.now()
    world.commands.queue.append(questions.activity.command(10**6, (0, None), now_s + 1.0))
    assert replies(world) == []
    assert len(observe(world).ticks) == 2
    world.clock.advance(1.0)
    (due,) = replies(world)
    assert (due.now_s >= now_s + 1.0, len(due.ticks)) == (True, 3)
    world.commands.queue.append(questions.activity.command(10**6, (0, None), world.clock.now() + 1.0))
    assert replies(world) == []
    world.cancel(key)
    (idle,) = replies(world)
    assert idle.slots.num_processing == 0
    assert replies(world) == []


def test_a_log_that_is_not_asked_for_ends() -> None:
    """After the lease nothing is kept; a later question begins it again, under the same start."""
    world = World(eos_every=ENDLESS)
    world.submit("abc", max_tokens=None)
    first = observe(world)
    world.clock.advance(LEASE_S + 1)
    world.tick(3)
    later = observe(world, first.last_number)
    assert (len(later.ticks), later.started_s) == (1, first.started_s)


def test_a_log_keeps_the_last_ticks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are until the next question, memory is bounded."""
    monkeypatch.setattr(telemetry, "LEASE_S", math.inf)
    world = World(eos_every=ENDLESS, num_cells=8000)
    world.submit("abc", max_tokens=None)
    observe(world)
    world.tick(MOST_TICKS + 50)
    found = observe(world)
    assert len(found.ticks) == MOST_TICKS
    assert found.ticks[-1].number == found.last_number


def test_a_failure_of_the_engine_begins_another_log() -> None:
    """Its start tells that the numbers are others."""
    world = World(eos_every=ENDLESS)
    world.submit("abc", max_tokens=None)
    before = observe(world)
    world.clock.advance(1.0)
    world.scheduler.reset()
    after = observe(world, before.last_number)
    assert after.started_s > before.started_s
    assert after.last_number < before.last_number + 1
    assert after.slots.num_processing == 0


def test_marks_say_the_fate_of_each_sequence() -> None:
    """A start, an end in a slot, a cancel in the queue, with its slot if it had one."""
    world = World(limits={"num_slots": 1}, eos_every=ENDLESS)
    observe(world)
    world.submit("abc", max_tokens=3)
    waiting = world.submit("def", max_tokens=3)
    world.cancel(waiting)
    world.run()
    marks = observe(world).marks
    assert what(marks) == [("cancelled", None), ("started", 0), ("ended", 0)]
    assert [mark.reason for mark in marks] == [FinishReason.CANCELLED, None, FinishReason.LENGTH]
    assert [mark.number for mark in marks] == sorted({mark.number for mark in marks})


def test_a_preempted_sequence_is_marked_and_waits() -> None:
    """Its slot counts how often it lost one, also after it has resumed."""
    world = World(limits={"num_slots": 2, "host_bytes": 0}, num_cells=40, eos_every=ENDLESS)
    observe(world)
    world.submit("a" * 12, max_tokens=24)
    world.submit("b" * 12, max_tokens=24)
    while not (waiting := observe(world).waiting):
        assert world.num_ticks < 200
    assert (waiting[0].is_preempted, waiting[0].num_generated > 0) == (True, True)
    assert ("preempted", 1) in what(observe(world).marks)
    while observe(world).waiting:
        assert world.num_ticks < 200
    (slot,) = [slot for slot in observe(world).slots if slot.is_processing]
    assert slot.num_preempted == 1


def test_a_sequence_that_waits_for_a_prefix_names_the_request_that_computes_it() -> None:
    """The second of two equal prompts starts when the first has been computed."""
    world = World(limits={"num_slots": 2, "chunk_size": 8, "n_batch": 8}, eos_every=ENDLESS)
    prompt = list(range(30, 130))
    first = world.submit(prompt, max_tokens=4)
    world.submit(prompt, max_tokens=4)
    (waiting,) = observe(world).waiting
    assert waiting.waits_for == first.request.key
    assert (waiting.num_prompt_tokens, waiting.is_preempted) == (100, False)


def test_a_long_queue_is_counted_and_not_listed() -> None:
    """Only the first sequences are records."""
    world = World(limits={"num_slots": 1}, eos_every=ENDLESS)
    for _ in range(MOST_WAITING + 9):
        world.submit("abc", max_tokens=None)
    found = observe(world)
    assert (len(found.waiting), found.num_waiting) == (MOST_WAITING, MOST_WAITING + 8)


def test_rows_of_ticks_and_slots_have_their_tenants() -> None:
    """If no request has a tenant none is named."""
    world = World(eos_every=ENDLESS)
    observe(world)
    world.submit("abc", max_tokens=None)
    assert observe(world).ticks[-1].tenants == ()
    world.submit("abc", max_tokens=None, tenant="blue")
    found = observe(world)
    assert found.ticks[-1].tenants == ("", "blue")
    assert [slot.tenant for slot in found.slots if slot.is_processing] == ["", "blue"]


def trees(world: World, max_nodes: int = 100) -> dict[str, Any]:
    found = observe(world, max_nodes=max_nodes).trees
    assert found is not None
    return {tree.tenant: tree for tree in found}


def test_the_tree_shows_which_sequences_share_a_prefix() -> None:
    """A node above two others, each behind its parent, with the sequences that have it."""
    world = World(eos_every=ENDLESS)
    head = list(range(30, 70))
    one = world.submit([*head, 1, 2], max_tokens=None)
    world.tick(2)
    two = world.submit([*head, 3, 4], max_tokens=None)
    world.tick(2)
    nodes = trees(world)[""].nodes
    keys = (one.request.key, two.request.key)
    assert nodes[0].parent is None
    assert (nodes[0].start, nodes[0].end) == (0, 40)
    assert {key for key, _ in nodes[0].running} == set(keys)
    assert {node.running for node in nodes[1:]} == {((key, 0),) for key in keys}
    assert all(node.parent == nodes[0].id and node.on_device for node in nodes[1:])


def test_nodes_keep_their_numbers() -> None:
    """So a picture of the tree can move instead of being made anew; the lower part of a split node keeps its own."""
    world = World(eos_every=ENDLESS)
    world.submit(list(range(30, 70)), max_tokens=None)
    (before,) = trees(world)[""].nodes
    world.submit([*range(30, 50), 1], max_tokens=None)
    world.tick(1)
    after = {node.id: node for node in trees(world)[""].nodes}
    assert after[before.id].end == 40
    assert after[before.id].start == 20
    assert len(after) == 3


def test_an_ended_sequence_is_a_cached_prefix_of_the_tree() -> None:
    """Nothing runs there any more."""
    world = World(eos_every=ENDLESS)
    world.submit(list(range(30, 70)), max_tokens=3)
    world.run()
    (node,) = trees(world)[""].nodes
    assert (node.running, node.num_cached, node.on_device) == ((), 1, True)


def test_each_tenant_has_a_tree_of_its_own() -> None:
    """Equal prompts of two tenants share nothing; a request without cache_prompt belongs to its tenant, too."""
    world = World(eos_every=ENDLESS)
    world.submit("abcdef", max_tokens=None)
    world.submit("abcdef", max_tokens=None, tenant="blue")
    world.submit("abcdef", max_tokens=None, tenant="blue", cache_prompt=False)
    world.tick(2)
    found = trees(world)
    assert {tenant: len(tree.nodes) for tenant, tree in found.items()} == {"": 1, "blue": 2}


@pytest.mark.parametrize("max_nodes", [0, 1, 2])
def test_a_tree_is_cut_to_as_many_nodes_of_each_tenant(max_nodes: int) -> None:
    """The deepest are left out, and all are counted."""
    world = World(eos_every=ENDLESS)
    for tenant in ("", "blue"):
        for last in (1, 2, 3):
            world.submit([*range(30, 70), last], max_tokens=1, tenant=tenant)
            world.run()
    for tree in trees(world, max_nodes).values():
        assert [node.start for node in tree.nodes] == [0, 40][:max_nodes]
        assert (tree.num_nodes, tree.num_tokens, tree.is_complete) == (4, 43, False)


def test_no_tree_is_looked_at_where_none_was_asked_for() -> None:
    """None, not an empty one."""
    world = World()
    assert observe(world).trees is None
    assert observe(world, max_nodes=5).trees == ()


def test_memory_is_that_of_running_sequences_and_cached_prefixes() -> None:
    """Together they are the cells in use."""
    world = World(eos_every=ENDLESS)
    world.submit(list(range(30, 70)), max_tokens=3)
    world.run()
    world.submit("uvwxyz", max_tokens=None)
    world.tick(2)
    found = observe(world)
    assert 0 < found.num_running_cells < found.num_cells
    assert found.num_free == world.scheduler.kv_cache.num_free


def test_memory_without_cells_has_no_number_of_free_ones() -> None:
    """None, as there is nothing to run out of."""
    assert observe(World(kind="recurrent")).num_free is None
