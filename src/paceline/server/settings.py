"""The settings of a server: one frozen record, resolved once from flags, environment and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

ACCESS_LOGGER: Final = "paceline.server.access"
"""The name of the access log, whose lines are JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key.

    Attributes:
        tenant: Salts the prefix cache, so that two tenants share no prefixes.
        name: For usage and metrics; empty: the key's number.
        weight: The share of its tenant while several tenants wait.
        tokens_per_minute: Computed tokens, at most; None: no limit.
        max_requests: Requests in flight, at most; None: no limit.
        tokens_per_day: Computed tokens of a day in UTC, at most; None: no limit.
    """

    secret: str = field(repr=False)
    tenant: str = ""
    name: str = ""
    weight: float = 1.0
    tokens_per_minute: int | None = None
    max_requests: int | None = None
    tokens_per_day: int | None = None

    def shown_name(self, number: int) -> str:
        """Return the name for usage and metrics. number: of the key, from 1."""
        return self.name or f"key-{number}"


def has_tenants(keys: Iterable[ApiKey]) -> bool:
    """Return whether API keys belong to several tenants; keys without a tenant count as one."""
    return len({key.tenant for key in keys}) > 1


def is_socket_path(host: str) -> bool:
    """Return whether an address to listen on is the path of a Unix socket."""
    return host.endswith(".sock")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All settings of `paceline serve`. Immutable.

    The help of the flags (docs/guide/flags.md) describes each setting. Attributes with more to say:

    Attributes:
        model: The path of a file; None: the demo model.
        engine_options: Keywords of `AsyncLLM`. Slots are saved if they have a state_folder.
        sampling: Keywords of `SamplingParams`. They win over the defaults of the model and of an API, a request wins over them.
        lora_scales: The scales of adapters for requests that set none.
        prefill_assistant: None: as llama-server does in its own routes, and as OpenAI in its routes.
        hosts: Addresses, names, or paths of Unix sockets that end in .sock.
        allowed_hosts: Names in Host headers beside localhost, addresses and hosts; "*": any. Keys or TLS without names: any,
            as they protect from DNS rebinding too.
        max_total_body_bytes: Of all requests in flight; None: four times max_body_bytes.
        media_marker: None: a random text for each start.
        embeddings: False: only models for embeddings have the routes; so it is with reranking.
        start_page: None: if only this machine reaches the server, or it has keys.
        responses_store_total_bytes: None: four times responses_store_bytes.
        batch_folder: Of files and batches; None: the server keeps none. `paceline serve` has a folder by default.
    """

    model: Path | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lora_scales: Mapping[str, float] = field(default_factory=dict)
    lora_loading: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill_assistant: bool | None = None
    pooling: str | None = None
    embd_normalize: int = 2
    spm_infill: bool = False
    special: bool = False
    model_changed: Literal["reload", "refuse"] = "reload"
    reasoning_format: str = "auto"
    skip_chat_parsing: bool = False
    untagged_calls: bool = True
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    api_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    cors_methods: tuple[str, ...] = ("GET", "POST", "DELETE", "OPTIONS")
    cors_headers: tuple[str, ...] = ("*",)
    cors_credentials: bool = False
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    root_path: str = ""

    max_body_bytes: int = 64 << 20
    max_total_body_bytes: int | None = None
    max_header_bytes: int = 64 << 10
    max_connections: int = 2048
    body_timeout_s: float = 60.0
    keep_alive_s: float = 75.0
    heartbeat_s: float = 10.0
    drain_s: float = 30.0
    timeout_s: float | None = None
    max_images: int = 64

    media_domains: tuple[str, ...] = ()
    media_marker: str | None = None

    embeddings: bool = False
    reranking: bool = False
    metrics: bool = True
    metrics_per_key: bool = False
    slots: bool = True
    props: bool = False
    docs: bool = True
    start_page: bool | None = None
    page_folder: Path | None = None
    strict_fields: bool = False
    responses_store: int = 0
    responses_store_bytes: int = 256 << 20
    responses_store_total_bytes: int | None = None
    batches: bool = True
    batch_folder: Path | None = None

    models_preset: Path | None = None
    models_dir: Path | None = None
    models_max: int = 4
    models_memory: int | None = None
    models_autoload: bool = True
    spare_worker: bool = True

    log_level: str = "info"
    log_json: bool = False
    log_file: Path | None = None

    @property
    def checks_hosts(self) -> bool:
        """Whether only certain Host headers are allowed."""
        return bool(self.allowed_hosts) or not (self.api_keys or self.ssl_certfile)
