"""The server in front of the replicas: a Serve deployment with the application of `paceline serve`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.ray_serve.cluster_app import cluster_app
from paceline.ray_serve.cluster_config import ClusterConfig, parse_cluster_config
from paceline.ray_serve.ray_calls import RayCalls


class Ingress:
    """The deployment's class. The file of the cluster comes as it is: this machine may be another one."""

    def __init__(self, path: str, data: bytes, handles: dict[str, DeploymentHandle[Any]]) -> None:
        """Take the file, and the handles of the models' deployments by their names."""
        self._config = parse_cluster_config(Path(path), data)
        self._handles = handles

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application; Serve runs its lifespan, in which the models are found."""
        return application(self._config, self._handles)


def application(config: ClusterConfig, handles: dict[str, DeploymentHandle[Any]]) -> FastAPI:
    """Return the application of an ingress over deployments."""
    return cluster_app(config, {one.name: partial(RayCalls, handles[one.name]) for one in config.models})


IngressDeployment = serve.ingress()(Ingress)
