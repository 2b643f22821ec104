"""The models of a router: presets as entries of a model manager, the `Service` of each loaded model, and events about models.

Presets are llama-server's presets, folder and caches, and the models of a TOML file; they are read in threads. All else happens
on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.responses import Response

from paceline.async_llm import AsyncLLM
from paceline.errors import ModelNotFound, ModelUnloaded, PacelineError
from paceline.hub import HubReference, UrlReference, is_reference, parse_reference
from paceline.model_manager import (
    AsyncModelManager,
    ManagerSettings,
    ModelEntry,
    ModelLoader,
    ModelState,
    ModelStatus,
    read_models_file,
)
from paceline.model_manager.engine_loader import AsyncLLMLoader
from paceline.server.api_errors import ApiException, ModelLoadFailed, invalid_request
from paceline.server.flags import ModelPreset, ModelPresets
from paceline.server.flags.presets import check_names
from paceline.server.resumable_streams import NextBytes, ResumableStreams
from paceline.server.service import KeptForClients, Service
from paceline.server.settings import ServerSettings
from paceline.server.sse import SSE, LiveEvents

_log = logging.getLogger("paceline.server")
_LATEST: Final = ":latest"  # Ollama's default tag
_KEEPING: Final[tuple[ModelState, ...]] = ("queued", "loading", "loaded", "sleeping")  # a sleeping model queues to wake


class RoutedModels:
    """All models of a server. Raises `InvalidParams` for wrong presets.

    kept: the state for clients that come back. feed: gets the events. loader: in place of a loader of `AsyncLLM`s.
    """

    def __init__(
        self,
        settings: ServerSettings,
        presets: ModelPresets,
        kept: KeptForClients,
        feed: EventFeed,
        loader: ModelLoader[AsyncLLM] | None = None,
    ) -> None:
        self._source, self._kept, self._feed = PresetSources(settings, presets), kept, feed
        self._presets, limits = self._source.read()
        own = AsyncLLMLoader(keeps_spare=settings.spare_worker) if loader is None else loader
        self.manager = AsyncModelManager(limits, loader=own)
        self._served: dict[
            str, tuple[ModelPreset, AsyncLLM, Service]
        ] = {}  # each service with its preset and its model
        self._services: weakref.WeakSet[Service] = weakref.WeakSet()  # also of models that are being unloaded
        self._preparing: set[asyncio.Task[None]] = set()
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

    async def reload(self) -> None:
        """Read the presets and limits again, and return when removed and changed models have been unloaded.

        Meanwhile requests for a changed model wait for its new version. Raises `InvalidParams`; then nothing is changed.
        """
        await (await self._begin_reload(self._source))

    async def begin_reload(
        self, settings: ServerSettings, presets: ModelPresets, before_replacing: Callable[[], None]
    ) -> asyncio.Task[None]:
        """Begin to reload with other settings and sources, which are kept. Returns the rest of the reload.

        before_replacing: called when the sources have been read. If it raises an error, nothing is changed.
        """
        return await self._begin_reload(PresetSources(settings, presets), before_replacing)

    async def _begin_reload(
        self, source: PresetSources, before_replacing: Callable[[], None] = lambda: None
    ) -> asyncio.Task[None]:
        async with self._reloading:
            presets, limits = await asyncio.to_thread(source.read)
            before_replacing()
            self._source = source
            replacing = asyncio.create_task(self._replace(presets, limits))
            await asyncio.sleep(0)  # it has begun then, so that the next reload replaces these presets
        return replacing

    async def _replace(self, presets: Mapping[str, ModelPreset], limits: ManagerSettings) -> None:
        """Replace the models, at once, and wait for the end of the models that are unloaded."""
        before, self._presets = self._presets, presets
        try:
            await self.manager.update(limits)  # replaces the models before it waits
        except PacelineError:
            self._presets = before
            raise
        for name, (preset, _, _) in tuple(self._served.items()):
            if preset != self._presets.get(name):  # a setting of the server has changed
                del self._served[name]
                self._begin_preparing(name)

    # ---- finding

    def preset(self, name: str) -> ModelPreset:
        """Return a model by its name, an alias or the name of one of its adapters, with or without Ollama's default tag.

        Raises `ModelNotFound` with the nearest names, and `ApiException` (400) for an adapter that several models have.
        """
        preset = self._own_name(name)
        if preset is not None:
            return preset
        spellings = set(_spellings(name))
        owners = [preset for preset in self._presets.values() if self.adapters(preset).keys() & spellings]
        if len(owners) > 1:
            models = ", ".join(repr(preset.name) for preset in owners)
            message = (
                f"{name!r} is an adapter of several models; name one of {models} as model, and the adapter in lora"
            )
            raise invalid_request(message, "model", "model_ambiguous")
        return owners[0] if owners else self._presets[self.manager.entry(name).name]

    def model(self, name: str) -> ModelPreset:
        """Return a model as `preset` does, but raise `ApiException` (400) for the name of an adapter, with the model's name."""
        preset = self._own_name(name)
        if preset is None:
            owner = self.preset(name)
            message = (
                f"{name!r} is an adapter of the model {owner.name!r}; give the name of the model, if that is meant"
            )
            raise invalid_request(message, "model", "model_is_adapter")
        return preset

    def _own_name(self, name: str) -> ModelPreset | None:
        for spelling in _spellings(name):
            with suppress(ModelNotFound):
                return self._presets[self.manager.entry(spelling).name]
        return None

    def adapters(self, preset: ModelPreset) -> Mapping[str, str]:
        """Return the paths of a model's LoRA adapters by their names; its configured adapters if it is not loaded."""
        service = self.ready(preset.name)
        if service is not None:
            return {adapter.name: adapter.path for adapter in service.adapters()}
        configured = preset.settings.engine_options.get("lora")
        return dict(configured) if isinstance(configured, Mapping) else {}

    def presets(self) -> list[ModelPreset]:
        """Return the models that are listed."""
        return [preset for preset in self._presets.values() if not preset.hidden]

    def status(self, preset: ModelPreset) -> ModelStatus:
        """Return the status of a model."""
        return self.manager.status(preset.name)

    def ready(self, name: str) -> Service | None:
        """Return the service of a model; None if the model is not loaded, or its service is not ready yet."""
        return self.all_ready().get(name)

    def all_ready(self) -> Mapping[str, Service]:
        """Return the services that are ready, by the names of their models."""
        return {name: service for name, (_, _, service) in self._served.items() if service.is_loaded}

    @property
    def streams(self) -> ResumableStreams:
        """The streams that clients may resume, of all models."""
        return self._kept.resumable_streams

    def services(self) -> list[Service]:
        """Return the services of all models that are loaded or being unloaded."""
        return list(self._services)

    # ---- serving

    async def serve(self, preset: ModelPreset, llm: AsyncLLM) -> Service:
        """Return the service of a loaded model. Raises `ModelLoadFailed`.

        preset: of the request. A model that was changed while the request waited is served with its present preset.
        """
        name = preset.name
        now = self._presets[name] if self._is_loaded(name) else preset
        served = self._served.get(name)
        if served is None or served[1] is not llm or served[0] != now:
            settings = now.settings
            if (
                now.reference is not None
            ):  # a model without a path has its name there, of which /props shows the last part
                settings = replace(settings, model=Path(str(now.reference)))
            service = Service(settings, llm, kept=self._kept, is_managed=True)
            served = now, llm, service
            self._services.add(service)
            if self._is_loaded(name):
                self._served[name] = served
            await service.start()
        service = served[2]
        await service.loaded.wait()
        if service.failure is not None:
            if self._served.get(name) is served:
                del self._served[name]  # the next request tries again
            raise ModelLoadFailed(service.failure)
        return service

    def _is_loaded(self, name: str) -> bool:
        """Return whether a model is loaded, and neither removed nor being unloaded."""
        return name in self._presets and self.manager.status(name).is_loaded

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
        """Make the service of a loaded model, drop the service of an unloaded one, and report the state."""
        if status.state == "loaded" != before and status.name not in self._served:
            self._begin_preparing(status.name)
        elif status.state not in _KEEPING:
            served = self._served.pop(status.name, None)
            if served is not None:
                served[2].unload(ModelUnloaded(f"the model {status.name!r} was unloaded while the request ran"))
        self._feed.report(status)

    def _begin_preparing(self, name: str) -> None:
        task = asyncio.create_task(self._prepare(name))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, name: str) -> None:
        with suppress(PacelineError, ApiException):  # the next request reports the error
            if self.manager.status(name).state != "loaded":
                return
            async with self.manager.use(name, load=False, timeout_s=0) as llm:
                await self.serve(self.preset(name), llm)


