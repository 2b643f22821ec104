"""The definition of every metric of the engine: name, kind, unit, label, buckets, help. `docs/metrics.md` is generated from it.

A `MetricsSnapshot` holds their values at one moment.

    python -m paceline.observability.metric_table > docs/metrics.md

Names follow the conventions of Prometheus (base units, `_total` at the end of a counter) and are stable.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal

from paceline import validation
from paceline.errors import InvalidParams
from paceline.streaming.chunk import ENGINE_REASONS, FinishReason

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. label: the name of its label, if it has one; known: label values that are present from the start.

    buckets: upper bounds of a histogram, in its unit.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    label: str | None = None
    known: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_REQUEST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.125, 0.15, 0.2),
    *(0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0),
)
_OWN_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_EIGHTHS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)

_KINDS = ("generate", "embed")
_SOURCES = ("running", "device", "host", "disk")
_PLACES = ("device", "host")
_BLOCK_EVENTS = ("read", "written", "evicted", "damaged", "lost")
_REASONS = tuple(reason.value for reason in ENGINE_REASONS)


def _counter(name: str, unit: str, text: str, label: str | None = None, known: tuple[str, ...] = ()) -> Metric:
    return Metric(f"paceline_{name}_total", "counter", unit, text, label, known)


def _gauge(name: str, unit: str, text: str) -> Metric:
    return Metric(f"paceline_{name}", "gauge", unit, text)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...], label: str | None = None) -> Metric:
    return Metric(f"paceline_{name}", "histogram", unit, text, label, _KINDS if label else (), buckets)


REQUESTS = _counter("requests", "requests", "Requests accepted.", "kind", _KINDS)
FINISHED = _counter("requests_finished", "requests", "Requests that ended.", "reason", _REASONS)
ERRORS = _counter("request_errors", "requests", "Requests that ended with an error, by the error's code.", "code")
QUEUED = _gauge("requests_queued", "requests", "Requests accepted and not started yet.")
RESIDENT = _gauge("requests_resident", "requests", "Requests started and not ended, preempted ones included.")
SLOTS = _gauge("slots", "slots", "Slots of the engine.")
SLOTS_IN_USE = _gauge("slots_in_use", "slots", "Slots occupied by a sequence.")
KV_CELLS = _gauge("kv_cells_in_use", "cells", "KV cells in use by sequences, as of the last generation tick.")
QUEUE_S = _histogram("queue_time_seconds", "seconds", "From the submit of a request to its start.", _REQUEST_S)
TTFT_S = _histogram("ttft_seconds", "seconds", "Time to first token, from the submit of a request.", _REQUEST_S)
ITL_S = _histogram(
    "itl_seconds",
    "seconds",
    "Inter-token latency of a sequence. The k tokens of a burst count as k equal intervals; a slow reader's pauses do not.",
    _TOKEN_S,
)
REQUEST_S = _histogram("request_seconds", "seconds", "From the submit of a request to its end of any kind.", _REQUEST_S)
TICK_S = _histogram("tick_seconds", "seconds", "Duration of a tick.", _TOKEN_S, "kind")
TICK_OWN_S = _histogram(
    "tick_own_seconds", "seconds", "Overhead of a tick: its duration less the forward pass.", _OWN_S
)
TICK_ROWS = _histogram("tick_rows", "rows", "Rows of a generation tick.", _ROWS)
OCCUPANCY = _histogram("batch_occupancy_ratio", "ratio", "Slots in use divided by all slots, at each tick.", _EIGHTHS)
PROMPT = _counter("prompt_tokens", "tokens", "Prompt tokens of accepted requests.")
PREFILL = _counter("prefill_tokens", "tokens", "Prompt tokens computed, and tokens recomputed after a preemption.")
PREFILL_S = _counter(
    "prefill_seconds", "seconds", "Forward passes that computed prompt tokens, with other rows or not."
)
DECODE = _counter("decode_tokens", "tokens", "Generated tokens computed to get the next one.")
GENERATED = _counter("tokens_generated", "tokens", "Tokens generated.")
DRAFTED = _counter("draft_tokens", "tokens", "Tokens proposed by speculation, and verified, in ended requests.")
ACCEPTED = _counter("draft_tokens_accepted", "tokens", "Draft tokens that were accepted, in ended requests.")
PROPOSALS = _counter("drafts", "drafts", "Proposals of one or more tokens that were verified.")
TOKENS_MAX = _gauge("request_tokens_max", "tokens", "Most tokens, prompt and generated, of a request that has ended.")
EMBEDDED = _counter("texts_embedded", "texts", "Texts embedded.")
EMBEDDED_TOKENS = _counter("embedded_tokens", "tokens", "Tokens of embedded texts.")
PREFIX_HITS = _counter("prefix_hits", "hits", "Prompts with a prefix match, by where the KV was.", "source", _SOURCES)
PREFIX_TOKENS = _counter("prefix_hit_tokens", "tokens", "Prompt tokens reused instead of computed.", "source", _SOURCES)
INSTABILITY = _counter("prefix_instability", "prompts", "Long cached prompts of which only the beginning matched.")
EVICTED = _counter(
    "evicted_tokens",
    "tokens",
    "Tokens of evicted cached prefixes: host memory keeps those of the device if it has space, those of the host are gone.",
    "source",
    _PLACES,
)
EVICTIONS = _counter("evictions", "evictions", "Cached prefixes evicted from there.", "source", _PLACES)
PREEMPTIONS = _counter("preemptions", "preemptions", "Sequences that lost their slot and had to wait to continue.")
PREEMPTED = _counter(
    "preempted_tokens",
    "tokens",
    "Computed tokens of preempted sequences; offloaded to host memory if it has space, otherwise recomputed.",
)
SLOW_READERS = _counter(
    "slow_readers",
    "times",
    "Requests paused or cancelled because their reader was too slow.",
    "outcome",
    ("paused", "cancelled"),
)
DISK_BYTES = _gauge(
    "disk_cache_bytes", "bytes", "Size of the disk cache's folder, of all models and processes, as of the last look."
)
DISK_LOOKUPS = _counter(
    "disk_cache_lookups",
    "lookups",
    "Searches of the disk cache: a hit has read a prefix; after a miss the tokens are computed.",
    "outcome",
    ("hit", "miss"),
)
DISK_BLOCKS = _counter(
    "disk_cache_blocks",
    "blocks",
    "Blocks (files) of the disk cache. Damaged ones were deleted; lost ones were not written, for want of time or of a disk.",
    "event",
    _BLOCK_EVENTS,
)
DISK_TOKENS = _counter(
    "disk_cache_tokens", "tokens", "Tokens with cells in these blocks; a state has none.", "event", _BLOCK_EVENTS
)
DISK_BLOCK_BYTES = _counter("disk_cache_block_bytes", "bytes", "Sizes of these blocks.", "event", _BLOCK_EVENTS)
DISK_READ_S = _counter("disk_cache_read_seconds", "seconds", "Seconds in which blocks were read from the disk cache.")
DISK_WRITE_S = _counter("disk_cache_write_seconds", "seconds", "Seconds in which blocks were written to it.")
RESTARTS = _counter("engine_restarts", "restarts", "Restarts after the worker process died.")

METRICS: Final = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""All metrics, in the order of the table."""

