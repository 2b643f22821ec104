"""Idle prefixes where attention reads every cell up to the highest cell in use, as on a GPU: the cells in use stay dense."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.engine_world import Outcome
from tests.unit.kv_cache.prefix_rig import KnownCost, Rig, operations_of, text

from paceline.kv_cache import Load, Save
from paceline.testing.fake_backend import FakeCost, FakeState

# About a model of 0.5 B parameters on a GPU. Saving a token takes more than a fiftieth of computing it.
GPU = FakeCost(base_s=0.001, token_s=0.0001, cell_s=40e-9, saved_token_s=20e-6, loaded_token_s=5e-6)
PLENTY = 10**9


class Device(Rig):
    """A world with the costs of a GPU. knows_cost: whether a calibration has measured the cost of an idle cell."""

    def __init__(
        self, *, knows_cost: bool = True, num_slots: int = 4, host_bytes: int = PLENTY, **options: Any
    ) -> None:
        limits = {"num_slots": num_slots, "host_bytes": host_bytes}
        super().__init__(**{"num_cells": 16384, "num_seq_ids": 64, "cost": GPU, **options}, limits=limits)
        if knows_cost:
            self.scheduler.calibrate((), GPU.cell_s)

    @property
    def num_prefixes(self) -> int:
        """Cached prefixes on the device."""
        return len(self.scheduler.kv_cache._offloader)

    def learn_to_move(self) -> None:
        """Let it learn the costs of saving and loading."""
        for seed in range(90, 95):
            self.ask(text(100, seed))
            self.export(text(100, seed))
            self.run()
        while self.scheduler.kv_cache.evict(self.clock.now()):
            pass
        self.ask(text(100, 90))
        self.scheduler.kv_cache.evict(self.clock.now())


def tokens_per_second(**options: Any) -> float:
    """Tokens generated per second by eight streams; half of the prompts came before."""
    world, chance = Device(num_slots=8, **options), random.Random(1)
    prompts: list[list[int]] = []
    outcomes: list[Outcome] = []
    while len(outcomes) < 72 or world.scheduler.running:
        while len(outcomes) < 72 and len(world.scheduler.running) + world.scheduler.num_waiting < 8:
            is_known = prompts and chance.random() < 0.5
            prompts.append(chance.choice(prompts) if is_known else [chance.randrange(250) for _ in range(512)])
            outcomes.append(world.begin(prompts[-1], chance.randrange(64, 192)))
            world.tick()
        world.tick()
    seconds = world.clock.now()
    world.run()
    world.check_done()
    return sum(len(outcome.token_ids()) for outcome in outcomes) / seconds


def test_cached_prefixes_cost_little_speed_if_host_memory_has_room() -> None:
    """They leave the device before they slow streams down, and are loaded when a prompt needs them."""
    assert tokens_per_second() > 1.25 * tokens_per_second(knows_cost=False)


@pytest.mark.parametrize("host_bytes", [0, 8000])
def test_cached_prefixes_cost_no_more_speed_than_before_if_host_memory_has_no_room(host_bytes: int) -> None:
    """They stay until they have cost the time of computing them, which half of the prompts save."""
    assert tokens_per_second(host_bytes=host_bytes) > 0.97 * tokens_per_second(host_bytes=host_bytes, knows_cost=False)


def idle_beside_a_stream(world: Device, num_rows: int) -> Outcome:
    """Cache six prefixes, and compute as many rows of a stream beside them."""
    for seed in range(6):
        world.ask(text(120, seed))
    runner = world.begin(text(10, 77), 4000, cache_prompt=False)
    world.tick(num_rows)
    assert runner.terminal is None
    return runner


@pytest.mark.parametrize(("num_rows", "source"), [(100, "device"), (160, "host")])
def test_a_prefix_leaves_when_its_cells_have_cost_the_time_of_loading_it(num_rows: int, source: str) -> None:
    """Loading a token takes 5 us, and a cell costs 40 ns in each row: 125 rows. Then the prefix comes from host memory."""
    world = Device()
    world.learn_to_move()
    idle_beside_a_stream(world, num_rows)
    again = world.begin(text(120, 1), 1)
    world.tick(4)
    assert world.shared(again) == [(119, source)]
    assert world.computed(again) == 1
    world.check_output_as_alone(again)


def test_cells_in_use_become_dense_again() -> None:
    """All idle prefixes leave, since a single one in high cells costs as much as many; the next request has the lowest cells."""
    world = Device()
    world.learn_to_move()
    runner = idle_beside_a_stream(world, 200)
    assert world.num_prefixes == 0
    assert world.backend.memory.num_attended >= 6 * 120, "the stream began above them"
    world.cancel(runner)
    world.ask(text(200, 80))
    assert world.backend.memory.num_attended == 256


def test_prefixes_stay_if_nothing_is_computed_beside_them() -> None:
    """Time alone costs nothing: ticks without rows make no prefix old."""
    world = Device()
    world.learn_to_move()
    for seed in range(6):
        world.ask(text(120, seed))
    world.clock.advance(3600)
    world.tick(20)
    assert world.num_prefixes >= 6


def test_a_prefix_that_is_used_becomes_young_again() -> None:
    """Prefixes that no request asks for leave the device meanwhile."""
    world = Device()
    world.learn_to_move()
    idle_beside_a_stream(world, 60)
    for _ in range(4):
        again = world.begin(text(120, 2), 1)
        world.tick(60)
        assert world.shared(again) == [(119, "device")]
    other = world.begin(text(120, 3), 1)
    world.tick(4)
    assert world.shared(other) == [(119, "host")]


def test_the_beginning_that_prefixes_share_is_saved_once_and_stays_for_a_running_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cells are in use; the rest of each prefix leaves, and is loaded behind the shared cells."""
    world = Device()
    world.learn_to_move()
    common = text(300, 1)
    prompts = [[*common, *text(100, 5 + seed)] for seed in range(4)]
    for prompt in prompts:
        world.ask(prompt)
    done = operations_of(world, monkeypatch)
    runner = world.begin([*common, *text(20, 50)], 4000)
    world.tick(200)
    num_saved = sum(item.end - item.start for item in done if isinstance(item, Save))
    assert 300 + 2 * 100 <= num_saved <= 300 + 4 * 100
    assert world.scheduler.kv_cache.num_cells <= 256 + runner.request.sequences[0].num_computed_tokens
    again = world.begin(prompts[0], 1)
    world.tick(4)
    assert [(item.start, item.end) for item in done if isinstance(item, Load)] == [(300, 349), (349, 399)]
    assert world.computed(again) == 1
    world.check_output_as_alone(again)


