"""The file of `paceline cluster serve`: models with their replicas, the server, and the policy of scaling.

[cluster]                  where and how it runs on Ray Serve: `ClusterOptions`
[server]                   flags of `paceline serve`, as in its --config file
[defaults]                 options of all models
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
from paceline.model_manager.model_settings import models_table
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
_MOST_GROWTH: Final = 2.0  # replicas grow at most to as many times their number at once
_CALM: Final = 0.5  # a replica is stopped if the others would stay below this share of both targets, and of their slots
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many replicas a model has, and the resources of each.

    Attributes:
        min: Replicas without any requests, at least 1.
        max: Most replicas.
        num_cpus: Processor cores that Ray reserves for each.
        num_gpus: GPUs that Ray reserves for each; may be a fraction.
        memory: Bytes that Ray reserves for each; None: none.
        resources: Custom resources of Ray.
        queue_time_s: Replicas are added if requests wait longer than this for a slot.
        itl_ms: Replicas are added if the time between two tokens is longer than this.
        upscale_delay_s: How long a limit must be exceeded before replicas are added.
        downscale_delay_s: How long fewer replicas must be enough before a replica is stopped.
        drain_s: Time for the open streams of a replica that is stopped, if no other replica can continue them.
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
        address: The address of a Ray cluster, such as "auto" or "ray://host:10001"; None: a local Ray is started, and ends
            with the command.
        app: The application's name in Serve.
        host: The address that Serve's proxies listen on.
        port: The port that they listen on.
        route_prefix: The prefix of all routes.
        ingresses: Servers in front of the replicas; each has its share of the queue.
        ingress_cpus: Processor cores that Ray reserves for each ingress.
        report_period_s: Seconds between two reports of a replica to routers.
        max_digest_bytes: Most bytes of a report about cached prefixes.
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
    """A model and its replicas.

    Attributes:
        entry: The model, with the options of its engines.
        settings: The server's settings for requests of this model.
        replicas: How many replicas it has.
    """

    entry: ModelEntry
    settings: ServerSettings
    replicas: ReplicaOptions

    @property
    def name(self) -> str:
        """The model's name."""
        return self.entry.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The parsed file. server: settings without a model. notes: options of the file that have no effect."""

    options: ClusterOptions
    server: ServerSettings
    models: tuple[ClusterModel, ...]
    notes: tuple[str, ...] = ()


def read_cluster_config(path: Path) -> ClusterConfig:
    """Read a file. Raises `InvalidParams`, which names the file, the table and the key."""
    try:
        data = validation.read_file(path, validation.MAX_CONFIG_BYTES)
    except OSError as error:
        raise InvalidParams(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_cluster_config(path, data)


def parse_cluster_config(path: Path, data: bytes) -> ClusterConfig:
    """Parse the bytes of a file. Raises as `read_cluster_config`."""
    try:
        content = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidParams(f"{path} is not valid TOML: {error}") from None
    try:
        return _config(path, content)
    except InvalidParams as error:
        if str(error).startswith(str(path)):  # the error of a server's flag
            raise
        raise type(error)(f"{path}: {error}") from None


def _config(path: Path, content: Mapping[str, Any]) -> ClusterConfig:
    validation.reject_unknown(content, ("cluster", "server", "defaults", "models"), "the guide on clusters")
    options = _record(ClusterOptions, "cluster", _table("cluster", content.get("cluster", {})))
    flags = _table("server", content.get("server", {}))
    for key in flags:
        why = _NOT_SERVERS.get(key.replace("_", "-"))
        if why is not None:
            raise InvalidParams(f"[server]: {key}: {why}")
    server, notes = resolve_table(path, flags, DiskFiles(lambda _line: None))  # these flags download nothing
    server = dataclasses.replace(server, hosts=(options.host,))  # Serve's proxies listen there for it
    defaults = dict(_table("defaults", content.get("defaults", {})))
    common = _table("defaults.replicas", defaults.pop("replicas", {}))
    models = _table("models", content.get("models", {}))
    tables = {name: dict(_table(f"models.{name}", table)) for name, table in models.items()}
    if not tables:
        raise InvalidParams("there is no model; name one as [models.NAME]")
    replicas = {}
    for name, table in tables.items():
        where = f"models.{name}.replicas"
        replicas[name] = _record(ReplicaOptions, where, {**common, **_table(where, table.pop("replicas", {}))})
    found = models_table({"defaults": defaults, "models": tables}, path.absolute().parent)
    return ClusterConfig(
        options=options,
        server=server,
        models=tuple(_model(server, entry, replicas[entry.name]) for entry in found.entries),
        notes=notes,
    )


def _model(server: ServerSettings, entry: ModelEntry, replicas: ReplicaOptions) -> ClusterModel:
    if entry.options.get("isolation") == "thread":
        raise InvalidParams(f'[models.{entry.name}]: isolation="thread" is not for replicas; leave it out')
    options = {**server.engine_options, **entry.options, "isolation": "process"}
    template = options.pop("chat_template", None)
    settings = dataclasses.replace(
        server,
        model=None if entry.model is None else Path(entry.model),
        aliases=entry.names,
        engine_options={name: value for name, value in options.items() if name not in ("offline", "hf_token")},
        chat_template=server.chat_template if template is None else template,
    )
    return ClusterModel(entry=dataclasses.replace(entry, options=options), settings=settings, replicas=replicas)


def _record(kind: type[T], where: str, table: Mapping[str, Any]) -> T:
    try:
        validation.reject_unknown(table, [field_.name for field_ in dataclasses.fields(kind)])  # type: ignore[arg-type]
        return kind(**table)
    except InvalidParams as error:
        raise type(error)(f"[{where}]: {error}") from None


def _table(name: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidType(f"[{name}] must be a table, not {value!r:.80}")
    return value


def wanted_replicas(
    current: int, queue_s: float, itl_s: float, busy: float, *, queue_target_s: float, itl_target_s: float
) -> float:
    """Return how many replicas there should be: at most twice as many at once, or a replica less.

    Args:
        current: The number of replicas, at least 1.
        queue_s: Mean time that requests wait for a slot, in seconds.
        itl_s: Mean time between two tokens of a stream, in seconds.
        busy: Share of the slots in use, 0 to 1.
        queue_target_s: The longest queue_s that is fine.
        itl_target_s: The longest itl_s that is fine.
    """
    pressure = max(queue_s / queue_target_s, itl_s / itl_target_s)
    if pressure > 1:
        return current * min(pressure, _MOST_GROWTH)
    if current > 1 and max(pressure, busy) * current / (current - 1) < _CALM:
        return current - 1
    return current


class LatencyPolicy:
    """The scaling policy that Serve's controller calls with an `AutoscalingContext`. Serve pickles it by value.

    Args:
        queue_time_s: The longest time that requests may wait for a slot.
        itl_s: The longest time between two tokens.
    """

    def __init__(self, queue_time_s: float, itl_s: float) -> None:
        self._queue_target_s, self._itl_target_s = queue_time_s, itl_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return how many replicas there should be, and no state."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        if context.current_num_replicas < 1:
            return context.target_num_replicas, {}
        means = []
        for name in ("queue_s", "itl_s", "busy"):
            values = list(metrics.get(name, {}).values())
            means.append(sum(values) / len(values) if values else 0.0)
        queue_s, itl_s, busy = means
        wanted = wanted_replicas(
            context.current_num_replicas,
            queue_s,
            itl_s,
            busy,
            queue_target_s=self._queue_target_s,
            itl_target_s=self._itl_target_s,
        )
        return wanted, {}
