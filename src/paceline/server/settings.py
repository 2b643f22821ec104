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
    """An API key. tenant: salts the prefix cache, so that two tenants share no prefixes."""

    secret: str = field(repr=False)
    tenant: str = ""


def has_tenants(keys: Iterable[ApiKey]) -> bool:
    """Return whether API keys belong to several tenants; keys without a tenant count as one."""
    return len({key.tenant for key in keys}) > 1


def is_socket_path(host: str) -> bool:
    """Return whether an address to listen on is the path of a Unix socket."""
    return host.endswith(".sock")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All settings of `paceline serve`. Immutable.

    Engine: model (a path; None: the demo model), engine_options (keywords of `AsyncLLM`), sampling (keywords of
    `SamplingParams` that the operator set; they win over the model's and over an API's defaults, a request wins over them),
    lora_scales (for requests that set none), lora_loading (whether clients may load and unload adapters), chat_template (text;
    None: the model's), chat_template_kwargs (variables for the template; a request's win over them), prefill_assistant (default
    of requests: whether to continue an assistant's last message; None: as llama-server does in its routes and OpenAI in its
    own), reasoning_format (default of requests: "none" leaves thinking in the content), skip_chat_parsing (whether thinking and
    tool calls stay in the content), untagged_calls (whether content that is nothing but the JSON of calls is read as calls),
    reasoning_budget (default of requests: most tokens of thinking; -1: no limit), reasoning_budget_message (what ends it then),
    pooling (default of embeddings; None: the model's), embd_normalize (default of llama-server's embeddings: -1 none, 0 by
    the greatest, 1 taxicab, 2 Euclidean, p > 2 the p-norm), spm_infill (whether an infill's prompt has its suffix before its
    prefix), special (default of requests: whether control tokens are detokenized), model_changed (of a worker that would load
    another model, since a file was replaced: "reload" loads the model again, "refuse" refuses all requests).

    Network: hosts (addresses, names, or paths of Unix sockets that end in .sock), port (of all of them; 0: any free one, for
    one address), aliases (names of the model; none: its file's), tags (of the model, as GET /v1/models lists them), api_keys
    (none: no key is needed), allowed_hosts (names in Host headers beside localhost, addresses and hosts; "*": any; none: these
    alone, unless there are keys or TLS, which protect from DNS rebinding too), cors_origins (none: off; "localhost":
    this machine's, any port; "*": all), cors_methods, cors_headers ("*": those that are requested), cors_credentials
    (whether pages may send cookies), ssl_certfile, ssl_keyfile, root_path (a prefix of every route).

    Limits: max_body_bytes, max_total_body_bytes (of all requests in flight; None: four times as many),
    max_header_bytes, max_connections (beyond: a new one replaces the longest idle one), body_timeout_s and keep_alive_s (for
    slow senders and idle connections),
    heartbeat_s (between comments while a stream waits; infinity: none), drain_s (what running streams get after SIGTERM),
    timeout_s (of a whole request; None: none), max_images (of a request).

    Media: media_domains (hosts that images are fetched from; none: nothing is fetched), media_marker (what stands for an image
    in prompts of llama-server's API; None: a random one for each start).

    Endpoints: embeddings and reranking (False: only what the model is made for, see docs), metrics, slots, props (whether
    `POST /props` is allowed), docs (the OpenAPI pages), start_page (GET /, the web page; None: where only this machine reaches
    the server, or it has keys), page_folder (files in place of the built page's; they need no key), strict_fields (whether
    requests with unknown fields are refused; False: a warning), responses_store (responses
    that are kept of each tenant; 0: none) and responses_store_bytes (of each tenant's), responses_store_total_bytes (of all;
    None: four times as many). Slots are saved where engine_options have a state_folder.

    Several models: models_preset (a file of models: llama-server's presets, or TOML), models_dir (a folder of GGUF files),
    models_max (that are loaded at once; 0: no limit), models_memory (bytes that the loaded ones may take together; None: no
    limit), models_autoload (whether a request loads its model), spare_worker (whether a worker waits for the next load).

    Log: log_level ("off", "error", "warning", "info", "debug"), log_json (a JSON object a line), log_file (None: stderr).
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
    slots: bool = True
    props: bool = False
    docs: bool = True
    start_page: bool | None = None
    page_folder: Path | None = None
    strict_fields: bool = False
    responses_store: int = 0
    responses_store_bytes: int = 256 << 20
    responses_store_total_bytes: int | None = None

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
