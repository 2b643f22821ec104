"""The file of `paceline cluster serve`: models with their replicas, and the server in front of them. Pure but for the file.

[cluster]                  where and how it runs on Ray Serve: `ClusterOptions`
[server]                   flags of `paceline serve`, as in its --config file
[defaults]                 what all models have in common
[models.NAME]              as in a file of several models: fields of `ModelEntry` and options of `LLM`, side by side
[models.NAME.replicas]     `ReplicaOptions`, also in [defaults.replicas]
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.model_manager import ModelEntry
from paceline.model_manager.models_file import models_table
from paceline.ray_serve.model_source import ModelSource
from paceline.server.flags import DiskFiles, resolve_table
from paceline.server.settings import ServerSettings

_NOT_SERVERS: Final = {
    "model": "models stand in [models.NAME]",
    "hf-repo": "models stand in [models.NAME]",
    "models-preset": "models stand in [models.NAME]",
    "models-dir": "models stand in [models.NAME]",
    "host": "Serve's proxy listens: host and port stand in [cluster]",
    "port": "Serve's proxy listens: host and port stand in [cluster]",
    "ssl-cert-file": "Serve's proxy listens: put TLS in front of it",
    "ssl-key-file": "Serve's proxy listens: put TLS in front of it",
    "slot-save-path": "saved prefixes are files of one machine, and the replicas of a cluster have none in common",
}
_OF_THE_SOURCE: Final = ("offline", "hf_token")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many replicas a model has, and what each gets.

    Attributes:
        min: Replicas that are there without requests, at least 1.
        max: Most replicas.
        num_cpus: Processor cores that Ray sets aside for each.
        num_gpus: GPUs, or a part of one.
        memory: Bytes that Ray sets aside for each; None: none.
        resources: Custom resources of Ray.
        queue_time_s: More replicas are started where requests wait longer than this for a slot.
        itl_ms: More are started where the time between two tokens is longer than this.
        upscale_delay_s: How long that has to be so.
        downscale_delay_s: How long fewer have to be enough before one is stopped.
        drain_s: What open streams of a replica that is stopped get, where no other replica can take them over.
    """

    min: int = 1
    max: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory: int | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    queue_time_s: float = 0.5
    itl_ms: float = 250.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    drain_s: float = 30.0

    def __post_init__(self) -> None:
        validation.integer("min", self.min, 1, 10_000)
        validation.integer("max", self.max, 1, 10_000)
        if self.max < self.min:
            raise InvalidParams(f"max must be at least min ({self.min}), not {self.max}")
        if self.memory is not None:
            validation.integer("memory", self.memory, 1)
        for name in ("num_cpus", "num_gpus", "upscale_delay_s", "downscale_delay_s"):
            validation.number(name, getattr(self, name), 0, 1e9)
        for name in ("queue_time_s", "itl_ms", "drain_s"):
            validation.number(name, getattr(self, name), above=0, high=1e9)
        for name, amount in _table("resources", self.resources).items():
            validation.number(f"resources.{name}", amount, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Where and how the application runs.

    Attributes:
        address: Of a Ray cluster, such as "auto" or "ray://host:10001"; None: a local one is started, and ends with the
            command.
        app: The application's name in Serve.
        host: The address that Serve's proxies listen on.
        port: Their port.
        route_prefix: Of all routes.
        ingresses: Servers in front of the replicas; each has its part of the queue.
        ingress_cpus: Processor cores that Ray sets aside for each of them.
        report_period_s: Seconds between two reports of a replica to routers.
        max_digest_bytes: Of what a report says of cached prefixes.
    """

    address: str | None = None
    app: str = "paceline"
    host: str = "127.0.0.1"
    port: int = 8000
    route_prefix: str = "/"
    ingresses: int = 1
    ingress_cpus: float = 0.5
    report_period_s: float = 0.5
    max_digest_bytes: int = 16 * 1024

    def __post_init__(self) -> None:
        for name in ("app", "host", "route_prefix"):
            if not validation.text(name, getattr(self, name)):
                raise InvalidParams(f"{name} is empty")
        if self.address is not None:
            validation.text("address", self.address)
        if not self.route_prefix.startswith("/"):
            raise InvalidParams(f"route_prefix must begin with /, not {self.route_prefix!r:.80}")
        validation.integer("port", self.port, 1, 65535)
        validation.integer("ingresses", self.ingresses, 1, 1000)
        validation.number("ingress_cpus", self.ingress_cpus, 0)
        validation.number("report_period_s", self.report_period_s, 0.1, 60)
        validation.integer("max_digest_bytes", self.max_digest_bytes, 256, 256 * 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterModel:
    """A model and its replicas. settings: the server's for requests of this model."""

    name: str
    source: ModelSource
    settings: ServerSettings
    replicas: ReplicaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What the file says. server: without a model. notes: what has no effect here."""

    options: ClusterOptions
    server: ServerSettings
    models: tuple[ClusterModel, ...]
    notes: tuple[str, ...] = ()


def read_cluster_config(path: Path) -> ClusterConfig:
    """Return what a file says. Raises `InvalidParams`, which names the file, the table and the key."""
    try:
        data = validation.read_file(path, validation.MAX_CONFIG_BYTES)
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_cluster_config(path, data)


def parse_cluster_config(path: Path, data: bytes) -> ClusterConfig:
    """Return what the bytes of a file say. Raises as `read_cluster_config`."""
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{path} is not valid TOML: {error}") from None
    try:
        return _config(path, content)
    except InvalidParams as error:
        if str(error).startswith(str(path)):  # of the server's flags
            raise
        raise type(error)(f"{path}: {error}") from None


def _config(path: Path, content: Mapping[str, Any]) -> ClusterConfig:
    validation.reject_unknown(content, ("cluster", "server", "defaults", "models"), "the guide on clusters")
    options = _record(ClusterOptions, "cluster", _table("cluster", content.get("cluster", {})))
    server, notes = _server(path, _table("server", content.get("server", {})))
    server = dataclasses.replace(server, hosts=(options.host,))  # where Serve's proxies listen for it
    defaults = dict(_table("defaults", content.get("defaults", {})))
    common = _table("defaults.replicas", defaults.pop("replicas", {}))
    tables = {
        name: dict(_table(f"models.{name}", one)) for name, one in _table("models", content.get("models", {})).items()
    }
    if not tables:
        raise InvalidParams("there is no model; name one as [models.NAME]")
    replicas = {
        name: _record(
            ReplicaOptions,
            f"models.{name}.replicas",
            {**common, **_table(f"models.{name}.replicas", table.pop("replicas", {}))},
        )
        for name, table in tables.items()
    }
    found = models_table({"defaults": defaults, "models": tables}, path.absolute().parent)
    models = tuple(_model(server, entry, replicas[entry.name]) for entry in found.entries)
    return ClusterConfig(options=options, server=server, models=models, notes=notes)


def _server(path: Path, table: Mapping[str, Any]) -> tuple[ServerSettings, tuple[str, ...]]:
    for key in table:
        why = _NOT_SERVERS.get(key.replace("_", "-"))
        if why is not None:
            raise InvalidParams(f"[server]: {key}: {why}")
    return resolve_table(path, table, DiskFiles(_quiet))


def _quiet(_line: str) -> None:
    """Drop lines about downloads: a server's flags download nothing."""


def _model(server: ServerSettings, entry: ModelEntry, replicas: ReplicaOptions) -> ClusterModel:
    if entry.options.get("isolation") == "thread":
        raise InvalidParams(f'[models.{entry.name}]: isolation="thread" is not for replicas; leave it out')
    options = {**server.engine_options, **entry.options, "isolation": "process"}
    template = options.pop("chat_template", None)
    source = {name: options.pop(name) for name in _OF_THE_SOURCE if name in options}
    model = None if entry.model is None else str(entry.model)
    settings = dataclasses.replace(
        server,
        model=None if model is None else Path(model),
        aliases=(entry.name, *entry.aliases),
        engine_options=options,
        chat_template=server.chat_template if template is None else template,
    )
    return ClusterModel(
        name=entry.name,
        source=ModelSource(model=model, options=options, **source),
        settings=settings,
        replicas=replicas,
    )


def _record(kind: type[T], where: str, table: Mapping[str, Any]) -> T:
    names = [one.name for one in dataclasses.fields(kind)]  # type: ignore[arg-type]
    try:
        validation.reject_unknown(table, names)
        return kind(**table)
    except InvalidParams as error:
        raise type(error)(f"[{where}]: {error}") from None


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidType(f"[{name}] must be a table, not {value!r:.80}")
    return value
