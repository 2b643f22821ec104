"""The metrics of GET /metrics in Prometheus's text format: an engine's, the server's own, and llama-server's names, `llamacpp:*`.

`python -m paceline.server.exposition > docs/prometheus.md` generates the page about them. HTTP is counted on the event loop and
read on any thread, under a lock. Reading an engine's metrics may wait for its worker: not on an event loop.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.observability import metric_table as table
from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metric_table import Histogram, Kind, Metric, MetricsSnapshot, Sample
from paceline.observability.metrics import Tally
from paceline.server.api_errors import ApiError
from paceline.server.key_accounts import KEY_HELP
from paceline.server.request_context import SpelledHeader

if TYPE_CHECKING:
    from paceline.engine import EngineClient
    from paceline.model_manager import ModelStatus

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
        self.more_samples: Callable[[], Iterable[Sample]] = tuple
        """Returns further samples of the server."""

    def observe(self, route: str, status: int, seconds: float, *, method: str = "GET") -> None:
        """Count a request. route: the route's pattern, never the path as sent; `OTHER` if none matched."""
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
        yield from self.more_samples()


Value = Callable[[MetricsSnapshot], float]


@dataclass(frozen=True, slots=True)
class LlamaMetric:
    """A metric of llama-server. value: computes it.

    seconds: computes the seconds of a rate, the quotient of both increases since the last scrape; None: it is no rate.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    value: Value
    seconds: Value | None = None


def _number(*metrics: Metric) -> Value:
    return lambda snapshot: sum(snapshot.number(metric.name) for metric in metrics)


def _histograms(snapshot: MetricsSnapshot, metric: Metric) -> list[Histogram]:
    return [sample.value for sample in snapshot if sample.name == metric.name and isinstance(sample.value, Histogram)]


def _sum(metric: Metric) -> Value:
    return lambda snapshot: sum(histogram.sum for histogram in _histograms(snapshot, metric))


def _count(metric: Metric) -> Value:
    return lambda snapshot: sum(histogram.count for histogram in _histograms(snapshot, metric))


def _prompt_s(snapshot: MetricsSnapshot) -> float:
    ticks = [sample for sample in snapshot if sample.name == table.TICK_S.name and ("kind", "embed") in sample.labels]
    embedding_s = sum(sample.value.sum for sample in ticks if isinstance(sample.value, Histogram))
    return snapshot.number(table.PREFILL_S.name) + embedding_s


def _busy_slots(snapshot: MetricsSnapshot) -> float:
    share = snapshot.histogram(table.OCCUPANCY.name).mean
    return 0.0 if share is None else share * snapshot.number(table.SLOTS.name)


def _llama(name: str, text: str, value: Value, seconds: Value | None = None) -> LlamaMetric:
    return LlamaMetric(f"llamacpp:{name}", "counter" if name.endswith("_total") else "gauge", text, value, seconds)


# fmt: off
LLAMA_METRICS: Final = (
    _llama("prompt_tokens_total", "Tokens computed of prompts and of embedded texts; those taken from memory are not among them.",
           _number(table.PREFILL, table.EMBEDDED_TOKENS)),
    _llama("prompt_tokens_cached_total", "Prompt tokens taken from memory.", _number(table.PREFIX_TOKENS)),
    _llama("prompt_seconds_total", "Seconds of the passes that computed them.", _prompt_s),
    _llama("tokens_predicted_total", "Tokens generated.", _number(table.GENERATED)),
    _llama("tokens_predicted_seconds_total", "Seconds between generated tokens, of all streams together.", _sum(table.ITL_S)),
    _llama("n_decode_total", "Passes.", _count(table.TICK_S)),
    _llama("n_tokens_max", "Most tokens of a request that has ended, of prompt and output.", _number(table.TOKENS_MAX)),
    _llama("spec_decode_num_draft_tokens_total", "Tokens that speculation proposed; 0 without it.", _number(table.DRAFTED)),
    _llama("spec_decode_num_accepted_tokens_total", "Proposed tokens that were kept; 0 without speculation.",
           _number(table.ACCEPTED)),
    _llama("spec_decode_num_drafts_total", "Proposals that were verified; 0 without speculation.", _number(table.PROPOSALS)),
    _llama("requests_processing", "Slots in which a sequence is.", _number(table.SLOTS_IN_USE)),
    _llama("requests_deferred", "Requests that wait for their start.", _number(table.QUEUED)),
    _llama("n_busy_slots_per_decode", "Slots in use at a pass, on average.", _busy_slots),
    _llama("prompt_tokens_seconds", "Prompt tokens computed in a second of such passes, since the last scrape.",
           _number(table.PREFILL), _number(table.PREFILL_S)),
    _llama("predicted_tokens_seconds", "Tokens that one stream got in a second, since the last scrape.",
           _count(table.ITL_S), _sum(table.ITL_S)),
)
# fmt: on


class LlamaMetrics:
    """Compute llama-server's metrics; remembers the last scrape's counters for the rates. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}

    def samples(self, snapshot: MetricsSnapshot, model: str = "") -> Iterator[Sample]:
        """Yield all samples in the order of the table. model: its name, if there are several."""
        for metric in LLAMA_METRICS:
            value = metric.value(snapshot)
            if metric.seconds is not None:
                amount, seconds = value, metric.seconds(snapshot)
                with self._lock:
                    last_amount, last_seconds = self._seen.get((model, metric.name), (0.0, 0.0))
                    self._seen[model, metric.name] = amount, seconds
                value = (amount - last_amount) / (seconds - last_seconds) if seconds > last_seconds else 0.0
            yield Sample(metric.name, metric.kind, (), value)


