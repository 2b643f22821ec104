"""The application of a server with several models: its state, and the routes about the server itself. On the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import FastAPI, Query
from pydantic import Field
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.async_llm import AsyncLLM
from paceline.errors import ModelNotFound, PacelineError
from paceline.model_manager import ModelLoader, ModelState
from paceline.server.api_errors import (
    OPENAI_FORM,
    ApiError,
    ApiException,
    ServerDraining,
    api_error_of,
    invalid_request,
    llama_error_body,
)
from paceline.server.application import health_routes, server_app
from paceline.server.dialects.llama_server import llama_routes
from paceline.server.dialects.ollama import ollama_routes
from paceline.server.dialects.ollama.ollama_requests import OllamaModelBody
from paceline.server.dialects.openai.openai_routes import cancel_routes
from paceline.server.dialects.request_body import RequestBody
from paceline.server.engine_routes import page_routes
from paceline.server.exposition import METRICS_OFF, models_metrics
from paceline.server.flags import ModelPresets
from paceline.server.json_bodies import OPENAI_ERRORS, PLAIN_TEXT, json_response
from paceline.server.middleware.access import may_be_forged
from paceline.server.pages import start_page_routes
from paceline.server.router import model_listing
from paceline.server.router.model_dispatch import ModelDispatch, routing_error
from paceline.server.router.model_downloads import ModelDownloads
from paceline.server.router.routed_models import EventFeed, RoutedModels
from paceline.server.routes import RouteFacts, Routes, check_operator
from paceline.server.service import Server
from paceline.server.settings import ServerSettings

_log = logging.getLogger("paceline.server")
_RUNNING: Final[tuple[ModelState, ...]] = ("preparing", "queued", "loading", "loaded", "sleeping", "unloading")
_CANCEL: Final = "Cancel by the X-Request-Id of a response, whichever model runs it, within the tenant of the API key."
_FORGED_RELOAD: Final = ApiError(
    403,
    "permission_error",
    "cross_site_request",
    "a GET request from a browser does not read the list of models again unless it comes from this server's own page; send "
    "the header X-Requested-With, or leave reload out",
)

ModelQuery = Annotated[str, Query(max_length=512, description="The name of a model")]


class ModelBody(RequestBody):
    """The body of what is done with a model. timeout_s: for running requests before it is unloaded; paceline's own."""

    model: str = Field(max_length=512, min_length=1)
    timeout_s: float | None = Field(
        None, ge=0, le=1e9, description="paceline's own: seconds that its requests have to end."
    )


def _warned(service: RouterService, body: RequestBody) -> dict[str, Any]:
    warnings = body.field_warnings(strict=service.settings.strict_fields)
    return {"warnings": warnings} if warnings else {}


def build_router_app(
    settings: ServerSettings, presets: ModelPresets, loader: ModelLoader[AsyncLLM] | None = None
) -> FastAPI:
    """Return the application of several models; `app.state.service` is its `RouterService`.

    loader: in place of a loader of `AsyncLLM`s. Raises `InvalidParams` for wrong presets.
    """
    service = RouterService(settings, presets, loader)
    return server_app(service, _own_routes(service), Middleware(ModelDispatch, settings, service.models))


def _own_routes(service: RouterService) -> list[Routes]:
    return [
        _health_routes(service),
        start_page_routes(service, lambda: _facts(service)),
        page_routes(service, lambda: model_listing.page_entries(service.models), is_router=True),
        cancel_routes(service.cancel, _CANCEL),
        llama_routes.STREAM_ROUTES,
        _metrics_routes(service),
        _list_routes(service),
        _management_routes(service),
        _props_routes(service),
        _ollama_routes(service),
        ollama_routes.ADMINISTRATION_ROUTES,
    ]


def _facts(service: RouterService) -> list[tuple[str, str]]:
    listed = [f"{preset.name} ({service.models.status(preset).state})" for preset in service.models.presets()]
    state = "ending" if service.is_draining else "ready"
    return [("version", __version__), ("models", ", ".join(listed) or "none"), ("state", state)]


def _health_routes(service: RouterService) -> Routes:

    async def health() -> Response:
        """200: a model that is not loaded or has failed leaves the server healthy."""
        return JSONResponse({"status": "ok"})

    async def live() -> Response:
        """200 while the server responds; GET /models has the state of each model."""
        return JSONResponse({"status": "ok", "state": "router"})

    async def ready() -> Response:
        """200 where a request would be accepted; 503 while the server shuts down."""
        if service.is_draining:
            api_error = ServerDraining().api_error
            return JSONResponse(llama_error_body(api_error), api_error.status)
        return JSONResponse({"status": "ok"})

    return health_routes(health, live, ready, "Whether the server runs", "Whether the server is alive")


