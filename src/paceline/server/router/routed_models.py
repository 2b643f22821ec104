"""The models of a router: presets as entries of a model manager, and the application of each one that is loaded.

On the event loop; presets are read and applications built in threads.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI

from paceline.async_llm import AsyncLLM
from paceline.errors import ModelNotFound, ModelUnloaded, PacelineError
from paceline.hub import HubReference, UrlReference
from paceline.model_manager import (
    AsyncModelManager,
    ManagerSettings,
    ModelEntry,
    ModelLoader,
    ModelState,
    ModelStatus,
)
from paceline.model_manager.engine_loader import AsyncLLMLoader
from paceline.server.api_errors import ApiException, ModelLoadFailed, invalid_request
from paceline.server.application import model_app, release_endpoints
from paceline.server.flags import ModelPreset, ModelPresets
from paceline.server.resumable_streams import ResumableStreams
from paceline.server.router.event_feed import EventFeed
from paceline.server.router.preset_sources import FoundPresets, PresetSources
from paceline.server.service import KeptForClients, Service
from paceline.server.settings import ServerSettings

_log = logging.getLogger("paceline.server")
_LATEST: Final = ":latest"  # Ollama's default tag
_KEEPING: Final[tuple[ModelState, ...]] = ("queued", "loading", "loaded", "sleeping")  # a sleeping one queues to wake


class LoadedFront:
    """A `Front` around a model that the manager has loaded and will close."""

    progress = 1.0

    def __init__(self) -> None:
        self.llm: AsyncLLM | None = None  # until it is loaded

    @property
    def engine(self) -> Any:
        """The engine."""
        assert self.llm is not None  # noqa: S101 - the service begins after that
        return self.llm.engine

    async def start(self) -> None:
        """Do nothing: it is loaded."""

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Do nothing: the manager closes it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model with its application. preset: with whose settings it is served."""

    preset: ModelPreset
    llm: AsyncLLM
    service: Service
    app: FastAPI


@dataclass(frozen=True, slots=True)
class _Draft:
    """An application that is built while its model is being loaded."""

    preset: ModelPreset
    front: LoadedFront
    service: Service
    app: asyncio.Task[FastAPI]


