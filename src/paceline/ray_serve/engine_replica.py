"""A replica of a model: a Serve deployment around an engine with a worker process of its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

import msgspec
from ray import serve

from paceline.cluster.replica_service import ReplicaService
from paceline.engine.worker import messages
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.ray_serve.model_source import ModelSource
from paceline.ray_serve.ray_metrics import RayMetrics
from paceline.ray_serve.request_router import STATS_KEY
from paceline.ray_serve.routed_prompt import RoutedPrompt


class EngineReplica(ReplicaService):
    """The deployment's class: Serve calls the methods of `ReplicaService`, some of them by what they are called here."""

    async def __init__(self, source: ModelSource, *, max_digest_bytes: int) -> None:  # type: ignore[misc]  # Serve awaits it
        """Find or download the model, and start the engine. Raises what that raises, and Serve tries again."""
        name = serve.get_replica_context().replica_id.unique_id
        engine = await asyncio.to_thread(_start, source, name)
        super().__init__(engine, name, max_digest_bytes=max_digest_bytes)
        self._metrics = RayMetrics()

    async def describe(self) -> bytes:
        """See `ReplicaService`; with where this replica runs."""
        ready = self._engine.describe()
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        return messages.encode(msgspec.structs.replace(ready, facts={**ready.facts, **place}))

    async def ping(self, routed: RoutedPrompt) -> str:
        """Return the id of this replica."""
        del routed
        return self._replica_id

    async def submit(  # type: ignore[override]
        self, routed: RoutedPrompt, front: str, request: bytes, adapters: dict[str, str]
    ) -> tuple[str, int]:
        """See `ReplicaService`. routed: was for the request router."""
        del routed
        return await super().submit(front, request, adapters)

    async def record_routing_stats(self) -> Mapping[str, bytes]:
        """Return the report for request routers, and pass the metrics on to Ray at the same time."""
        self._metrics.update(await asyncio.to_thread(self._engine.stats))
        return {STATS_KEY: msgspec.msgpack.encode(await self.routing_stats())}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `LatencyPolicy` decides by."""
        return await self.scaling_stats()

    async def __del__(self) -> None:
        """End the engine, when Serve stops the replica and nothing is open any more."""
        if hasattr(self, "_engine"):
            await self.aclose()


def _start(source: ModelSource, name: str) -> WorkerEngine:
    paths, options = source.found(trace_name=name)
    return WorkerEngine(paths, options)