ALIVE = "paceline_engine_alive"

# fmt: off
_OF_HEARTBEAT: dict[str, tuple[Kind, str, Callable[[Heartbeat], float]]] = {  # kind, help and value
    ALIVE: ("gauge", "1 while the engine is idle or runs ticks, or a new worker process takes over; else 0.",
            lambda heartbeat: heartbeat.is_alive),
    "paceline_engine_sleeping": (
        "gauge", "1 while the worker process is stopped because there are no requests (sleep_idle_s); else 0.",
        lambda heartbeat: heartbeat.state == "sleeping"),
    "paceline_engine_crashes_in_a_row": (
        "gauge", "Crashes of the worker process, none of which ran for a minute in between; 0 when the present one has.",
        lambda heartbeat: heartbeat.num_crashes),
    "paceline_engine_restart_wait_seconds": (
        "gauge", "Until the worker process is started again; 0 while it runs or loads.",
        lambda heartbeat: heartbeat.restart_in_s or 0.0),
    "paceline_engine_hangs_total": (
        "counter", "Worker processes that were killed because their heartbeats stopped (hang_timeout_s).",
        lambda heartbeat: heartbeat.num_hangs),
}
# fmt: on

HELP = {
    **{metric.name: metric.help for metric in table.METRICS},
    **{name: text for name, (_, text, _) in _OF_HEARTBEAT.items()},
    **HTTP_HELP,
    **ROUTER_HELP,
    **KEY_HELP,
    **{metric.name: metric.help for metric in LLAMA_METRICS},
}

METRICS_OFF = ApiError(
    501, "not_supported_error", "metrics_off", "metrics are disabled; start the server without --no-metrics"
)
_KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def engine_metrics(
    engine: EngineClient | None, http: HttpMetrics, llama: LlamaMetrics, accept: str = "", created: int = 0
) -> Response:
    """Return the response to a scrape of one engine and its server. Waits for the engine's metrics: not on an event loop.

    engine: None: it is not loaded. accept: the Accept header, which decides about the format. created: the server's start in Unix
    seconds, for llama-server's header.
    """
    if engine is None:
        return _response(http.samples(), accept, created)
    snapshot, heartbeat = engine.stats(), engine.heartbeat()
    samples = (*snapshot, *_heartbeat_samples(heartbeat), *http.samples(), *llama.samples(snapshot))
    workers = () if heartbeat.worker_pid is None else _worker_families(heartbeat.worker_pid)
    return _response(samples, accept, created, after=workers)


def models_metrics(
    statuses: Sequence[ModelStatus],
    engines: Mapping[str, EngineClient],
    http: HttpMetrics,
    llama: LlamaMetrics,
    accept: str,
    created: int,
) -> Response:
    """Return the response to a scrape of several models, with the label `model`. engines: of the models that are ready."""
    workers: dict[str, Family] = {}
    for status in statuses:
        for family in () if status.worker_pid is None else _worker_families(status.worker_pid):
            labelled = [sample._replace(labels={"model": status.name}) for sample in family.samples]
            family.samples = []
            workers.setdefault(family.name, family).samples += labelled
    samples = _samples_of_models(statuses, engines, http, llama)
    return _response(samples, accept, created, before=workers.values())


