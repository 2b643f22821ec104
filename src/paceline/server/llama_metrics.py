"""llama-server's own metrics, `llamacpp:*`, from what this engine counts: for dashboards that know those names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from paceline.observability import metric_table as table
from paceline.observability.metric_table import Metric
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot, Sample

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


METRICS: Final = (
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
    _gauge("n_tokens_max", "Most tokens of a request that has ended, prompt and answer.", _number(table.TOKENS_MAX)),
    _counter("spec_decode_num_draft_tokens", "Tokens that speculation proposed; 0 without it.", _number(table.DRAFTED)),
    _counter(
        "spec_decode_num_accepted_tokens",
        "Proposed tokens that were kept; 0 without speculation.",
        _number(table.ACCEPTED),
    ),
    _counter("spec_decode_num_drafts", "Passes that verified drafts; 0 without speculation.", lambda _: 0.0),
    _gauge("requests_processing", "Slots in which a sequence is.", _number(table.SLOTS_IN_USE)),
    _gauge("requests_deferred", "Requests that wait for their start.", _number(table.QUEUED)),
    _gauge("n_busy_slots_per_decode", "Slots in use at a pass, on average.", _busy_slots),
)
RATES: Final = (
    LlamaRate(
        "llamacpp:prompt_tokens_seconds",
        "Prompt tokens computed in a second of such passes, since the last look.",
        _number(table.PREFILL),
        _number(table.PREFILL_S),
    ),
    LlamaRate(
        "llamacpp:predicted_tokens_seconds",
        "Tokens that one stream got in a second, since the last look.",
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
        for metric in METRICS:
            yield Sample(metric.name, metric.kind, (), metric.value(snapshot))
        with self._lock:
            rates = [(rate.name, self._rate(rate, snapshot)) for rate in RATES]
        for name, value in rates:
            yield Sample(name, "gauge", (), value)

    def _rate(self, rate: LlamaRate, snapshot: MetricsSnapshot) -> float:
        amount, seconds = rate.amount(snapshot), rate.seconds(snapshot)
        amount_before, seconds_before = self._seen.get(rate.name, (0.0, 0.0))
        self._seen[rate.name] = (amount, seconds)
        return (amount - amount_before) / (seconds - seconds_before) if seconds > seconds_before else 0.0
