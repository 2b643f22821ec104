"""The application of an ingress, whatever carries its calls: with one model that of `paceline serve`, else that of its router."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from paceline.ray_serve.cluster_config import ClusterConfig
from paceline.ray_serve.cluster_front import ClusterFront, ClusterLoader, ClusterPresets, FrontModelSource, MakeCalls
from paceline.ray_serve.cluster_routes import cluster_routes
from paceline.server.application import build_app, build_routes
from paceline.server.router.router_application import build_router_app


def cluster_app(config: ClusterConfig, calls: Mapping[str, MakeCalls]) -> FastAPI:
    """Return the application. calls: to the replicas of each model, by its name."""
    share = 1 / config.options.ingresses
    sources = {one.name: FrontModelSource(one, calls[one.name], share) for one in config.models}
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
