"""Every metric of the engine, once: name, kind, unit, label, buckets, what it says. `docs/metrics.md` is made from it.

    python -m paceline.engine.metric_table > docs/metrics.md

Names follow the conventions of Prometheus: base units, `_total` at the end of a counter. A name here is a promise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from paceline.streaming.chunk import FinishReason

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. label: the name of its one label, if it has one; known: values that are there from the start.

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
_SOURCES = ("running", "device", "host")
_REASONS = tuple(reason.value for reason in FinishReason)


def _counter(name: str, unit: str, text: str, label: str | None = None, known: tuple[str, ...] = ()) -> Metric:
    return Metric(f"paceline_{name}_total", "counter", unit, text, label, known)


def _gauge(name: str, unit: str, text: str) -> Metric:
    return Metric(f"paceline_{name}", "gauge", unit, text)


def _histogram(name: str, unit: str, text: str, buckets: tuple[float, ...], label: str | None = None) -> Metric:
    return Metric(f"paceline_{name}", "histogram", unit, text, label, _KINDS if label else (), buckets)


REQUESTS = _counter("requests", "requests", "Requests that were accepted.", "kind", _KINDS)
FINISHED = _counter("requests_finished", "requests", "Requests that ended.", "reason", _REASONS)
ERRORS = _counter("request_errors", "requests", "Requests that ended with an error, by the error's code.", "code")
QUEUED = _gauge("requests_queued", "requests", "Accepted, and not started yet.")
RESIDENT = _gauge("requests_resident", "requests", "Started, and not ended; a preempted one is still resident.")
SLOTS = _gauge("slots", "slots", "Slots that the engine has.")
SLOTS_IN_USE = _gauge("slots_in_use", "slots", "Slots in which a sequence is.")
KV_CELLS = _gauge("kv_cells_in_use", "cells", "KV cells in use by sequences, as of the last tick that generated.")
QUEUE_S = _histogram("queue_time_seconds", "seconds", "From the submit of a request to its start.", _REQUEST_S)
TTFT_S = _histogram("ttft_seconds", "seconds", "From the submit of a request to its first token.", _REQUEST_S)
ITL_S = _histogram(
    "itl_seconds",
    "seconds",
    "Between a sequence's tokens. The k tokens of a burst count as k equal intervals; a slow reader's pauses do not count.",
    _TOKEN_S,
)
REQUEST_S = _histogram(
    "request_seconds", "seconds", "From the submit of a request to its end, however it ended.", _REQUEST_S
)
TICK_S = _histogram("tick_seconds", "seconds", "A tick from its beginning to its end.", _TOKEN_S, "kind")
TICK_OWN_S = _histogram("tick_own_seconds", "seconds", "Of a tick, what was not spent in the pass itself.", _OWN_S)
TICK_ROWS = _histogram("tick_rows", "rows", "Sequences that had a share of a tick.", _ROWS)
OCCUPANCY = _histogram("batch_occupancy_ratio", "ratio", "Slots in use of all slots, at each tick.", _EIGHTHS)
PROMPT = _counter("prompt_tokens", "tokens", "Tokens of the prompts of accepted requests.")
PREFILL = _counter("prefill_tokens", "tokens", "Prompt tokens computed, and what is computed again after a preemption.")
PREFILL_S = _counter("prefill_seconds", "seconds", "Passes that computed prompt tokens, whatever else they computed.")
DECODE = _counter("decode_tokens", "tokens", "Tokens computed to go on from a generated one, drafts included.")
GENERATED = _counter("tokens_generated", "tokens", "Tokens that came out.")
DRAFTED = _counter("draft_tokens", "tokens", "Tokens that speculation proposed, of ended requests.")
ACCEPTED = _counter("draft_tokens_accepted", "tokens", "Of those, the ones that were kept.")
TOKENS_MAX = _gauge(
    "request_tokens_max", "tokens", "Most tokens of a request that has ended: its prompt and all that it generated."
)
EMBEDDED = _counter("texts_embedded", "texts", "Texts that became vectors.")
EMBEDDED_TOKENS = _counter("embedded_tokens", "tokens", "Tokens of those texts.")
PREFIX_HITS = _counter("prefix_hits", "hits", "Prompts of which a beginning was in memory.", "source", _SOURCES)
PREFIX_TOKENS = _counter(
    "prefix_hit_tokens", "tokens", "Prompt tokens taken from memory instead of computed.", "source", _SOURCES
)
INSTABILITY = _counter("prefix_instability", "prompts", "Long cached prompts that matched only a little.")
EVICTED = _counter(
    "evicted_tokens",
    "tokens",
    "Tokens of idle prefixes that made way: host memory keeps those of the device where it can, those of the host are gone.",
    "source",
    _SOURCES[1:],
)
EVICTIONS = _counter("evictions", "evictions", "Times that an idle prefix made way there.", "source", _SOURCES[1:])
PREEMPTIONS = _counter("preemptions", "preemptions", "Times that a sequence lost its slot and had to wait to go on.")
PREEMPTED = _counter(
    "preempted_tokens",
    "tokens",
    "Tokens that it had computed; host memory keeps them where it can, else they are computed again.",
)
SLOW_READERS = _counter(
    "slow_readers",
    "times",
    "Readers that fell behind too far: their request paused, or was cancelled.",
    "outcome",
    ("paused", "cancelled"),
)
RESTARTS = _counter("engine_restarts", "restarts", "Times that the engine's process died and another one took over.")

METRICS: Final = tuple(value for value in tuple(globals().values()) if isinstance(value, Metric))
"""All of them, in the order of the table."""

NAMES: Final = tuple(metric.name for metric in METRICS)

_INTRODUCTION = """\
# Metrics

`paceline.engine.metrics.Metrics` is an instrument that counts what an engine does. `snapshot()` answers all of it at one
moment, from any thread; `collect()` the same as plain records, for whatever exports them.

At every moment each request that was accepted is in one place:

    accepted = completed + cancelled + failed + resident + queued

`GET /metrics` of the server answers all of it in Prometheus's text format, beside its own: docs/prometheus.md.

Completed are those that ended with `stop`, `end` or `length`; cancelled those with `cancelled`; failed all others.
A metric has at most one label. Of a counter with a label the values named here are there from the start, as zeros.
This page is generated from `src/paceline/engine/metric_table.py`.
"""


def markdown() -> str:
    """The text of `docs/metrics.md`."""
    return "\n".join([_INTRODUCTION, *_table(), "", "## Buckets", "", *_buckets(), ""])


def _table() -> Iterator[str]:
    yield "| name | kind | unit | label | what it says |"
    yield "|---|---|---|---|---|"
    for metric in METRICS:
        label = "" if metric.label is None else f"`{metric.label}`: {', '.join(metric.known) or 'any'}"
        yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {label} | {metric.help} |"


def _buckets() -> Iterator[str]:
    yield "Upper bounds, each inclusive; beyond the last one is a bucket for all that is larger."
    yield ""
    for metric in METRICS:
        if metric.buckets:
            yield f"- `{metric.name}`: {', '.join(f'{bound:g}' for bound in metric.buckets)}"


if __name__ == "__main__":
    sys.stdout.write(markdown())
