"""The application of an ingress: `paceline serve` over engines on replicas, and GET /cluster, which lists the replicas.

Nothing here imports Ray: `MakeCalls` makes the calls to the replicas of a model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response

from paceline.cluster.cluster_engine import ClusterEngine
from paceline.cluster.replica_calls import ReplicaCalls
from paceline.engine.in_process_engine import local_files
from paceline.model_manager import ModelEntry, PreparedModel
from paceline.model_manager.engine_loader import RunningModel, engine_options, source_options
from paceline.observability.metric_table import Histogram, MetricsSnapshot
from paceline.ray_serve.cluster_config import ClusterConfig, ClusterModel
from paceline.server.api_errors import ApiException, invalid_request, not_supported
from paceline.server.application import build_app
from paceline.server.dialects.llama_server.slots import SLOTS_OFF
from paceline.server.exposition import METRICS_OFF
from paceline.server.flags import ModelPreset
from paceline.server.model_front import ModelFront
from paceline.server.router.router_app import build_router_app
from paceline.server.routes import RouteFacts, Routes

MakeCalls = Callable[[], ReplicaCalls]
OpenEngine = Callable[[threading.Event], ClusterEngine]
"""Returns the engine over a model's replicas, once there is one. Blocks; raises `Aborted` after the event was set."""


def cluster_app(config: ClusterConfig, calls: Mapping[str, MakeCalls]) -> FastAPI:
    """Return the application: that of a server with one model, or that of a router.

    Args:
        config: The file of the cluster.
        calls: Makes the calls to the replicas of each model, by the model's name.
    """
    open_engines = {
        model.name: partial(_open_engine, model, calls[model.name], 1 / config.options.ingresses)
        for model in config.models
    }
    if len(config.models) == 1:
        (model,) = config.models
        app = build_app(model.settings, ModelFront(model.settings, open_engines[model.name]))
    else:
        settings = dataclasses.replace(config.server, models_max=0)
        presets: Any = ClusterPresets(config.models)
        loader: Any = ClusterLoader(open_engines)
        app = build_router_app(settings, presets, loader)
    app.router.routes.extend(cluster_routes(app.state.service))
    return app


def _open_engine(model: ClusterModel, make_calls: MakeCalls, share: float, cancel: threading.Event) -> ClusterEngine:
    files: Any = local_files(model.entry.model, {"cancel": cancel}, **source_options(model.entry))
    if files is None:
        from paceline.demo import demo_model_path

        files = demo_model_path()
    paths = [str(files)] if isinstance(files, (str, Path)) else [str(path) for path in files]
    return ClusterEngine(paths, engine_options(model.entry), make_calls, share=share, cancel=cancel)


@dataclasses.dataclass(frozen=True, slots=True)
class _Holder:
    """The object with an engine that users of a loaded model get, in place of an `AsyncLLM`."""

    engine: ClusterEngine


class ClusterLoader:
    """A `ModelLoader` of engines over replicas that run already. open_engines: by the models' names."""

    def __init__(self, open_engines: Mapping[str, OpenEngine]) -> None:
        self._open_engines = open_engines

    def check(self, entry: ModelEntry) -> None:
        """Do nothing: the file of the cluster was checked."""

    async def prepare(self, entry: ModelEntry, cancel: threading.Event, *, budget: int | None) -> PreparedModel:  # noqa: ARG002
        """Return the entry: nothing is downloaded or planned here."""
        return PreparedModel(entry=entry, needed_bytes=None)

    async def load(
        self, prepared: PreparedModel, progress: Callable[[float], None], cancel: threading.Event
    ) -> RunningModel[_Holder]:
        """Wait for the first replica."""
        engine = await asyncio.to_thread(self._open_engines[prepared.entry.name], cancel)
        progress(1.0)
        return RunningModel(_Holder(engine), engine, partial(asyncio.to_thread, engine.close))


class ClusterPresets:
    """The models of a cluster in the form in which the router reads presets. They never change."""

    offline = True
    hf_token = None

    def __init__(self, models: tuple[ClusterModel, ...]) -> None:
        self._models = models

    def sets(self, target: str) -> bool:  # noqa: ARG002
        """Return False: no flag overrides the file."""
        return False

    def read(self, preset_file: Path | None, folder: Path | None) -> list[ModelPreset]:  # noqa: ARG002
        """Return the models."""
        return [
            ModelPreset(
                name=model.name,
                settings=model.settings,
                source="preset",
                text=f"[{model.name}]\n\n",
                load_on_startup=True,
            )
            for model in self._models
        ]


def cluster_routes(service: Any) -> Routes:
    """Return the routes of /cluster. service: the `Service` of one model, or the `RouterService` of several."""
    router = Routes(RouteFacts(operator=True), tags=["cluster"])

    @router.get("/cluster", summary="The replicas of each model")
    async def cluster() -> Response:
        """List the replicas that are connected, with the slots and the open requests of each."""
        models = {name: await asyncio.to_thread(_replicas, engine) for name, engine in _engines(service).items()}
        return JSONResponse({"ingress": {"host": socket.gethostname(), "pid": os.getpid()}, "models": models})

    @router.get("/cluster/{model}/{replica}/slots", summary="The slots of one replica")
    async def slots(model: str, replica: str) -> Response:
        """Show what each slot of one replica does; as `/slots`, off with `--no-slots`."""
        if not service.settings.slots:
            raise not_supported(SLOTS_OFF)
        engine: ClusterEngine = _named(_engines(service), model)
        views = _named(await asyncio.to_thread(engine.replica_slots), replica)
        return JSONResponse(
            [
                {
                    "id": view.id,
                    "state": view.state,
                    "prompt_tokens": view.num_prompt_tokens,
                    "cached_tokens": view.num_cached,
                    "generated_tokens": view.num_generated,
                    "running_s": round(view.running_s, 3),
                }
                for view in views
            ]
        )

    @router.get("/cluster/{model}/{replica}/metrics", summary="The metrics of one replica")
    async def metrics(model: str, replica: str) -> Response:
        """Show counters and gauges of one replica; of histograms sum and count. Off where `/metrics` is."""
        if not service.settings.metrics:
            raise ApiException(METRICS_OFF)
        engine: ClusterEngine = _named(_engines(service), model)
        return JSONResponse(_numbers(_named(await asyncio.to_thread(engine.replica_stats), replica)))

    return router


def _engines(service: Any) -> dict[str, ClusterEngine]:
    if hasattr(service, "models"):
        return {name: model.engine() for name, model in service.models.all_ready().items()}
    return {service.names[0]: service.engine()}


def _named(found: Mapping[str, Any], name: str) -> Any:
    """Return the item of that name. Raises the error of status 404 with the names that there are."""
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise invalid_request(f"{name[:200]!r} is not here; there are: {known}", status=404)
    return found[name]


def _replicas(engine: ClusterEngine) -> list[dict[str, Any]]:
    places = engine.replica_places()
    return [
        {
            "id": name,
            "host": places.get(name, (None, None))[0],
            "pid": places.get(name, (None, None))[1],
            "slots": len(slots),
            "processing": slots.num_processing,
            "waiting": slots.num_waiting,
        }
        for name, slots in sorted(engine.replica_slots().items())
    ]


def _numbers(snapshot: MetricsSnapshot) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for sample in snapshot:
        name = sample.name + "".join(f"{{{key}={value}}}" for key, value in sample.labels)
        if isinstance(sample.value, Histogram):
            numbers[f"{name}_sum"], numbers[f"{name}_count"] = sample.value.sum, sample.value.count
        else:
            numbers[name] = sample.value
    return numbers
