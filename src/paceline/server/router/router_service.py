"""The state of a server with several models: what middleware and `serving` need, the models, events, downloads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from paceline.async_llm import AsyncLLM
from paceline.errors import ModelNotFound
from paceline.model_manager import ModelLoader
from paceline.server.api_errors import DEFAULT_RETRY_S, ApiError, api_error_of
from paceline.server.flags import ModelPresets
from paceline.server.in_flight import InFlight
from paceline.server.router.event_feed import EventFeed
from paceline.server.router.model_dispatch import routing_error
from paceline.server.router.model_downloads import ModelDownloads
from paceline.server.router.routed_models import RoutedModels
from paceline.server.server_metrics import HttpMetrics
from paceline.server.service import KeptForClients, body_budget
from paceline.server.settings import ServerSettings
from paceline.server.web_page import WebPage


class RouterService:
    """The state of a router's app. settings: the server's; those of each model are its preset's."""

    def __init__(
        self, settings: ServerSettings, presets: ModelPresets, loader: ModelLoader[AsyncLLM] | None = None
    ) -> None:
        """Read the presets. loader: in place of one of `AsyncLLM`s. Raises `InvalidParams` for wrong presets."""
        self.settings, self.names = settings, ()
        self.created = int(time.time())
        self.in_flight, self.http_metrics = InFlight(), HttpMetrics()
        self.body_budget = body_budget(settings)
        self.kept = KeptForClients(settings)
        self.page = WebPage.of(settings)
        self.feed = EventFeed()
        self.models = RoutedModels(settings, presets, self.kept, self.feed, loader)
        self.downloads = ModelDownloads(self.feed, offline=presets.offline, hf_token=presets.hf_token)
        self.is_draining = False
        self.loaded = asyncio.Event()
        self._tasks: set[asyncio.Future[Any]] = set()

    # ---- life

    async def start(self) -> None:
        """Begin to load the models that are loaded on startup."""
        await self.models.start()
        self.loaded.set()

    @property
    def failure(self) -> BaseException | None:
        """None: a model that fails leaves the others."""
        return None

    @property
    def is_loaded(self) -> bool:
        """Whether requests can run."""
        return self.loaded.is_set()

    def ready_line(self, seconds: float) -> str:
        """Return what to print when it is ready."""
        names = [preset.name for preset in self.models.presets()]
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        return f"{len(names)} models are served by name ({shown or 'none found'}); ready after {seconds:.1f} s"

    async def ended(self) -> BaseException | None:
        """Wait for ever: it does not give up by itself."""
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
        await asyncio.gather(self.downloads.aclose(), self.models.aclose())  # a slow hub holds no model up
        for task in tuple(self._tasks):
            task.cancel()

    # ---- for middleware and routes

    def retry_after_s(self) -> int:
        """Return when to try again: there is no estimate for all models."""
        return DEFAULT_RETRY_S

    def api_error_of(self, error: BaseException) -> ApiError:
        """Return an error of a route of the server's own."""
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
        found = [service.request_registry.cancel(request_id, tenant) for service in self.models.services()]
        return any(found)
