"""The routes of monitoring: /health and its kin, and /metrics for Prometheus. Health needs no API key."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metrics_snapshot import MetricsSnapshot
from paceline.server.api_errors import (
    ApiError,
    ApiException,
    ModelLoadFailed,
    ModelLoading,
    WorkerCrashLoop,
    llama_error_body,
)
from paceline.server.exposition import Exposition
from paceline.server.openapi_responses import PLAIN_TEXT
from paceline.server.request_context import HeaderName
from paceline.server.service import Service

_START = HeaderName(b"Process-Start-Time-Unix")
_ENGINE_DEAD = ApiError(503, "unavailable_error", "engine_dead", "the engine has ended or hangs; restart the server")
_METRICS_OFF = ApiError(
    501, "not_supported_error", "metrics_off", "metrics are disabled; start the server without --no-metrics"
)


def health_routes(service: Service) -> APIRouter:
    """Return /health, /v1/health, /health/live and /health/ready."""
    router = APIRouter(tags=["health"])

    async def health() -> Response:
        """200 once the model is loaded; 503 with the progress before, and in a crash loop while no worker is ready."""
        return _health(service)

    async def live() -> Response:
        """200 also while it loads, idles, computes a long pass or restarts its worker; 503 where it has ended or hangs."""
        try:
            heartbeat = service.engine().heartbeat()
        except ModelLoading:
            return JSONResponse({"status": "ok", "state": "loading"})
        except ModelLoadFailed as failed:
            return _unavailable(failed.api_error, state="failed")
        if heartbeat.is_alive:
            return JSONResponse({"status": "ok", "state": heartbeat.state})
        return _unavailable(_ENGINE_DEAD, state=heartbeat.state)

    async def ready() -> Response:
        """200 where a request would be accepted; else 503 with the reason."""
        try:
            service.check_ready()
        except ApiException as error:
            return _unavailable(error.api_error)
        return JSONResponse({"status": "ok"})

    for path, endpoint, summary in (
        ("/health", health, "Whether the model is loaded"),
        ("/v1/health", health, "As /health"),
        ("/health/live", live, "Whether the engine lives"),
        ("/health/ready", ready, "Whether a request would be accepted"),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], summary=summary)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)  # monitors often send HEAD
    return router


def _health(service: Service) -> Response:
    try:
        engine = service.engine()
        if engine.is_closed:
            return _unavailable(_ENGINE_DEAD, status="ended")
        service.check_worker()
    except ModelLoading as loading:
        return _unavailable(loading.api_error, status="loading", progress=round(loading.progress, 4))
    except ModelLoadFailed as failed:
        return _unavailable(failed.api_error, status="failed")
    except WorkerCrashLoop as looping:
        return _unavailable(looping.api_error, status="crash_loop", crashes=looping.num_crashes)
    return JSONResponse({"status": "ok"})


def _unavailable(api_error: ApiError, **more: Any) -> Response:
    headers = {} if api_error.retry_after_s is None else {"retry-after": str(api_error.retry_after_s)}
    return JSONResponse({**llama_error_body(api_error), **more}, api_error.status, headers)


def metrics_routes(service: Service) -> APIRouter:
    """Return /metrics: 501 where the settings disable it, 503 before the model is loaded."""
    router = APIRouter(tags=["observability"])

    def stats() -> MetricsSnapshot:
        return service.engine().stats()

    def heartbeat() -> Heartbeat:
        return service.engine().heartbeat()

    exposition = Exposition(stats, heartbeat, service.http_metrics)

    @router.get(
        "/metrics", summary="Counters and histograms for Prometheus", responses=PLAIN_TEXT, response_class=Response
    )
    async def metrics(request: Request) -> Response:
        """Prometheus's text format, or OpenMetrics where Accept asks for it; docs/prometheus.md lists the names."""
        if not service.settings.metrics:
            raise ApiException(_METRICS_OFF)
        service.engine()
        answer = await asyncio.to_thread(exposition.scrape, request.headers.get("accept", ""))
        response = Response(answer.body, headers={"content-type": answer.content_type})
        response.raw_headers.append((_START, b"%d" % service.created))
        return response

    return router
