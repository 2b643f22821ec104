"""Cached prefixes that no sequence uses: when they leave the device, and in which parts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest
from tests.engine_world import Outcome
from tests.unit.kv_cache.prefix_rig import TOKEN_BYTES, KnownCost, Rig, operations_of, slow_saves, text

from paceline.kv_cache import KVCache, Save
from paceline.kv_cache.offload import BLOCK_TOKENS as _PIECE
from paceline.scheduling.strategies import DecodeMaximal, SchedulerView, TokenAllocation


@pytest.mark.usefixtures("nothing_idle")
def test_idle_prefixes_are_offloaded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a sequence generates, a tick moves one piece; the prefix leaves the device with the last, and comes back whole."""
    world = Rig(strategy="decode_maximal")
    done = operations_of(world, monkeypatch)
    prompt = text(2 * _PIECE + 76)
    runner = world.begin(text(30, 5), 40)
    world.begin(prompt)
    for _ in range(15):
        before = len(done)
        world.tick()
        assert sum(item.end - item.start for item in done[before:] if isinstance(item, Save)) <= _PIECE
    assert runner.terminal is None
    saves = [(item.start, item.end) for item in done if isinstance(item, Save)]
    assert saves == [(0, _PIECE), (_PIECE, 2 * _PIECE), (2 * _PIECE, 2 * _PIECE + 76)]
    assert len(world.scheduler.kv_cache._offloader) == 0
    assert world.scheduler.kv_cache.host_bytes == TOKEN_BYTES * len(prompt)
    again = world.begin(prompt, 1)
    world.run()
    assert world.shared(again) == [(len(prompt) - 1, "host")]
    assert world.computed(again) == 1
    world.check_output_as_alone(again, runner)
    world.check_done()


class OneStream:
    """A dozen prefixes on the device beside one decoding stream, by the costs of computing and saving."""

    def __init__(self, per_cell_s: float = 0.0, **options: Any) -> None:
        self.world = world = Rig(strategy="decode_maximal", num_seq_ids=20, **options)
        cost: Any = KnownCost(per_cell_s)
        world.scheduler.cost_model = world.scheduler.kv_cache._cost = cost
        world.scheduler.kv_cache.update_idle_limit()

    def save_a_few(self) -> None:
        """Let it learn the cost of saving for sure."""
        for seed in range(4):
            self.world.ask(text(40, 90 + seed))
            self.world.export(text(40, 90 + seed))
            self.world.run()

    def num_idle(self) -> int:
        """Compute the prefixes, decode, and return how many cells are idle; then all streams end."""
        world = self.world
        for seed in range(12):
            world.ask(text(120, seed))
        runner = world.begin(text(10, 77), 100, cache_prompt=False)
        world.tick(80)
        assert runner.terminal is None
        num_idle = world.scheduler.kv_cache.num_cells - runner.request.sequences[0].num_computed_tokens
        world.run()
        world.check_output_as_alone(runner)
        return num_idle


