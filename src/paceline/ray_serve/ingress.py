"""The server in front of the replicas: a Serve deployment with the application of `paceline serve`."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from paceline.ray_serve.cluster_config import ClusterConfig, parse_cluster_config
from paceline.ray_serve.cluster_front import ClusterFront, ClusterLoader, ClusterPresets, FrontModelSource
from paceline.ray_serve.cluster_routes import cluster_routes
from paceline.ray_serve.ray_calls import RayCalls
from paceline.server.application import build_app, build_routes
from paceline.server.router.router_application import build_router_app


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
    """Return the application of an ingress: with one model that of `paceline serve`, else that of its router."""
    share = 1 / config.options.ingresses
    sources = {one.name: FrontModelSource(one, partial(RayCalls, handles[one.name]), share) for one in config.models}
    if len(config.models) == 1:
        model = config.models[0]
        app = build_app(model.settings, ClusterFront(sources[model.name]))
    else:
        settings = dataclasses.replace(config.server, models_max=0)
        presets: Any = ClusterPresets(config.models)
        loader: Any = ClusterLoader(sources)
        app = build_router_app(settings, presets, loader)
    app.include_router(cluster_routes(app.state.service))
    build_routes(app)
    return app


IngressDeployment = serve.ingress()(Ingress)
