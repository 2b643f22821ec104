"""Build the application: routes and middleware around one `Service`. Any ASGI server can run it; `serving` does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.api_errors import error_response
from paceline.server.llama_server import router as llama_server
from paceline.server.middleware.access import AllowedHosts, ApiKeys, Cors, RoutePrefix
from paceline.server.middleware.limits import BodyReader, HeaderLimit, RequestLimit
from paceline.server.middleware.recording import AccessLog, ErrorBoundary, HttpCounts, RequestIds
from paceline.server.monitoring import health_routes, metrics_routes
from paceline.server.openai import router as openai
from paceline.server.openapi_responses import LLAMA_ERRORS
from paceline.server.pages import document_routes, start_page_routes
from paceline.server.request_context import route_path
from paceline.server.service import Front, Service
from paceline.server.settings import ServerSettings

ROUTES = (
    health_routes,
    start_page_routes,
    openai.cancel_routes,
    metrics_routes,
    openai.routes,
    llama_server.routes,
)

_MODEL_ROUTES = (openai.routes, llama_server.routes)  # a POST to them wakes a sleeping engine


def build_app(settings: ServerSettings, llm: Front | None = None) -> FastAPI:
    """Return the application; `app.state.service` is its `Service`, which starts loading when the app starts.

    llm: used in place of an `AsyncLLM` made of the settings. Raises `InvalidParams` for invalid engine options.
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
        responses=LLAMA_ERRORS,
    )
    app.state.service = service

    async def handle_error(request: Request, error: Exception) -> Response:
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        return error_response(service.api_error_of(error), route_path(request.scope), headers)

    for kind in (PacelineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, handle_error)

    async def wake(request: Request) -> None:
        if request.method == "POST":
            service.wake()

    for routes in ROUTES:
        needs_model = routes in _MODEL_ROUTES and bool(settings.engine_options.get("sleep_idle_s"))
        app.include_router(routes(service), dependencies=[Depends(wake)] if needs_model else None)
    if settings.docs:
        app.router.routes[:0] = document_routes(app)
    _build_routes(app)
    return app


def _build_routes(app: FastAPI) -> None:
    """Have FastAPI build the routers' routes now, which it otherwise does, slowly, at the first request."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})


def _middleware(service: Service) -> list[Middleware]:
    """Return the middleware from the outermost to the innermost."""
    settings = service.settings
    cors = Middleware(
        Cors,
        settings.cors_origins,
        settings.cors_methods,
        settings.cors_headers,
        credentials=settings.cors_credentials,
    )
    return [
        Middleware(RequestIds),
        Middleware(HttpCounts, service.http_metrics),
        Middleware(AccessLog),
        *([Middleware(RoutePrefix, settings.root_path)] if settings.root_path else ()),
        *([Middleware(AllowedHosts, (*settings.allowed_hosts, *settings.hosts))] if settings.checks_hosts else ()),
        *([cors] if settings.cors_origins else ()),
        Middleware(HeaderLimit, settings.max_header_bytes),
        Middleware(ApiKeys, settings.api_keys),
        Middleware(RequestLimit, service, settings.max_connections),
        Middleware(
            BodyReader,
            settings.max_body_bytes,
            settings.body_timeout_s,
            service.body_budget,
            service.retry_after_s,
        ),
        Middleware(ErrorBoundary),
    ]
