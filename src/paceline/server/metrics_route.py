"""GET /metrics: the numbers of engine and server for Prometheus. Reading them happens in a thread."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.engine.heartbeat import Heartbeat
from paceline.engine.metrics_snapshot import MetricsSnapshot
from paceline.server.documents import TEXT
from paceline.server.exposition import Exposition
from paceline.server.problems import Problem, Refused
from paceline.server.service import Service

_OFF = "This server does not give metrics; they were switched off when it was started."


def routes(service: Service) -> APIRouter:
    """/metrics; 501 where the settings switch it off, 503 before the model is loaded."""
    router = APIRouter(tags=["observability"])

    def stats() -> MetricsSnapshot:
        return service.engine().stats()

    def heartbeat() -> Heartbeat:
        return service.engine().heartbeat()

    exposition = Exposition(stats, heartbeat, service.http_metrics)

    @router.get("/metrics", summary="Counters and histograms for Prometheus", responses=TEXT, response_class=Response)
    async def metrics(request: Request) -> Response:
        """Prometheus's text format, or OpenMetrics where Accept asks for it; docs/prometheus.md lists the names."""
        if not service.settings.metrics:
            raise Refused(Problem(501, "not_supported_error", "metrics_off", _OFF))
        service.engine()
        answer = await asyncio.to_thread(exposition.answer, request.headers.get("accept", ""))
        headers = {"content-type": answer.content_type, "process-start-time-unix": str(service.created)}
        return Response(answer.body, headers=headers)

    return router
