"""The metrics of an engine whose worker may be the third: what the front counts itself, and what workers report.

The front sees every request once, however often it is replayed, so it counts requests. A worker sees ticks and tokens; when it
dies, its last report is added up, and what it did since is lost. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from paceline.observability import metric_table as table
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot, Sample

_OF_FRONT = frozenset(
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


class WorkerTotals:
    """What all workers of an engine have reported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: dict[_Place, Sample] = {}
        self._now: dict[_Place, Sample] = {}

    def report(self, samples: Iterable[Sample]) -> None:
        """Take in what the current worker has done so far."""
        with self._lock:
            self._now = {(one.name, one.labels): one for one in samples}

    def died(self) -> None:
        """Add up the counters and histograms of a dead worker; drop its gauges."""
        with self._lock:
            for place, sample in self._now.items():
                if sample.kind != "gauge":
                    self._past[place] = _sum(self._past.get(place), sample)
            self._now = {}

    def together(self, front: MetricsSnapshot) -> MetricsSnapshot:
        """All metrics, in the order of the table; those of requests, and how many slots there are, the front's."""
        samples: dict[_Place, Sample] = {(one.name, one.labels): one for one in front}
        with self._lock:
            for place, sample in (self._past | self._now).items():
                if place[0] not in _OF_FRONT:
                    both = place in self._past and place in self._now
                    samples[place] = _sum(self._past[place], sample) if both else sample
        order = {name: index for index, name in enumerate(table.NAMES)}
        return MetricsSnapshot(tuple(sorted(samples.values(), key=lambda one: order[one.name])))


def _sum(first: Sample | None, second: Sample) -> Sample:
    if first is None:
        return second
    one, other = first.value, second.value
    value = _joined(one, other) if isinstance(one, Histogram) and isinstance(other, Histogram) else None
    if value is None:
        assert not isinstance(one, Histogram)  # noqa: S101 - a metric keeps its kind
        assert not isinstance(other, Histogram)  # noqa: S101
        return Sample(second.name, second.kind, second.labels, one + other)
    return Sample(second.name, second.kind, second.labels, value)


def _joined(one: Histogram, other: Histogram) -> Histogram:
    full = [each for each in (one, other) if each.count]
    return Histogram(
        bounds=other.bounds,
        counts=tuple(a + b for a, b in zip(one.counts, other.counts, strict=True)),
        sum=one.sum + other.sum,
        smallest=min((each.smallest for each in full), default=0.0),
        largest=max((each.largest for each in full), default=0.0),
    )
