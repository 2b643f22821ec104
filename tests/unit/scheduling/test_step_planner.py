"""Limits of a tick, and a strategy's allocations made into rows: every breach is named."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_world import World

from paceline.errors import StrategyError
from paceline.scheduling.step_planner import rows_of
from paceline.scheduling.strategies import TokenAllocation
from paceline.sequence import Sequence


def running(*prompts: str, limits: dict[str, Any] | None = None, **options: Any) -> tuple[World, list[Sequence]]:
    """Sequences that have just been admitted."""
    world = World(limits=limits)
    for prompt in prompts:
        world.submit(prompt, **options)
    world.engine._take_commands()
    world.scheduler._admission.admit(0, 0)
    return world, list(world.scheduler.running)


def test_a_row_is_the_next_part_of_what_is_known() -> None:
    """Its position is the number of computed tokens; only the row that reaches the end draws."""
    world, (one,) = running("0123456789")
    world.scheduler._step_planner.set_limits([one])
    (row,) = rows_of([TokenAllocation(one.key, 4)], [one], 64)
    assert (row.position, bytes(row.token_ids), row.draws) == (0, b"0123", False)
    one.num_computed_tokens = 4
    world.scheduler._step_planner.set_limits([one])
    (row,) = rows_of([TokenAllocation(one.key, 6)], [one], 64)
    assert (row.position, bytes(row.token_ids), row.draws) == (4, b"456789", True)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (None, "must return a list or a tuple of TokenAllocation, not"),
        ("ab", "must return a list or a tuple of TokenAllocation, not"),
        ([1], "must return TokenAllocations, not 1"),
        ([TokenAllocation(99, 1)], "key 99, which is not in the view or came before"),
        ([TokenAllocation(1, 1), TokenAllocation(1, 1)], "key 1, which is not in the view or came before"),
        ([TokenAllocation(1, 0)], "planned 0 tokens for key 1, which may have 1 to 5"),
        ([TokenAllocation(1, 6)], "planned 6 tokens for key 1, which may have 1 to 5"),
        ([TokenAllocation(1, -1)], "planned -1 tokens"),
        ([TokenAllocation(1, True)], "must plan an int of tokens, not True"),
        ([TokenAllocation(1, 1.0)], "must plan an int of tokens, not 1.0"),  # type: ignore[arg-type]
        ([TokenAllocation(1, 5), TokenAllocation(2, 4)], "planned 9 tokens, over the budget of 8"),
        ([], r"planned nothing, and \d+ sequences have work"),
    ],
)
def test_a_plan_that_breaks_the_contract_is_refused(shares: object, message: str) -> None:
    """Unknown keys, keys twice, too much, too little, other types: each has its message."""
    world, sequences = running("hello", "world")
    world.scheduler._step_planner.set_limits(sequences)
    with pytest.raises(StrategyError, match=message):
        rows_of(shares, sequences, 8)


def test_a_chunk_bounds_what_one_gets() -> None:
    """chunk_size is part of the limit."""
    world, (one, other) = running("0123456789", "abc", limits={"chunk_size": 4})
    assert world.scheduler._step_planner.set_limits([one, other]) == [one, other]
    assert (one.limit, other.limit) == (4, 3)


def test_rows_of_logits_are_shared_out_in_order() -> None:
    """Scored prompt tokens are limited: the first sequence gets them, one without sits out, one that needs none is unaffected."""
    world = World(limits={"max_scored": 6})
    for scores in (1, 1, None):
        world.submit("0123456789", prompt_logprobs=scores)
    world.engine._take_commands()
    world.scheduler._admission.admit(0, 0)
    first, second, plain = world.scheduler.running
    assert world.scheduler._step_planner.set_limits([first, second, plain]) == [first, plain]
    assert (first.limit, second.limit, plain.limit) == (6, 0, 10)
    row, other = rows_of([TokenAllocation(first.key, 6), TokenAllocation(plain.key, 2)], [first, plain], 64)
    assert (bytes(row.targets), row.num_logprobs, other.targets) == (b"123456", 1, [])


def test_scores_that_are_known_are_not_computed_twice() -> None:
    """After a preemption the tokens are computed again without logits, up to the end of the scores."""
    world, (one,) = running("0123456789", prompt_logprobs=1)
    one.num_scored = 4
    world.scheduler._step_planner.set_limits([one])
    assert one.limit == 4
    (row,) = rows_of([TokenAllocation(one.key, 4)], [one], 64)
    assert (row.targets, row.draws) == ([], False)
    one.num_computed_tokens = 4
    world.scheduler._step_planner.set_limits([one])
    (row,) = rows_of([TokenAllocation(one.key, one.limit)], [one], 64)
    assert bytes(row.targets) == b"56789"


def test_the_last_token_of_a_shared_prompt_comes_alone() -> None:
    """If memory is copied as a whole, others can only take over the part before it."""
    world = World(kind="recurrent")
    outcome = world.submit("0123456789", n=3)
    world.tick()
    first = outcome.request.sequences[0]
    assert (first.num_computed_tokens, outcome.token_ids()) == (9, [])
    world.tick()
    assert [sequence.num_computed_tokens for sequence in outcome.request.sequences] == [10, 10, 10]
