"""Downloads into the cache that clients of a router ask for: POST and DELETE /models. On the event loop, work in threads."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from paceline.errors import Aborted, PacelineError, QueueFull
from paceline.hub import ModelReference, is_reference, parse_hub_reference, parse_reference
from paceline.hub.caches import check_removable, matching_models, remove_models
from paceline.hub.download import DownloadObserver
from paceline.hub.locate import Locator
from paceline.hub.references import hub_settings
from paceline.server.api_errors import ServerDraining, invalid_request
from paceline.server.flags import ModelPreset
from paceline.server.router.model_listing import download_body
from paceline.server.router.routed_models import EventFeed

_log = logging.getLogger("paceline.server")
MAX_DOWNLOADS: Final = 4
"""Most downloads of a server at once."""
_STEP_S: Final = 0.1  # between two events of one download


class _FeedObserver(DownloadObserver):
    """Reports a download's progress. report: called on the thread that downloads."""

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._report = report
        self._files: dict[str, dict[str, int | None]] = {}
        self._file: dict[str, int | None] = {}
        self._reported_s = 0.0

    def begin(self, name: str, total: int | None) -> None:
        super().begin(name, total)
        self._file = self._files[name] = {"done": 0, "total": total}
        self.end()

    def reached(self, num_bytes: int) -> None:
        self._file["done"] = num_bytes
        if time.monotonic() - self._reported_s >= _STEP_S:
            self.end()

    def end(self) -> None:
        self._reported_s = time.monotonic()
        self._report({name: dict(file) for name, file in self._files.items()})


class ModelDownloads:
    """The downloads that run."""

    def __init__(self, feed: EventFeed, *, offline: bool, hf_token: str | None) -> None:
        self._feed, self._offline, self._token = feed, offline, hf_token
        self._threads = ThreadPoolExecutor(MAX_DOWNLOADS, "paceline-download")  # a slow hub may occupy all of them
        self._num_beginning = 0
        self._running: dict[str, tuple[threading.Event, dict[str, Any], asyncio.Task[None]]] = {}
        self._is_closed = False

    def bodies(self) -> list[dict[str, Any]]:
        """Return the entries of the models that are being downloaded."""
        return [download_body(name, progress) for name, (_, progress, _) in self._running.items()]

    def is_running(self, name: str) -> bool:
        """Return whether a model is being downloaded."""
        return name in self._running

    async def start(self, name: str, when_done: Callable[[], Awaitable[None]]) -> None:
        """Begin to download a model of the hub. Raises the hub's error for an unknown name before anything is downloaded.

        when_done: called when the download has ended, before its event.
        """
        reference = parse_hub_reference(name)
        self._check_new(name)
        cancel = threading.Event()
        observer = _FeedObserver(self._reporter(name))
        settings = hub_settings(token=self._token, offline=self._offline)
        locator = Locator(settings=settings, observer=observer, cancel=cancel)
        if not settings.offline:
            self._num_beginning += 1
            try:
                await asyncio.get_running_loop().run_in_executor(self._threads, locator.look_up, reference)
            finally:
                self._num_beginning -= 1
            self._check_new(name)  # another request may have begun it meanwhile
        task = asyncio.create_task(self._run(name, locator, reference, when_done))
        self._running[name] = (cancel, {}, task)

    def _check_new(self, name: str) -> None:
        if self._is_closed:
            raise ServerDraining
        if name in self._running:
            raise invalid_request(f"model {name!r} is being downloaded already", "model", "model_exists")
        if len(self._running) + self._num_beginning >= MAX_DOWNLOADS:
            raise QueueFull(f"{MAX_DOWNLOADS} models are being downloaded already; try again when one has ended")

    def cancel(self, name: str) -> None:
        """End a download; the bytes that have arrived are kept for the next one."""
        self._running[name][0].set()

    async def check_removable(self, name: str, presets: Sequence[ModelPreset]) -> None:
        """Raise the errors of `remove`, and `ApiException` (400) for a model with files that a preset uses.

        presets: of all models; presets that were found in a cache are left out.
        """
        await asyncio.to_thread(_check_removable, name, [preset for preset in presets if preset.source != "cache"])

    async def remove(self, name: str) -> None:
        """Delete a model from the cache, and end its download. Raises `ModelNotFound`, and `Unsupported` for Ollama's."""
        reference = _reference(name)
        if name in self._running:
            self.cancel(name)
            await asyncio.wait((self._running[name][2],))
        await asyncio.to_thread(lambda: remove_models(hub_settings(), matching_models(hub_settings(), reference)))

    async def aclose(self) -> None:
        """End all downloads, and refuse new ones."""
        self._is_closed = True
        tasks = [task for _, _, task in self._running.values()]
        for name in tuple(self._running):
            self.cancel(name)
        if tasks:
            await asyncio.wait(tasks)
        self._threads.shutdown(wait=False)

    def _reporter(self, name: str) -> Callable[[dict[str, Any]], None]:
        loop = asyncio.get_running_loop()

        def show(progress: dict[str, Any]) -> None:
            if name in self._running:
                self._running[name][1].update(progress)
                self._feed.publish("download_progress", name, progress)

        def report(progress: dict[str, Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(show, progress)

        return report

    async def _run(
        self, name: str, locator: Locator, reference: ModelReference, when_done: Callable[[], Awaitable[None]]
    ) -> None:
        event = "download_failed"
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, locator.locate, reference)
            event = "download_finished"
        except Aborted:
            _log.info("the download of %s was ended", name)
        except PacelineError as error:
            _log.error("the download of %s failed: %s", name, error)
        except Exception:  # noqa: BLE001 - no task awaits this one: its event is what clients see
            _log.exception("the download of %s failed", name)
        finally:
            self._running.pop(name, None)
        if self._is_closed:
            return
        try:
            await when_done()
        except PacelineError as error:
            _log.error("the models could not be read again: %s", error)
        except Exception:  # noqa: BLE001 - the download's event is sent all the same
            _log.exception("the models could not be read again")
        self._feed.publish(event, name, {})


def _reference(name: str) -> ModelReference:
    return parse_reference(name) if is_reference(name) else parse_hub_reference(name)


def _check_removable(name: str, presets: Sequence[ModelPreset]) -> None:
    cached = matching_models(hub_settings(), _reference(name))
    check_removable(cached)
    files = {part.resolve() for model in cached for part in model.parts}
    for preset in presets:
        if not files.isdisjoint(path.resolve() for path in _files_of(preset)):
            message = f"model {name!r} is kept: its file is that of the preset {preset.name!r}; change the preset first"
            raise invalid_request(message, "model", "model_kept")


def _files_of(preset: ModelPreset) -> list[Path]:
    """Return the files of a preset that are on this machine: its model's and its adapters'."""
    adapters = preset.settings.engine_options.get("lora")
    files = [Path(path) for path in adapters.values()] if isinstance(adapters, Mapping) else []
    if preset.reference is None:
        return files if preset.settings.model is None else [*files, preset.settings.model]
    locator = Locator(settings=hub_settings(offline=True), observer=DownloadObserver(), cancel=threading.Event())
    with suppress(PacelineError):  # it was not downloaded yet
        files += locator.locate(preset.reference).parts
    return files
