"""The engine of a server with one model, which may begin to load before there is an application."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.async_llm import AsyncLLM
from paceline.server.settings import ServerSettings

if TYPE_CHECKING:
    from paceline.engine import EngineClient


class ModelFront:
    """Loads once: all callers that wait get the same result or error. On the event loop. Raises `InvalidParams`.

    open_engine: in place of an `AsyncLLM` of the settings. Blocks; raises `Aborted` after the event was set.
    progress: the share of the model that is loaded, 0 to 1.
    """

    def __init__(
        self, settings: ServerSettings, open_engine: Callable[[threading.Event], EngineClient] | None = None
    ) -> None:
        self.progress, self._cancel = 0.0, threading.Event()
        self._loading: asyncio.Task[EngineClient] | None = None
        self._open: Callable[[], Coroutine[Any, Any, EngineClient]]
        if open_engine is not None:
            self._open = partial(asyncio.to_thread, open_engine, self._cancel)
            return
        options: Any = {"isolation": "process", "progress": partial(setattr, self, "progress"), "cancel": self._cancel}
        llm = AsyncLLM(settings.model, **{**options, **settings.engine_options})

        async def load() -> EngineClient:
            return (await llm.start()).engine

        self._open = load

    def begin(self) -> None:
        """Begin to load. Idempotent."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._open())

    @property
    def failure(self) -> BaseException | None:
        """The error that ended loading; None if there is none so far."""
        loading = self._loading
        return loading.exception() if loading is not None and loading.done() and not loading.cancelled() else None

    @property
    def engine(self) -> EngineClient:
        """The engine, once loaded."""
        assert self._loading is not None  # noqa: S101 - `start` has returned
        return self._loading.result()

    async def start(self) -> None:
        """Load the model, unless that has begun, and wait for it. Raises the errors of loading."""
        self.begin()
        assert self._loading is not None  # noqa: S101 - begun above
        await asyncio.shield(self._loading)

    async def aclose(self) -> None:
        """End the engine, or the load."""
        self._cancel.set()
        if self._loading is not None:
            await asyncio.wait((self._loading,))
            if not self._loading.cancelled() and self._loading.exception() is None:
                await asyncio.to_thread(self._loading.result().close)
