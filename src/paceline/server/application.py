"""Build the application: middleware, routes and health checks around one `Service`, for `serving` or any ASGI server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline import __version__
from paceline.errors import PacelineError
from paceline.server import engine_routes
from paceline.server.api_errors import (
    OPENAI_FORM,
    ApiError,
    ApiException,
    ModelLoadFailed,
    ModelLoading,
    llama_error_body,
)
from paceline.server.batch_jobs import BatchJobs
from paceline.server.dialects.anthropic import anthropic_routes
from paceline.server.dialects.llama_server import completion_routes, llama_routes, slots
from paceline.server.dialects.ollama import ollama_routes
from paceline.server.dialects.openai import openai_batches, openai_routes, openai_vectors, transcriptions
from paceline.server.dialects.responses import responses_routes
from paceline.server.middleware import access, request_limits, requests
from paceline.server.model_front import ModelFront
from paceline.server.pages import MissingDocumentRoute, PageRoute, document_routes, server_facts, start_page_routes
from paceline.server.request_context import SERVICE, HttpMiddleware
from paceline.server.routes import RouteFacts, Routes, error_response, facts_of
from paceline.server.service import Server, Service
from paceline.server.settings import ServerSettings

Endpoint = Callable[[], Awaitable[Response]]

_ENGINE_DEAD = ApiError(503, "unavailable_error", "engine_dead", "the engine has ended or hangs; restart the server")

DIALECTS: tuple[Routes, ...] = (
    openai_routes.MODEL_ROUTES,
    openai_routes.ROUTES,
    openai_vectors.ROUTES,
    openai_vectors.SCORE_ROUTES,
    openai_vectors.CHOICE_ROUTES,
    openai_routes.LORA_ROUTES,
    transcriptions.ROUTES,
    openai_batches.ROUTES,
    responses_routes.ROUTES,
    responses_routes.STORED_ROUTES,
    anthropic_routes.ROUTES,
    ollama_routes.ROUTES,
    ollama_routes.MODEL_ROUTES,
    ollama_routes.ADMINISTRATION_ROUTES,
    completion_routes.ROUTES,
    slots.ROUTES,
    llama_routes.ROUTES,
)
"""The routes of the dialects."""


def build_app(settings: ServerSettings, front: ModelFront | None = None) -> FastAPI:
    """Return the application of one model; `app.state.service` is its `Service`, which starts loading when the app starts.

    front: the model; None: a `ModelFront` of the settings. Raises `InvalidParams` for invalid engine options.
    """
    service = Service(settings, front)
    own = (
        _health_of_model(service),
        start_page_routes(service, lambda: server_facts(service)),
        engine_routes.page_routes(service, lambda: [engine_routes.model_entry(service)], is_router=False),
        openai_routes.cancel_routes(service.request_registry.cancel, openai_routes.CANCEL),
        llama_routes.STREAM_ROUTES,
    )
    return server_app(service, own, Middleware(OneModel, service))


def server_app(server: Server, own: Iterable[Routes], dispatch: Middleware) -> FastAPI:
    """Return the application of a server.

    Args:
        server: Its state, which becomes `app.state.service`.
        own: The routes about the server itself; they win over routes of a model.
        dispatch: The innermost middleware, which gives a request the `Service` of its model.
    """
    settings = server.settings

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        await app.state.batches.start()
        try:
            yield
        finally:
            await app.state.batches.stop()
            await server.aclose()
            await server.kept.key_accounts.aclose()

    app = FastAPI(
        title="paceline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        redirect_slashes=False,
        middleware=[*_middleware(server), dispatch],
        lifespan=lifespan,
    )
    app.state.service, app.state.batches = server, BatchJobs(app, server)

    async def handle_error(request: Request, error: Exception) -> Response:
        headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
        model: Service | None = request.scope.get(SERVICE)
        return error_response((server if model is None else model).api_error_of(error), request.scope, headers)

    for kind in (PacelineError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, handle_error)
    routes = app.router.routes
    engine = (engine_routes.METRICS_ROUTES, engine_routes.USAGE_ROUTES, engine_routes.ROUTES)
    for group in (*own, *engine, *DIALECTS):
        routes.extend(group)
    if settings.docs:
        routes[:0] = document_routes(app, strict_fields=settings.strict_fields)
    if server.page.files is not None:
        routes.append(PageRoute(server.page.files))
    if not settings.docs:
        routes += map(MissingDocumentRoute, ("/docs", "/openapi.json"))
    return app


class OneModel(HttpMiddleware):
    """Gives each request the service of the only model. A POST request wakes an engine that sleeps."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        super().__init__(app)
        self._service = service
        self._sleeps = bool(service.settings.engine_options.get("sleep_idle_s"))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SERVICE] = self._service
        if self._sleeps and scope["method"] == "POST":
            facts = facts_of(scope)
            if facts is not None and facts.model != "none":
                self._service.wake()
        await self._app(scope, receive, send)


