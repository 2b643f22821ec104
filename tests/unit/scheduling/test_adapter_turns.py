"""Sets of adapters take turns by time, and no set waits until the first one is done."""

from __future__ import annotations

from collections import Counter

from tests.engine_world import World

from paceline.scheduling.step_planner import AdapterTurns
from paceline.sequence import Sequence

A, B, C = (("a", 1.0),), (("b", 1.0),), ()


def sequences_of(*loras: tuple[tuple[str, float], ...]) -> list[Sequence]:
    world = World(limits={"num_slots": 8})
    outcomes = [world.submit("hello", lora=dict(lora)) for lora in loras]
    world.engine._take_commands()
    return [outcome.request.sequences[0] for outcome in outcomes]


def test_one_set_has_all_turns() -> None:
    """If all want the same there are no turns."""
    turns, sequences = AdapterTurns(0.1), sequences_of(A, A)
    for now_s in (0, 1, 2):
        assert turns.choose(sequences, now_s) == (A, sequences)


def test_the_current_set_stays_for_its_share_of_the_target() -> None:
    """With two sets half of itl_target_s each, in turn."""
    turns = AdapterTurns(10)
    one, other = sequences_of(A, B)
    seen = []
    for step in range(20):
        lora, group = turns.choose([one, other], step)
        for sequence in group:
            sequence.last_tick = step
        seen.append(lora)
    assert Counter(seen) == {A: 10, B: 10}
    assert seen[:11] == [A] * 5 + [B] * 5 + [A]


def test_the_set_that_waited_longest_comes_next() -> None:
    """Three sets rotate; none comes twice before each came once."""
    turns = AdapterTurns(0.0)
    sequences = sequences_of(A, B, C)
    seen = []
    for step in range(9):
        lora, group = turns.choose(sequences, step)
        for sequence in group:
            sequence.last_tick = step + 1
        seen.append(lora)
    assert all(set(seen[start : start + 3]) == {A, B, C} for start in (0, 3, 6))


def test_a_set_that_is_gone_gives_way_at_once() -> None:
    """Its share of time is not waited for; without sequences nothing changes."""
    turns = AdapterTurns(100.0)
    one, other = sequences_of(A, B)
    assert turns.choose([one, other], 0)[0] == A
    assert turns.choose([other], 0.001) == (B, [other])
    assert turns.choose([], 0.002) == (B, [])
