"""The metrics that a server adds to its engine's: HTTP requests and streams, and llama-server's names, `llamacpp:*`.

HTTP is counted on the event loop and read on any thread, under a lock. llama-server's metrics follow from the engine's
counters, for dashboards that know those names.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from paceline.observability import metric_table as table
from paceline.observability.metric_table import Metric
from paceline.observability.metrics import Tally
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot, Sample

OTHER: Final = "other"
"""The route of requests that matched none, and of all beyond the maximum number of series."""

_MAX_SERIES = 1000  # of route, method and status: requests must not fill memory
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)

REQUESTS: Final = "paceline_http_requests_total"
SECONDS: Final = "paceline_http_request_seconds"
STREAMS: Final = "paceline_http_streams_open"
BYTES: Final = "paceline_http_streamed_bytes_total"

HTTP_HELP: Final = {
    REQUESTS: "HTTP requests that have ended.",
    SECONDS: "Time from the first byte of a request to the last of its response.",
    STREAMS: "Streams of events or lines that are open.",
    BYTES: "Bytes sent in streams of events or lines, heartbeats included.",
}


MODEL_LOADED: Final = "paceline_model_loaded"
MODEL_USERS: Final = "paceline_model_users"
MODEL_WAITING: Final = "paceline_model_waiting"
MODEL_BYTES: Final = "paceline_model_memory_bytes"

ROUTER_HELP: Final = {
    MODEL_LOADED: "1 while the model is loaded, also while its process sleeps; else 0.",
    MODEL_USERS: "HTTP requests that use the model now.",
    MODEL_WAITING: "HTTP requests that wait until the model is loaded.",
    MODEL_BYTES: "Resident memory of the model's worker process; 0 without one.",
}


class HttpMetrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._seconds: dict[str, Tally] = {}
        self._num_streams = 0
        self._num_bytes = 0

    def observe(self, route: str, status: int, seconds: float, *, method: str = "GET") -> None:
        """Count a request. route: the route's pattern, never the path as sent; `OTHER` where none matched."""
        with self._lock:
            series = (route, method, status)
            if series not in self._requests and len(self._requests) >= _MAX_SERIES:
                route, series = OTHER, (OTHER, OTHER, status)
            self._requests[series] += 1
            if route not in self._seconds:
                self._seconds[route] = Tally(_SECONDS)
            self._seconds[route].observe(seconds)

    def stream_opened(self) -> None:
        """Count a stream as open."""
        with self._lock:
            self._num_streams += 1

    def stream_closed(self) -> None:
        """Count a stream as ended."""
        with self._lock:
            self._num_streams -= 1

    def sent(self, num_bytes: int) -> None:
        """Count bytes of streams."""
        with self._lock:
            self._num_bytes += num_bytes

    def samples(self) -> Iterator[Sample]:
        """Yield a consistent snapshot of all samples."""
        with self._lock:
            requests = sorted(self._requests.items())
            seconds = [(route, tally.histogram()) for route, tally in sorted(self._seconds.items())]
            num_streams, num_bytes = self._num_streams, self._num_bytes
        for (route, method, status), number in requests:
            labels = (("route", route), ("method", method), ("status", str(status)))
            yield Sample(REQUESTS, "counter", labels, number)
        for route, histogram in seconds:
            yield Sample(SECONDS, "histogram", (("route", route),), histogram)
        yield Sample(STREAMS, "gauge", (), num_streams)
        yield Sample(BYTES, "counter", (), num_bytes)


Value = Callable[[MetricsSnapshot], float]


@dataclass(frozen=True, slots=True)
class LlamaMetric:
    """A metric and the function that computes it."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: Value


@dataclass(frozen=True, slots=True)
class LlamaRate:
    """A gauge: the quotient of two counters' increases since the last scrape."""

    name: str
    help: str
    amount: Value
    seconds: Value


def _number(metric: Metric) -> Value:
    return lambda snapshot: snapshot.number(metric.name)


def _histograms(snapshot: MetricsSnapshot, metric: Metric) -> list[Histogram]:
    return [one.value for one in snapshot if one.name == metric.name and isinstance(one.value, Histogram)]


def _sum(metric: Metric) -> Value:
    return lambda snapshot: sum(one.sum for one in _histograms(snapshot, metric))


