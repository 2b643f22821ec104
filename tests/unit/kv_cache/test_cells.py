"""Slots, sequence ids, waiting: everything is in one place, and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_world import World

from paceline.kv_cache import KVCache
from paceline.kv_cache.device_cells import DeviceCells, SeqIds
from paceline.kv_cache.prefix_match import NO_MATCH
from paceline.scheduling.admission import Slots, WaitingQueue
from paceline.scheduling.fair_shares import FairShares
from paceline.sequence import Sequence


def sequences(*prompts: str, n: int = 1) -> tuple[World, list[Sequence]]:
    """Sequences that wait, in a world that has no time for them."""
    world = World(limits={"num_slots": 8})
    outcomes = [world.submit(prompt, n=n) for prompt in prompts]
    world.engine._take_commands()
    return world, [sequence for outcome in outcomes for sequence in outcome.request.sequences]


def test_the_lowest_free_id_goes_first() -> None:
    """Ids come in order, and a returned id comes before those never taken."""
    ids = SeqIds(4)
    assert [ids.allocate() for _ in range(3)] == [0, 1, 2]
    ids.release(1)
    assert (ids.allocate(), ids.allocate(), ids.num_free) == (1, 3, 0)
    with pytest.raises(IndexError):
        ids.allocate()


@given(st.lists(st.booleans(), max_size=30))
def test_taken_and_free_ids_are_all_of_them(takes: list[bool]) -> None:
    """Whatever is taken and given back, `check` holds; it fails for an id too many, too few or twice."""
    ids, taken = SeqIds(5), list[int]()
    for is_take in takes:
        if is_take and ids.num_free:
            taken.append(ids.allocate())
        elif not is_take and taken:
            ids.release(taken.pop())
        ids.check(taken)
        assert ids.num_free + len(taken) == 5
    for wrong in ([*taken, 99], [*taken, *taken[:1], 0, 1, 2, 3, 4]):
        with pytest.raises(AssertionError):
            ids.check(wrong)


def test_a_waiting_sequence_keeps_its_turn() -> None:
    """A preempted sequence comes before all later arrivals; a missing sequence is discarded silently."""
    _, (first, second, third) = sequences("a", "b", "c")
    waiting = WaitingQueue()
    for item in (third, first):
        waiting.add(item)
    waiting.add(second)
    assert list(waiting) == [first, second, third]
    waiting.discard(second)
    waiting.discard(second)
    assert (list(waiting), len(waiting)) == ([first, third], 2)


def test_iterating_while_it_changes_is_safe() -> None:
    """Admission takes out the sequences it walks over."""
    _, all_of_them = sequences("a", "b", "c")
    waiting = WaitingQueue()
    for item in all_of_them:
        waiting.add(item)
    for item in waiting:
        waiting.discard(item)
    assert len(waiting) == 0


def test_a_slot_is_taken_and_freed() -> None:
    """The lowest free slot first; freed slots can be taken again."""
    _, (one, other, third) = sequences("hello", "world", "third")
    slots = Slots(8, FairShares(1000))
    assert [slots.allocate(sequence, 5) for sequence in (one, other, third)] == [0, 1, 2]
    assert [(s.slot, s.last_tick) for s in (one, other, third)] == [(0, 5), (1, 5), (2, 5)]
    assert slots.release(other) == 1
    assert (other.slot, slots.running, slots.num_free) == (None, [one, third], 6)
    slots.check()
    assert slots.allocate(other, 6) == 1


def cache_of(world: World) -> KVCache:
    return world.scheduler.kv_cache


def test_shared_cells_count_once() -> None:
    """Shared cells cost nothing, whichever sequence frees them first."""
    cells = DeviceCells(3)
    cells.extend(0, 9)
    cells.share(0, 1, 9)
    assert cells.num_used == 9
    cells.extend(0, 3)
    cells.extend(1, 4)
    assert (cells.num_used, cells.length(0), cells.length(1), cells.num_own(0)) == (16, 12, 13, 3)
    cells.share(1, 2, 5)
    assert cells.num_used == 16
    cells.free(0)
    assert (cells.num_used, cells.num_own(1)) == (13, 8)
    cells.free(1)
    assert (cells.num_used, cells.num_under([2]), cells.length(2)) == (5, 5, 5)
    cells.free(2)
    assert cells.num_used == 0


def test_room_counts_what_will_be_needed() -> None:
    """Cells for known tokens and the next token of every sequence are kept free; memory without cells always has room."""
    world, (one, other) = sequences("x" * 10, "y" * 10)
    cache = cache_of(world)
    cache.allocate(one, NO_MATCH, 0.0)
    free = world.limits.num_cells or 0
    assert cache._budget.fits(free - 11)
    assert not cache._budget.fits(free - 10)
    assert cache_of(World(kind="recurrent"))._budget.fits(10**9)
    cache.allocate(other, NO_MATCH, 0.0)
    assert not cache._budget.fits(free - 11)