def _spellings(name: str) -> tuple[str, str]:
    return name, name.removesuffix(_LATEST)


def _entry_of(preset: ModelPreset, defaults: Mapping[str, Any]) -> ModelEntry:
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
        options={**defaults, **settings.engine_options, **source, **token},
        aliases=settings.aliases[1:],
        pinned=preset.pinned,
        load_on_startup=preset.load_on_startup,
        unload_idle_s=preset.unload_idle_s,
        stop_timeout_s=preset.stop_timeout_s,
    )


_OF_THE_SERVER: Final = ("chat_template", "offline", "hf_token")  # options of an entry that are no engine's


class PresetSources:
    """The sources of models: a file, a folder and caches. settings: the server's."""

    def __init__(self, settings: ServerSettings, presets: ModelPresets) -> None:
        self._settings, self._presets = settings, presets

    @property
    def _toml(self) -> Path | None:
        path = self._settings.models_preset
        return path if path is not None and path.suffix.lower() == ".toml" else None

    def read(self) -> tuple[Mapping[str, ModelPreset], ManagerSettings]:
        """Return all models by their names, and the settings of their manager.

        Models of a TOML file win over models of the same name. Flags win over the file's limits. Raises `InvalidParams`.
        """
        of_file = ManagerSettings() if self._toml is None else read_models_file(self._toml)
        named = [self._of_entry(entry) for entry in of_file.entries]
        names = {preset.name for preset in named}
        others = self._presets.read(self._settings.models_preset, self._settings.models_dir)
        all_models = [*named, *(preset for preset in others if preset.name not in names)]
        check_names(all_models)
        memory, most = self._settings.models_memory, self._settings.models_max
        of_server = self._settings.engine_options
        defaults = {"disk_cache": of_server["disk_cache"]} if "disk_cache" in of_server else {}
        limits = replace(
            of_file,
            entries=tuple(_entry_of(preset, defaults) for preset in all_models),
            memory_budget=of_file.memory_budget if memory is None else memory,
            max_loaded=most if self._toml is None or self._presets.sets("server.models_max") else of_file.max_loaded,
        )
        return {preset.name: preset for preset in all_models}, limits

    def _of_entry(self, entry: ModelEntry) -> ModelPreset:
        options = dict(entry.options)
        template, offline, token = (options.pop(name, None) for name in _OF_THE_SERVER)
        reference = parse_reference(str(entry.model)) if is_reference(entry.model) else None
        of_server = self._settings.engine_options
        given = {name: value for name, value in of_server.items() if self._presets.sets(f"engine.{name}")}
        settings = replace(
            self._settings,
            model=None if reference is not None or entry.model is None else Path(entry.model),
            aliases=(entry.name, *entry.aliases),
            tags=(),
            engine_options={**of_server, **options, **given},
            chat_template=self._settings.chat_template if template is None else template,
        )
        return ModelPreset(
            name=entry.name,
            settings=settings,
            source="preset",
            text=_as_text(entry),
            reference=reference,
            offline=self._presets.offline if offline is None else offline,
            hf_token=self._presets.hf_token if token is None else token,
            load_on_startup=entry.load_on_startup,
            pinned=entry.pinned,
            unload_idle_s=entry.unload_idle_s,
            stop_timeout_s=entry.stop_timeout_s,
        )


