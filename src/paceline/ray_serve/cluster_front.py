"""The models of an ingress: engines over replicas, as the server's application and its router take them. On the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.cluster.cluster_engine import ClusterEngine, ClusterSettings
from paceline.cluster.replica_calls import ReplicaCalls
from paceline.errors import EngineStopped
from paceline.model_manager import ModelEntry
from paceline.model_manager.engine_loader import PreparedModel
from paceline.ray_serve.cluster_config import ClusterModel
from paceline.server.flags import ModelPreset

MakeCalls = Callable[[], ReplicaCalls]


@dataclass(frozen=True, slots=True)
class FrontModelSource:
    """What an ingress needs to know of a model. make_calls: to its replicas; share: see `ClusterSettings`."""

    model: ClusterModel
    make_calls: MakeCalls
    share: float

    def open(self, cancel: threading.Event) -> ClusterEngine:
        """Return an engine over the replicas, once there is one. Blocking.

        Raises what loading the vocabulary raises, and `Aborted` after `cancel` was set.
        """
        source = self.model.source
        settings = ClusterSettings(share=self.share, cancel=cancel)
        return ClusterEngine(_texts(source.files(cancel)), source.options, self.make_calls, settings)


def _texts(paths: Any) -> list[str]:
    if paths is None:
        from paceline.demo import demo_model_path

        paths = demo_model_path()
    one = isinstance(paths, (str, Path))
    return [str(paths)] if one else [str(each) for each in paths]


class ClusterFront:
    """The `Front` of a server with one model."""

    progress = 0.0

    def __init__(self, source: FrontModelSource) -> None:
        self._source, self._cancel = source, threading.Event()
        self._starting: asyncio.Task[ClusterEngine] | None = None
        self._engine: ClusterEngine | None = None

    @property
    def engine(self) -> ClusterEngine:
        """See `Front`."""
        assert self._engine is not None  # noqa: S101 - the service has started it
        return self._engine

    async def start(self) -> None:
        """See `Front`."""
        if self._starting is None:
            self._starting = asyncio.create_task(asyncio.to_thread(self._source.open, self._cancel))
        self._engine = await asyncio.shield(self._starting)
        self.progress = 1.0

    async def aclose(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """See `Front`."""
        self._cancel.set()
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if self._engine is not None:
            await asyncio.to_thread(partial(self._engine.close, drain=drain, timeout_s=timeout_s))


@dataclass(frozen=True, slots=True)
class EngineHolder:
    """What the router calls a model that is loaded, as an `AsyncLLM` is one."""

    engine: ClusterEngine


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A `RunningModel`: it has no process here, and takes no memory that counts."""

    llm: Any
    is_asleep = False
    taken_bytes = None
    worker_pid = None

    @property
    def ended(self) -> Future[EngineStopped | None]:
        """See `RunningModel`."""
        found: Future[EngineStopped | None] = self.llm.engine.ended
        return found

    def wake(self) -> None:
        """Do nothing: replicas do not sleep."""

    async def aclose(self) -> None:
        """See `RunningModel`."""
        await asyncio.to_thread(self.llm.engine.close)


class ClusterLoader:
    """A `ModelLoader` of engines over replicas, which run already. sources: by the models' names."""

    def __init__(self, sources: Mapping[str, FrontModelSource]) -> None:
        self._sources = sources

    def check(self, entry: ModelEntry) -> None:
        """Do nothing: the file of the cluster was checked."""

    async def prepare(
        self,
        entry: ModelEntry,
        cancel: threading.Event,  # noqa: ARG002 - nothing is downloaded here
        *,
        budget: int | None,  # noqa: ARG002
    ) -> PreparedModel:
        """See `ModelLoader`."""
        return PreparedModel(entry=entry, needed_bytes=None)

    async def load(
        self,
        prepared: PreparedModel,
        progress: Callable[[float], None],
        cancel: threading.Event,
    ) -> Any:
        """See `ModelLoader`."""
        engine = await asyncio.to_thread(self._sources[prepared.entry.name].open, cancel)
        progress(1.0)
        return RunningCluster(EngineHolder(engine))


class ClusterPresets:
    """The models of a cluster, as the router reads presets: always the same."""

    offline = True
    hf_token = None

    def __init__(self, models: tuple[ClusterModel, ...]) -> None:
        self._models = models

    def sets(self, target: str) -> bool:  # noqa: ARG002 - no flag is stronger than the file
        """See `ModelPresets`."""
        return False

    def read(self, preset_file: Path | None, folder: Path | None) -> list[ModelPreset]:  # noqa: ARG002
        """See `ModelPresets`."""
        return [
            ModelPreset(
                name=one.name,
                settings=one.settings,
                source="preset",
                text=f"[{one.name}]\n\n",
                load_on_startup=True,
            )
            for one in self._models
        ]
