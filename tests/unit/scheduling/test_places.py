"""Slots, sequence ids, waiting: everything is in one place, and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_world import World

from paceline.scheduling.plan import Copy, Remove
from paceline.scheduling.seq_ids import SeqIds
from paceline.scheduling.sequence import Sequence
from paceline.scheduling.slots import Slots
from paceline.scheduling.waiting import Waiting


def sequences(*prompts: str, n: int = 1) -> tuple[World, list[Sequence]]:
    """Sequences that wait, in a world that has no time for them."""
    world = World(limits={"num_slots": 8})
    outcomes = [world.submit(prompt, n=n) for prompt in prompts]
    world.engine._take_commands()
    return world, [one for outcome in outcomes for one in outcome.request.sequences]


def test_the_lowest_free_id_goes_first() -> None:
    """Ids come in order, and one that was given back comes before those never taken."""
    ids = SeqIds(4)
    assert [ids.take() for _ in range(3)] == [0, 1, 2]
    ids.give_back(1)
    assert (ids.take(), ids.take(), ids.num_free) == (1, 3, 0)
    with pytest.raises(IndexError):
        ids.take()


@given(st.lists(st.booleans(), max_size=30))
def test_taken_and_free_ids_are_all_of_them(takes: list[bool]) -> None:
    """Whatever is taken and given back, `check` holds; it fails for an id too many, too few or twice."""
    ids, taken = SeqIds(5), list[int]()
    for is_take in takes:
        if is_take and ids.num_free:
            taken.append(ids.take())
        elif not is_take and taken:
            ids.give_back(taken.pop())
        ids.check(taken)
        assert ids.num_free + len(taken) == 5
    for wrong in ([*taken, 99], [*taken, *taken[:1], 0, 1, 2, 3, 4]):
        with pytest.raises(AssertionError):
            ids.check(wrong)


def test_who_waits_keeps_his_turn() -> None:
    """A preempted sequence comes before all that arrived later; what is not there is discarded without a word (edge 35)."""
    _, (first, second, third) = sequences("a", "b", "c")
    waiting = Waiting()
    for one in (third, first):
        waiting.add(one)
    waiting.add(second)
    assert list(waiting) == [first, second, third]
    waiting.discard(second)
    waiting.discard(second)
    assert (list(waiting), len(waiting)) == ([first, third], 2)


def test_iterating_while_it_changes_is_safe() -> None:
    """Admission takes out what it walks over."""
    _, all_of_them = sequences("a", "b", "c")
    waiting = Waiting()
    for one in all_of_them:
        waiting.add(one)
    for one in waiting:
        waiting.discard(one)
    assert len(waiting) == 0


def test_a_slot_is_placed_and_freed() -> None:
    """Slot and id are taken together, freed together, and the memory is told (edge 36, 37, 38)."""
    world, (one, other, third) = sequences("hello", "world", "third")
    slots = Slots(world.limits)
    for sequence in (one, other, third):
        slots.place(sequence, 5)
    assert [(s.slot, s.seq_id, s.last_tick) for s in (one, other, third)] == [(0, 0, 5), (1, 1, 5), (2, 2, 5)]
    other.num_computed = 3
    assert slots.free(other) == 1
    assert (other.slot, other.seq_id, other.num_computed) == (None, None, 0)
    assert slots.take_operations() == [Remove(1)]
    assert slots.take_operations() == []
    assert slots.running == [one, third]
    slots.check()
    slots.free(third)
    slots.free(one)
    assert (slots.running, slots.num_free) == ([], 8)
    slots.check()


def test_shared_cells_count_once() -> None:
    """What a choice takes over costs no cells; each group of sharers is counted by itself."""
    world, (one, two, three, four) = sequences("0123456789", n=4)
    slots = Slots(world.limits)
    slots.place(one, 0)
    one.num_computed = 9
    slots.place(two, 0)
    slots.share(two, one, 9)
    assert slots.num_cells == 9
    assert slots.take_operations() == [Copy(0, 1, 9, two)]
    one.num_computed = two.num_computed = 12
    assert slots.num_cells == 9 + 3 + 3
    slots.place(three, 0)
    three.num_computed = 9
    slots.place(four, 0)
    slots.share(four, three, 9)
    assert slots.num_cells == 15 + 9
    slots.free(one)
    assert slots.num_cells == 12 + 9
    slots.free(two)
    assert slots.num_cells == 9


def test_room_counts_what_will_be_needed() -> None:
    """What is known and the next token of everybody is kept free; memory without cells always has room."""
    world, (one, other) = sequences("x" * 10, "y" * 10)
    slots = Slots(world.limits)
    slots.place(one, 0)
    free = world.limits.num_cells or 0
    assert slots.has_room(free - 11)
    assert not slots.has_room(free - 10)
    assert Slots(World(kind="recurrent").limits).has_room(10**9)
    slots.place(other, 0)
    assert not slots.has_room(free - 11)
