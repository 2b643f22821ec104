"""Build the application: middleware, routes and health checks around one `Service`, for `serving` or any ASGI server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import APIRouter, Depends, FastAPI
from fastapi.dependencies import models as endpoint_caches
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server.api_errors import (
    ApiError,
    ApiException,
    ModelLoadFailed,
    ModelLoading,
    WorkerCrashLoop,
    WorkerHung,
    error_response,
    llama_error_body,
)
from paceline.server.dialects.anthropic import anthropic_routes
from paceline.server.dialects.llama_server import llama_routes, stream_routes
from paceline.server.dialects.ollama import ollama_routes
from paceline.server.dialects.openai import openai_routes
from paceline.server.dialects.responses import responses_routes
from paceline.server.engine_events import engine_routes, page_facts
from paceline.server.exposition import metrics_routes
from paceline.server.in_flight import ByteBudget
from paceline.server.json_bodies import LLAMA_ERRORS
from paceline.server.middleware.access import AllowedHosts, ApiKeys, Cors, RoutePrefix
from paceline.server.middleware.awaited_streams import AwaitedStreams
from paceline.server.middleware.recording import AccessLog, ErrorBoundary, HttpCounts, RequestIds
from paceline.server.middleware.request_limits import BodyReader, HeaderLimit, LimitedServer, RequestLimit
from paceline.server.middleware.rewriting import HeadAsGet, TrailingSlashes
from paceline.server.pages import PageRoute, document_routes, server_facts, serves_page_file, start_page_routes
from paceline.server.request_context import route_path
from paceline.server.server_metrics import HttpMetrics
from paceline.server.service import Front, KeptForClients, Service
from paceline.server.settings import ServerSettings, has_tenants
from paceline.server.web_page import WebPage

_ENGINE_DEAD = ApiError(503, "unavailable_error", "engine_dead", "the engine has ended or hangs; restart the server")


def build_app(settings: ServerSettings, llm: Front | None = None) -> FastAPI:
    """Return the application; `app.state.service` is its `Service`, which starts loading when the app starts.

    llm: the model; None for a `ModelFront` of the settings. Raises `InvalidParams` for invalid engine options.
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
        redirect_slashes=False,
        middleware=server_middleware(service),
        lifespan=lifespan,
        responses=LLAMA_ERRORS,
    )
    app.state.service = service
    add_error_handlers(app, service.api_error_of)
    for own_routes in (
        health_routes(service),
        start_page_routes(settings, service.page, lambda: server_facts(service)),
        page_facts.page_routes(settings, lambda: [page_facts.model_entry(service)], is_router=False),
        openai_routes.cancel_routes(service),
        stream_routes.routes(service.resumable_streams),
    ):
        app.include_router(own_routes)
    add_model_routes(app, service)
    add_documents(app, settings, service.page)
    build_routes(app)
    return app


def add_documents(app: FastAPI, settings: ServerSettings, page: WebPage) -> None:
    """Add the pages of the API before all other routes, and the files of the web page behind them."""
    if settings.docs:
        app.router.routes[:0] = document_routes(app, strict_fields=settings.strict_fields)
    if page.files is not None:
        app.router.routes.append(PageRoute(page.files))


def model_app(service: Service) -> FastAPI:
    """Return the application of one of several models: its routes without middleware. The service is closed elsewhere."""
    app = FastAPI(
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=[Middleware(ErrorBoundary)],
        responses=LLAMA_ERRORS,
    )
    app.state.service = service
    add_error_handlers(app, service.api_error_of)
    add_model_routes(app, service)
    build_routes(app)
    return app


def add_error_handlers(app: FastAPI, api_error_of: Callable[[BaseException], ApiError]) -> None:
    """Have errors of routes reported in the shape of the route's API."""

    async def handle_error(request: Request, error: Exception) -> Response:
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        return error_response(api_error_of(error), route_path(request.scope), headers)

    for kind in (PacelineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, handle_error)


def add_model_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that need the model. A POST to one of them wakes a sleeping engine."""

    async def wake(request: Request) -> None:
        if request.method == "POST":
            service.wake()

    app.include_router(metrics_routes(service))
    app.include_router(engine_routes.routes(service))
    app.include_router(page_facts.model_routes(service))
    sleeps = bool(service.settings.engine_options.get("sleep_idle_s"))
    for api in (openai_routes, responses_routes, anthropic_routes, ollama_routes, llama_routes):
        app.include_router(api.routes(service), dependencies=[Depends(wake)] if sleeps else None)


def build_routes(app: FastAPI) -> None:
    """Have FastAPI build the routers' routes now, which it otherwise does, slowly, at the first request."""
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})


def release_endpoints() -> None:
    """Clear FastAPI's caches of endpoints.

    The caches are global, and their keys are the endpoints' functions, which hold the `Service` of their application.
    An application of an unloaded model would be kept until thousands of further endpoints displace it.
    """
    for cached in vars(endpoint_caches).values():
        if callable(clear := getattr(cached, "cache_clear", None)):
            clear()


class ServedState(LimitedServer, Protocol):
    """What the middleware needs to know of a server."""

    settings: ServerSettings
    page: WebPage
    http_metrics: HttpMetrics
    body_budget: ByteBudget
    kept: KeptForClients


def server_middleware(service: ServedState) -> list[Middleware]:
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
        Middleware(HeadAsGet),
        Middleware(TrailingSlashes, service.page),
        Middleware(ApiKeys, settings.api_keys, serves_page_file),
        Middleware(AwaitedStreams, service.kept.resumable_streams),
        Middleware(RequestLimit, service, settings.max_connections, is_shared=has_tenants(settings.api_keys)),
        Middleware(
            BodyReader,
            settings.max_body_bytes,
            settings.body_timeout_s,
            service.body_budget,
            service.retry_after_s,
        ),
        Middleware(ErrorBoundary),
    ]


def health_routes(service: Service) -> APIRouter:
    """Return /health, /v1/health, /health/live and /health/ready."""
    router = APIRouter(tags=["health"])

    async def health() -> Response:
        """200 once the model is loaded; 503 with the progress before, in a crash loop, and while a worker hangs."""
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
        ("/health/live", live, "Whether the engine is alive"),
        ("/health/ready", ready, "Whether a request would be accepted"),
    ):
        router.add_api_route(path, endpoint, methods=["GET"], summary=summary)
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
    except WorkerHung as hung:
        return _unavailable(hung.api_error, status="hung")
    return JSONResponse({"status": "ok"})


def _unavailable(api_error: ApiError, **more: Any) -> Response:
    headers = {} if api_error.retry_after_s is None else {"retry-after": str(api_error.retry_after_s)}
    return JSONResponse({**llama_error_body(api_error), **more}, api_error.status, headers)
