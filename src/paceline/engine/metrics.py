"""Counters, gauges and histograms of an engine, as an instrument; `metric_table` says what each one means.

The hooks run on the engine's thread, everything else on any thread: a lock is held for as long as copying takes. Takes the
same room however many requests have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from paceline.engine import metric_table as table
from paceline.engine.histogram import Histogram, Tally
from paceline.engine.metric_table import METRICS, Metric
from paceline.engine.metrics_snapshot import COMPLETED, MetricsSnapshot, Sample
from paceline.engine.token_times import TokenTimes
from paceline.scheduling.instrument import EndRecord, Instrument, RequestRecord, TickRecord
from paceline.streaming.chunk import FinishReason, Usage


class Metrics(Instrument):
    """Give it to an engine from the start; one that is added later counts only requests that were queued since.

    num_slots: of the engine, to be told before its first tick. has_ticks: whether it is told of ticks at all.
    """

    def __init__(self, num_slots: int = 0, *, has_ticks: bool = True) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, dict[str, float]] = {
            metric.name: dict.fromkeys(_known(metric), 0) for metric in METRICS if not metric.buckets
        }
        self._tallies = {
            metric.name: {label: Tally(metric.buckets) for label in _known(metric)}
            for metric in METRICS
            if metric.buckets
        }
        self._gauge(table.SLOTS, num_slots)
        self._times = TokenTimes(has_ticks=has_ticks)
        self._in_slots: set[tuple[int, int]] = set()
        self._num_stray = 0

    def snapshot(self) -> MetricsSnapshot:
        """All of it at one moment."""
        with self._lock:
            return MetricsSnapshot(tuple(self._samples()))

    def collect(self) -> Iterator[Sample]:
        """The samples of a snapshot, one after the other."""
        return iter(self.snapshot())

    def check(self) -> None:
        """Raises `AssertionError` unless every accepted request is in exactly one place.

        For metrics that have watched the engine from its first request: added later, they are told of requests that they
        do not know, which counts as an error here.
        """
        with self._lock:
            now, num_stray = MetricsSnapshot(tuple(self._samples())), self._num_stray
            num_resident = sum(live.has_started for live in self._times)
            num_queued = len(self._times) - num_resident
        if (now.queued, now.resident) != (num_queued, num_resident):
            raise AssertionError(f"of those that live {num_queued} wait and {num_resident} run, but {_places(now)}")
        if now.submitted != now.completed + now.cancelled + now.failed + now.resident + now.queued:
            raise AssertionError(f"requests are lost or counted twice: {_places(now)}")
        if num_stray:
            raise AssertionError(f"{num_stray} times a request was named that does not live; {_places(now)}")

    def request_queued(self, record: RequestRecord) -> None:
        """Counts it as accepted; it is queued."""
        with self._lock:
            if not self._times.add(record):
                self._num_stray += 1
                return
            self._count(table.REQUESTS, 1, record.kind)
            self._count(table.PROMPT, record.prompt_tokens)
            self._count(table.QUEUED, 1)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002 - the hook's shape
        """With its first slot a request is resident."""
        with self._lock:
            self._in_slots.add((key, choice))
            live = self._times.find(key)
            if live is None:
                self._num_stray += 1
            elif live.start():
                self._count(table.QUEUED, -1)
                self._count(table.RESIDENT, 1)
                self._observe(table.QUEUE_S, now_s - live.record.submitted_s)

    def request_ended(self, record: EndRecord) -> None:
        """Counts its end; nothing of it is kept."""
        with self._lock:
            live = self._times.pop(record.key)
            if live is None:
                self._num_stray += 1
                return
            self._count(table.RESIDENT if live.has_started else table.QUEUED, -1)
            self._count(table.FINISHED, 1, record.reason.value)
            self._observe(table.REQUEST_S, record.now_s - live.record.submitted_s)
            if record.error_code is not None:
                self._count(table.ERRORS, 1, record.error_code)
            if record.reason is FinishReason.SLOW_READER:
                self._count(table.SLOW_READERS, 1, "cancelled")
            if record.reason in COMPLETED and not live.has_started:  # it needed no slot, only a vector
                self._observe(table.QUEUE_S, record.usage.queue_s)
            self._count_drafts(record.usage)
            self._note_tokens(live.record, record.usage)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002
        """One slot fewer is in use."""
        with self._lock:
            self._in_slots.discard((key, choice))

    def preempted(self, key: int, choice: int, num_computed: int, now_s: float) -> None:  # noqa: ARG002
        """Counts it, and what it cost."""
        with self._lock:
            self._count(table.PREEMPTIONS, 1)
            self._count(table.PREEMPTED, num_computed)

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:  # noqa: ARG002
        """Counts a hit and its tokens, by where they were."""
        with self._lock:
            self._count(table.PREFIX_HITS, 1, source)
            self._count(table.PREFIX_TOKENS, num_tokens, source)

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:  # noqa: ARG002
        """Counts it."""
        with self._lock:
            self._count(table.INSTABILITY, 1)

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:  # noqa: ARG002
        """Counts it and its tokens, by where they were."""
        with self._lock:
            self._count(table.EVICTIONS, 1, source)
            self._count(table.EVICTED, num_tokens, source)

    def engine_restarted(self, now_s: float) -> None:  # noqa: ARG002
        """Counts it; whatever was in a slot is in none any more."""
        with self._lock:
            self._count(table.RESTARTS, 1)
            self._in_slots.clear()

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:  # noqa: ARG002
        """Counts a pause; the time it takes is no interval between tokens."""
        with self._lock:
            if is_paused:
                self._count(table.SLOW_READERS, 1, "paused")
                self._times.pause(key)

    def tick_finished(self, record: TickRecord) -> None:
        """Counts what it computed and what came out, and the times that this ended."""
        with self._lock:
            self._tallies[table.TICK_S.name][record.kind].observe(record.elapsed_s)
            self._observe(table.TICK_OWN_S, record.own_s)
            self._gauge(table.SLOTS, record.num_slots)
            if record.kind == "embed":
                self._count(table.EMBEDDED, record.num_embedded)
                self._count(table.EMBEDDED_TOKENS, record.num_embedded_tokens)
            else:
                self._count_rows(record)

    def _count_rows(self, record: TickRecord) -> None:
        self._gauge(table.KV_CELLS, record.num_cells)  # those of embedding ticks are other cells
        num_tokens = num_decode = num_drafts = num_new = 0
        for row in record.rows:
            num_tokens += row.num_tokens
            num_decode += row.num_decode
            num_drafts += row.num_drafts
            num_new += row.num_new
        num_prefill = num_tokens - num_decode - num_drafts
        if num_prefill:
            self._count(table.PREFILL, num_prefill)
            self._count(table.PREFILL_S, record.step_s)
        self._count(table.DECODE, num_decode + num_drafts)
        self._count(table.GENERATED, num_new)
        self._observe(table.TICK_ROWS, len(record.rows))
        if record.num_slots:  # a trace may say anything
            self._observe(table.OCCUPANCY, record.num_running / record.num_slots)
        times = self._times.tick(record)
        for ttft_s in times.ttft_s:
            self._observe(table.TTFT_S, ttft_s)
        for interval_s, num_times in times.intervals_s.items():
            self._observe(table.ITL_S, interval_s, num_times)

    def _count_drafts(self, usage: Usage) -> None:
        self._count(table.DRAFTED, usage.draft_tokens)
        self._count(table.ACCEPTED, usage.accepted_tokens)

    def _note_tokens(self, request: RequestRecord, usage: Usage) -> None:
        largest, mine = self._numbers[table.TOKENS_MAX.name], usage.prompt_tokens + usage.completion_tokens
        if request.kind == "generate" and mine > largest[""]:
            largest[""] = mine

    def _count(self, metric: Metric, by: float, label: str = "") -> None:
        numbers = self._numbers[metric.name]
        numbers[label] = numbers.get(label, 0) + by

    def _gauge(self, metric: Metric, value: int) -> None:
        self._numbers[metric.name][""] = value

    def _observe(self, metric: Metric, value: float, times: int = 1) -> None:
        self._tallies[metric.name][""].observe(value, times)

    def _samples(self) -> Iterator[Sample]:
        self._gauge(table.SLOTS_IN_USE, len(self._in_slots))
        for metric in METRICS:
            for label, number in self._numbers.get(metric.name, {}).items():
                yield _sample(metric, label, number)
            for label, tally in self._tallies.get(metric.name, {}).items():
                yield _sample(metric, label, tally.histogram())


def _sample(metric: Metric, label: str, value: float | Histogram) -> Sample:
    labels = () if metric.label is None else ((metric.label, label),)
    return Sample(metric.name, metric.kind, labels, value)


def _known(metric: Metric) -> tuple[str, ...]:
    """The label values that are there from the start; "" stands for no label."""
    return ("",) if metric.label is None else metric.known


def _places(now: MetricsSnapshot) -> str:
    return (
        f"submitted {now.submitted}, completed {now.completed}, cancelled {now.cancelled}, failed {now.failed}, "
        f"resident {now.resident}, queued {now.queued}"
    )