def _middleware(service: Server) -> list[Middleware]:
    """Return the middleware from the outermost to the innermost."""
    settings = service.settings
    cors = (settings.cors_origins, settings.cors_methods, settings.cors_headers)
    body = (settings.max_body_bytes, settings.body_timeout_s, service.body_budget, service.retry_after_s)
    hosts = (*settings.allowed_hosts, *settings.hosts)
    return [
        Middleware(requests.RequestIds),
        Middleware(requests.HttpCounts, service.http_metrics),
        Middleware(requests.AccessLog),
        *([Middleware(access.RoutePrefix, settings.root_path)] if settings.root_path else ()),
        *([Middleware(access.AllowedHosts, hosts)] if settings.checks_hosts else ()),
        *([Middleware(access.Cors, *cors, credentials=settings.cors_credentials)] if settings.cors_origins else ()),
        Middleware(request_limits.HeaderLimit, settings.max_header_bytes),
        Middleware(requests.HeadAsGet),
        Middleware(requests.TrailingSlashes, service.page),
        Middleware(requests.Traces),
        Middleware(access.ApiKeys, service),
        Middleware(requests.AwaitedStreams, service.kept.resumable_streams),
        Middleware(request_limits.KeyLimits, service),
        Middleware(request_limits.RequestLimit, service, settings.max_connections),
        Middleware(request_limits.BodyReader, *body),
        Middleware(requests.ErrorBoundary),
    ]


def health_routes(health: Endpoint, live: Endpoint, ready: Endpoint, *summaries: str) -> Routes:
    """Return /health, /v1/health, /health/live and /health/ready. summaries: of the first and the third."""
    router = Routes(RouteFacts(public=True, is_counted=False), tags=["health"])
    router.add("GET", "/health", health, summary=summaries[0])
    router.add("GET", "/v1/health", health, errors=OPENAI_FORM, summary="As /health")
    router.add("GET", "/health/live", live, summary=summaries[1])
    router.add("GET", "/health/ready", ready, summary="Whether a request would be accepted")
    return router


def _health_of_model(service: Service) -> Routes:

    async def health() -> Response:
        """200 once the model is loaded; 503 with the progress before, in a crash loop, and while a worker hangs."""
        try:
            if service.engine().is_closed:
                return _unavailable(_ENGINE_DEAD, status="ended")
            service.check_worker()
        except ApiException as error:
            return _unavailable(error.api_error, **error.health)
        return JSONResponse({"status": "ok"})

    async def live() -> Response:
        """Return 200 unless the engine has ended or hangs: also during a load, a long pass or a restart of the worker."""
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
        """Return 200 if a request would be accepted; else 503 with the reason."""
        try:
            service.check_ready()
        except ApiException as error:
            return _unavailable(error.api_error)
        return JSONResponse({"status": "ok"})

    return health_routes(health, live, ready, "Whether the model is loaded", "Whether the engine is alive")


def _unavailable(api_error: ApiError, **more: Any) -> Response:
    headers = {} if api_error.retry_after_s is None else {"retry-after": str(api_error.retry_after_s)}
    return JSONResponse({**llama_error_body(api_error), **more}, api_error.status, headers)
