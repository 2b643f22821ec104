"""The fake memory: cells, holders, and the manners of three kinds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidParams, NoKvSlot, Unsupported
from paceline.testing.fake_memory import FakeMemory, Kind


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


@pytest.mark.parametrize("kind", ["sliding_window", "recurrent"])
def test_only_attention_copies_parts(kind: Kind) -> None:
    """Other kinds refuse to copy a part of a sequence."""
    one = memory(kind)
    one.append(0, 0, [1, 2, 3])
    with pytest.raises(Unsupported, match="can only be copied whole"):
        one.copy(0, 1, 2)
    one.copy(0, 1, 3)
    assert one.hashes(1) == one.hashes(0)


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


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4)), max_size=40))
def test_num_owners_add_up_whatever_is_done(steps: list[tuple[int, int, int]]) -> None:
    """Used cells are those that some sequence id names, each as often held as it is named."""
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