class RoutedModels:
    """All models of a server. presets: where they come from; kept: what clients come back for; feed: gets their events."""

    def __init__(
        self,
        settings: ServerSettings,
        presets: ModelPresets,
        kept: KeptForClients,
        feed: EventFeed,
        loader: ModelLoader[AsyncLLM] | None = None,
    ) -> None:
        """Read the presets. loader: in place of one of `AsyncLLM`s. Raises `InvalidParams` for wrong presets."""
        self._source, self._kept, self._feed = PresetSources(settings, presets), kept, feed
        found = self._source.read()
        self._presets = found.presets
        own = AsyncLLMLoader(keeps_spare=settings.spare_worker) if loader is None else loader
        self.manager = AsyncModelManager(_settings_of(found), loader=own)
        self._served: dict[str, ServedModel] = {}
        self._services: weakref.WeakSet[Service] = weakref.WeakSet()  # also of models whose last requests end
        self._preparing: set[asyncio.Task[None]] = set()
        self._building: dict[str, asyncio.Lock] = {}
        self._drafts: dict[str, _Draft] = {}
        self._one_at_a_time = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._reloading = asyncio.Lock()

    async def start(self) -> None:
        """Begin to load the models that are loaded on startup."""
        for preset in self._presets.values():
            for note in preset.notes:
                _log.warning("model %s: %s", preset.name, note)
        self._following = asyncio.create_task(self._follow())
        await self.manager.start()

    async def aclose(self) -> None:
        """Unload everything; running requests end with SHUTDOWN."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        await self.manager.aclose()
        for name in tuple(self._drafts):
            self._drop_draft(name)

    async def reload(self) -> None:
        """Read the presets and limits again, and return when models that are gone or changed have been unloaded.

        Meanwhile requests for a changed one wait for the new one. Raises `InvalidParams`; then nothing is changed.
        """
        async with self._reloading:
            found = await asyncio.to_thread(self._source.read)
            replacing = asyncio.create_task(self._replace(found))
            await asyncio.sleep(0)  # it has begun then, so that the next reload replaces what this one has read
        await replacing

    async def _replace(self, found: FoundPresets) -> None:
        """Replace the models, at once, and wait for the end of those that are unloaded."""
        before, self._presets = self._presets, found.presets
        try:
            await self.manager.update(_settings_of(found))  # which has them replaced before it waits
        except PacelineError:
            self._presets = before
            raise
        for name, served in tuple(self._served.items()):
            if served.preset != self._presets.get(name):  # in what its engine does not have
                del self._served[name]
                self._begin_preparing(name)

    # ---- finding

    def preset(self, name: str) -> ModelPreset:
        """Return a model by its name, an alias or the name of one of its adapters, with or without Ollama's default tag.

        Raises `ModelNotFound` with the nearest names, and `ApiException` (400) for an adapter that several models have.
        """
        found = self._own_name(name)
        if found is not None:
            return found
        owners = self._owners(name)
        if len(owners) > 1:
            models = ", ".join(repr(preset.name) for preset in owners)
            message = (
                f"{name!r} is an adapter of several models; name one of {models} as model, and the adapter in lora"
            )
            raise invalid_request(message, "model", "model_ambiguous")
        return owners[0] if owners else self._presets[self.manager.entry(name).name]

    def model(self, name: str) -> ModelPreset:
        """Return a model as `preset`, but not for the name of an adapter: that raises `ApiException` (400) with the model's."""
        found = self._own_name(name)
        if found is None:
            owner = self.preset(name)
            message = (
                f"{name!r} is an adapter of the model {owner.name!r}; give the name of the model, if that is meant"
            )
            raise invalid_request(message, "model", "model_is_adapter")
        return found

    def _own_name(self, name: str) -> ModelPreset | None:
        for one in _spellings(name):
            with suppress(ModelNotFound):
                return self._presets[self.manager.entry(one).name]
        return None

    def _owners(self, adapter: str) -> list[ModelPreset]:
        names = set(_spellings(adapter))
        return [preset for preset in self._presets.values() if self.adapters(preset).keys() & names]

    def adapters(self, preset: ModelPreset) -> Mapping[str, str]:
        """Return the paths of a model's LoRA adapters by their names; those that it begins with where it is not loaded."""
        served = self._served.get(preset.name)
        if served is not None:
            return {one.name: one.path for one in served.service.adapters()}
        configured = preset.settings.engine_options.get("lora")
        return dict(configured) if isinstance(configured, Mapping) else {}

    def presets(self) -> list[ModelPreset]:
        """Return the models that are listed."""
        return [preset for preset in self._presets.values() if not preset.hidden]

    def status(self, preset: ModelPreset) -> ModelStatus:
        """Return the status of a model."""
        return self.manager.status(preset.name)

    def ready(self, name: str) -> ServedModel | None:
        """Return a model whose application is there already; None where it is not loaded, or was not used yet."""
        return self._served.get(name)

    def all_ready(self) -> Mapping[str, ServedModel]:
        """Return all models with an application."""
        return self._served

    @property
    def streams(self) -> ResumableStreams:
        """The streams that clients may resume, of all models."""
        return self._kept.resumable_streams

    def services(self) -> list[Service]:
        """Return the services of all models that are loaded or being unloaded."""
        return list(self._services)

    # ---- serving

    async def serve(self, preset: ModelPreset, llm: AsyncLLM) -> ServedModel:
        """Return the application of a model that was loaded just now or before. Raises `ModelLoadFailed`.

        preset: of the request. A model that was changed while the request waited is served as it is now.
        """
        name = preset.name
        async with self._building.setdefault(name, asyncio.Lock()):
            now = self._presets[name] if self._is_loaded(name) else preset
            found = self._served.get(name)
            if found is None or found.llm is not llm or found.preset != now:
                found = await self._built(now, llm)
                if self._is_loaded(name) and now == self._presets[name]:
                    self._served[name] = found
            return found

    def _is_loaded(self, name: str) -> bool:
        """Return whether a model is loaded, and neither removed nor being unloaded."""
        return name in self._presets and self.manager.status(name).is_loaded

    async def _built(self, preset: ModelPreset, llm: AsyncLLM) -> ServedModel:
        draft = self._drafts.get(preset.name)
        if draft is not None and draft.preset == preset:
            del self._drafts[preset.name]
        else:
            self._drop_draft(preset.name)
            draft = self._draft(preset)
        draft.front.llm, service = llm, draft.service
        self._services.add(service)
        service.start_loading()
        app = await draft.app
        await service.loaded.wait()
        if service.failure is not None:
            raise ModelLoadFailed(service.failure)
        return ServedModel(preset, llm, service, app)

    def _draft(self, preset: ModelPreset) -> _Draft:
        """Begin to build the application of a model, loaded or not."""
        front = LoadedFront()
        service = Service(_shown_settings(preset), front, kept=self._kept)
        return _Draft(preset, front, service, asyncio.create_task(self._build(service)))

    def _begin_draft(self, name: str) -> None:
        """Begin to build the application of a model that is being loaded, unless it has one."""
        # One that wakes has it still; one that is loaded by now, since this is noticed late, gets it from its first user.
        if name not in self._presets or name in self._served or self._is_loaded(name):
            return
        draft, preset = self._drafts.get(name), self._presets[name]
        if draft is None or draft.preset != preset:
            self._drop_draft(name)
            self._drafts[name] = self._draft(preset)

    def _drop_draft(self, name: str) -> None:
        """Let go of an application that will not be served, if there is one. Its build may run in a thread, and ends there."""
        draft = self._drafts.pop(name, None)
        if draft is not None:
            draft.app.add_done_callback(partial(_report_dropped, name))

    async def _build(self, service: Service) -> FastAPI:
        async with self._one_at_a_time:  # FastAPI silences warnings meanwhile, which threads would do to each other
            return await asyncio.to_thread(model_app, service)

    async def _follow(self) -> None:
        """Follow the models. An event that cannot be handled is logged, and the next ones are handled."""
        states: dict[str, ModelState] = {}
        async with self.manager.subscribe() as events:
            async for status in events:
                before, states[status.name] = states.get(status.name), status.state
                try:
                    self._changed(status, before)
                except Exception:  # noqa: BLE001 - the next events are handled all the same
                    _log.exception("the state %r of the model %s could not be followed", status.state, status.name)

    def _changed(self, status: ModelStatus, before: ModelState | None) -> None:
        """Prepare the application of a model that is or was loaded, forget that of one that is unloaded, and report it."""
        if status.state == "loading" != before:
            self._begin_draft(status.name)
        if status.state == "loaded" != before and status.name not in self._served:
            self._begin_preparing(status.name)
        elif status.state not in _KEEPING:
            self._drop_draft(status.name)
            self._forget(status)
            release_endpoints()
        self._feed.report(status)

    def _begin_preparing(self, name: str) -> None:
        task = asyncio.create_task(self._prepare(name))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, name: str) -> None:
        """Build the application of a model that was loaded, so that its first request need not wait for that."""
        with suppress(PacelineError, ApiException):  # reported to the next request; one that leaves is not waited for
            if self.manager.status(name).state != "loaded":
                return
            async with self.manager.use(name, load=False, timeout_s=0) as llm:
                await self.serve(self.preset(name), llm)

    def _forget(self, status: ModelStatus) -> None:
        served = self._served.pop(status.name, None)
        if served is not None:
            served.service.unload(ModelUnloaded(f"the model {status.name!r} was unloaded while the request ran"))


