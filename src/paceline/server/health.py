"""Whether the server lives, whether it would take a request, and how far loading is. Public: no key is asked for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from paceline.server.problems import LoadFailed, Loading, Problem, Refused, llama_body
from paceline.server.service import Service

_DEAD = Problem(503, "unavailable_error", "engine_dead", "the engine does not live any more, or hangs")


def routes(service: Service) -> APIRouter:
    """/health, /v1/health, /health/live, /health/ready."""
    router = APIRouter(tags=["health"])

    async def health() -> Response:
        """200 once the model is loaded; before, 503 with the progress of loading."""
        return _health(service)

    async def live() -> Response:
        """200 also while it loads, idles, or computes a long pass; 503 where it has ended or hangs."""
        try:
            heartbeat = service.engine().heartbeat()
        except Loading:
            return JSONResponse({"status": "ok", "state": "loading"})
        except LoadFailed as failed:
            return _refusal(failed.problem, state="failed")
        if heartbeat.is_alive:
            return JSONResponse({"status": "ok", "state": heartbeat.state})
        return _refusal(_DEAD, state=heartbeat.state)

    async def ready() -> Response:
        """200 where it would; else 503 with the reason."""
        try:
            service.check_ready()
        except Refused as refused:
            return _refusal(refused.problem)
        return JSONResponse({"status": "ok"})

    for path, endpoint, summary in (
        ("/health", health, "Whether the model is loaded"),
        ("/v1/health", health, "As /health"),
        ("/health/live", live, "Whether the engine lives"),
        ("/health/ready", ready, "Whether a request would be taken"),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], summary=summary)
        router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)  # what watches often asks so
    return router


def _health(service: Service) -> Response:
    try:
        if service.engine().is_closed:
            return _refusal(_DEAD, status="ended")
    except Loading as loading:
        return _refusal(loading.problem, status="loading", progress=round(loading.progress, 4))
    except LoadFailed as failed:
        return _refusal(failed.problem, status="failed")
    return JSONResponse({"status": "ok"})


def _refusal(problem: Problem, **more: Any) -> Response:
    return JSONResponse({**llama_body(problem), **more}, problem.status)
