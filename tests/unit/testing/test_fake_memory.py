"""The fake memory: cells, holders, and the manners of each kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidParams, NoKvSlot, Unsupported
from paceline.testing.fake_backend import FakeMemory, Kind


def memory(kind: Kind = "attention", num_cells: int = 20) -> FakeMemory:
    return FakeMemory(num_cells, 4, kind, 16)


def test_cells_are_shared_by_copies_and_freed_with_the_last_holder() -> None:
    """A copy costs nothing; a cell is free when no sequence holds it."""
    one = memory()
    one.append(0, 0, [1, 2, 3])
    one.copy(0, 1, 2)
    assert one.num_used == 3
    one.append(1, 2, [9])
    assert one.num_used == 4
    one.remove(0)
    assert one.num_used == 3
    one.remove(1)
    one.remove(1)
    assert one.num_used == 0


def test_there_is_no_room_beyond_the_cells() -> None:
    """`needs` raises before anything is taken; recurrent memory has no cells."""
    one = memory(num_cells=3)
    one.append(0, 0, [1, 2])
    one.needs(1)
    with pytest.raises(NoKvSlot, match="2 cells are needed and 1 are free"):
        one.needs(2)
    endless = memory("recurrent", num_cells=1)
    endless.needs(1000)
    endless.append(0, 0, list(range(50)))
    assert (endless.num_used, endless.length(0)) == (0, 50)


UNCUT: list[Kind] = ["sliding_window", "hybrid", "recurrent", "compressed"]
APART: list[Kind] = ["sliding_window", "hybrid"]


@pytest.mark.parametrize("kind", UNCUT)
def test_only_attention_copies_parts(kind: Kind) -> None:
    """Other kinds refuse to copy a part of a sequence."""
    one = memory(kind)
    one.append(0, 0, [1, 2, 3])
    with pytest.raises(Unsupported, match="can only be copied whole"):
        one.copy(0, 1, 2)
    one.copy(0, 1, 3)
    assert one.hashes(1) == one.hashes(0)


@pytest.mark.parametrize("kind", APART)
def test_cells_without_their_state_cannot_go_on(kind: Kind) -> None:
    """A copy of cells, and loaded cells, compute only when the state of their place exists; then as the source did."""
    one = memory(kind, num_cells=60)
    one.append(0, 0, list(range(1, 21)))
    saved = one.save_state(0, 20)
    one.append(0, 20, [7, 8])
    expected = one.append(0, 22, [9])
    one.copy_cells(0, 1, 20)
    assert one.num_used == 23
    for act in (
        lambda: one.append(1, 20, [7]),
        lambda: one.save_state(1, 20),
        lambda: one.copy(1, 2, 20),
        lambda: one.load_state(1, saved, 19),
    ):
        with pytest.raises(InvalidParams):
            act()
    one.load_state(1, saved, 20)
    assert one.append(1, 20, [7, 8, 9]) == expected
    with pytest.raises(InvalidParams, match="has a state"):
        one.load(1, one.save(0, 0, 23), 23, 23)
    one.load(2, one.save(0, 0, 10), 0, 10)
    one.load(2, one.save(0, 10, 20), 10, 20)
    one.load_state(2, saved, 20)
    assert one.append(2, 20, [7, 8, 9]) == expected


@pytest.mark.parametrize("kind", APART)
def test_a_state_of_other_tokens_changes_what_follows(kind: Kind) -> None:
    """It can be loaded, as a real one can: the hashes tell."""
    one = memory(kind, num_cells=60)
    one.append(0, 0, [1, 2, 3])
    one.append(1, 0, [1, 2, 4])
    other = one.save_state(1, 3)
    one.copy_cells(0, 2, 3)
    one.load_state(2, other, 3)
    assert one.append(2, 3, [5]) != one.append(0, 3, [5])


@pytest.mark.parametrize("kind", ["recurrent", "compressed"])
def test_a_state_is_all_where_nothing_lies_apart(kind: Kind) -> None:
    """Saved whole, loaded into an empty sequence; no cells are copied, saved or loaded apart."""
    one = memory(kind)
    one.append(0, 0, [1, 2, 3])
    state = one.save_state(0, 3)
    for act in (lambda: one.copy_cells(0, 1, 2), lambda: one.save(0, 0, 3)):
        with pytest.raises(Unsupported):
            act()
    with pytest.raises(InvalidParams):
        one.load_state(0, state, 3)
    one.load_state(1, state, 3)
    assert one.append(1, 3, [4]) == one.append(0, 3, [4])
    with pytest.raises(InvalidParams, match="not 3"):
        one.save_state(0, 3)
    with pytest.raises(InvalidParams):
        memory().save_state(0, 0)


def test_misuse_is_refused() -> None:
    """Wrong positions, unknown ids, targets that are not empty, more than there is."""
    one = memory()
    one.append(0, 0, [1, 2])
    one.append(1, 0, [1])
    for wrong in (
        lambda: one.append(0, 1, [3]),
        lambda: one.append(4, 0, [3]),
        lambda: one.length(-1),
        lambda: one.copy(0, 1, 1),
        lambda: one.copy(0, 2, 3),
        lambda: one.copy(0, 2, 0),
    ):
        with pytest.raises(InvalidParams):
            wrong()
    assert one.num_used == 3


def test_the_lowest_free_cells_are_taken_and_attention_reads_blocks_up_to_the_highest() -> None:
    """As in llama.cpp: cells above the highest cell in use cost nothing, and free cells below it do."""
    one = memory(num_cells=1000)
    assert one.num_attended == 0
    one.append(0, 0, [1] * 300)
    one.append(1, 0, [1] * 300)
    assert one.num_attended == 768
    one.remove(0)
    one.append(2, 0, [1] * 10)
    assert one.num_attended == 768, "the second sequence is where it was"
    one.remove(1)
    assert one.num_attended == 256
    one.append(3, 0, [1] * 990)
    assert one.num_attended == 1000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_num_owners_add_up_whatever_is_done(steps: list[tuple[int, int, int]]) -> None:
    """Used cells are cells that some sequence id names, each held as often as it is named."""
    one = memory()
    for seq_id, other, action in steps:
        if action <= 1 and one.num_used < 20:
            one.append(seq_id, one.length(seq_id), [action])
        elif action == 2 and one.length(seq_id) and not one.length(other) and seq_id != other:
            one.copy(seq_id, other, 1)
        elif action >= 3:
            one.remove(seq_id)
        named = [cell for held in one._sequences for cell in held.cells]
        assert one.num_used == len(set(named))
        assert all(one._num_owners[cell] == named.count(cell) for cell in range(20))