def _list_routes(service: RouterService) -> Routes:
    router = Routes(RouteFacts(), tags=["models"], responses=OPENAI_ERRORS)
    models = service.models

    @router.get("/v1/models", errors=OPENAI_FORM, summary="As /models")
    @router.get("/models", summary="The models and their status")
    async def list_models(request: Request, reload: str = "") -> dict[str, Any]:
        """List all models. With ?reload=1 presets, folder and caches are read again.

        A web page of another origin needs the header X-Requested-With for that, and tenants need an operator's key.
        """
        if reload:
            check_operator(request)
            if may_be_forged(request.scope["headers"]):
                raise ApiException(_FORGED_RELOAD)
            await models.reload()
            service.feed.publish("models_reload", "*")
        return model_listing.list_body(models, service.downloads.bodies())

    @router.get("/models/sse", summary="Events about models", response_class=Response)
    async def events() -> Response:
        """Send an event whenever the status of a model changes, and on the progress of downloads."""
        return service.feed.stream(service.settings.heartbeat_s)

    @router.get("/v1/models/{model_id:path}", errors=OPENAI_FORM, summary="One model")
    async def one_model(model_id: str) -> dict[str, Any]:
        """Describe the model under one of its names; 404 for any other."""
        return model_listing.named_body(models, model_id)

    return router


def _management_routes(service: RouterService) -> Routes:
    router = Routes(RouteFacts(operator=True), tags=["models"])
    models = service.models

    @router.post("/models/load", summary="Load a model")
    async def load(body: ModelBody) -> dict[str, Any]:
        """Begin to load a model. Its status and the events report how that goes on."""
        warned, preset = _warned(service, body), models.preset(body.model)
        if models.status(preset).state in _RUNNING:
            raise invalid_request("model is already running", "model", "model_running")
        service.begin(models.manager.load(preset.name))
        await asyncio.sleep(0)  # so that the status is that of a load
        return {"success": True} | warned

    @router.post("/models/unload", summary="Unload a model")
    async def unload(body: ModelBody) -> dict[str, Any]:
        """Begin to unload a model, or end its download. Its requests have some time to end, then end with an error."""
        warned = _warned(service, body)
        if service.downloads.is_running(body.model):
            service.downloads.cancel(body.model)
            return {"success": True} | warned
        preset = models.preset(body.model)
        if models.status(preset).state not in _RUNNING:
            raise invalid_request("model is not running", "model", "model_not_running")
        service.begin(models.manager.unload(preset.name, timeout_s=body.timeout_s))
        return {"success": True} | warned

    @router.post("/models", summary="Download a model")
    async def download(body: ModelBody) -> dict[str, Any]:
        """Begin to download a model of the Hugging Face Hub into the cache. The events report its progress."""
        warned = _warned(service, body)
        if body.model in models.manager.names():
            raise invalid_request(f"model {body.model!r} already exists", "model", "model_exists")
        await service.downloads.start(body.model, models.reload)
        return {"success": True} | warned

    @router.delete("/models", summary="Delete a model from the cache")
    async def delete(model: ModelQuery) -> dict[str, Any]:
        """Unload a model and delete its files, if it is one of the cache and of no preset; or end its download."""
        preset = None if service.downloads.is_running(model) else models.model(model)
        name = model if preset is None else preset.name
        if preset is not None and preset.source != "cache":
            message = f"model {name!r} is not of the cache; remove it from its preset or its folder"
            raise invalid_request(message, "model", "model_kept")
        if preset is not None:
            await service.downloads.check_removable(name, models.presets())
            await models.manager.unload(name)
        await service.downloads.remove(name)
        await models.reload()
        return {"success": True}

    return router


def _props_routes(service: RouterService) -> Routes:
    router = Routes(RouteFacts(model="named"), tags=["llama-server"])
    settings = service.settings

    @router.get("/props", summary="Properties of the server, or with ?model= of a model")
    async def router_props() -> dict[str, Any]:
        """Return the properties of the server."""
        return {
            "role": "router",
            "max_instances": service.models.manager.settings.max_loaded,
            "models_autoload": settings.models_autoload,
            "model_alias": "paceline",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui_settings": {},
            "build_info": f"paceline-{__version__}",
            "cors_proxy_enabled": False,
        }

    return router