NAMES: Final = tuple(metric.name for metric in METRICS)

_INTRODUCTION = """\
# Metrics

`paceline.observability.metrics.Metrics` is an instrument that counts what an engine does. `snapshot()` returns all
metrics at one moment, on any thread; `collect()` iterates over the same as plain records, for exporters.

At every moment each accepted request is in one state:

    accepted = completed + cancelled + failed + resident + queued

`GET /metrics` of the server returns all of them in Prometheus's text format, beside its own: docs/prometheus.md.

Completed requests ended with `stop` or `length`; cancelled ones with `cancelled`; failed ones otherwise.
A metric has at most one label. The label values of a counter that are listed here are present from the start, as zeros.
This page is generated from `src/paceline/observability/metric_table.py`.
"""


def markdown() -> str:
    """Return the text of `docs/metrics.md`."""
    return "\n".join([_INTRODUCTION, *_table(), "", "## Buckets", "", *_buckets(), ""])


def _table() -> Iterator[str]:
    yield "| name | kind | unit | label | meaning |"
    yield "|---|---|---|---|---|"
    for metric in METRICS:
        label = "" if metric.label is None else f"`{metric.label}`: {', '.join(metric.known) or 'any'}"
        yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {label} | {metric.help} |"


def _buckets() -> Iterator[str]:
    yield "Upper bounds, inclusive; a further bucket counts all larger values."
    yield ""
    for metric in METRICS:
        if metric.buckets:
            yield f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}"


