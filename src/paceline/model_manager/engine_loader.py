"""How a manager loads: finds the file, plans its memory, and opens an `AsyncLLM` or an `LLM` with a process of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from paceline import validation
from paceline.async_llm import AsyncLLM
from paceline.engine.in_process_engine import check_options, check_source, local_files, local_options
from paceline.engine.memory_needs import estimate_on_machine
from paceline.engine.spare_workers import SPARE_WORKERS
from paceline.errors import InvalidParams, NotEnoughMemory, PacelineError
from paceline.llm import LLM
from paceline.model_manager.model_settings import ModelEntry

if TYPE_CHECKING:
    from paceline.engine import EngineClient
    from paceline.errors import EngineStopped

T_co = TypeVar("T_co", covariant=True)

_PROCESS_BYTES: Final = 128 << 20  # of Python and the libraries, and of the vocabulary in both processes
_CACHE_SHARE: Final = 8  # of a budget, the part that the cells of one sequence may take if n_ctx is left open
_HOST_SHARE: Final = 8  # of a model's memory, the part that its idle prefixes may take under a budget
_SPARE_DELAY_S: Final = 2.0  # after a load: the first requests of the model come first
_OF_THE_FRONT: Final = ("chat_template", "offline", "hf_token")


class RunningModel(Generic[T_co]):
    """A model that runs: an object for users, and its engine. close: ends both; requests end with SHUTDOWN."""

    def __init__(self, llm: T_co, engine: EngineClient, close: Callable[[], Awaitable[None]]) -> None:
        self._llm, self._engine, self._close = llm, engine, close

    @property
    def llm(self) -> T_co:
        """The object that users get."""
        return self._llm

    @property
    def is_asleep(self) -> bool:
        """Whether its worker was ended because it was idle."""
        return self._engine.heartbeat().state == "sleeping"

    @property
    def taken_bytes(self) -> int | None:
        """The memory of its worker; None if that is not known. Pages of a mapped file count if they are in memory."""
        pid = self.worker_pid
        return None if pid is None else resident_bytes(pid)

    @property
    def worker_pid(self) -> int | None:
        """The process id of its worker; None without a worker."""
        return self._engine.heartbeat().worker_pid

    @property
    def ended(self) -> Future[EngineStopped | None]:
        """Done when the engine has ended, with the reason if it gave up by itself."""
        return self._engine.ended

    def wake(self) -> None:
        """Start its worker again if it sleeps, and count as use of it."""
        self._engine.wake()

    async def aclose(self) -> None:
        """End it."""
        await self._close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """An entry with its file on this machine.

    Attributes:
        entry: The entry.
        needed_bytes: The memory that it needs; None if it was not planned.
        model: The file or files to load.
        options: The options to load it with.
    """

    entry: ModelEntry
    needed_bytes: int | None
    model: str | os.PathLike[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class ModelLoader(Protocol[T_co]):
    """Loads the models of a manager. On the event loop, which it does not block."""

    def check(self, entry: ModelEntry) -> None:
        """Raise the error of an entry that is wrong, as far as that is known before it is loaded."""

    async def prepare(self, entry: ModelEntry, cancel: threading.Event, *, budget: int | None) -> PreparedModel:
        """Find or download the file and plan its memory. Raises as a load, and `Aborted` after `cancel` was set.

        Raises `NotEnoughMemory` if the machine has too little even without other models; then no model is evicted.

        Args:
            entry: The model.
            cancel: Ends it when set.
            budget: Bytes that all models may take together, so that the memory of this model must be planned; None: no limit.
        """

    async def load(
        self, prepared: PreparedModel, progress: Callable[[float], None], cancel: threading.Event
    ) -> RunningModel[T_co]:
        """Load. progress: called with 0 to 1, on any thread. Raises `Aborted` after `cancel` was set."""


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if /proc does not have it."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def engine_options(entry: ModelEntry) -> dict[str, Any]:
    """Return the options of a model's engine."""
    options = {name: value for name, value in entry.options.items() if name not in _OF_THE_FRONT}
    return {"isolation": "process", **options}


def source_options(entry: ModelEntry) -> dict[str, Any]:
    """Return the options of the download of a model."""
    return {"offline": entry.options.get("offline", False), "hf_token": entry.options.get("hf_token")}


