"""GET /cluster: the replicas of each model, with their slots and metrics; what one machine does not have."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline.cluster.cluster_engine import ClusterEngine
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot
from paceline.server.api_errors import ApiException, invalid_request, not_supported
from paceline.server.dialects.llama_server.slots import SLOTS_OFF
from paceline.server.exposition import METRICS_OFF
from paceline.server.request_context import OPERATOR_ONLY


def cluster_routes(service: Any) -> APIRouter:
    """Return the routes. service: the `Service` of one model, or the `RouterService` of several."""
    router = APIRouter(tags=["cluster"], dependencies=[OPERATOR_ONLY])

    @router.get("/cluster", summary="The replicas of each model")
    async def cluster() -> Response:
        """List the replicas that are connected, with the slots and the open requests of each."""
        models = {name: await asyncio.to_thread(_replicas, one) for name, one in _engines(service).items()}
        return JSONResponse({"ingress": {"host": socket.gethostname(), "pid": os.getpid()}, "models": models})

    @router.get("/cluster/{model}/{replica}/slots", summary="The slots of one replica")
    async def slots(model: str, replica: str) -> Response:
        """Show what each slot of one replica does; as `/slots`, off with `--no-slots`."""
        if not service.settings.slots:
            raise not_supported(SLOTS_OFF)
        found = await asyncio.to_thread(_engine(service, model).replica_slots)
        return JSONResponse([_slot(one) for one in _of(found, replica)])

    @router.get("/cluster/{model}/{replica}/metrics", summary="The metrics of one replica")
    async def metrics(model: str, replica: str) -> Response:
        """Show counters and gauges of one replica; of histograms sum and count. Off where `/metrics` is."""
        if not service.settings.metrics:
            raise ApiException(METRICS_OFF)
        found = await asyncio.to_thread(_engine(service, model).replica_stats)
        return JSONResponse(_numbers(_of(found, replica)))

    return router


def _engines(service: Any) -> dict[str, ClusterEngine]:
    if hasattr(service, "models"):
        return {name: one.llm.engine for name, one in service.models.all_ready().items()}
    return {service.names[0]: service.engine()}


def _engine(service: Any, model: str) -> ClusterEngine:
    found: ClusterEngine = _of(_engines(service), model)
    return found


def _of(found: Any, name: str) -> Any:
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise invalid_request(f"{name[:200]!r} is not here; there are: {known}", status=404)
    return found[name]


def _replicas(engine: ClusterEngine) -> list[dict[str, Any]]:
    places = engine.replica_places()
    return [
        {
            "id": name,
            "host": places.get(name, (None, None))[0],
            "pid": places.get(name, (None, None))[1],
            "slots": len(slots),
            "processing": slots.num_processing,
            "waiting": slots.num_waiting,
        }
        for name, slots in sorted(engine.replica_slots().items())
    ]


def _slot(view: Any) -> dict[str, Any]:
    return {
        "id": view.id,
        "state": view.state,
        "prompt_tokens": view.num_prompt_tokens,
        "cached_tokens": view.num_cached,
        "generated_tokens": view.num_generated,
        "running_s": round(view.running_s, 3),
    }


def _numbers(snapshot: MetricsSnapshot) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for one in snapshot:
        name = one.name + "".join(f"{{{key}={value}}}" for key, value in one.labels)
        if isinstance(one.value, Histogram):
            numbers[f"{name}_sum"], numbers[f"{name}_count"] = one.value.sum, one.value.count
        else:
            numbers[name] = one.value
    return numbers
