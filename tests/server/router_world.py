"""A server with several models over fake engines, which tests hold up; and its client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.server.running import RunningServer
from tests.server.stand_in import StandInEngine
from tests.unit.server.flags.world import FakeFiles

from paceline.errors import EngineStopped, ModelLoadError
from paceline.model_manager import ModelEntry, PreparedModel
from paceline.server.flags import ModelPresets, resolve
from paceline.server.router.router_app import build_router_app

PRESETS = "[small]\nmodel = small.gguf\nalias = s\n[large]\nmodel = large.gguf\n[other]\nmodel = other.gguf\n"


FACTS: dict[str, Any] = {
    "size_bytes": 100,
    "n_params": 10,
    "n_vocab": 260,
    "n_embd": 4,
    "n_ctx_train": 1000,
    "ftype": "F32",
    "has_decoder": True,
    "pooling_type": "none",
    "modalities": frozenset({"text"}),
}


def described(engine: StandInEngine, name: str) -> StandInEngine:
    """Give a fake's model the facts that responses have."""
    for fact, value in FACTS.items():
        setattr(engine.model, fact, value)
    engine.model.fingerprint, engine.model.tokenizer = name.encode(), engine.tokenizer
    engine.tokenizer.eog_ids, engine.tokenizer.vocab_type = (), "bpe"
    return engine


class FakeModel:
    """In the place of an `AsyncLLM`."""

    def __init__(self, engine: StandInEngine) -> None:
        self.engine = engine


class FakeLoaded:
    """A loaded model of the manager's."""

    taken_bytes, worker_pid = 100, None

    def __init__(self, engine: StandInEngine) -> None:
        self.llm, self.engine = FakeModel(engine), engine
        self.ended: Future[EngineStopped | None] = Future()
        self.is_asleep = False

    def wake(self) -> None:
        """Count as use."""
        self.is_asleep = False

    async def aclose(self) -> None:
        await asyncio.to_thread(self.engine.close)


class FakeLoader:
    """Loads fake engines. gate: set while loads may end; failures: why models fail; loads: names, in order."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failures: dict[str, Exception] = {}
        self.loads: list[str] = []
        self.engines: dict[str, StandInEngine] = {}

    def check(self, entry: ModelEntry) -> None:
        """Accept all."""

    async def prepare(self, entry: ModelEntry, cancel: threading.Event, *, budget: int | None) -> PreparedModel:
        return PreparedModel(entry=entry, needed_bytes=100)

    async def load(self, prepared: PreparedModel, progress: Callable[[float], None], cancel: threading.Event) -> Any:
        name = prepared.entry.name
        self.loads.append(name)
        progress(0.5)
        while not self.gate.is_set() and not cancel.is_set():
            await asyncio.sleep(0.005)
        if name in self.failures:
            raise self.failures[name]
        self.engines[name] = described(StandInEngine(), name)
        return FakeLoaded(self.engines[name])


class RouterWorld:
    """A router over a loader that loads nothing, and its client."""

    def __init__(
        self,
        *argv: str,
        presets: str = PRESETS,
        file: str = "p.ini",
        env: Mapping[str, str] | None = None,
        keys: str = "",
    ) -> None:
        """file: the path of the presets, which if it is TOML is read from the disk. keys: the text of the file "keys"."""
        self.files = FakeFiles({file: presets, "keys": keys})
        found = resolve(["--models-preset", file, *argv], env or {}, self.files)
        self.loader = FakeLoader()
        self.server = RunningServer(
            found.settings,
            wait=False,
            build=lambda settings, _: build_router_app(settings, ModelPresets(found, self.files), self.loader),
        )
        self.client = self.server.client()

    def fail(self, name: str) -> None:
        """Let loads of a model fail."""
        self.loader.failures[name] = ModelLoadError(f"the file {Path('/secret') / name}.gguf is damaged")

    def state(self, name: str) -> str:
        """The state of a model, as the manager has it."""
        found = self.client.get(f"/v1/models/{name}").json()["status"]["state"]
        return str(found)

    def until(self, name: str, state: str) -> None:
        """Wait until a model has a state."""
        service: Any = self.server.app.state.service
        self.server.until(lambda: service.models.manager.status(name).state == state)

    def users(self, name: str, count: int) -> None:
        """Wait until a model has so many users, or so many wait for it."""
        service: Any = self.server.app.state.service
        status = service.models.manager.status
        self.server.until(lambda: status(name).num_users + status(name).num_waiting == count)

    def settle(self) -> None:
        """Wait until no model is in use, loads or is unloaded."""
        service: Any = self.server.app.state.service

        def is_settled() -> bool:
            found = [service.models.manager.status(name) for name in ("small", "large", "other")]
            return all(status.state in ("loaded", "unloaded", "failed") and not status.num_users for status in found)

        self.server.until(is_settled)

    def close(self) -> None:
        self.loader.gate.set()
        for engine in self.loader.engines.values():
            engine.backend.gate.set()
        self.client.close()
        self.server.close()