def find_model(entry: ModelEntry, cancel: threading.Event | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the file or files of a model, and its engine's options with the files that they name, downloaded if necessary.

    Blocks. Raises as `LLM`, and `Aborted` after `cancel` was set.
    """
    source, given = source_options(entry), {**engine_options(entry), "cancel": cancel}
    files = local_files(entry.model, given, **source)
    options = local_options(given, **source)
    del options["cancel"]
    return files, options


class EngineLoader:
    """The base of both loaders. Under a budget it plans the memory, and bounds the host cache."""

    def __init__(self) -> None:
        self._prepared: dict[str, tuple[object, PreparedModel]] = {}

    def check(self, entry: ModelEntry) -> None:
        """Raise the error of an entry that is wrong."""
        try:
            check_options(None if entry.model is None else entry.model, engine_options(entry))
            check_source(entry.model, **source_options(entry))
            if (template := entry.options.get("chat_template")) is not None:
                validation.text("chat_template", template)
        except InvalidParams as error:
            raise type(error)(f"model {entry.name!r}: {error}") from error

    async def prepare(self, entry: ModelEntry, cancel: threading.Event, *, budget: int | None) -> PreparedModel:
        """Find the file and plan the memory. The result is used again while entry, file and budget stay the same."""
        return await asyncio.to_thread(self._prepare, entry, cancel, budget)

    def _prepare(self, entry: ModelEntry, cancel: threading.Event, budget: int | None) -> PreparedModel:
        stamp, known = self._prepared.get(entry.name, (None, None))
        if known is not None and known.entry == entry and stamp == (budget, _stamp(known.model)):
            return known
        files, options = find_model(entry, cancel)
        if budget is not None:
            options.setdefault("fit_cache_bytes", budget // _CACHE_SHARE)
        needed = None
        try:
            needed = estimate_on_machine(files, options, dry_run=budget is not None).total_bytes
        except PacelineError as error:  # without a budget, the load raises any other error
            if budget is not None or isinstance(error, NotEnoughMemory):
                raise
        if needed is not None and budget is not None:
            host = options.setdefault("host_cache_bytes", needed // _HOST_SHARE)
            needed += (host if options.get("cache_prompt", True) else 0) + _PROCESS_BYTES
        if (template := entry.options.get("chat_template")) is not None:
            options["chat_template"] = template
        prepared = PreparedModel(entry=entry, needed_bytes=needed, model=files, options=options)
        self._prepared[entry.name] = ((budget, _stamp(files)), prepared)
        return prepared


class AsyncLLMLoader(EngineLoader):
    """Loads `AsyncLLM`s.

    Args:
        keeps_spare: Whether a spare worker waits for the next load, after a model with a worker was loaded. The thread of
            the event loop starts it, and should last as long as the process: on Linux the worker ends with the thread.
    """

    def __init__(self, *, keeps_spare: bool = False) -> None:
        super().__init__()
        self._keeps_spare = keeps_spare

    async def load(
        self, prepared: PreparedModel, progress: Callable[[float], None], cancel: threading.Event
    ) -> RunningModel[AsyncLLM]:
        """Open an `AsyncLLM`."""
        llm = AsyncLLM(prepared.model, **{**prepared.options, "progress": progress, "cancel": cancel})
        try:
            await llm.start()
        finally:
            if self._keeps_spare and prepared.options.get("isolation") == "process":
                asyncio.get_running_loop().call_later(_SPARE_DELAY_S, SPARE_WORKERS.launch)
        return RunningModel(llm, llm.engine, llm.aclose)


class LLMLoader(EngineLoader):
    """Loads `LLM`s."""

    async def load(
        self, prepared: PreparedModel, progress: Callable[[float], None], cancel: threading.Event
    ) -> RunningModel[LLM]:
        """Open an `LLM`."""
        options = {**prepared.options, "progress": progress, "cancel": cancel}
        llm = await asyncio.to_thread(partial(LLM, prepared.model, **options))
        return RunningModel(llm, llm.engine, partial(asyncio.to_thread, llm.close))


def _stamp(model: object) -> object:
    """Return a value that changes when the file does."""
    if model is None:
        return ()
    try:
        found = Path(str(model)).stat()
    except OSError:
        return object()  # equal to none
    return (found.st_mtime_ns, found.st_size, found.st_ino)