def _as_text(entry: ModelEntry) -> str:
    """Return an entry as lines of a preset, without secrets."""
    shown = {"model": entry.model and Path(entry.model).name, **entry.options}
    lines = [f"{key} = {value}" for key, value in shown.items() if value is not None and key != "hf_token"]
    return "\n".join([f"[{entry.name}]", *lines]) + "\n\n"


_MAX_BEHIND: Final = 1024  # events that wait for a reader; further events drop the oldest

VALUES: Final[Mapping[str, str]] = {
    "preparing": "loading",
    "queued": "loading",
    "loading": "loading",
    "loaded": "loaded",
    "unloading": "loaded",
    "sleeping": "sleeping",
    "unloaded": "unloaded",
    "failed": "unloaded",
}
"""llama-server's names of the states."""


class EventFeed:
    """Passes events on to all readers."""

    def __init__(self) -> None:
        self._queues: list[asyncio.Queue[bytes | None]] = []
        self._last: dict[str, dict[str, Any]] = {}
        self._is_closed = False

    def publish(self, event: str, model: str, data: Mapping[str, Any] | None = None) -> None:
        """Send an event to every reader."""
        members = {"model": model, "event": event, **({} if data is None else {"data": data})}
        for queue in self._queues:
            _put(queue, SSE.frame(msgspec.json.encode(members)))

    def report(self, status: ModelStatus) -> None:
        """Send the status of a model if it has changed in llama-server's terms."""
        if status.state == "removed":
            self._last.pop(status.name, None)
            self.publish("model_remove", status.name)
            return
        data: dict[str, Any] = {"status": VALUES[status.state]}
        if data["status"] == "unloaded":
            data["exit_code"] = int(status.state == "failed")
        elif status.state == "loading":
            data["progress"] = {"stages": ["text_model"], "current": "text_model", "value": round(status.progress, 4)}
        if data != self._last.get(status.name, {"status": "unloaded", "exit_code": 0}):
            self._last[status.name] = data
            self.publish("model_status", status.name, data)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for queue in self._queues:
            _put(queue, None)

    def stream(self, heartbeat_s: float) -> Response:
        """Return a response with the events from now on."""
        return LiveEvents(self._reading(), opening=SSE.ping, ping=SSE.ping, heartbeat_s=heartbeat_s)

    @contextmanager
    def _reading(self) -> Iterator[NextBytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_BEHIND)
        if self._is_closed:
            queue.put_nowait(None)

        async def next_event() -> tuple[bytes, bool]:
            data = await queue.get()
            return data or b"", data is None

        self._queues.append(queue)
        try:
            yield next_event
        finally:
            self._queues.remove(queue)


def _put(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
