"""The table of frozen files: the name of each, and the function that makes its text.

Another version of FastAPI or pydantic may change the OpenAPI documents; write them again then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from tests.cluster_world import ClusterWorld
from tests.frozen.errors import reported_errors
from tests.frozen.exchanges import EXCHANGES
from tests.frozen.interfaces import engine_events, flags_of_serve, metrics, options_of_commands, trace
from tests.frozen.text import laid_out
from tests.server.router_world import PRESETS, FakeLoader
from tests.unit.server.flags.world import FakeFiles

from paceline.ray_serve.cluster_app import cluster_app
from paceline.ray_serve.cluster_config import parse_cluster_config
from paceline.server.application import build_app
from paceline.server.flags import ModelPresets, resolve
from paceline.server.router.router_app import build_router_app
from paceline.server.settings import ServerSettings

FOLDER = Path(__file__).parent


def model_app() -> FastAPI:
    """Return the application of one model."""
    return build_app(ServerSettings(docs=True))


def router_app() -> FastAPI:
    """Return the application of several models; none is loaded."""
    files = FakeFiles({"p.ini": PRESETS})
    found = resolve(["--models-preset", "p.ini"], {}, files)
    return build_router_app(found.settings, ModelPresets(found, files), FakeLoader())  # type: ignore[arg-type]


def cluster_front() -> FastAPI:
    """Return the application in front of the replicas of one model."""
    config = parse_cluster_config(Path("/cluster.toml"), b"[models.tiny]\n")
    return cluster_app(config, {"tiny": ClusterWorld()._make_calls})


def _document(make: Callable[[], FastAPI]) -> Any:
    document = json.loads(json.dumps(make().openapi(), sort_keys=True))
    document["info"]["version"] = "<version>"
    return document


def _of_model() -> str:
    return laid_out(_document(model_app), 120) + "\n"


def _beside_model(make: Callable[[], FastAPI]) -> str:
    """Return a document. A path or schema that is equal in the document of one model is replaced by a remark."""
    same, document = _document(model_app), _document(make)
    for there, here in (
        (same["paths"], document["paths"]),
        (same["components"]["schemas"], document["components"]["schemas"]),
    ):
        for name, value in here.items():
            if there.get(name) == value:
                here[name] = "as of one model"
        here.update(dict.fromkeys(there.keys() - here.keys(), "not there"))
    return laid_out(document, 120) + "\n"


FROZEN: dict[str, Callable[[], str]] = {
    "openapi_model.json": _of_model,
    "openapi_router.json": lambda: _beside_model(router_app),
    "openapi_cluster.json": lambda: _beside_model(cluster_front),
    **EXCHANGES,
    "errors.txt": reported_errors,
    "flags.txt": flags_of_serve,
    "options.txt": options_of_commands,
    "metrics.txt": metrics,
    "trace.txt": trace,
    "engine_events.json": engine_events,
}
