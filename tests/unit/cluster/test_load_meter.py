"""A replica's load, as it is read from an engine's metrics and slots."""

from __future__ import annotations

from typing import Any

import pytest
from tests.running_engine import LONG_S

from paceline.cluster import LoadMeter
from paceline.cluster.routing import _Ratio
from paceline.engine import EngineClient
from paceline.errors import InvalidParams
from paceline.observability.metrics import Metrics
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import RequestRecord, RowRecord, SlotsSnapshot, SlotView, TickRecord
from paceline.testing.fake_engine_client import FakeEngineClient, fake_worker_engine

IDLE = SlotsSnapshot((SlotView(id=0), SlotView(id=1)), 0)


def tick(metrics: Metrics, elapsed_s: float, step_s: float, num_prefill: int, key: int = 1) -> None:
    """A tick over one row of a prompt."""
    row = RowRecord(
        slot=0,
        key=key,
        choice=0,
        position=0,
        num_tokens=num_prefill,
        num_decode=0,
        num_drafts=0,
        num_new=0,
        first=False,
    )
    metrics.tick_finished(
        TickRecord(
            index=1, kind="generate", start_s=0.0, elapsed_s=elapsed_s, step_s=step_s, rows=(row,), num_slots=2,
            num_running=1, num_waiting=0, num_cells=0, budget=64,
        )
    )  # fmt: skip


def begin(metrics: Metrics, key: int, prompt_tokens: int) -> None:
    metrics.request_queued(
        RequestRecord(
            key=key, request_id=None, kind="generate", prompt_tokens=prompt_tokens, num_choices=1, max_tokens=1,
            priority=0, submitted_s=0.0,
        )
    )  # fmt: skip
    metrics.request_started(key, 0, 0, 0.0)


def test_an_engine_that_has_done_nothing_has_no_costs() -> None:
    """They are 0, which stands for unknown; all cells are free."""
    load = LoadMeter(100).read(Metrics(2).snapshot(), IDLE)
    assert (load.num_slots, load.num_running, load.num_waiting, load.waiting_tokens) == (2, 0, 0, 0)
    assert (load.free_cells, load.prefill_token_s, load.tick_s, load.slot_s) == (100, 0.0, 0.0, 0.0)
    assert LoadMeter(None).read(Metrics(2).snapshot(), IDLE).free_cells is None


def test_costs_are_of_the_last_readings() -> None:
    """A reading without new ticks changes nothing; older readings count half as much each time."""
    metrics, meter = Metrics(2), LoadMeter(100)
    begin(metrics, 1, 100)
    tick(metrics, 0.12, 0.1, 100)
    load = meter.read(metrics.snapshot(), IDLE)
    assert (load.prefill_token_s, load.tick_s) == pytest.approx((0.001, 0.12))
    assert meter.read(metrics.snapshot(), IDLE) == load
    tick(metrics, 0.32, 0.3, 100)
    load = meter.read(metrics.snapshot(), IDLE)
    assert load.prefill_token_s == pytest.approx((0.05 + 0.3) / 150)


def test_a_time_that_falls_does_not_count_twice() -> None:
    """Requests that still run have waited already, so that their waits come before their times."""
    ratio = _Ratio()
    assert [ratio.update(above, below) for above, below in ((4.0, 2), (1.0, 3))] == [2.0, pytest.approx(4 / 3, rel=0.3)]
    assert ratio.update(2.0, 4) >= 0
    assert ratio.update(30.0, 5) > 0


def test_what_is_left_of_prompts_waits() -> None:
    """Of running requests exactly, of waiting requests the mean of others' computed tokens; shared cells do not count."""
    metrics, meter = Metrics(2), LoadMeter(1000)
    begin(metrics, 1, 100)
    tick(metrics, 0.1, 0.1, 60)
    slots = SlotsSnapshot(
        (
            SlotView(id=0, state="prefilling", key=1, num_prompt_tokens=100, num_cached=20, num_computed_tokens=80),
            SlotView(id=1, state="decoding", key=2, num_prompt_tokens=50, num_computed_tokens=70),
        ),
        3,
    )
    load = meter.read(metrics.snapshot(), slots)
    assert (load.num_running, load.num_waiting) == (2, 3)
    assert load.waiting_tokens == 20 + 3 * 60
    assert load.free_cells == 1000 - 60 - 70


def test_a_number_of_cells_that_is_none_is_refused() -> None:
    """By name."""
    with pytest.raises(InvalidParams, match="num_cells"):
        LoadMeter(-1)


@pytest.mark.parametrize("make", [FakeEngineClient, fake_worker_engine])
def test_every_engine_can_be_read(make: Any) -> None:
    """With a thread and with a worker."""
    engine: EngineClient = make()
    try:
        channel = engine.accept(engine.prepare(list(range(200)), SamplingParams(max_tokens=3), RequestOptions()))
        assert channel.wait_released(LONG_S)
        load = LoadMeter(engine.limits.num_cells).read(engine.stats(), engine.slots())
        assert load.num_slots == engine.limits.num_slots
        assert (load.num_running, load.waiting_tokens, load.free_cells) == (0, 0, engine.limits.num_cells)
        assert load.slot_s > 0
    finally:
        engine.close()