@pytest.mark.parametrize(("per_cell_s", "most"), [(0.0, 10_000), (1e-6, 1000), (2e-6, 500), (1e-5, 256)])
def test_where_saving_is_dear_as_many_idle_cells_stay_as_slow_no_decode_down(
    per_cell_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped cell costs a fifth of one that is attended to; all of them a fiftieth of a lone stream's tick; 256 are free."""
    one = OneStream(per_cell_s)
    slow_saves(one.world, monkeypatch)
    one.save_a_few()
    num_idle = one.num_idle()
    assert num_idle <= most
    assert num_idle >= min(12, most // 120) * 120
    one.world.check_done()


@pytest.mark.parametrize("share", [0.015, 0.025])
def test_idle_prefixes_leave_where_saving_takes_less_than_a_fiftieth_of_computing(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any learned cost of idle cells, 256 cost nothing; prefixes that left are found again in host memory."""
    one = OneStream()
    slow_saves(one.world, monkeypatch, share * one.world.scheduler.kv_cache._token_s)
    one.save_a_few()
    num_idle = one.num_idle()
    assert num_idle <= 256 if share < 0.02 else num_idle >= 12 * 120
    again = one.world.ask(text(120, 0))
    assert one.world.shared(again) == [(119, "host" if share < 0.02 else "device")]
    assert one.world.computed(again) == 1
    one.world.check_done()


@pytest.mark.parametrize(("host_tokens", "is_left"), [(0, True), (1000, True), (5000, False)])
def test_idle_prefixes_stay_where_host_memory_has_no_room(host_tokens: int, is_left: bool) -> None:
    """To leave early they evict nothing, and are not lost without host memory."""
    one = OneStream(limits={"host_bytes": host_tokens * TOKEN_BYTES})
    num_idle = one.num_idle()
    assert num_idle + one.world.scheduler.kv_cache.host_bytes // TOKEN_BYTES >= 12 * 120
    assert num_idle > 400 if is_left else num_idle <= 256
    assert one.world.recorder.evicted_tokens["host"] == 0
    assert [one.world.computed(one.world.ask(text(120, seed))) for seed in range(6)] == [1] * 6
    one.world.check_done()


def test_host_memory_many_times_as_large_as_the_devices_may_be_full() -> None:
    """Else idle cells would slow down every server that has run for long."""
    one = OneStream(num_cells=400, limits={"host_bytes": 1600 * TOKEN_BYTES})
    one.num_idle()
    for seed in range(20, 40):
        one.world.ask(text(100, seed))
    assert one.world.recorder.evicted_tokens["host"] > 0
    runner = one.world.begin(text(10, 77), 30, cache_prompt=False)
    one.world.tick(12)
    assert runner.terminal is None
    assert one.world.scheduler.kv_cache.num_cells <= 256 + runner.request.sequences[0].num_computed_tokens
    one.world.run()
    one.world.check_done()


def many_idle(monkeypatch: pytest.MonkeyPatch, prompts: Many[list[int]], **options: Any) -> tuple[Rig, Outcome]:
    """A world in which a stream decodes beside these prefixes, all on the device; from now on they are too many."""
    world = Rig(strategy="decode_maximal", num_seq_ids=30, **options)
    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "_idle_limit", lambda self: 10_000)
        for prompt in prompts:
            world.ask(prompt)
        runner = world.begin(text(10, 77), 100, cache_prompt=False)
        world.tick()
    assert len(world.scheduler.kv_cache._offloader) == len(prompts)
    return world, runner


def test_as_many_prefixes_leave_in_a_tick_as_fit_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single prefix would not be enough if many short requests end."""
    world, runner = many_idle(monkeypatch, [text(100, seed) for seed in range(12)])
    done = operations_of(world, monkeypatch)
    world.tick(2)
    assert sum(item.end - item.start for item in done if isinstance(item, Save)) >= 2 * _PIECE - 64
    assert len(world.scheduler.kv_cache._offloader) <= 12 - 5
    world.tick(2)
    assert world.scheduler.kv_cache.num_cells <= 256 + runner.request.sequences[0].num_computed_tokens
    world.run()
    world.check_output_as_alone(runner)
    world.check_done()


@pytest.mark.usefixtures("nothing_idle")
def test_what_prefixes_share_is_saved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though they leave at once, whether their common beginning fits a tick or not."""
    for length in (100, _PIECE + 100):
        common = text(length, 1)
        prompts = [[*common, *text(30, 5 + seed)] for seed in range(4)]
        world, runner = many_idle(monkeypatch, prompts)
        done = operations_of(world, monkeypatch)
        world.run()
        assert runner.terminal is not None
        assert sum(item.end - item.start for item in done if isinstance(item, Save)) == length + 4 * 30
        assert [world.computed(world.ask(prompt)) for prompt in prompts] == [1] * 4
        world.check_done()


def test_a_prefix_that_is_used_while_it_leaves_is_saved_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part in host memory may be gone by then, and is saved again."""
    world, runner = many_idle(monkeypatch, [text(300, 1), text(300, 2)])
    limit = [400]
    monkeypatch.setattr(KVCache, "_idle_limit", lambda self: limit[0])
    world.tick()
    limit[0] = 10_000
    again = world.begin([*text(300, 1)[:200], *text(20, 9)], 2)
    world.tick(12)
    assert world.shared(again) == [(200, "device")]
    world.scheduler.kv_cache._host.forget(lambda _: True, 0.0)
    limit[0] = 0
    world.tick(8)
    assert runner.terminal is None
    assert len(world.scheduler.kv_cache._offloader) == 0
    world.run()
    assert world.computed(world.ask(text(300, 1))) == 1
    assert world.computed(world.ask(text(300, 2))) == 1
    world.check_done()


def test_where_cells_run_out_one_prefix_goes_at_a_time() -> None:
    """Also without host memory, if nothing has to be saved of the others."""
    world = Rig(num_cells=600, num_seq_ids=12, limits={"host_bytes": 0, "num_slots": 2})
    for seed in range(5):
        world.ask(text(99, seed))
    runner = world.begin(text(40, 77), 120, cache_prompt=False)
    world.run()
    assert runner.terminal is not None
    assert world.recorder.num_preempted == 0
    assert len(world.scheduler.kv_cache._offloader) >= 3
    assert world.computed(world.ask(text(99, 4))) == 1
    world.check_done()


@pytest.mark.usefixtures("anything_idle")
def test_a_request_that_waits_for_cells_gets_them_in_parts_while_another_generates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick saves for a part of its time; the paused sequence keeps its slot, and nothing is computed twice."""
    world = Rig(num_cells=600, limits={"num_slots": 3})
    counts = slow_saves(world, monkeypatch)
    known = text(200, 1)
    world.ask(known)
    world.ask(text(430, 2))  # the first has to make way: now it is known what that takes
    paused, runner = world.begin(text(20, 3), 60), world.begin(text(20, 4), 60)
    world.tick(4)
    world.pause(paused)
    world.tick()
    del counts[:-1]
    waiting = world.begin(known, 3)
    while waiting.terminal is None:
        world.tick()
    assert runner.terminal is None, "it was not held up"
    assert max(counts) <= 32
    assert sum(counts) == 430
    assert world.recorder.num_preempted == 0
    world.pause(paused, is_paused=False)
    world.run()
    again = world.ask(text(430, 2))
    assert world.computed(again) == 1
    assert world.shared(again) == [(429, "host")]
    world.check_output_as_alone(paused, runner, waiting, again)
    world.check_done()


@pytest.mark.usefixtures("anything_idle")
def test_without_a_generating_sequence_there_are_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all are paused or waiting, prefixes in the way are saved at once."""
    world = Rig(num_cells=600)
    counts = slow_saves(world, monkeypatch)
    world.ask(text(200, 1))
    world.ask(text(430, 2))
    waiting = world.begin(text(300, 5), 2)
    world.tick()
    assert counts[-1] == 430
    assert waiting.is_started
    world.run()
    world.check_output_as_alone(waiting)


@pytest.mark.usefixtures("nothing_idle")
def test_what_moves_leaves_less_of_a_tick_to_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy is given the rest of the time between two tokens, and at least half of it."""
    targets: list[float] = []

    class Asked(DecodeMaximal):
        def plan(self, view: SchedulerView, budget: int) -> Many[TokenAllocation]:
            targets.append(view.itl_target_s)
            return super().plan(view, budget)

    world = Rig(strategy=Asked(), limits={"itl_target_s": 0.4})
    slow_saves(world, monkeypatch)
    runner = world.begin(text(20, 4), 200)
    for seed in range(3):
        world.begin(text(100, 5 + seed))
        world.tick(10)
    assert {round(target, 3) for target in targets} >= {0.4, 0.36}
    assert min(targets) >= 0.2
    world.run()
    world.check_output_as_alone(runner)