if __name__ == "__main__":
    sys.stdout.write(markdown())


COMPLETED: Final = (FinishReason.STOP, FinishReason.REPETITION, FinishReason.LENGTH)
CANCELLED: Final = (FinishReason.CANCELLED,)
FAILED: Final = tuple(reason for reason in ENGINE_REASONS if reason not in (*COMPLETED, *CANCELLED))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Values counted by size. counts[i]: values <= bounds[i] and above the bound before; the last: above all bounds.

    bounds ascend; sum, smallest and largest of the values are in their unit (0 without values).
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    smallest: float
    largest: float

    @property
    def count(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Return the mean of the values, None without values."""
        return self.sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """Estimate the value below which a fraction `q` of the values lies; None without values.

        Interpolated linearly between the bounds of its bucket, so its error is at most the bucket's width.

        Raises:
            InvalidParams: q is not in [0, 1].
        """
        q = validation.number("q", q, 0, 1)
        if not self.count:
            return None
        sums = list(accumulate(self.counts))
        wanted = q * self.count
        index = next(index for index, sum_ in enumerate(sums) if self.counts[index] and sum_ >= wanted)
        low = self.bounds[index - 1] if index and self.bounds[index - 1] > self.smallest else self.smallest
        high = self.bounds[index] if index < len(self.bounds) and self.bounds[index] < self.largest else self.largest
        below = sums[index] - self.counts[index]
        return min(high, low + (high - low) * max(0.0, wanted - below) / self.counts[index])


@dataclass(frozen=True, slots=True)
class Sample:
    """One metric with one value of its label. labels: empty, or one pair of name and value."""

    name: str
    kind: Kind
    labels: tuple[tuple[str, str], ...]
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The samples of all metrics, in the order of the table.

    An unknown name of a metric raises `InvalidParams`, which suggests a known one.
    """

    samples: tuple[Sample, ...]

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def number(self, name: str, label: str | None = None) -> float:
        """Return a counter or gauge with this label value, or the sum over all; 0 for a label value that never occurred."""
        values = [sample.value for sample in self._named(name, label)]
        numbers = [value for value in values if not isinstance(value, Histogram)]
        if len(numbers) < len(values):
            raise InvalidParams(f"{name} is a histogram; use histogram({name!r})")
        return sum(numbers)

    def histogram(self, name: str, label: str | None = None) -> Histogram:
        """Return a histogram; `label` selects one if a metric has several."""
        found = [sample.value for sample in self._named(name, label) if isinstance(sample.value, Histogram)]
        if len(found) != 1:
            labels = [value for sample in self._named(name) for _, value in sample.labels]
            way_out = f"pass a label, one of {', '.join(labels)}" if labels else f"use number({name!r})"
            raise InvalidParams(f"{name} is not a single histogram under the label {label!r}; {way_out}")
        return found[0]

    @property
    def submitted(self) -> int:
        """Return the number of requests accepted so far."""
        return int(self.number(REQUESTS.name))

    @property
    def completed(self) -> int:
        """Return the number of requests that ended with `stop` or `length`."""
        return self._ended(COMPLETED)

    @property
    def cancelled(self) -> int:
        """Return the number of requests that their caller cancelled."""
        return self._ended(CANCELLED)

    @property
    def failed(self) -> int:
        """Return the number of requests that ended with `error`, `deadline`, `shutdown` or `slow_reader`."""
        return self._ended(FAILED)

    @property
    def resident(self) -> int:
        """Return the number of requests that got a slot and have not ended."""
        return int(self.number(RESIDENT.name))

    @property
    def queued(self) -> int:
        """Return the number of requests that have not got a slot yet."""
        return int(self.number(QUEUED.name))

    def _ended(self, reasons: tuple[FinishReason, ...]) -> int:
        return int(sum(self.number(FINISHED.name, reason) for reason in reasons))

    def _named(self, name: str, label: str | None = None) -> list[Sample]:
        validation.choice("name", name, NAMES)
        named = [sample for sample in self.samples if sample.name == name]
        return [sample for sample in named if label is None or label in dict(sample.labels).values()]
