"""The metrics of an engine: the counts of each hook, conservation, and the names that others rely on."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.observability.simulated import Job, Simulation

from paceline.errors import InvalidParams
from paceline.observability import metric_table
from paceline.observability.metric_table import METRICS, NAMES, Histogram
from paceline.observability.metrics import Metrics
from paceline.scheduling.records import EndRecord, RequestRecord, RowRecord, TickRecord
from paceline.streaming.chunk import ENGINE_REASONS, FinishReason, Usage

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def request(key: int, **fields: Any) -> RequestRecord:
    defaults = {"request_id": None, "kind": "generate", "prompt_tokens": 5, "num_choices": 1, "max_tokens": 9}
    return RequestRecord(**{"key": key, "priority": 0, "submitted_s": 0.0} | defaults | fields)


def end(key: int, reason: FinishReason = FinishReason.STOP, **fields: Any) -> EndRecord:
    return EndRecord(**{"key": key, "reason": reason, "usage": Usage(), "now_s": 1.0} | fields)


def row(key: int, **fields: Any) -> RowRecord:
    defaults = {"choice": 0, "position": 0, "num_tokens": 1, "num_decode": 1, "num_drafts": 0, "num_new": 1}
    return RowRecord(**{"slot": key, "key": key, "first": False} | defaults | fields)


def tick(end_s: float, *rows: RowRecord, **fields: Any) -> TickRecord:
    defaults = {"index": 0, "kind": "generate", "elapsed_s": 0.5, "step_s": 0.4, "num_slots": 4, "num_running": 2}
    defaults |= {"num_waiting": 0, "num_cells": 77, "budget": 64}
    return TickRecord(**{"start_s": end_s - 0.5, "rows": rows} | defaults | fields)


def test_the_names_are_stable() -> None:
    """Dashboards rely on names: one may be added, none changed."""
    assert NAMES == (
        "paceline_requests_total",
        "paceline_requests_finished_total",
        "paceline_request_errors_total",
        "paceline_requests_queued",
        "paceline_requests_resident",
        "paceline_slots",
        "paceline_slots_in_use",
        "paceline_kv_cells_in_use",
        "paceline_queue_time_seconds",
        "paceline_ttft_seconds",
        "paceline_itl_seconds",
        "paceline_request_seconds",
        "paceline_tick_seconds",
        "paceline_tick_own_seconds",
        "paceline_tick_rows",
        "paceline_batch_occupancy_ratio",
        "paceline_prompt_tokens_total",
        "paceline_prefill_tokens_total",
        "paceline_prefill_seconds_total",
        "paceline_decode_tokens_total",
        "paceline_tokens_generated_total",
        "paceline_draft_tokens_total",
        "paceline_draft_tokens_accepted_total",
        "paceline_drafts_total",
        "paceline_request_tokens_max",
        "paceline_texts_embedded_total",
        "paceline_embedded_tokens_total",
        "paceline_prefix_hits_total",
        "paceline_prefix_hit_tokens_total",
        "paceline_prefix_instability_total",
        "paceline_evicted_tokens_total",
        "paceline_evictions_total",
        "paceline_preemptions_total",
        "paceline_preempted_tokens_total",
        "paceline_slow_readers_total",
        "paceline_disk_cache_bytes",
        "paceline_disk_cache_lookups_total",
        "paceline_disk_cache_blocks_total",
        "paceline_disk_cache_tokens_total",
        "paceline_disk_cache_block_bytes_total",
        "paceline_disk_cache_read_seconds_total",
        "paceline_disk_cache_write_seconds_total",
        "paceline_engine_restarts_total",
    )


def test_names_follow_the_conventions() -> None:
    """Counters end in _total, units are part of names, and a histogram's bounds ascend."""
    for metric in METRICS:
        assert metric.name.startswith("paceline_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.removesuffix("_total").endswith("_seconds") == (metric.unit == "seconds")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert metric.help.endswith(".")
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.skipif(not PAGE.is_file(), reason="the tests run without the pages beside them")
def test_the_page_is_the_table() -> None:
    """docs/metrics.md is generated from the table: python -m paceline.observability.metric_table > docs/metrics.md."""
    assert PAGE.read_text(encoding="utf-8") == metric_table.markdown()


def test_every_metric_is_there_from_the_start() -> None:
    """A new engine reports every metric, with zero for every known label value."""
    samples = list(Metrics().collect())
    by_code = metric_table.ERRORS.name
    assert {sample.name for sample in samples} == set(NAMES) - {by_code}
    for sample in samples:
        value = sample.value.count if isinstance(sample.value, Histogram) else sample.value
        assert value == 0
    reasons = [dict(sample.labels)["reason"] for sample in samples if sample.name == metric_table.FINISHED.name]
    assert reasons == list(ENGINE_REASONS)


def test_queue_time_runs_from_submit_to_the_first_slot() -> None:
    """Queue time is observed once a request, not for later choices or after a preemption."""
    metrics = Metrics()
    metrics.request_queued(request(1, submitted_s=2.0, num_choices=2))
    metrics.request_started(1, 0, 0, 2.5)
    metrics.request_started(1, 1, 1, 9.0)
    metrics.request_started(1, 0, 0, 9.5)
    found = metrics.snapshot().histogram("paceline_queue_time_seconds")
    assert (found.count, found.sum) == (1, 0.5)


def test_time_to_the_first_token_counts_once_a_request() -> None:
    """Time to first token ends with the tick of the first token of any choice."""
    metrics = Metrics()
    metrics.request_queued(request(1, submitted_s=1.0, num_choices=2))
    metrics.tick_finished(tick(3.0, row(1, num_new=0, num_decode=0)))
    metrics.tick_finished(tick(4.0, row(1, first=True, num_decode=0), row(1, choice=1, num_new=0)))
    metrics.tick_finished(tick(5.0, row(1, choice=1, first=True)))
    found = metrics.snapshot().histogram("paceline_ttft_seconds")
    assert (found.count, found.sum) == (1, 3.0)


def test_intervals_are_those_between_the_tokens_of_one_sequence() -> None:
    """Intervals are measured by choice; a tick without a token of it makes its interval longer."""
    metrics = Metrics()
    metrics.request_queued(request(1))
    metrics.tick_finished(tick(1.0, row(1, first=True), row(1, choice=1, first=True)))
    metrics.tick_finished(tick(2.0, row(1)))
    metrics.tick_finished(tick(2.5, row(1, num_new=0), row(1, choice=1)))
    metrics.tick_finished(tick(4.0, row(1)))
    found = metrics.snapshot().histogram("paceline_itl_seconds")
    assert (found.count, found.sum, found.smallest, found.largest) == (3, 1.0 + 1.5 + 2.0, 1.0, 2.0)


def test_a_burst_counts_as_many_equal_intervals() -> None:
    """Four tokens after one second are four intervals of a quarter."""
    metrics = Metrics()
    metrics.request_queued(request(1))
    metrics.tick_finished(tick(1.0, row(1, first=True)))
    metrics.tick_finished(tick(2.0, row(1, num_tokens=4, num_drafts=3, num_new=4)))
    found = metrics.snapshot().histogram("paceline_itl_seconds")
    assert (found.count, found.sum, found.smallest, found.largest) == (4, 1.0, 0.25, 0.25)


def test_tokens_count_although_the_end_was_reported_before_their_tick() -> None:
    """The hooks of ends come while a tick is applied, and that of the tick afterwards."""
    metrics = Metrics()
    for key in (1, 2):
        metrics.request_queued(request(key))
        metrics.request_started(key, 0, key, 0.1)
    metrics.tick_finished(tick(1.0, row(1, first=True)))
    metrics.request_ended(end(1))
    metrics.request_ended(end(2))
    metrics.tick_finished(tick(2.0, row(1), row(2, first=True)))
    metrics.tick_finished(tick(3.0, row(1), row(2)))
    now = metrics.snapshot()
    assert (now.histogram("paceline_ttft_seconds").count, now.histogram("paceline_ttft_seconds").sum) == (2, 3.0)
    assert (now.histogram("paceline_itl_seconds").count, now.histogram("paceline_itl_seconds").sum) == (1, 1.0)


def test_a_slow_reader_s_pause_is_no_interval() -> None:
    """A pause is no inter-token latency, and is counted separately."""
    metrics = Metrics()
    metrics.request_queued(request(1))
    metrics.tick_finished(tick(1.0, row(1, first=True)))
    metrics.paused(1, True, 1.1)
    metrics.paused(1, False, 60.0)
    metrics.tick_finished(tick(60.5, row(1)))
    metrics.tick_finished(tick(61.0, row(1)))
    now = metrics.snapshot()
    assert (now.histogram("paceline_itl_seconds").count, now.histogram("paceline_itl_seconds").sum) == (1, 0.5)
    assert now.number("paceline_slow_readers_total", "paused") == 1


def test_a_tick_counts_its_rows_and_tokens() -> None:
    """Rows are counted as prefill, decode and generated tokens; verified drafts are decode."""
    metrics = Metrics()
    prompt = row(1, num_tokens=40, num_decode=0, num_new=0)
    drafted = row(2, num_tokens=5, num_decode=1, num_drafts=4, num_new=3)
    metrics.tick_finished(tick(1.0, prompt, drafted, num_running=3))
    now = metrics.snapshot()
    assert now.number("paceline_prefill_tokens_total") == 40
    assert now.number("paceline_decode_tokens_total") == 5
    assert now.number("paceline_tokens_generated_total") == 3
    assert now.histogram("paceline_tick_rows").sum == 2
    assert now.histogram("paceline_batch_occupancy_ratio").sum == 0.75
    assert now.histogram("paceline_tick_seconds", "generate").sum == 0.5
    assert now.histogram("paceline_tick_own_seconds").sum == pytest.approx(0.1)
    assert (now.number("paceline_slots"), now.number("paceline_kv_cells_in_use")) == (4, 77)


def test_an_embedding_tick_counts_texts_and_no_rows() -> None:
    """An embedding tick changes no metric of the generation batch."""
    metrics = Metrics()
    metrics.tick_finished(tick(0.5, num_cells=77))
    metrics.tick_finished(tick(1.0, kind="embed", num_cells=0, num_embedded=3, num_embedded_tokens=50))
    now = metrics.snapshot()
    assert now.number("paceline_kv_cells_in_use") == 77
    assert (now.number("paceline_texts_embedded_total"), now.number("paceline_embedded_tokens_total")) == (3, 50)
    assert now.histogram("paceline_tick_seconds", "embed").count == 1
    assert now.histogram("paceline_batch_occupancy_ratio").count == now.histogram("paceline_tick_rows").count == 1


def test_an_embedding_request_has_a_queue_time_without_a_slot() -> None:
    """Without a start, the queue time comes from the usage."""
    metrics = Metrics()
    metrics.request_queued(request(1, kind="embed"))
    metrics.request_ended(end(1, usage=Usage(queue_s=0.25)))
    now = metrics.snapshot()
    assert now.histogram("paceline_queue_time_seconds").sum == 0.25
    assert now.number("paceline_requests_total", "embed") == 1
    metrics.check()


def test_an_end_is_counted_by_reason_code_and_drafts() -> None:
    """An end is counted by its reason, with the request's duration."""
    metrics = Metrics()
    for key, reason in enumerate(ENGINE_REASONS):
        metrics.request_queued(request(key, submitted_s=0.5))
        code = "decode_error" if reason is FinishReason.ERROR else None
        usage = Usage(draft_tokens=10, accepted_tokens=7)
        metrics.request_ended(end(key, reason, usage=usage, now_s=2.0, error_code=code))
    now = metrics.snapshot()
    assert [now.number("paceline_requests_finished_total", reason) for reason in ENGINE_REASONS] == [1] * 8
    assert (now.completed, now.cancelled, now.failed) == (3, 1, 4)
    assert now.number("paceline_request_errors_total", "decode_error") == 1
    assert now.number("paceline_slow_readers_total", "cancelled") == 1
    assert (now.number("paceline_draft_tokens_total"), now.number("paceline_draft_tokens_accepted_total")) == (80, 56)
    assert now.histogram("paceline_request_seconds").sum == 8 * 1.5
    metrics.check()


def test_memory_events_are_counted_by_source() -> None:
    """Hits, evictions and preemptions are counted with their tokens; a new source gets a sample of its own."""
    metrics = Metrics()
    metrics.prefix_shared(1, 0, 100, "running")
    metrics.prefix_shared(2, 0, 30, "host")
    metrics.prefix_shared(3, 0, 10, "disk")
    metrics.prefix_instability(3, 900, 100, 0.0)
    metrics.evicted(64, "device", 0.0)
    metrics.preempted(1, 0, 55, 0.0)
    metrics.engine_restarted(0.0)
    now = metrics.snapshot()
    sources = ("running", "device", "host", "disk")
    assert [now.number("paceline_prefix_hit_tokens_total", source) for source in sources] == [100, 0, 30, 10]
    assert (now.number("paceline_prefix_hits_total"), now.number("paceline_prefix_hit_tokens_total")) == (3, 140)
    assert (now.number("paceline_evictions_total"), now.number("paceline_evicted_tokens_total", "device")) == (1, 64)
    assert (now.number("paceline_preemptions_total"), now.number("paceline_preempted_tokens_total")) == (1, 55)
    assert (now.number("paceline_prefix_instability_total"), now.number("paceline_engine_restarts_total")) == (1, 1)


def test_slots_in_use_follow_their_sequences() -> None:
    """The gauge is right while no tick runs, too."""
    metrics = Metrics()
    metrics.request_queued(request(1, num_choices=2))
    metrics.request_started(1, 0, 0, 0.1)
    metrics.request_started(1, 1, 1, 0.1)
    metrics.slot_freed(1, 0, 0, 0.2)
    assert metrics.snapshot().number("paceline_slots_in_use") == 1
    metrics.engine_restarted(0.3)
    assert metrics.snapshot().number("paceline_slots_in_use") == 0


def jobs() -> Iterator[Job]:
    reasons = (FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR, FinishReason.LENGTH)
    for key in range(40):
        reason = reasons[key % 4]
        leaves = 3 + key if reason is FinishReason.CANCELLED else None
        yield Job(key, 10 + 7 * key % 90, 1 + key % 13, 0.01 * key, 1 + key % 3, reason=reason, ends_at_tick=leaves)


def test_every_request_is_in_one_place_after_every_tick() -> None:
    """Submitted = completed + cancelled + failed + resident + queued, while all of it happens."""
    metrics = Metrics()
    simulation = Simulation(metrics)
    for job in jobs():
        simulation.submit(job)
    while simulation.coming or simulation.queue or simulation.slots:
        simulation.tick()
        if simulation.num_ticks % 5 == 0 and simulation.slots:
            simulation.preempt(max(simulation.slots))
        metrics.check()
    now = metrics.snapshot()
    assert (now.submitted, now.completed, now.cancelled, now.failed) == (40, 20, 10, 10)
    assert now.number("paceline_preemptions_total") > 0


def test_a_request_that_ends_twice_breaks_conservation() -> None:
    """The check finds hooks for a request that is not live."""
    metrics = Metrics()
    metrics.request_queued(request(1))
    metrics.request_ended(end(1))
    metrics.check()
    metrics.request_ended(end(1))
    with pytest.raises(AssertionError, match="1 hooks named a request that is not live"):
        metrics.check()


@pytest.mark.parametrize("metric", [metric_table.REQUESTS, metric_table.QUEUED])
def test_a_count_that_is_wrong_breaks_conservation(metric: metric_table.Metric) -> None:
    """The check finds a wrong counter and a wrong gauge."""
    metrics = Metrics()
    metrics.request_queued(request(1))
    metrics._count(metric, 1, metric.known[0] if metric.known else "")
    with pytest.raises(AssertionError, match="submitted"):
        metrics.check()


def test_ends_of_requests_from_before_are_not_counted() -> None:
    """Metrics added to a running engine count requests queued afterwards."""
    metrics = Metrics()
    metrics.request_started(1, 0, 0, 0.5)
    metrics.tick_finished(tick(1.0, row(1, first=True)))
    metrics.request_ended(end(1))
    now = metrics.snapshot()
    assert (now.completed, now.queued, now.resident) == (0, 0, 0)
    assert now.histogram("paceline_ttft_seconds").count == 0


def num_containers(root: object) -> int:
    """Count the container objects reachable from one, apart from classes and modules."""
    seen: dict[int, object] = {}
    found = [root]
    while found:
        each = found.pop()
        if id(each) in seen or not gc.is_tracked(each) or isinstance(each, type) or callable(each):
            continue
        seen[id(each)] = each
        found += gc.get_referents(each)
    return len(seen)


def test_memory_does_not_grow_with_requests_that_ended() -> None:
    """Two hundred ended requests take no more objects than twenty."""
    metrics = Metrics()
    sizes = []
    for batch in range(10):
        simulation = Simulation(metrics)
        for key in range(20):
            simulation.submit(Job(20 * batch + key, 10, 4))
        simulation.run()
        sizes.append(num_containers(metrics))
    assert sizes[0] > 20
    assert set(sizes) == {sizes[0]}


def test_without_ticks_nothing_is_kept_of_requests_that_ended() -> None:
    """Without ticks, ended requests are forgotten at once."""
    metrics, sizes = Metrics(has_ticks=False), []
    for key in range(100):
        metrics.request_queued(request(key))
        metrics.request_started(key, 0, 0, 0.5)
        metrics.request_ended(end(key))
        metrics.slot_freed(key, 0, 0, 1.0)
        sizes.append(num_containers(metrics))
    assert set(sizes) == {sizes[0]}


def test_a_snapshot_is_of_its_moment_and_can_be_sent() -> None:
    """A snapshot does not change, and survives pickling."""
    metrics = Metrics()
    before = metrics.snapshot()
    metrics.request_queued(request(1))
    assert (before.submitted, metrics.snapshot().submitted) == (0, 1)
    assert pickle.loads(pickle.dumps(before)) == before


def test_a_misspelt_name_raises_with_the_nearest() -> None:
    """An unknown name raises instead of returning 0."""
    with pytest.raises(InvalidParams, match="did you mean 'paceline_ttft_seconds'"):
        Metrics().snapshot().histogram("paceline_ttft_second")


def test_numbers_and_histograms_are_not_confused() -> None:
    """The message has the method or the label to use."""
    now = Metrics().snapshot()
    with pytest.raises(InvalidParams, match=r"use histogram\('paceline_ttft_seconds'\)"):
        now.number("paceline_ttft_seconds")
    with pytest.raises(InvalidParams, match=r"use number\('paceline_slots'\)"):
        now.histogram("paceline_slots")
    with pytest.raises(InvalidParams, match="one of generate, embed"):
        now.histogram("paceline_tick_seconds")
