"""GET /metrics: the metrics of an engine and its server in Prometheus's text format.

`python -m paceline.server.exposition > docs/prometheus.md` generates the page about them. Reading metrics may wait for the
worker: not on an event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from paceline.observability import metric_table
from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metric_table import Kind
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot, Sample
from paceline.server.api_errors import ApiError, ApiException
from paceline.server.json_bodies import PLAIN_TEXT
from paceline.server.request_context import SpelledHeader
from paceline.server.routes import RouteFacts, Routes
from paceline.server.server_metrics import (
    HTTP_HELP,
    LLAMA_METRICS,
    LLAMA_RATES,
    ROUTER_HELP,
    SECONDS,
    STREAMS,
    HttpMetrics,
    LlamaMetrics,
)
from paceline.server.service import Service

ALIVE = "paceline_engine_alive"

HANGS = "paceline_engine_hangs_total"

_OF_HEARTBEAT: dict[str, tuple[str, Callable[[Heartbeat], float]]] = {  # help and value
    ALIVE: (
        "1 while the engine is idle or runs ticks, or a new worker process takes over; else 0.",
        lambda heartbeat: heartbeat.is_alive,
    ),
    "paceline_engine_sleeping": (
        "1 while the worker process is stopped because there are no requests (sleep_idle_s); else 0.",
        lambda heartbeat: heartbeat.state == "sleeping",
    ),
    "paceline_engine_crashes_in_a_row": (
        "Crashes of the worker process, none of which ran for a minute in between; 0 when the present one has.",
        lambda heartbeat: heartbeat.num_crashes,
    ),
    "paceline_engine_restart_wait_seconds": (
        "Until the worker process is started again; 0 while it runs or loads.",
        lambda heartbeat: heartbeat.restart_in_s or 0.0,
    ),
    HANGS: (
        "Worker processes that were killed because their heartbeats stopped (hang_timeout_s).",
        lambda heartbeat: heartbeat.num_hangs,
    ),
}
_KINDS_OF_HEARTBEAT: dict[str, Kind] = {name: "counter" if name == HANGS else "gauge" for name in _OF_HEARTBEAT}

HELP = {
    **{metric.name: metric.help for metric in metric_table.METRICS},
    **{name: text for name, (text, _) in _OF_HEARTBEAT.items()},
    **HTTP_HELP,
    **ROUTER_HELP,
    **{metric.name: metric.help for metric in (*LLAMA_METRICS, *LLAMA_RATES)},
}

METRICS_OFF = ApiError(
    501, "not_supported_error", "metrics_off", "metrics are disabled; start the server without --no-metrics"
)
_KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


@dataclass(frozen=True, slots=True)
class ScrapeResponse:
    """The response to a scrape."""

    body: bytes
    content_type: str


class Exposition:
    """The metrics of one server. stats, heartbeat: the engine's; called on any thread; what they raise is passed on."""

    def __init__(
        self, stats: Callable[[], MetricsSnapshot], heartbeat: Callable[[], Heartbeat], http: HttpMetrics
    ) -> None:
        self._stats, self._heartbeat, self._http = stats, heartbeat, http
        self._llama = LlamaMetrics()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Samples(self._samples))
        ProcessCollector(registry=self._registry)
        self._registry.register(_Worker(lambda: heartbeat().worker_pid))

    def scrape(self, accept: str = "") -> ScrapeResponse:
        """Return the text in the format that an Accept header asks for. Waits for the engine's metrics."""
        encode, content_type = choose_encoder(accept)
        return ScrapeResponse(encode(self._registry), content_type)

    def _samples(self) -> Iterator[Sample]:
        snapshot = self._stats()
        yield from snapshot
        yield from heartbeat_samples(self._heartbeat())
        yield from self._http.samples()
        yield from self._llama.samples(snapshot)


def heartbeat_samples(heartbeat: Heartbeat) -> Iterator[Sample]:
    """Yield the metrics of a heartbeat."""
    for name, (_, value) in _OF_HEARTBEAT.items():
        yield Sample(name, _KINDS_OF_HEARTBEAT[name], (), value(heartbeat))


