"""The blocking manager, `ModelManager`, which loads `LLM`s by name: a `ModelPool` on the event loop of a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline.errors import EngineStopped
from paceline.llm import LLM
from paceline.model_manager.engine_loader import LLMLoader, ModelLoader
from paceline.model_manager.managed_model import ModelRun, ModelStatus
from paceline.model_manager.model_pool import ModelPool
from paceline.model_manager.model_settings import (
    ManagerSettings,
    ModelEntry,
    Models,
    changed_settings,
)

R = TypeVar("R")


class ModelManager:
    """Several models by name, each with an engine process of its own, that share the machine.

    A model is loaded when it is first used. If there is no room for it, idle models are unloaded, the least recently used
    first. If all models are in use, it waits in line; after `patience_s` the others take no new users until it has its room.
    The death of a model's process does not affect the other models.

    Any thread may call its methods. `close()`, the end of a `with` block or the garbage collector unloads everything.

        with ModelManager([ModelEntry(name="small", model="small.gguf"), ModelEntry(name="large", model="large.gguf")],
                          memory_budget="12 GiB") as models:
            with models.use("small") as llm:
                print(llm.generate("Once upon a time", max_tokens=40).text)
    """

    def __init__(
        self,
        models: Models = (),
        *,
        memory_budget: int | str | None = None,
        max_loaded: int | None = None,
        wait_timeout_s: float | None = None,
        patience_s: float | None = None,
        loader: ModelLoader[LLM] | None = None,
    ) -> None:
        """Read the models, and begin to load the models with load_on_startup.

        An option that is None is that of the file, or the default.

        Args:
            models: Entries, or the path of a TOML file with entries and options, or a result of `read_models_file`.
            memory_budget: The memory that the loaded models may take together, of all devices: bytes, or a text such as
                "12 GiB". A model counts with llama.cpp's plan for it, its host cache and its process; a sleeping model with
                nothing. None: the machine is the only limit.
            max_loaded: Models that may be loaded at once, 4 by default; 0: no limit.
            wait_timeout_s: Seconds that a user waits for room, then `ModelsBusy` is raised. None: no limit.
            patience_s: Seconds, 5 by default, that a model waits for room before models in use take no new users.
            loader: Loads in place of `LLM`, for tests of code that holds a manager.

        Raises:
            InvalidParams: An option is invalid; of a file, the message names table and key.
        """
        self._pool = ModelPool[LLM](
            LLMLoader() if loader is None else loader,
            models,
            memory_budget=memory_budget,
            max_loaded=max_loaded,
            wait_timeout_s=wait_timeout_s,
            patience_s=patience_s,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop,), name="paceline-model-manager", daemon=True
        )
        self._closing = threading.Lock()
        self._thread.start()
        weakref.finalize(self, _abandon, self._loop, self._pool).atexit = False
        self._run(self._pool.start())

    @property
    def settings(self) -> ManagerSettings:
        """The present options, with the entries of all models."""
        return self._ask(lambda: self._pool.settings)

    def names(self) -> list[str]:
        """Return the names of all models, without aliases."""
        return self._ask(self._pool.names)

    def entry(self, name: str) -> ModelEntry:
        """Return the entry of a model.

        Args:
            name: The name of a model, or an alias.

        Returns:
            The entry.

        Raises:
            ModelNotFound: There is none of that name; the message has the nearest names.
        """
        return self._ask(lambda: self._pool.entry(name))

    def status(self, name: str) -> ModelStatus:
        """Return the status of a model.

        Args:
            name: The name of a model, or an alias.

        Returns:
            Its state, users, memory and error.

        Raises:
            ModelNotFound: There is none of that name.
        """
        return self._ask(lambda: self._pool.status(name))

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every model."""
        return self._ask(self._pool.statuses)

    @contextmanager
    def use(self, name: str, *, load: bool = True, timeout_s: float | None = None) -> Iterator[LLM]:
        """Use a model: a context manager with its `LLM`, which stays loaded until the block ends.

        Args:
            name: The name of a model, or an alias.
            load: Whether to load it if it is not loaded.
            timeout_s: Seconds to wait for room; None: `wait_timeout_s`. A load that has begun is not cut short.

        Yields:
            The model. Entering the block raises:

        Raises:
            ModelNotFound: There is none of that name; the message has the nearest names.
            ModelNotLoaded: It is not loaded, and load is False.
            ModelsBusy: There was no room for so long.
            NotEnoughMemory: It can never fit, or does not fit into the machine.
            ModelUnloaded: It was unloaded during the wait, or, from inside the block, while it was in use.
            EngineStopped: The manager was closed.
            PacelineError: The error of `LLM`, if a load fails. The next use tries again.
        """
        user = _User(self._pool)
        try:
            run = self._run(user.enter(name, load=load, timeout_s=timeout_s))
            with run.errors_of_a_user():
                yield run.loaded.llm
        finally:
            with suppress(RuntimeError):  # the manager was closed meanwhile
                self._loop.call_soon_threadsafe(user.leave)

    def load(self, name: str, *, timeout_s: float | None = None) -> None:
        """Load a model, if it is not loaded, and wait for it.

        Args:
            name: The name of a model, or an alias.
            timeout_s: As in `use`.

        Raises:
            PacelineError: As entering `use`.
        """
        self._run(self._pool.load(name, timeout_s=timeout_s))

    def unload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model, or cancel its load, and wait until its memory is free.

        New users wait, and load it again afterwards. Requests that still run after the time-out end with the finish reason
        SHUTDOWN; calls from their blocks then raise `ModelUnloaded`.

        Args:
            name: The name of a model, or an alias.
            timeout_s: Seconds for its users to leave; None: the entry's stop_timeout_s.

        Raises:
            ModelNotFound: There is none of that name.
        """
        self._run(self._pool.unload(name, timeout_s=timeout_s))

    def reload(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model and load it again, for instance after its file was replaced.

        Args:
            name: The name of a model, or an alias.
            timeout_s: As in `unload`.

        Raises:
            PacelineError: As `unload` and `load`.
        """
        self.unload(name, timeout_s=timeout_s)
        self.load(name)

    def add(self, entry: ModelEntry) -> None:
        """Add a model.

        Args:
            entry: The model.

        Raises:
            InvalidParams: Its name or an alias is taken, or an option is wrong.
        """
        self._ask(lambda: self._pool.add(entry))

    def remove(self, name: str, *, timeout_s: float | None = None) -> None:
        """Unload a model and forget it. Its waiting users get `ModelNotFound`.

        Args:
            name: The name of a model, or an alias.
            timeout_s: As in `unload`.

        Raises:
            ModelNotFound: There is none of that name.
        """
        self._run(self._pool.remove(name, timeout_s=timeout_s))

    def update(self, models: Models) -> None:
        """Replace the models: add new ones, remove missing ones, unload changed ones. Models that are the same stay loaded.

        The new names hold at once. Users of a changed model have its stop_timeout_s to leave; users that wait for it get the
        new model. New and changed models with load_on_startup begin to load. Returns when the removed and changed models have
        been unloaded.

        Args:
            models: The entries of all models, which leave the limits as they are. The path of a TOML file, or
                `ManagerSettings`, replace the limits as well: idle models beyond lower limits are unloaded at once, others
                when their users have left. Options that the manager was made with override the file's, as when it was
                made; `ManagerSettings` hold as they are.

        Raises:
            InvalidParams: The file cannot be read, a name is taken twice, or an option is wrong; then nothing was changed.
        """
        self._run(self._pool.update(changed_settings(models, self._pool.options)))

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Unload everything. Idempotent. Requests end with the finish reason SHUTDOWN, loads and waits with `EngineStopped`.

        Args:
            drain: Whether requests that run may end first.
            timeout_s: How long they may take, in seconds; None: no limit.
        """
        with self._closing:
            if self._loop.is_closed():
                return
            self._run(self._pool.aclose(drain=drain, timeout_s=timeout_s))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, question: Callable[[], R]) -> R:
        async def ask() -> R:
            return question()

        return self._run(ask())

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run on the manager's loop, and wait for it. Leaving the wait cancels it."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise EngineStopped("the model manager was closed") from None
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


class _User:
    """A block of `use`, on the manager's loop. Its thread may be interrupted at any moment, also when it just got the model."""

    def __init__(self, pool: ModelPool[LLM]) -> None:
        self._pool = pool
        self._run: ModelRun[LLM] | None = None
        self._has_left = False

    async def enter(self, name: str, *, load: bool, timeout_s: float | None) -> ModelRun[LLM]:
        run = await self._pool.acquire(name, load=load, timeout_s=timeout_s)
        if self._has_left:
            self._pool.release(run)
        else:
            self._run = run
        return run

    def leave(self) -> None:
        self._has_left = True
        if self._run is not None:
            self._pool.release(self._run)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _abandon(loop: asyncio.AbstractEventLoop, pool: ModelPool[LLM]) -> None:
    """Unload everything, and end the thread, without waiting for either."""

    async def end() -> None:
        await pool.aclose()
        loop.stop()

    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: loop.create_task(end()))
