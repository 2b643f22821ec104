"""The metrics of several workers and one front."""

from __future__ import annotations

import math

from paceline.engine.worker.worker_telemetry import RequestsWatch, WorkerTotals
from paceline.observability.metrics import Metrics
from paceline.params import SamplingParams
from paceline.request import RequestOptions
from paceline.scheduling.records import Delta, RequestRecord, Started, TickRecord
from paceline.sequence import Request
from paceline.streaming import FinishReason, StreamChunk
from paceline.testing.fake_backend import FakeBackend, ManualClock


def worker_with(num_ticks: int, elapsed_s: float) -> Metrics:
    metrics = Metrics()
    for index in range(num_ticks):
        metrics.tick_finished(
            TickRecord(
                index=index,
                kind="embed",
                start_s=0.0,
                elapsed_s=elapsed_s,
                step_s=elapsed_s,
                rows=(),
                num_slots=4,
                num_running=0,
                num_waiting=0,
                num_cells=0,
                budget=10,
                num_embedded=2,
                num_embedded_tokens=20,
            )
        )
    return metrics


def test_counters_go_on_over_a_death_and_gauges_do_not() -> None:
    """Histograms are added up, their smallest and largest too."""
    totals, front = WorkerTotals(), Metrics(num_slots=4)
    totals.report(worker_with(2, 0.5).snapshot())
    running = worker_with(3, 0.5)
    running.request_started(1, 0, 0, 0.0)
    totals.report(running.snapshot(), 5.0)
    assert totals.together(front.snapshot()).number("paceline_slots_in_use") == 1
    assert totals.reported_s == 5.0
    totals.died()
    assert totals.reported_s == -math.inf
    assert totals.together(front.snapshot()).number("paceline_slots_in_use") == 0
    totals.report(worker_with(4, 0.01).snapshot())
    both = totals.together(front.snapshot())
    assert both.number("paceline_texts_embedded_total") == 14
    ticks = both.histogram("paceline_tick_seconds", "embed")
    assert (ticks.count, ticks.smallest, ticks.largest) == (7, 0.01, 0.5)
    assert both.number("paceline_slots") == 4


def test_a_request_has_a_slot_in_the_front_until_it_ends() -> None:
    """However it ends; nothing is kept of it, and no request counts as running when all have ended."""
    metrics, clock = Metrics(), ManualClock()
    watch = RequestsWatch(metrics, clock)
    request = Request(
        key=7,
        prompt=[1, 2],
        params=SamplingParams(),
        options=RequestOptions(),
        samplers=(),
        submitted_s=0.0,
        lora=(),
        vocabulary=FakeBackend(clock=clock).vocabulary,
        echo="",
    )
    watch.queued(request)
    watch.saw(Started(7), request)
    assert metrics.snapshot().number("paceline_slots_in_use") == 1
    request.sequences[0].end(FinishReason.CANCELLED)
    watch.saw(Delta(7, StreamChunk(index=0, finish_reason=FinishReason.CANCELLED), is_last=True), request)
    assert metrics.snapshot().number("paceline_slots_in_use") == 0
    metrics.check()


def test_requests_are_the_fronts_however_often_a_worker_saw_them() -> None:
    """A replayed request is new to the worker, and counted once."""
    totals, front, worker = WorkerTotals(), Metrics(), Metrics()
    record = RequestRecord(
        key=1,
        request_id=None,
        kind="generate",
        prompt_tokens=5,
        num_choices=1,
        max_tokens=3,
        priority=0,
        submitted_s=0.0,
    )
    front.request_queued(record)
    worker.request_queued(record)
    totals.report(worker.snapshot())
    totals.died()
    totals.report(worker.snapshot())
    both = totals.together(front.snapshot())
    assert (both.submitted, both.queued, both.number("paceline_prompt_tokens_total")) == (1, 1, 5)
    assert [sample.name for sample in both] == [sample.name for sample in front.snapshot()]


def test_engines_side_by_side_are_added_up_and_those_that_are_gone_stay_counted() -> None:
    """Counters are sums over all engines that ever reported; a report replaces the last report of the same engine."""
    totals, front = WorkerTotals(), Metrics()
    totals.report(worker_with(2, 0.1).snapshot(), name="a")
    totals.report(worker_with(3, 0.1).snapshot(), name="b")
    totals.report(worker_with(4, 0.1).snapshot(), name="b")
    embedded = "paceline_texts_embedded_total"
    assert totals.together(front.snapshot()).number(embedded) == 2 * (2 + 4)
    totals.died("b")
    totals.died("none")
    assert totals.together(front.snapshot()).number(embedded) == 2 * (2 + 4)
    totals.report(worker_with(5, 0.1).snapshot(), name="a")
    totals.report(worker_with(1, 0.1).snapshot(), name="c")
    both = totals.together(front.snapshot())
    assert both.number(embedded) == 2 * (4 + 5 + 1)
    assert both.histogram("paceline_tick_seconds", "embed").count == 10
    assert [sample.name for sample in both] == [sample.name for sample in front.snapshot()]