@pytest.mark.parametrize(("num_rows", "is_there"), [(450, True), (520, False)])
def test_without_host_memory_a_prefix_leaves_when_its_cells_have_cost_the_time_of_computing_it(
    num_rows: int, is_there: bool
) -> None:
    """A token of a pass of 512 takes 20 us, and a cell costs 40 ns in each row: 488 rows."""
    world = Device(host_bytes=0)
    cost: Any = KnownCost(0.0, GPU.cell_s)
    world.scheduler.cost_model = world.scheduler.kv_cache._cost = cost
    world.scheduler.kv_cache.update_idle_limit()
    idle_beside_a_stream(world, num_rows)
    again = world.begin(text(120, 5), 1)
    world.tick(12)
    assert world.computed(again) == (1 if is_there else 120)


def test_prefixes_stay_as_long_as_without_host_memory_if_saving_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be lost."""
    world = Device()
    world.learn_to_move()

    def failing(seq_id: int, start: int, end: int) -> FakeState:
        raise MemoryError

    monkeypatch.setattr(world.backend, "save", failing)
    idle_beside_a_stream(world, 1000)
    assert world.num_prefixes >= 2


def test_a_preempted_stream_continues_as_alone() -> None:
    """Cells run out while prefixes leave early."""
    world = Device(num_cells=700)
    world.learn_to_move()
    for seed in range(3):
        world.ask(text(120, seed))
    outcomes = [world.begin(text(120, 10 + seed), 150) for seed in range(4)]
    world.run()
    assert world.recorder.num_preempted > 0
    world.check_output_as_alone(*outcomes)
    world.check_done()
