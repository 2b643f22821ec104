"""The application: routes and middleware around one `Service`. Any ASGI server can run it; `serving` does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server import health, metrics_route, pages, requests
from paceline.server.documentation import document_routes
from paceline.server.documents import ERRORS
from paceline.server.exchange import route_path
from paceline.server.llama_server import router as llama_server
from paceline.server.middleware.access_log import AccessLog
from paceline.server.middleware.admission import Admission
from paceline.server.middleware.bodies import Bodies
from paceline.server.middleware.failures import Failures
from paceline.server.middleware.header_limit import HeaderLimit
from paceline.server.middleware.hosts import Hosts
from paceline.server.middleware.http_counts import HttpCounts
from paceline.server.middleware.keys import ApiKeys
from paceline.server.middleware.prefix import Prefix
from paceline.server.middleware.request_ids import RequestIds
from paceline.server.openai import router as openai
from paceline.server.problems import response_of
from paceline.server.service import Front, Service
from paceline.server.settings import ServerSettings

ROUTES = (health.routes, pages.routes, requests.routes, metrics_route.routes, openai.routes, llama_server.routes)


def build_app(settings: ServerSettings, llm: Front | None = None) -> FastAPI:
    """The application; `app.state.service` is its `Service`, which begins to load when the app starts.

    llm: what answers instead of an `AsyncLLM` by the settings. Raises what is wrong with the engine's options.
    """
    service = Service(settings, llm)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start_loading()
        try:
            yield
        finally:
            await service.aclose()

    app = FastAPI(
        title="paceline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        middleware=_middleware(service),
        lifespan=lifespan,
        responses=ERRORS,
    )
    app.state.service = service

    async def answer_problem(request: Request, error: Exception) -> Response:
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        return response_of(service.problem_of(error), route_path(request.scope), headers)

    for kind in (PacelineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, answer_problem)
    for routes in ROUTES:
        app.include_router(routes(service))
    if settings.docs:
        app.router.routes[:0] = document_routes(app)
    _make_routes(app)
    return app


def _make_routes(app: FastAPI) -> None:
    """FastAPI makes the routes of a router when somebody first asks for one, which takes a while; so somebody asks now."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})


def _middleware(service: Service) -> list[Middleware]:
    """From the outermost to the innermost: what a request goes through before a route sees it."""
    settings = service.settings
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    return [
        Middleware(RequestIds),
        Middleware(HttpCounts, service.http_metrics),
        Middleware(AccessLog),
        *([Middleware(Prefix, settings.root_path)] if settings.root_path else ()),
        *([Middleware(Hosts, (*settings.allowed_hosts, settings.host))] if settings.checks_hosts else ()),
        *([cors] if settings.cors_origins else ()),
        Middleware(HeaderLimit, settings.max_header_bytes),
        Middleware(ApiKeys, settings.api_keys),
        Middleware(Admission, service, settings.max_connections),
        Middleware(
            Bodies,
            settings.max_body_bytes,
            settings.body_timeout_s,
            service.body_budget,
            service.retry_after_s,
        ),
        Middleware(Failures),
    ]
