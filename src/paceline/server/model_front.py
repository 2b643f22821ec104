"""The model of a server: an `AsyncLLM` made of its settings, which may begin to load before there is an application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.async_llm import AsyncLLM
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.engine import EngineClient


class ModelFront:
    """Loads once: who waits gets the same result or error. On the event loop. progress: 0 to 1."""

    def __init__(self, settings: ServerSettings) -> None:
        """Check the options; nothing is loaded yet. Raises `InvalidParams`."""
        self.progress = 0.0
        self._cancel = threading.Event()
        options: Mapping[str, Any] = {
            "isolation": "process",
            "progress": self._set_progress,
            "cancel": self._cancel,
            **settings.engine_options,
        }
        self._llm = AsyncLLM(settings.model, **options)
        self._loading: asyncio.Task[Any] | None = None

    def begin(self) -> None:
        """Begin to load. Idempotent."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._llm.start())

    @property
    def failure(self) -> BaseException | None:
        """The error that ended loading; None if there is none so far."""
        loading = self._loading
        return loading.exception() if loading is not None and loading.done() and not loading.cancelled() else None

    @property
    def engine(self) -> EngineClient:
        """See `Front`."""
        return self._llm.engine

    async def start(self) -> None:
        """See `Front`."""
        self.begin()
        assert self._loading is not None  # noqa: S101 - begun above
        await asyncio.shield(self._loading)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """See `Front`. A load that runs is cancelled."""
        self._cancel.set()
        if self._loading is not None:
            await asyncio.wait((self._loading,))
        await self._llm.aclose(drain=drain, timeout_s=timeout_s)

    def _set_progress(self, share: float) -> None:  # on the thread that loads
        self.progress = share