def _ollama_routes(service: RouterService) -> Routes:
    router = Routes(
        RouteFacts(errors=ollama_routes.OLLAMA_FORM), tags=["Ollama"], responses=ollama_routes.OLLAMA_ERRORS
    )
    models = service.models

    @router.get("/api/tags", summary="The models")
    async def all_tags() -> Response:
        """List all models, with facts of those that are loaded."""
        return json_response(model_listing.tags_body(models))

    @router.get("/api/ps", summary="The models that are loaded")
    async def all_running() -> Response:
        """List the models that are loaded."""
        return json_response(model_listing.running_body(models))

    @router.get("/api/version", summary="The version of Ollama's API")
    async def ollama_version() -> Response:
        """Return the version of Ollama whose API this is, and paceline's own."""
        return json_response({"version": ollama_routes.FOLLOWED_VERSION, "paceline": __version__})

    @router.post("/api/show", summary="Describe a model")
    async def show_one(body: OllamaModelBody) -> Response:
        """Describe a model, by its file where it is not loaded; 404 for a name that there is not."""
        if not (name := body.model or body.name):
            return ollama_routes.ollama_error_response(ollama_routes.NAME_MISSING)
        try:
            preset = models.preset(name)
        except ModelNotFound as error:
            return ollama_routes.ollama_error_response(routing_error(error))
        served, verbose = models.ready(preset.name), bool(body.verbose)
        if served is not None:
            shown = await asyncio.to_thread(ollama_routes.shown_model, served, verbose=verbose)
        else:
            shown = await asyncio.to_thread(model_listing.file_description, preset, verbose=verbose)
        return json_response(shown | _warned(service, body))

    @router.post("/api/pull", summary="Check that a model is here", responses=ollama_routes.OLLAMA_STREAMS)
    async def pull_one(body: OllamaModelBody) -> Response:
        """Report success for a model that is here, and 404 for any other: POST /models downloads one."""
        if not (name := body.model or body.name):
            return ollama_routes.ollama_error_response(ollama_routes.NAME_MISSING)
        try:
            models.preset(name)
        except PacelineError as error:
            api_error = routing_error(error)
            message = f"{api_error.message}; POST /models downloads a model"
            return ollama_routes.ollama_error_response(replace(api_error, message=message))
        return ollama_routes.pull_response(body)

    return router


class RouterService(Server):
    """The state of a server with several models. Each model has the settings of its preset. Arguments as `build_router_app`."""

    def __init__(
        self, settings: ServerSettings, presets: ModelPresets, loader: ModelLoader[AsyncLLM] | None = None
    ) -> None:
        super().__init__(settings, ())
        self.feed = EventFeed()
        self.models = RoutedModels(settings, presets, self.kept, self.feed, loader)
        self.downloads = ModelDownloads(self.feed, offline=presets.offline, hf_token=presets.hf_token)
        self._tasks: set[asyncio.Future[Any]] = set()

    # ---- life

    def apply(self, settings: ServerSettings) -> None:
        """Take over settings, as in `Server`, and the tenants of all engines. Models have settings of their own."""
        super().apply(settings)
        for service in self.models.services():
            service.expect_tenants()

    async def start(self) -> None:
        """Begin to load the models that are loaded on startup."""
        await self.models.start()
        self.is_loaded = True
        self.loaded.set()

    def ready_line(self, seconds: float) -> str:
        """Return the line to print when the server is ready."""
        names = [preset.name for preset in self.models.presets()]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return f"{len(names)} models are served by name ({shown or 'none found'}); ready after {seconds:.1f} s"

    async def ended(self) -> BaseException | None:
        """Wait for ever: a router does not give up by itself."""
        await asyncio.Event().wait()
        return None

    def drain(self) -> None:
        """Reject new requests from now on; end streams of events about models."""
        self.is_draining = True
        self.kept.resumable_streams.cancel_unread()
        for service in self.models.services():
            service.drain()
        self.feed.close()

    async def aclose(self) -> None:
        """Unload everything, and end downloads."""
        self.drain()
        await asyncio.gather(self.downloads.aclose(), self.models.aclose())  # a slow hub delays no model
        for task in tuple(self._tasks):
            task.cancel()

    # ---- for middleware and routes

    def api_error_of(self, error: BaseException) -> ApiError:
        """Return an error of one of the server's own routes."""
        return routing_error(error) if isinstance(error, ModelNotFound) else api_error_of(error)

    def begin(self, work: Awaitable[Any]) -> None:
        """Run work in the background; its errors are in the status of its model and in the log."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def cancel(self, request_id: str, tenant: str) -> bool:
        """Cancel the requests with an id of all models; return whether there was any."""
        cancelled = [service.request_registry.cancel(request_id, tenant) for service in self.models.services()]
        return any(cancelled)


def _metrics_routes(service: RouterService) -> Routes:
    router = Routes(RouteFacts(model="named", loads_model=False), tags=["observability"])

    @router.get(
        "/metrics", summary="Counters and histograms of all models", responses=PLAIN_TEXT, response_class=Response
    )
    async def all_metrics(request: Request) -> Response:
        """Return the metrics of all loaded models with the label `model`; with ?model=NAME one's, without it."""
        if not service.settings.metrics:
            raise ApiException(METRICS_OFF)
        accept, statuses = request.headers.get("accept", ""), service.models.manager.statuses()
        engines = {name: model.engine() for name, model in service.models.all_ready().items()}
        http, llama = service.http_metrics, service.llama_metrics
        return await asyncio.to_thread(models_metrics, statuses, engines, http, llama, accept, service.created)

    return router
