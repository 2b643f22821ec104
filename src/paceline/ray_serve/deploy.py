"""Start what the file of a cluster says on Ray Serve, and keep it until a signal."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from paceline import validation
from paceline.ray_serve.cluster_config import ClusterConfig, ClusterModel, ClusterOptions, read_cluster_config
from paceline.ray_serve.engine_replica import EngineReplica
from paceline.ray_serve.ingress import IngressDeployment

MANY_REQUESTS: Final = 100_000
"""More than a replica can have: the queues are bounded by ingresses, and a replica's calls are no requests."""

_OBJECT_STORE_BYTES: Final = 100 << 20  # of a local Ray: nothing here is large
_HEALTH_PERIOD_S: Final = 2.0
_HEALTH_TIMEOUT_S: Final = 20.0


def connect(options: ClusterOptions) -> None:
    """Connect with the Ray cluster of the options, or start one on this machine, which sends no usage statistics."""
    if ray.is_initialized():
        return
    if options.address is not None:
        ray.init(address=options.address)
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, object_store_memory=_OBJECT_STORE_BYTES)


def run(path: Path, data: bytes, config: ClusterConfig) -> DeploymentHandle[Any]:
    """Deploy, or update what is deployed already, and return when all of it is healthy. Raises what Serve raises."""
    options = config.options
    serve.start(proxy_location="EveryNode", http_options={"host": options.host, "port": options.port})
    app = application(path, data, config)
    return serve.run(app, name=options.app, route_prefix=options.route_prefix)


def build(args: dict[str, str]) -> serve.Application:
    """Return the application for Serve's own configuration files: import path `paceline.ray_serve.deploy:build`.

    args: "config" is the path of the cluster's file, where the application is built; "revision" any text. Serve builds the
    application anew where args have changed, and not where the file has. Host, port, name and route prefix are those of Serve's
    file. Raises `InvalidParams` for other args, and for what is wrong with the file.
    """
    validation.reject_unknown(args, ("config", "revision"))
    path = validation.path("config", args.get("config"))
    config = read_cluster_config(path)
    return application(path, validation.read_file(path, validation.MAX_CONFIG_BYTES), config)


def application(path: Path, data: bytes, config: ClusterConfig) -> serve.Application:
    """Return the application: a deployment for each model, and the ingress."""
    models = {one.name: _replicas(one, config.options) for one in config.models}
    ingress = serve.deployment(IngressDeployment).options(
        name="ingress",
        num_replicas=config.options.ingresses,
        max_ongoing_requests=MANY_REQUESTS,
        ray_actor_options={"num_cpus": config.options.ingress_cpus},
        graceful_shutdown_timeout_s=config.server.drain_s,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
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
        scaling = {"autoscaling_config": _autoscaling(model)}
    deployment = serve.deployment(EngineReplica).options(
        name=deployment_name(model.name),
        max_ongoing_requests=MANY_REQUESTS,
        ray_actor_options=actor,
        graceful_shutdown_timeout_s=wanted.drain_s,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config=RequestRouterConfig(
            request_router_class="paceline.ray_serve.request_router:PrefixRequestRouter",
            request_routing_stats_period_s=options.report_period_s,
        ),
        **scaling,
    )
    return deployment.bind(model.source, max_digest_bytes=options.max_digest_bytes)


def deployment_name(model: str) -> str:
    """Return the name of a model's deployment: Serve reserves some characters."""
    return "model-" + "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in model)


def _autoscaling(model: ClusterModel) -> AutoscalingConfig:
    wanted = model.replicas
    return AutoscalingConfig(
        min_replicas=wanted.min,
        max_replicas=wanted.max,
        upscale_delay_s=wanted.upscale_delay_s,
        downscale_delay_s=wanted.downscale_delay_s,
        policy=AutoscalingPolicy(
            policy_function="paceline.ray_serve.scaling:LatencyPolicy",
            policy_kwargs={"queue_time_s": wanted.queue_time_s, "itl_s": wanted.itl_ms / 1000},
        ),
    )


def serve_until(
    stop: threading.Event, path: Path, data: bytes, config: ClusterConfig, ready: Callable[[], None]
) -> None:
    """Deploy, call `ready`, wait for `stop`, and take what was deployed down, unless the cluster is another's."""
    connect(config.options)
    run(path, data, config)
    ready()
    try:
        stop.wait()
    finally:
        if config.options.address is None:
            serve.shutdown()
            ray.shutdown()
