"""Metrics, traces and instruments of an engine with workers: from the front itself, and from the reports of workers.

The front sees each request once, even if it is replayed, so it counts requests and writes the trace file. A worker sees ticks,
tokens, slots and memory. It sends its metrics, and its trace events as lines after each tick. When it dies, its last metrics are
added up, and later counts are lost.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.clock import Clock
from paceline.engine.client import close_trace
from paceline.errors import PacelineError
from paceline.observability import metric_table as table
from paceline.observability.metric_table import Histogram, MetricsSnapshot, Sample
from paceline.observability.metrics import Instrument
from paceline.observability.trace_file import (
    EngineRestarted,
    EventInstrument,
    Paused,
    TraceEvent,
    TraceRecorder,
    to_line,
)
from paceline.scheduling.records import (
    Delta,
    Embedded,
    EmbeddingRequest,
    EndRecord,
    RequestEvent,
    RequestRecord,
    Started,
)
from paceline.sequence import Request
from paceline.streaming.chunk import FinishReason, StreamChunk, Usage

_log = logging.getLogger("paceline.engine")
_REASONS = {
    "cancelled": FinishReason.CANCELLED,
    "deadline_exceeded": FinishReason.DEADLINE,
    "engine_stopped": FinishReason.SHUTDOWN,
}
_FRONT_EVENTS = (RequestRecord, EndRecord, Paused, EngineRestarted)
_FRONT_METRICS = frozenset(
    metric.name
    for metric in (
        table.REQUESTS,
        table.FINISHED,
        table.ERRORS,
        table.QUEUED,
        table.RESIDENT,
        table.QUEUE_S,
        table.REQUEST_S,
        table.PROMPT,
        table.SLOW_READERS,
        table.RESTARTS,
        table.TOKENS_MAX,
        table.SLOTS,
    )
)
_Place = tuple[str, tuple[tuple[str, str], ...]]


class RequestsWatch:
    """Calls the hooks of one instrument that are about whole requests and restarts. The front's supervising thread.

    Slots are the worker's, so a request is reported with slot 0 from its start to its end, across workers.
    """

    def __init__(self, instrument: Instrument, clock: Clock, trace: FrontTrace | None = None) -> None:
        self._instrument, self._clock, self._trace = instrument, clock, trace

    def queued(self, request: Request | EmbeddingRequest) -> None:
        """Report that a request was accepted."""
        self._instrument.request_queued(RequestRecord.of(request))

    def paused(self, key: int, is_paused: bool) -> None:
        """Report that the reader of a request is too slow or has caught up."""
        self._instrument.paused(key, is_paused, self._clock.now())

    def restarted(self) -> None:
        """Report that another worker took over."""
        self._instrument.engine_restarted(self._clock.now())

    def traced(self, lines: Iterable[str]) -> None:
        """Write a worker's lines of the trace."""
        if self._trace is not None:
            self._trace.write_lines(lines, self._clock.now())

    def close(self) -> None:
        """End the trace; idempotent."""
        if self._trace is not None:
            self._trace.close()

    def saw(self, event: RequestEvent, request: object) -> None:
        """Report an event of a request that is about to be delivered."""
        if isinstance(event, Delta) and not event.is_last:  # a token: most events are
            return
        match event, request:
            case Started(key), Request():
                self._instrument.request_started(key, 0, 0, request.progress.started_s or self._clock.now())
            case Delta(key, StreamChunk() as chunk, True), Request():
                self._ended(request, worst_reason(request), chunk.error)
                self._instrument.slot_freed(key, 0, 0, self._clock.now())
            case Embedded(key, _, error), EmbeddingRequest():
                reason = FinishReason.STOP if error is None else _REASONS.get(error.code, FinishReason.ERROR)
                self._ended(request, reason, error)

    def _ended(self, request: Request | EmbeddingRequest, reason: FinishReason, error: PacelineError | None) -> None:
        now = self._clock.now()
        code = None if error is None else error.code
        usage = usage_of(request, now) if isinstance(request, Request) else request.usage(now)
        self._instrument.request_ended(
            EndRecord(key=request.key, reason=reason, usage=usage, now_s=now, error_code=code)
        )


def worst_reason(request: Request) -> FinishReason:
    """Return the reason of a request's end for instruments: the first in rank among the reasons of its choices."""
    reasons = [sequence.reason for sequence in request.sequences if sequence.reason is not None]
    return min(reasons, key=lambda reason: reason.rank)


