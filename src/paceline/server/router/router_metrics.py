"""GET /metrics of a router: the metrics of all loaded models, with a label that names the model, and the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.model_manager import ModelStatus
from paceline.observability.metrics_snapshot import Sample
from paceline.server.api_errors import ApiException
from paceline.server.exposition import METRICS_OFF, ScrapeResponse, family, heartbeat_samples, start_time_header
from paceline.server.json_bodies import PLAIN_TEXT
from paceline.server.router.router_service import RouterService
from paceline.server.routes import RouteFacts, Routes
from paceline.server.server_metrics import (
    MODEL_BYTES,
    MODEL_LOADED,
    MODEL_USERS,
    MODEL_WAITING,
    LlamaMetrics,
)
from paceline.server.service import Service


class RouterExposition:
    """The metrics of a router."""

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._llama: dict[str, LlamaMetrics] = {}

    async def scrape(self, accept: str = "") -> ScrapeResponse:
        """Return the text in the format that an Accept header asks for.

        The manager is read on the event loop, its own; engines, which may wait for their workers, in a thread.
        """
        models = self._service.models
        return await asyncio.to_thread(self._encoded, accept, models.manager.statuses(), models.all_ready())

    def _encoded(self, accept: str, statuses: Sequence[ModelStatus], ready: Mapping[str, Service]) -> ScrapeResponse:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(partial(self._families, statuses, ready)))
        ProcessCollector(registry=registry)
        encode, content_type = choose_encoder(accept)
        return ScrapeResponse(encode(registry), content_type)

    def _families(self, statuses: Sequence[ModelStatus], ready: Mapping[str, Service]) -> Iterator[Family]:
        """Yield all metrics, each with the samples of all models."""
        by_name: dict[str, list[Sample]] = {}
        for sample in self._samples(statuses, ready):
            by_name.setdefault(sample.name, []).append(sample)
        for samples in by_name.values():
            yield family(samples)
        yield from _worker_families(statuses)

    def _samples(self, statuses: Sequence[ModelStatus], ready: Mapping[str, Service]) -> Iterator[Sample]:
        for status in statuses:
            label = (("model", status.name),)
            yield Sample(MODEL_LOADED, "gauge", label, status.is_loaded)
            yield Sample(MODEL_USERS, "gauge", label, status.num_users)
            yield Sample(MODEL_WAITING, "gauge", label, status.num_waiting)
            yield Sample(MODEL_BYTES, "gauge", label, status.taken_bytes or 0)
        yield from self._service.http_metrics.samples()
        for name, service in ready.items():
            with suppress(PacelineError, ApiException):  # it has ended meanwhile
                engine = service.engine()
                snapshot, heartbeat = engine.stats(), engine.heartbeat()
                llama = self._llama.setdefault(name, LlamaMetrics()).samples(snapshot)
                for sample in (*snapshot, *heartbeat_samples(heartbeat), *llama):
                    yield Sample(sample.name, sample.kind, (("model", name), *sample.labels), sample.value)


def _worker_families(statuses: Sequence[ModelStatus]) -> Iterator[Family]:
    """Yield memory, time and file descriptors of all worker processes."""
    found: dict[str, Family] = {}
    for status in statuses:
        pid = status.worker_pid
        if pid is None:
            continue
        collector = ProcessCollector(namespace="paceline_worker", pid=partial(int, pid), registry=None)
        for metric in collector.collect():
            samples = [one._replace(labels={"model": status.name}) for one in metric.samples]
            metric.samples = []
            found.setdefault(metric.name, metric).samples += samples
    yield from found.values()


class _Families(Collector):
    """The families of one scrape, for the client library."""

    def __init__(self, families: Callable[[], Iterator[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Family]:
        """Yield one family per name."""
        yield from self._families()


def router_metrics_routes(service: RouterService) -> Routes:
    """Return /metrics, which loads no model."""
    router = Routes(RouteFacts(model="named", loads_model=False), tags=["observability"])
    exposition = RouterExposition(service)

    @router.get(
        "/metrics", summary="Counters and histograms of all models", responses=PLAIN_TEXT, response_class=Response
    )
    async def all_metrics(request: Request) -> Response:
        """Return the metrics of all loaded models with the label `model`; with ?model=NAME one's, without it."""
        if not service.settings.metrics:
            raise ApiException(METRICS_OFF)
        scraped = await exposition.scrape(request.headers.get("accept", ""))
        response = Response(scraped.body, headers={"content-type": scraped.content_type})
        response.raw_headers.append(start_time_header(service.created))
        return response

    return router