def _count(metric: Metric) -> Value:
    return lambda snapshot: sum(one.count for one in _histograms(snapshot, metric))


def _prompt_tokens(snapshot: MetricsSnapshot) -> float:
    return snapshot.number(table.PREFILL.name) + snapshot.number(table.EMBEDDED_TOKENS.name)


def _prompt_s(snapshot: MetricsSnapshot) -> float:
    ticks = [one for one in snapshot if one.name == table.TICK_S.name and ("kind", "embed") in one.labels]
    embedding_s = sum(one.value.sum for one in ticks if isinstance(one.value, Histogram))
    return snapshot.number(table.PREFILL_S.name) + embedding_s


def _busy_slots(snapshot: MetricsSnapshot) -> float:
    share = snapshot.histogram(table.OCCUPANCY.name).mean
    return 0.0 if share is None else share * snapshot.number(table.SLOTS.name)


def _counter(name: str, text: str, value: Value) -> LlamaMetric:
    return LlamaMetric(f"llamacpp:{name}_total", "counter", text, value)


def _gauge(name: str, text: str, value: Value) -> LlamaMetric:
    return LlamaMetric(f"llamacpp:{name}", "gauge", text, value)


LLAMA_METRICS: Final = (
    _counter(
        "prompt_tokens",
        "Tokens computed of prompts and of embedded texts; those taken from memory are not among them.",
        _prompt_tokens,
    ),
    _counter("prompt_tokens_cached", "Prompt tokens taken from memory.", _number(table.PREFIX_TOKENS)),
    _counter("prompt_seconds", "Seconds of the passes that computed them.", _prompt_s),
    _counter("tokens_predicted", "Tokens generated.", _number(table.GENERATED)),
    _counter(
        "tokens_predicted_seconds", "Seconds between generated tokens, of all streams together.", _sum(table.ITL_S)
    ),
    _counter("n_decode", "Passes.", _count(table.TICK_S)),
    _gauge("n_tokens_max", "Most tokens of a request that has ended, of prompt and output.", _number(table.TOKENS_MAX)),
    _counter("spec_decode_num_draft_tokens", "Tokens that speculation proposed; 0 without it.", _number(table.DRAFTED)),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Proposed tokens that were kept; 0 without speculation.",
        _number(table.ACCEPTED),
    ),
    _counter(
        "spec_decode_num_drafts", "Proposals that were verified; 0 without speculation.", _number(table.PROPOSALS)
    ),
    _gauge("requests_processing", "Slots in which a sequence is.", _number(table.SLOTS_IN_USE)),
    _gauge("requests_deferred", "Requests that wait for their start.", _number(table.QUEUED)),
    _gauge("n_busy_slots_per_decode", "Slots in use at a pass, on average.", _busy_slots),
)
LLAMA_RATES: Final = (
    LlamaRate(
        "llamacpp:prompt_tokens_seconds",
        "Prompt tokens computed in a second of such passes, since the last scrape.",
        _number(table.PREFILL),
        _number(table.PREFILL_S),
    ),
    LlamaRate(
        "llamacpp:predicted_tokens_seconds",
        "Tokens that one stream got in a second, since the last scrape.",
        _count(table.ITL_S),
        _sum(table.ITL_S),
    ),
)


class LlamaMetrics:
    """Compute llama-server's metrics; remembers the last scrape's counters for the rates. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[float, float]] = {}

    def samples(self, snapshot: MetricsSnapshot) -> Iterator[Sample]:
        """Yield all samples in the order of the tables."""
        for metric in LLAMA_METRICS:
            yield Sample(metric.name, metric.kind, (), metric.value(snapshot))
        with self._lock:
            rates = [(rate.name, self._rate(rate, snapshot)) for rate in LLAMA_RATES]
        for name, value in rates:
            yield Sample(name, "gauge", (), value)

    def _rate(self, rate: LlamaRate, snapshot: MetricsSnapshot) -> float:
        amount, seconds = rate.amount(snapshot), rate.seconds(snapshot)
        amount_before, seconds_before = self._seen.get(rate.name, (0.0, 0.0))
        self._seen[rate.name] = (amount, seconds)
        return (amount - amount_before) / (seconds - seconds_before) if seconds > seconds_before else 0.0
