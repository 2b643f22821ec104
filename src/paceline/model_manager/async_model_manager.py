"""The manager for event loops: `AsyncModelManager`, which loads `AsyncLLM`s by name."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

from paceline.async_llm import AsyncLLM
from paceline.errors import EngineStopped
from paceline.model_manager.engine_loader import AsyncLLMLoader, ModelLoader
from paceline.model_manager.model_entry import ModelEntry
from paceline.model_manager.model_pool import ModelPool
from paceline.model_manager.model_status import ModelStatus
from paceline.model_manager.models_file import ManagerSettings, changed_settings, manager_settings
from paceline.model_manager.status_feed import StatusReader


class AsyncModelManager:
    """Several models by name in one event loop: `ModelManager`, with awaitable methods.

    Unless stated otherwise, a method has the arguments, result and errors of the one of `ModelManager` that it names.

        async with AsyncModelManager("models.toml") as models:
            async with models.use("small") as llm:
                print((await llm.generate("Once upon a time", max_tokens=40)).text)
    """

    def __init__(
        self,
        models: str | os.PathLike[str] | Iterable[ModelEntry] | ManagerSettings = (),
        *,
        memory_budget: int | str | None = None,
        max_loaded: int | None = None,
        wait_timeout_s: float | None = None,
        patience_s: float | None = None,
        loader: ModelLoader[AsyncLLM] | None = None,
    ) -> None:
        """Read the models; nothing is loaded yet.

        Args:
            models: Entries, or the path of a TOML file with them and with the options, or what `read_models_file` returned.
            memory_budget: See `ModelManager`.
            max_loaded: See `ModelManager`.
            wait_timeout_s: See `ModelManager`.
            patience_s: See `ModelManager`.
            loader: Loads in place of `AsyncLLM`, for tests of code that holds a manager.

        Raises:
            InvalidParams: An option is invalid; of a file, the message names table and key.
        """
        self._given = {
            "memory_budget": memory_budget,
            "max_loaded": max_loaded,
            "wait_timeout_s": wait_timeout_s,
            "patience_s": patience_s,
        }
        settings = manager_settings(models, **self._given)
        self._pool: ModelPool[AsyncLLM] = ModelPool(AsyncLLMLoader() if loader is None else loader, settings)

    async def start(self) -> Self:
        """Begin to load the models with load_on_startup, without waiting for them.

        Returns:
            This object.
        """
        await self._pool.start()
        return self

    @property
    def settings(self) -> ManagerSettings:
        """The options that hold, and the entries of all models."""
        return self._pool.settings

    def names(self) -> list[str]:
        """Return the names of all models, without aliases."""
        return self._pool.names()

    def entry(self, name: str) -> ModelEntry:
        """Return the entry of a model, as `ModelManager.entry` does."""
        return self._pool.entry(name)

    def status(self, name: str) -> ModelStatus:
        """Return the status of a model, as `ModelManager.status` does."""
        return self._pool.status(name)

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every model."""
        return self._pool.statuses()

    def use(
        self, name: str, *, load: bool = True, timeout_s: float | None = None
    ) -> AbstractAsyncContextManager[AsyncLLM]:
        """Use a model, as `ModelManager.use` does: an async context manager with its `AsyncLLM`."""
        return self._use(name, load=load, timeout_s=timeout_s)

    @asynccontextmanager
    async def _use(self, name: str, *, load: bool, timeout_s: float | None) -> AsyncIterator[AsyncLLM]:
        run = await self._pool.acquire(name, load=load, timeout_s=timeout_s)
        try:
            yield run.loaded.llm
        except EngineStopped as error:
            if run.revoked is None:
                raise
            raise run.why_revoked() from error
        finally:
            self._pool.release(run)

    async def load(self, name: str, *, timeout_s: float | None = None) -> None:
        """Load a model, as `ModelManager.load` does."""
        await self._pool.load(name, timeout_s)

    async def unload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model, as `ModelManager.unload` does."""
        await self._pool.unload(name, timeout_s)

    async def reload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model and load it again, as `ModelManager.reload` does."""
        await self._pool.unload(name, timeout_s)
        await self._pool.load(name, None)

    def add(self, entry: ModelEntry) -> None:
        """Add a model, as `ModelManager.add` does."""
        self._pool.add(entry)

    async def remove(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model and forget it, as `ModelManager.remove` does."""
        await self._pool.remove(name, timeout_s)

    async def update(self, models: str | os.PathLike[str] | Iterable[ModelEntry] | ManagerSettings) -> None:
        """Replace the models, as `ModelManager.update` does; they are replaced before it first waits."""
        await self._pool.update(changed_settings(models, self._given))

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[StatusReader]:
        """Follow the models: a context manager with an async iterator of `ModelStatus`.

        An event comes whenever the state, the progress or the users of a model change. A reader that is slow gets the newest
        of several events of one state. The iteration ends when the manager is closed.

            async with models.subscribe() as events:
                async for status in events:
                    print(status.name, status.state, status.progress)
        """
        reader = self._pool.feed.subscribe()
        try:
            yield reader
        finally:
            self._pool.feed.unsubscribe(reader)

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Unload everything, as `ModelManager.close` does, without blocking the loop."""
        await self._pool.aclose(drain=drain, timeout_s=timeout_s)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