class _Samples(Collector):
    """Samples as metric families of the client library."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Yield one family per name."""
        for _, samples in groupby(self._read(), key=lambda sample: sample.name):
            yield family(list(samples))


class _Worker(Collector):
    """Memory, time and file descriptors of the worker process, while there is one."""

    def __init__(self, pid: Callable[[], int | None]) -> None:
        self._pid = pid

    def collect(self) -> Iterator[Family]:
        """Yield the process metrics; none if the system does not report them or the process has just died."""
        pid = self._pid()
        if pid is not None:
            yield from ProcessCollector(namespace="paceline_worker", pid=lambda: pid, registry=None).collect()


def family(samples: list[Sample]) -> Family:
    """Return samples of one name, which differ in their labels, as a family."""
    first = samples[0]
    made = _KINDS[first.kind](first.name, HELP[first.name], labels=[name for name, _ in first.labels])
    for sample in samples:
        labels = [value for _, value in sample.labels]
        if isinstance(made, HistogramMetricFamily):
            assert isinstance(sample.value, Histogram)  # noqa: S101 - a metric keeps its kind
            made.add_metric(labels, _buckets(sample.value), sample.value.sum)
        else:
            assert not isinstance(sample.value, Histogram)  # noqa: S101
            made.add_metric(labels, sample.value)
    return made


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative buckets, as the format has them, of bounds and counts."""
    bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
    return list(zip(bounds, accumulate(histogram.counts), strict=True))


_START = SpelledHeader(b"Process-Start-Time-Unix")


def start_time_header(created: int) -> tuple[bytes, bytes]:
    """Return llama-server's header with the start of the server, in Unix seconds."""
    return (_START, b"%d" % created)


def _exposition(service: Service) -> Exposition:
    return Exposition(lambda: service.engine().stats(), lambda: service.engine().heartbeat(), service.http_metrics)


def metrics_routes() -> Routes:
    """Return /metrics: 501 where the settings disable it, 503 before the model is loaded."""
    router = Routes(RouteFacts(model="required", loads_model=False), tags=["observability"])

    @router.get(
        "/metrics", summary="Counters and histograms for Prometheus", responses=PLAIN_TEXT, response_class=Response
    )
    async def metrics(request: Request) -> Response:
        """Prometheus's text format, or OpenMetrics where Accept asks for it; docs/prometheus.md lists the names."""
        service = Service.of(request.scope)
        if not service.settings.metrics:
            raise ApiException(METRICS_OFF)
        service.engine()
        scraped = await asyncio.to_thread(service.part(_exposition).scrape, request.headers.get("accept", ""))
        response = Response(scraped.body, headers={"content-type": scraped.content_type})
        response.raw_headers.append(start_time_header(service.created))
        return response

    return router


_INTRODUCTION = """\
# Prometheus

`GET /metrics` responds in Prometheus's text format, or in OpenMetrics where the scraper asks for that. It has all
metrics of the engine (docs/metrics.md), and those on this page. With a worker process the engine's numbers are those of all
workers so far; what the last report of a worker that died did not hold is lost.
`process_*` is about the process that serves HTTP and `paceline_worker_process_*` about the one that computes, where
there is one and the system reports them: memory, processor time, open file descriptors, start.

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
    kinds = {SECONDS: "histogram", STREAMS: "gauge", **_KINDS_OF_HEARTBEAT}
    server = [(name, kinds.get(name, "counter"), HELP[name]) for name in (*_OF_HEARTBEAT, *HTTP_HELP)]
    llama = [(one.name, one.kind, one.help) for one in LLAMA_METRICS]
    llama += [(one.name, "gauge", one.help) for one in LLAMA_RATES]
    router = [(name, "gauge", text) for name, text in ROUTER_HELP.items()]
    return "\n".join(
        [
            _INTRODUCTION,
            "## The server's own",
            "",
            *_table(server),
            "",
            "## Several models",
            "",
            _SEVERAL,
            *_table(router),
            "",
            "## `llamacpp:*`",
            "",
            _LLAMA,
            *_table(llama),
            "",
        ]
    )


def _table(rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    yield "| name | kind | meaning |"
    yield "|---|---|---|"
    for name, kind, text in rows:
        yield f"| `{name}` | {kind} | {text} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
