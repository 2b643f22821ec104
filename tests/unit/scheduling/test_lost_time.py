"""Time lost to small batches while prompts wait: of a pass, and summed up over passes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engine_world import World

from paceline.cost_model import DecodeCost, MeasuredPass, TickCostModel
from paceline.scheduling.step_planner import LostTime
from paceline.scheduling.strategies import DecodeMaximal, SchedulerView, TokenAllocation


class LinearCost(DecodeCost):
    """A machine that takes 20 ms for a pass and 10 for a row of it."""

    def seconds(self, num_rows: int) -> float:
        return 0.02 + 0.01 * num_rows


def lost_time() -> LostTime:
    return LostTime(LinearCost(TickCostModel()))


def test_rows_are_compared_with_rows_of_the_whole_batch() -> None:
    """Two of eight that could decode take 40 ms, and 2 of 8 parts of 100 ms in a whole batch."""
    assert lost_time().of_pass(2, 6) == pytest.approx(0.015)
    assert lost_time().of_pass(7, 1) == pytest.approx(0.0025)


def test_the_share_is_of_all_passes() -> None:
    """A pass that lost a fifth, and a pass of the same length that lost nothing: a tenth."""
    lost = lost_time()
    assert (lost.share, lost.mean_s) == (0, 0)
    lost.observe(0.01, 0.002)
    lost.observe(0.01, None)
    assert lost.share == pytest.approx(0.1, rel=0.01)
    assert lost.mean_s == pytest.approx(0.002, rel=0.01)


def test_a_pass_may_make_up_for_another_and_no_more() -> None:
    """If a small batch is cheaper than a large batch, that counts against earlier losses."""
    lost = lost_time()
    lost.observe(0.02, 0.01)
    lost.observe(0.01, -0.004)
    assert lost.share == pytest.approx(0.006 / 0.03, rel=0.01)
    lost.observe(0.01, -0.1)
    assert lost.share == 0
    lost.observe(0.01, 0.005)
    assert lost.share == pytest.approx(0.1, rel=0.01)


def test_what_is_long_ago_fades() -> None:
    """After half a minute of passes that lose nothing a twentieth is left of the loss."""
    lost = lost_time()
    for _ in range(10):
        lost.observe(1.0, 0.5)
    assert lost.share == pytest.approx(0.5, rel=0.1)
    for _ in range(30):
        lost.observe(1.0, None)
    assert 0 < lost.share < 0.05 * 0.5
    assert lost.mean_s == pytest.approx(0.5, rel=0.1)


class Watching(DecodeMaximal):
    """Keeps the views that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[SchedulerView] = []

    def plan(self, view: SchedulerView, budget: int) -> list[TokenAllocation]:
        self.views.append(view)
        return super().plan(view, budget)


def shares(views: list[SchedulerView]) -> list[float]:
    return [view.lost_share for view in views]


def test_a_strategy_sees_what_the_passes_lost() -> None:
    """Nothing while one sequence decodes alone, more with each piece of a prompt beside it, less once both decode."""
    strategy = Watching()
    world = World(strategy=strategy, num_cells=2048)
    world.submit("alone", max_tokens=200, ignore_eos=True)
    world.tick(20)
    assert set(shares(strategy.views)) == {0.0}
    begin = len(strategy.views)
    world.submit("x" * 300, max_tokens=200, ignore_eos=True)
    while not all(sequence.is_decoding for sequence in world.scheduler.running) or len(world.scheduler.running) < 2:
        world.tick()
    world.tick(10)
    found = shares(strategy.views[begin:])
    highest = found.index(max(found))
    assert highest == 300 // 32 + 1  # passes, each in the view of the next
    assert found[: highest + 1] == sorted(found[: highest + 1])
    assert found[highest:] == sorted(found[highest:], reverse=True)
    assert strategy.views[-1].lost_tick_s == pytest.approx(0.011 - 0.012 / 2, rel=0.3)


def test_passes_that_only_decode_are_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With their number of rows, and none with a piece of a prompt."""
    learnt: list[tuple[int, float]] = []

    def observe(self: Any, num_rows: int, num_cells: int, seconds: float) -> None:
        learnt.append((num_rows, round(seconds, 6)))

    monkeypatch.setattr(DecodeCost, "observe", observe)
    world = World(strategy="decode_maximal", num_cells=2048)
    for prompt in ("one", "two"):
        world.submit(prompt, max_tokens=50, ignore_eos=True)
    world.tick(6)
    assert learnt == [(2, 0.012)] * 5
    world.submit("x" * 300, max_tokens=50, ignore_eos=True)
    world.tick(6)
    assert len(learnt) == 5


def test_single_tokens_of_a_prompt_are_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in chunks of one token is not taken for rows that decode, but for its last one, which draws."""
    learnt: list[int] = []
    monkeypatch.setattr(DecodeCost, "observe", lambda _, num_rows, num_cells, seconds: learnt.append(num_rows))
    world = World(strategy="decode_maximal", num_cells=2048, limits={"chunk_size": 1})
    world.submit("x" * 20, max_tokens=3, ignore_eos=True)
    world.tick(19)
    assert learnt == []
    world.tick(4)
    assert learnt == [1, 1, 1]


def test_measured_passes_are_learnt_from() -> None:
    """Before the first request: passes that decode by their rows, and all of them by the cost model."""
    world = World(num_cells=2048)
    passes = [MeasuredPass(1, 1, 0.03, 1), MeasuredPass(8, 8, 0.1, 8), MeasuredPass(64, 64, 0.4, 0)]
    before_s = world.scheduler.cost_model.mean_seconds(64, 64, 0)
    seen: list[tuple[int, int, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeCost, "observe", lambda _, *measured: seen.append(measured))
        world.scheduler.calibrate(passes)
    assert seen == [(1, 1, 0.03), (8, 8, 0.1)]
    assert abs(world.scheduler.cost_model.mean_seconds(64, 64, 0) - 0.4) < abs(before_s - 0.4)


def test_a_failure_of_ours_is_no_strategys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors after the strategy's plan are raised unchanged, not as its `StrategyError`."""

    def fail(*_: Any) -> float:
        raise ArithmeticError("of our own")

    monkeypatch.setattr(LostTime, "of_pass", fail)
    world = World(strategy="decode_maximal", num_cells=2048)
    world.submit("one", max_tokens=50, ignore_eos=True)
    world.tick(3)
    world.submit("x" * 300, max_tokens=50, ignore_eos=True)
    with pytest.raises(ArithmeticError, match="of our own"):
        world.tick()
