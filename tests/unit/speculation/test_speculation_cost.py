"""The cost of speculation if it does not pay, and its gain if it does, with passes as dear as real passes, on a clock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.drafters import BatchOracle
from tests.engine_world import World
from tests.speculation_world import FreeDrafter, StreamWorld
from tests.sweeps import sampled

from paceline.speculation.drafters.model_drafter import ModelDrafter
from paceline.testing.fake_backend import ManualClock


def ratios(world: StreamWorld, plain: StreamWorld, num_rounds: int = 4) -> dict[int, float]:
    """Of the times of closed loops of 1, 4 and 16 streams in turn, without speculation and with it."""
    times: dict[int, list[float]] = {1: [0.0, 0.0], 4: [0.0, 0.0], 16: [0.0, 0.0]}
    for seed in range(num_rounds):
        for width, sums in times.items():
            for index, item in enumerate((plain, world)):
                sums[index] += 1 / item.tokens_per_s(width, 16 if width == 16 else 2 * width, seed=seed)
    return {width: without / with_drafts for width, (without, with_drafts) in times.items()}


@pytest.mark.parametrize(("acceptance", "at_four"), sampled([(0.1, 0.98), (0.5, 1.1), (0.7, 1.2), (0.9, 1.5)], every=3))
def test_a_draft_model_costs_at_most_three_percent_and_wins_where_it_can(acceptance: float, at_four: float) -> None:
    """With four streams 16 rows are nearly as cheap as 4; with one and with sixteen next to nothing pays."""
    found = ratios(StreamWorld(acceptance), StreamWorld())
    assert found[1] >= 0.98
    assert found[16] >= 0.965
    assert found[4] >= at_four


@pytest.mark.parametrize("acceptance", sampled([0.7, 0.1, 0.5, 0.9], every=4))
def test_sixteen_streams_of_cached_prompts_lose_no_more(acceptance: float) -> None:
    """They come within milliseconds, and decode in their first pass: the drafter has none of their prompts yet."""
    with_s = without_s = 0.0
    for interval_s in (0.0, 0.001, 0.0025, 0.005, 0.009):
        world, plain = StreamWorld(acceptance), StreamWorld()
        for width in (1, 4, 16):
            world.tokens_per_s(width, 16 if width == 16 else 2 * width)
        for item in (world, plain):
            item.tokens_per_s(16, 16, seed=1)
        for _ in range(2):
            with_s += 1 / world.tokens_per_s(16, 16, seed=1, interval_s=interval_s)
            without_s += 1 / plain.tokens_per_s(16, 16, seed=1, interval_s=interval_s)
    assert without_s / with_s >= 0.965


@pytest.mark.parametrize(
    ("acceptance", "least"), [(1.0, {1: 1.8, 4: 2.0, 16: 1.05}), (0.0, {1: 0.98, 4: 0.98, 16: 0.98})]
)
def test_free_proposals_win_where_they_are_right_and_cost_nothing_where_not(
    acceptance: float, least: dict[int, float]
) -> None:
    """As prompt lookup has them: from the first request on, without a draft model's time."""
    found = ratios(StreamWorld(drafter=FreeDrafter(acceptance)), StreamWorld(), num_rounds=2)
    assert all(found[width] >= ratio for width, ratio in least.items()), found


def test_a_new_request_has_drafts_at_once_whatever_was_left_out_before_the_end_of_the_last() -> None:
    """Near its end a sequence has no room for drafts that pay; the choice of none is not kept for the next sequence."""
    world = StreamWorld(drafter=FreeDrafter(1.0))
    world.tokens_per_s(1, 2)
    num_passes = []
    for seed in range(1, 9):
        world.passes.clear()
        world.tokens_per_s(1, 1, seed=seed)
        num_passes.append(len(world.passes))
    assert max(num_passes) <= 8, num_passes


def test_trials_are_made_by_one_sequence_at_a_time() -> None:
    """If nothing pays no pass has drafts of two, once sizes are known."""
    world = StreamWorld(drafter=FreeDrafter(0.0))
    world.tokens_per_s(16, 16)
    world.passes.clear()
    world.tokens_per_s(16, 64, seed=1)
    decoding = [
        rows
        for rows in world.passes
        if len(rows) == 16 and all(len(row.token_ids) == 1 + row.num_drafts for row in rows)
    ]
    drafting = [sum(row.num_drafts > 0 for row in rows) for rows in decoding]
    assert max(drafting) == 1
    assert sum(drafting) > 1


class SlowToBegin(BatchOracle):
    """Takes half a second to say how far it is behind, and next to nothing for anything else."""

    clock: ManualClock
    num_caught_up = 0

    def lag(self, key: int) -> float:
        self.clock.advance(0.5)
        return 0.0

    def limit_catch_up(self, num_tokens: int) -> int:
        return num_tokens


def test_only_decisions_count_as_deciding() -> None:
    """Neither the time of beginning with a sequence counts, nor do ticks without candidates make decisions seem cheap."""
    drafter = SlowToBegin()
    world = World(drafter=drafter, cost=lambda rows: 0.01)
    drafter.clock = world.clock
    speculation: Any = world.scheduler._speculation
    for _ in range(3):
        world.submit("abc", max_tokens=20, ignore_eos=True)
        world.run()
    assert speculation._chooser.deciding_s == 0
    speculation._chooser.deciding_s = 0.0005
    world.submit("a long prompt " * 20, max_tokens=1)
    world.run()
    assert speculation._chooser.deciding_s == 0.0005


class Asked(ModelDrafter):
    """Notes the requested depths, with the backlog of each sequence."""

    asked: list[list[tuple[int, float]]]

    def propose_all(self, wanted: Sequence[tuple[int, int]]) -> list[list[int]]:
        self.asked.append([(depth, self.lag(key)) for key, depth in wanted])
        return super().propose_all(wanted)


def test_a_sequence_that_misses_much_is_caught_up_with_before_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk a tick with 0 drafts; drafts are chosen for it when the rest fits into the tick."""
    monkeypatch.setattr(Asked, "asked", [], raising=False)
    monkeypatch.setattr("tests.draft_world.ModelDrafter", Asked)
    world = StreamWorld(0.9)
    world.tokens_per_s(4, 8)  # what all of it takes is known
    Asked.asked.clear()
    source = random.Random(1)
    world.world.submit([source.randrange(200) for _ in range(900)], max_tokens=200, ignore_eos=True)
    world.world.submit("abc", max_tokens=200, ignore_eos=True)
    while not world.world.engine.is_idle or world.world.commands.queue:
        world.world.take(world.world.engine.tick())
    late = [(depth, lag) for wanted in Asked.asked for depth, lag in wanted if lag > 256]
    assert len(late) >= 2
    assert all(depth == 0 for depth, _ in late)
    assert max(depth for wanted in Asked.asked for depth, lag in wanted if not lag) > 1
