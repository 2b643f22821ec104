"""Tenants share slots, embedding passes and the encoder, however many requests each has sent."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine_world import World

from paceline.observability.metrics import Instrument
from paceline.scheduling.admission import Slots, WaitingQueue
from paceline.scheduling.fair_shares import FairShares
from paceline.scheduling.records import EndRecord

STRATEGIES = ("paced", "balanced", "decode_maximal", "prefill_priority")


class Starts(Instrument):
    """The tenants of requests in the order in which these got slots, and in the order in which they ended."""

    def __init__(self) -> None:
        self.tenants: list[str] = []
        self.ended: list[str] = []
        self.world: World | None = None

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        assert self.world is not None
        self.tenants.append(self.world.outcomes[key].request.options.tenant)

    def request_ended(self, record: EndRecord) -> None:
        assert self.world is not None
        self.ended.append(self.world.outcomes[record.key].request.options.tenant)


def world_of(starts: Starts, **options: Any) -> World:
    world = starts.world = World(instruments=(starts,), **options)
    return world


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_of_another_tenant_gets_a_slot_within_one_turn(strategy: str) -> None:
    """Forty requests of one tenant came first, and none more is served before the request of another tenant."""
    starts = Starts()
    world = world_of(starts, strategy=strategy, limits={"num_slots": 2})
    for number in range(40):
        world.submit(f"a{number:02}", max_tokens=3, tenant="a")
    world.tick()
    world.submit("b", max_tokens=3, tenant="b")
    world.run()
    assert starts.tenants[2] == "b"
    assert Counter(starts.tenants) == {"a": 41, "b": 1}  # one of them gave its slot up and started again


def test_tenants_with_equally_many_running_sequences_take_turns() -> None:
    """With one slot each tenant has one request served before another has its second; priority counts within a tenant."""
    starts = Starts()
    world = world_of(starts, limits={"num_slots": 1})
    for tenant, number in (("a", 4), ("b", 2), ("", 3)):
        for _ in range(number):
            world.submit("hello", max_tokens=2, tenant=tenant, priority=9 if tenant == "a" else 0)
    world.run()
    assert starts.tenants == ["a", "b", "", "a", "b", "", "a", "", "a"]


def test_without_tenants_priority_and_arrival_decide() -> None:
    """One tenant's requests come by priority, then by arrival, as requests without a tenant do."""
    for tenant in ("", "a"):
        world = World(limits={"num_slots": 1})
        outcomes = [world.submit("hello", max_tokens=2, tenant=tenant, priority=case) for case in (0, 2, 1, 2)]
        world.run()
        starts = [outcome.request.progress.started_s or 0 for outcome in outcomes]
        assert sorted(range(4), key=lambda index: starts[index]) == [1, 3, 2, 0]


def test_the_tenant_with_most_sequences_is_preempted() -> None:
    """If cells are short, the youngest sequence of the tenant with most is preempted, not the only sequence of another tenant."""
    world = World(limits={"num_slots": 4}, num_cells=60)
    outcomes = [world.submit("abcdef", max_tokens=20, ignore_eos=True, tenant="a") for _ in range(3)]
    world.tick()
    other = world.submit("ghijkl", max_tokens=20, ignore_eos=True, tenant="b")
    world.run()
    preempted = [item.request.sequences[0].num_preempted for item in (*outcomes, other)]
    assert sum(preempted) > 0
    assert preempted[3] == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_priority_of_a_tenant_does_not_hold_up_the_prompt_of_another(strategy: str) -> None:
    """While one tenant sends long prompts of the highest priority all the time, another tenant's prompt is computed."""
    starts = Starts()
    limits = {"num_slots": 2, "n_batch": 16, "chunk_size": 16, "max_positions": 200}
    world = world_of(starts, strategy=strategy, limits=limits, num_cells=600)
    for number in range(30):
        world.submit(f"{number:02}" * 60, max_tokens=1, tenant="a", priority=1_000_000, cache_prompt=False)
    world.tick()
    world.submit("b" * 100, max_tokens=1, tenant="b")
    world.run()
    assert starts.ended.index("b") <= 6


@pytest.mark.parametrize("other", [None, "b"])
def test_prompts_of_a_tenant_wait_for_a_prefix_that_another_one_of_it_computes(other: str | None) -> None:
    """Three prompts with the same beginning are computed once, with and without another running tenant."""
    world = World(limits={"num_slots": 4, "n_batch": 32, "chunk_size": 32}, num_cells=600)
    if other is not None:
        world.submit("hello", max_tokens=40, ignore_eos=True, tenant=other)
        world.tick()
    outcomes = []
    for _ in range(3):
        outcomes.append(world.submit("abcdefghijklmnop" * 6, max_tokens=4, tenant="a", priority=3))
        world.clock.advance(0.01)
    world.run()
    assert [outcome.request.progress.num_cached for outcome in outcomes] == [0, 95, 95]


def test_embedding_passes_alternate_between_tenants() -> None:
    """One text of another tenant does not wait for the thousand texts of the first."""
    world = World(limits={"embed_texts": 4})
    many = world.submit_embedding(["hello"] * 100, tenant="a")
    more = world.submit_embedding(["hello"] * 4, tenant="a")
    one = world.submit_embedding(["hello"], tenant="b")
    for _ in range(3):
        world.tick()
    assert set(world.embedded) == {one}
    world.run()
    assert set(world.embedded) == {many, more, one}


@settings(deadline=None, max_examples=100)
@given(
    num_slots=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 4)), min_size=1, max_size=60),
)
def test_a_tenant_without_a_slot_is_passed_over_at_most_once_by_each_other(
    num_slots: int, steps: list[tuple[str, int]]
) -> None:
    """Requests come and end in any order; the sequence that gets a slot is of a tenant with the fewest, in turn."""
    world, queue, slots = World(), WaitingQueue(), Slots(num_slots, FairShares(100))
    turns: dict[str, Counter[str]] = {}  # of other tenants, while a tenant waits without a slot
    for number, (tenant, action) in enumerate(steps):
        if action < 3:
            request = world.request("hello", tenant=tenant)
            sequence = request.sequences[0]
            sequence.request = request
            sequence.key = sequence.order = number
            queue.add(sequence)
        elif slots.running:
            slots.release(slots.running[number % len(slots.running)])
        for sequence in queue.in_turn(slots.turn_of):
            if not slots.num_free:
                break
            own = sequence.request.options.tenant
            num_running = Counter(sequence.request.options.tenant for sequence in slots.running)
            waiting = {item.request.options.tenant for item in queue}
            assert num_running[own] == min(num_running[item] for item in waiting)
            queue.take(sequence)
            slots.allocate(sequence, number)
            turns.pop(own, None)
            for other in waiting - {own}:
                if not num_running[other]:
                    turns.setdefault(other, Counter())[own] += 1
                    assert turns[other][own] == 1
        assert not (slots.num_free and len(queue))
    world.check()
