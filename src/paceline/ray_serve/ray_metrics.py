"""The metrics of a replica's engine as metrics of Ray, which adds application, deployment and replica as labels.

Of histograms sum and count are passed on: Ray's own can only be given single values.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray.serve.metrics import Counter, Gauge

from paceline.observability import metric_table
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot

_HELP = {metric.name: metric.help for metric in metric_table.METRICS}


class RayMetrics:
    """Passes snapshots on. In a replica of Serve, on one thread."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, snapshot: MetricsSnapshot) -> None:
        """Set the gauges, and raise the counters by what came since the last call."""
        for name, kind, labels, value in _numbers(snapshot):
            tags = dict(labels)
            if kind == "gauge":
                self._gauge(name, labels).set(value, tags)
                continue
            more = value - self._last.get((name, labels), 0.0)
            if more > 0:
                self._counter(name, labels).inc(more, tags)
                self._last[name, labels] = value

    def _gauge(self, name: str, labels: tuple[tuple[str, str], ...]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=_help(name), tag_keys=tuple(key for key, _ in labels))
        return self._gauges[name]

    def _counter(self, name: str, labels: tuple[tuple[str, str], ...]) -> Counter:
        if name not in self._counters:
            self._counters[name] = Counter(name, description=_help(name), tag_keys=tuple(key for key, _ in labels))
        return self._counters[name]


def _numbers(snapshot: MetricsSnapshot) -> Iterator[tuple[str, str, tuple[tuple[str, str], ...], float]]:
    for one in snapshot:
        if isinstance(one.value, Histogram):
            yield f"{one.name}_sum", "counter", one.labels, one.value.sum
            yield f"{one.name}_count", "counter", one.labels, float(one.value.count)
        else:
            yield one.name, one.kind, one.labels, float(one.value)


def _help(name: str) -> str:
    return _HELP.get(name.removesuffix("_sum").removesuffix("_count"), name)