def _samples_of_models(
    statuses: Sequence[ModelStatus], engines: Mapping[str, EngineClient], http: HttpMetrics, llama: LlamaMetrics
) -> Iterator[Sample]:
    for status in statuses:
        label = (("model", status.name),)
        yield Sample(MODEL_LOADED, "gauge", label, status.is_loaded)
        yield Sample(MODEL_USERS, "gauge", label, status.num_users)
        yield Sample(MODEL_WAITING, "gauge", label, status.num_waiting)
        yield Sample(MODEL_BYTES, "gauge", label, status.taken_bytes or 0)
    yield from http.samples()
    for name, engine in engines.items():
        with suppress(PacelineError):  # it has ended meanwhile
            snapshot, heartbeat = engine.stats(), engine.heartbeat()
            for sample in (*snapshot, *_heartbeat_samples(heartbeat), *llama.samples(snapshot, name)):
                yield Sample(sample.name, sample.kind, (("model", name), *sample.labels), sample.value)


def _worker_families(pid: int) -> Iterable[Family]:
    """Return memory, time and file descriptors of a worker process, if the system reports them."""
    return ProcessCollector(namespace="paceline_worker", pid=lambda: pid, registry=None).collect()


def _heartbeat_samples(heartbeat: Heartbeat) -> Iterator[Sample]:
    for name, (kind, _, value) in _OF_HEARTBEAT.items():
        yield Sample(name, kind, (), value(heartbeat))


_START = SpelledHeader(b"Process-Start-Time-Unix")


def _response(
    samples: Iterable[Sample], accept: str, created: int, *, before: Iterable[Family] = (), after: Iterable[Family] = ()
) -> Response:
    """Return samples and families as text, the families before or after the families of this process."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    families = [*map(_family, by_name.values()), *before, *ProcessCollector(registry=None).collect(), *after]
    registry: Any = SimpleNamespace(collect=lambda: families)
    encode, content_type = choose_encoder(accept)
    response = Response(encode(registry), headers={"content-type": content_type})
    response.raw_headers.append((_START, b"%d" % created))
    return response


def _family(samples: list[Sample]) -> Family:
    first = samples[0]
    family = _KINDS[first.kind](first.name, HELP[first.name], labels=[name for name, _ in first.labels])
    for sample in samples:
        labels = [value for _, value in sample.labels]
        if isinstance(family, HistogramMetricFamily):
            assert isinstance(sample.value, Histogram)  # noqa: S101 - a metric keeps its kind
            bounds = (*map(floatToGoString, sample.value.bounds), "+Inf")
            buckets = list(
                zip(bounds, accumulate(sample.value.counts), strict=True)
            )  # cumulative, as the format has them
            family.add_metric(labels, buckets, sample.value.sum)
        else:
            assert not isinstance(sample.value, Histogram)  # noqa: S101
            family.add_metric(labels, sample.value)
    return family


_INTRODUCTION = """\
# Prometheus

`GET /metrics` responds in Prometheus's text format, or in OpenMetrics if the scraper asks for it. It has all
metrics of the engine (docs/metrics.md) once the model is loaded, and the metrics on this page. With a worker process
the engine's numbers are those of all workers so far; a worker that died takes along the counts since its last report.
`process_*` is about the process that serves HTTP and `paceline_worker_process_*` about the worker process, if
there is a worker and the system reports them: memory, processor time, open file descriptors, start.

This page is generated from `src/paceline/server/exposition.py`.
"""

_SEVERAL = """\
A server with several models has all metrics of every loaded model with the label `model`, and these of every model.
`/metrics?model=NAME` has those of one model, as a server of that model would have them. Neither loads a model.
"""

_LLAMA = """\
llama-server's names, from the same counters. They mean what they mean there, with these differences: `n_tokens_max` is a gauge,
since it is no sum, and covers requests that have ended; `tokens_predicted_seconds_total` adds up the time between the tokens
of every stream; the two rates are means since the last scrape, as there, so that two scrapers see each other's.
`spec_decode_num_accepted_tokens_per_pos_total` is absent, as it is there without speculation.
"""


def markdown() -> str:
    """Return the text of `docs/prometheus.md`."""
    kinds = {SECONDS: "histogram", STREAMS: "gauge", **{name: kind for name, (kind, _, _) in _OF_HEARTBEAT.items()}}
    server = [(name, kinds.get(name, "counter"), HELP[name]) for name in (*_OF_HEARTBEAT, *HTTP_HELP, *KEY_HELP)]
    llama = [(metric.name, metric.kind, metric.help) for metric in LLAMA_METRICS]
    router = [(name, "gauge", text) for name, text in ROUTER_HELP.items()]
    parts = (
        (_INTRODUCTION, "## The server's own", "", *_table(server), ""),
        ("## Several models", "", _SEVERAL, *_table(router), ""),
        ("## `llamacpp:*`", "", _LLAMA, *_table(llama), ""),
    )
    return "\n".join(line for part in parts for line in part)


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    yield "| name | kind | meaning |"
    yield "|---|---|---|"
    for name, kind, text in rows:
        yield f"| `{name}` | {kind} | {text} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