def _report_dropped(name: str, app: asyncio.Task[FastAPI]) -> None:
    release_endpoints()
    error = None if app.cancelled() else app.exception()
    if error is not None:
        _log.warning("an application of the model %s, which is not served, could not be built", name, exc_info=error)


def _spellings(name: str) -> tuple[str, str]:
    """Return a name with and without Ollama's default tag."""
    return name, name.removesuffix(_LATEST)


def entry_of(preset: ModelPreset) -> ModelEntry:
    """Return the manager's entry of a preset."""
    settings, reference = preset.settings, preset.reference
    model: Path | str | None = settings.model
    if isinstance(reference, HubReference):
        model = f"hf:{reference}"
    elif isinstance(reference, UrlReference):
        model = reference.url
    elif reference is not None:
        model = str(reference)
    source = {"offline": True} if preset.offline else {}
    token = {"hf_token": preset.hf_token} if preset.hf_token is not None and reference is not None else {}
    return ModelEntry(
        name=preset.name,
        model=model,
        options={**settings.engine_options, **source, **token},
        aliases=settings.aliases[1:],
        pinned=preset.pinned,
        load_on_startup=preset.load_on_startup,
        unload_idle_s=preset.unload_idle_s,
        stop_timeout_s=preset.stop_timeout_s,
    )


def _settings_of(found: FoundPresets) -> ManagerSettings:
    return replace(found.limits, entries=tuple(entry_of(preset) for preset in found.presets.values()))


def _shown_settings(preset: ModelPreset) -> ServerSettings:
    """Return a model's settings; one without a path has its name there, of which /props shows the last part."""
    shown = None if preset.reference is None else Path(str(preset.reference))
    return preset.settings if shown is None else replace(preset.settings, model=shown)