def usage_of(request: Request, now_s: float) -> Usage:
    """Return the usage of a request so far, as the front knows it."""
    num_generated = sum(sequence.num_tokens - sequence.num_prompt_tokens for sequence in request.sequences)
    return replace(request.usage(now_s), completion_tokens=num_generated)


class FrontTrace(EventInstrument):
    """Writes the trace file: events of requests, which the front knows, and the lines of workers. Supervising thread."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def take(self, event: TraceEvent) -> None:
        """Write an event that the front knows better than a worker."""
        if isinstance(event, _FRONT_EVENTS):
            self._recorder.take(event)

    def write_lines(self, lines: Iterable[str], now_s: float) -> None:
        """Write a worker's lines. An error ends the trace and nothing else."""
        try:
            self._recorder.write_lines(lines, now_s)
        except OSError as error:
            _log.error("the trace ends, as it cannot be written: %s", error.strerror or error)

    def close(self) -> None:
        """Write the remaining lines; idempotent."""
        close_trace(self._recorder)


class WorkerTrace(EventInstrument):
    """A worker's part of the trace: lines since the last `flush`. zero_s: the time of its beginning. Engine's thread."""

    def __init__(self, zero_s: float, send: Callable[[list[str]], None]) -> None:
        self._zero_s, self._send = zero_s, send
        self._lines: list[str] = []

    def flush(self) -> None:
        """Send the lines."""
        if self._lines:
            self._send(self._lines)
            self._lines = []

    def take(self, event: TraceEvent) -> None:
        """Keep the line of an event, unless the front writes the event."""
        if not isinstance(event, _FRONT_EVENTS):
            self._lines.append(to_line(event, self._zero_s))


class WorkerTotals:
    """The metrics that workers, or replicas by their names, have reported. Any thread.

    Attributes:
        reported_s: The time of the last report; -inf after the worker's death.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reported_s = -math.inf
        self._past: dict[_Place, Sample] = {}
        self._now: dict[str, tuple[Sample, ...]] = {}

    def report(self, samples: Iterable[Sample], now_s: float = -math.inf, name: str = "") -> None:
        """Replace the metrics of a worker."""
        with self._lock:
            self._now[name] = tuple(samples)
            self.reported_s = now_s

    def died(self, name: str = "") -> None:
        """Add up the counters and histograms of a worker that is gone; drop its gauges."""
        with self._lock:
            _add(self._past, (sample for sample in self._now.pop(name, ()) if sample.kind != "gauge"))
            self.reported_s = -math.inf

    def together(self, front: MetricsSnapshot) -> MetricsSnapshot:
        """Return all metrics in the order of the table. Those of requests, and the number of slots, are the front's."""
        samples: dict[_Place, Sample] = {(sample.name, sample.labels): sample for sample in front}
        with self._lock:
            total = dict(self._past)
            for now in self._now.values():
                _add(total, now)
        samples |= {place: sample for place, sample in total.items() if place[0] not in _FRONT_METRICS}
        order = {name: index for index, name in enumerate(table.NAMES)}
        return MetricsSnapshot(tuple(sorted(samples.values(), key=lambda sample: order[sample.name])))


def _add(samples: dict[_Place, Sample], more: Iterable[Sample]) -> None:
    for sample in more:
        place = (sample.name, sample.labels)
        samples[place] = _sum(samples.get(place), sample)


def _sum(first: Sample | None, second: Sample) -> Sample:
    if first is None:
        return second
    before, now = first.value, second.value
    if isinstance(before, Histogram) and isinstance(now, Histogram):
        filled = [histogram for histogram in (before, now) if histogram.count]
        joined = Histogram(
            bounds=now.bounds,
            counts=tuple(a + b for a, b in zip(before.counts, now.counts, strict=True)),
            sum=before.sum + now.sum,
            smallest=min((histogram.smallest for histogram in filled), default=0.0),
            largest=max((histogram.largest for histogram in filled), default=0.0),
        )
        return Sample(second.name, second.kind, second.labels, joined)
    assert not isinstance(before, Histogram)  # noqa: S101 - a metric keeps its kind
    assert not isinstance(now, Histogram)  # noqa: S101
    return Sample(second.name, second.kind, second.labels, before + now)
