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

    router.add_api_route("/health", health, methods=["GET"], summary="Whether the model is loaded")
    router.add_api_route("/v1/health", health, methods=["GET"], summary="As /health")

    @router.get("/health/live", summary="Whether the engine lives")
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

    @router.get("/health/ready", summary="Whether a request would be taken")
    async def ready() -> Response:
        """200 where it would; else 503 with the reason."""
        try:
            service.check_ready()
        except Refused as refused:
            return _refusal(refused.problem)
        return JSONResponse({"status": "ok"})

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
