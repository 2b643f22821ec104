"""Build the application of a server with several models: middleware once, the server's routes, each model's behind them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from paceline import __version__
from paceline.async_llm import AsyncLLM
from paceline.model_manager import ModelLoader
from paceline.server.application import (
    add_documents,
    add_error_handlers,
    add_model_routes,
    build_routes,
    server_middleware,
)
from paceline.server.flags import ModelPresets
from paceline.server.json_bodies import LLAMA_ERRORS
from paceline.server.router.model_dispatch import ModelDispatch, ModelRoutes
from paceline.server.router.router_routes import own_routers
from paceline.server.router.router_service import RouterService
from paceline.server.service import Service
from paceline.server.settings import ServerSettings


class _NoModel:
    """The `Front` of the service whose routes describe those of the models; none of them is called with a model."""

    progress = 1.0

    @property
    def engine(self) -> Any:
        """Raise: there is no model."""
        raise AssertionError("a route of a model ran outside of it")

    async def start(self) -> None:
        """Do nothing."""

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Do nothing."""


def build_router_app(
    settings: ServerSettings, presets: ModelPresets, loader: ModelLoader[AsyncLLM] | None = None
) -> FastAPI:
    """Return the application; `app.state.service` is its `RouterService`.

    loader: in place of one of `AsyncLLM`s. Raises `InvalidParams` for wrong presets.
    """
    service = RouterService(settings, presets, loader)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.aclose()

    routes = ModelRoutes()
    app = FastAPI(
        title="paceline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        redirect_slashes=False,
        middleware=[*server_middleware(service), Middleware(ModelDispatch, settings, service.models, routes)],
        lifespan=lifespan,
        responses=LLAMA_ERRORS,
    )
    app.state.service = service
    add_error_handlers(app, service.api_error_of)
    for router in own_routers(service):
        app.include_router(router)
    num_own = len(app.routes)
    add_model_routes(app, Service(settings, _NoModel(), kept=service.kept))
    routes.set(models=app.routes[num_own:], own=app.routes[:num_own])
    add_documents(app, settings, service.page)
    build_routes(app)
    return app
