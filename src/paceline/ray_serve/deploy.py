"""The deployments on Ray Serve: start them from the file of a cluster and keep them until a signal.

Each model is a deployment of `EngineReplica`s. `Ingress` is the deployment in front of them, with the application of `paceline
serve`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Counter, Gauge

from paceline import validation
from paceline.cluster.replica_service import ReplicaService
from paceline.engine.worker import messages
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.model_manager import ModelEntry
from paceline.model_manager.engine_loader import find_model
from paceline.observability import metric_table
from paceline.observability.metric_table import Histogram, MetricsSnapshot
from paceline.ray_serve.cluster_app import cluster_app
from paceline.ray_serve.cluster_config import (
    ClusterConfig,
    ClusterModel,
    ClusterOptions,
    parse_cluster_config,
    read_cluster_config,
)
from paceline.ray_serve.ray_calls import RayCalls, RoutedPrompt
from paceline.ray_serve.request_router import STATS_KEY

MANY_REQUESTS: Final = 100_000
"""No limit in practice: ingresses bound the queues, and a call to a replica is no request."""

_OBJECT_STORE_BYTES: Final = 100 << 20  # of a local Ray: no object here is large
_HEALTH: Final = {"health_check_period_s": 2.0, "health_check_timeout_s": 20.0}
_HELP: Final = {metric.name: metric.help for metric in metric_table.METRICS}


def serve_until(
    stop: threading.Event, path: Path, data: bytes, config: ClusterConfig, ready: Callable[[], None]
) -> None:
    """Deploy, call `ready`, wait for `stop`, and remove the deployments if Ray was started here. Raises as Serve does."""
    options = config.options
    if not ray.is_initialized():
        if options.address is not None:
            ray.init(address=options.address)
        else:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES)
    serve.start(proxy_location="EveryNode", http_options={"host": options.host, "port": options.port})
    serve.run(application(path, data, config), name=options.app, route_prefix=options.route_prefix)
    ready()
    try:
        stop.wait()
    finally:
        if options.address is None:
            serve.shutdown()
            ray.shutdown()


def build(args: dict[str, str]) -> serve.Application:
    """Return the application for Serve's own configuration files: import path `paceline.ray_serve.deploy:build`.

    Args:
        args: "config" is the path of the cluster's file on the machine that builds the application; "revision" is any text.
            Serve builds the application again when args change, not when the file does. Host, port, name and route prefix
            are in Serve's file.

    Raises:
        InvalidParams: args has another key, or the file is wrong.
    """
    validation.reject_unknown(args, ("config", "revision"))
    path = validation.path("config", args.get("config"))
    config = read_cluster_config(path)
    return application(path, validation.read_file(path, validation.MAX_CONFIG_BYTES), config)


def application(path: Path, data: bytes, config: ClusterConfig) -> serve.Application:
    """Return the application: a deployment for each model, and the ingress."""
    models = {model.name: _replicas(model, config.options) for model in config.models}
    ingress = serve.deployment(IngressDeployment).options(
        name="ingress",
        num_replicas=config.options.ingresses,
        max_ongoing_requests=MANY_REQUESTS,
        ray_actor_options={"num_cpus": config.options.ingress_cpus},
        graceful_shutdown_timeout_s=config.server.drain_s,
        **_HEALTH,
    )
    return ingress.bind(str(path.absolute()), data, models)


def _replicas(model: ClusterModel, options: ClusterOptions) -> serve.Application:
    wanted = model.replicas
    actor: dict[str, Any] = {"num_cpus": wanted.num_cpus, "num_gpus": wanted.num_gpus}
    if wanted.memory is not None:
        actor["memory"] = wanted.memory
    if wanted.resources:
        actor["resources"] = dict(wanted.resources)
    scaling: dict[str, Any] = {"num_replicas": wanted.min}
    if wanted.max > wanted.min:
        policy = AutoscalingPolicy(
            policy_function="paceline.ray_serve.cluster_config:LatencyPolicy",
            policy_kwargs={"queue_time_s": wanted.queue_time_s, "itl_s": wanted.itl_ms / 1000},
        )
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=wanted.min,
                max_replicas=wanted.max,
                upscale_delay_s=wanted.upscale_delay_s,
                downscale_delay_s=wanted.downscale_delay_s,
                policy=policy,
            )
        }
    # Serve reserves some characters.
    name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in model.name)
    deployment = serve.deployment(EngineReplica).options(
        name=f"model-{name}",
        max_ongoing_requests=MANY_REQUESTS,
        ray_actor_options=actor,
        graceful_shutdown_timeout_s=wanted.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=RequestRouterConfig(
            request_router_class="paceline.ray_serve.request_router:PrefixRequestRouter",
            request_routing_stats_period_s=options.report_period_s,
        ),
        **_HEALTH,
        **scaling,
    )
    return deployment.bind(model.entry, max_digest_bytes=options.max_digest_bytes)


class EngineReplica(ReplicaService):
    """A replica: an engine with a worker process of its own. Serve calls the methods of `ReplicaService`, and hooks by name."""

    async def __init__(self, entry: ModelEntry, *, max_digest_bytes: int) -> None:  # type: ignore[misc]  # Serve awaits it
        """Find or download the model, and start the engine. If that raises, Serve tries again."""
        name = serve.get_replica_context().replica_id.unique_id
        paths, options = await asyncio.to_thread(find_model, entry)
        if options.get("trace") is not None:  # each replica writes its own
            trace = Path(options["trace"])
            options["trace"] = trace.with_name(f"{trace.stem}-{name}{trace.suffix}")
        engine = await asyncio.to_thread(WorkerEngine, paths, options)
        super().__init__(engine, name, max_digest_bytes=max_digest_bytes)
        self._metrics = RayMetrics()

    async def describe(self) -> bytes:
        """Describe the model as `ReplicaService` does, with the host and process of this replica."""
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
        """Begin a request as `ReplicaService` does. routed: for the request router, which has read it."""
        del routed
        return await super().submit(front, request, adapters)

    async def record_routing_stats(self) -> Mapping[str, bytes]:
        """Return the report for request routers, and pass the engine's metrics to Ray."""
        self._metrics.update(await asyncio.to_thread(self._engine.stats))
        return {STATS_KEY: msgspec.msgpack.encode(await self.routing_stats())}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers that `LatencyPolicy` decides by."""
        return await self.scaling_stats()

    async def __del__(self) -> None:
        """End the engine. Serve calls this when it stops the replica and no request is open."""
        if hasattr(self, "_engine"):
            await self.aclose()


class RayMetrics:
    """Passes an engine's metrics to Ray, which adds application, deployment and replica as labels. On one thread.

    Of histograms sum and count are passed on, as counters: Ray's histograms take single values only.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def update(self, snapshot: MetricsSnapshot) -> None:
        """Set the gauges, and raise the counters by their growth since the last call."""
        for name, kind, labels, value in _numbers(snapshot):
            metric = self._metrics.get(name)
            if metric is None:
                description = _HELP.get(name.removesuffix("_sum").removesuffix("_count"), name)
                make = Gauge if kind == "gauge" else Counter
                metric = self._metrics[name] = make(
                    name, description=description, tag_keys=tuple(key for key, _ in labels)
                )
            if kind == "gauge":
                metric.set(value, dict(labels))
            elif (growth := value - self._last.get((name, labels), 0.0)) > 0:
                metric.inc(growth, dict(labels))
                self._last[name, labels] = value


def _numbers(snapshot: MetricsSnapshot) -> Iterator[tuple[str, str, tuple[tuple[str, str], ...], float]]:
    """Yield name, kind, labels and value."""
    for sample in snapshot:
        if isinstance(sample.value, Histogram):
            yield f"{sample.name}_sum", "counter", sample.labels, sample.value.sum
            yield f"{sample.name}_count", "counter", sample.labels, float(sample.value.count)
        else:
            yield sample.name, sample.kind, sample.labels, float(sample.value)


class Ingress:
    """The server in front of the replicas. It gets the file's path and content, since it may run on another machine."""

    def __init__(self, path: str, data: bytes, handles: dict[str, DeploymentHandle[Any]]) -> None:
        """Take the file, and the handles of the models' deployments by the models' names."""
        self._config, self._handles = parse_cluster_config(Path(path), data), handles

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application. Serve runs its lifespan, in which the replicas are found."""
        return cluster_app(self._config, {name: partial(RayCalls, handle) for name, handle in self._handles.items()})


IngressDeployment = serve.ingress()(Ingress)
