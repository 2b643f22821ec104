"""What a server is set up with: one frozen record, resolved once from flags, environment and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that opens the server. tenant: salts the prefix cache, so that keys of two tenants share nothing."""

    secret: str = field(repr=False)
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything that `paceline serve` resolves. Immutable.

    Engine: model (a path; None: the demo model), engine_options (keywords of `AsyncLLM`), sampling (keywords of
    `SamplingParams` that the operator set; they win over the model's and over an API's defaults, a request wins over them),
    lora_scales (what applies where a request does not say), chat_template (text; None: the model's), chat_template_kwargs
    (variables for the template; a request's win over them), prefill_assistant (whether an answer goes on with a last message
    of the assistant's where a request does not say; None: as llama-server has it in its routes and OpenAI in its own),
    pooling (of embeddings where a request does not say; None: as the model was made), embd_normalize (of llama-server's
    embeddings where a request does not say: -1 none, 0 by the greatest, 1 taxicab, 2 Euclidean, p > 2 the p-norm),
    spm_infill (whether an infill's prompt has its suffix before its prefix).

    Network: host, port (0: any free one), aliases (names of the model; none: its file's), api_keys (none: everybody may),
    allowed_hosts (names that clients may ask for beside localhost, addresses and host; "*": any; none: these alone, unless
    there are keys or TLS, which keep strangers' pages out), cors_origins (none: off), ssl_certfile, ssl_keyfile, root_path (a
    prefix of every route).

    Limits: max_body_bytes, max_total_body_bytes (of all requests that are being answered; None: four times as many),
    max_header_bytes, max_connections (beyond: 429), body_timeout_s and keep_alive_s (for slow senders and idle connections),
    heartbeat_s (between comments while a stream waits; infinity: none), drain_s (what SIGTERM leaves to running streams),
    timeout_s (of a whole request; None: none).

    Endpoints: embeddings and reranking (False: only what the model is made for, see docs), metrics, slots, props (whether
    `POST /props` is allowed), docs (the OpenAPI pages). Slots are saved where engine_options have a state_folder.

    Log: log_level ("off", "error", "warning", "info", "debug"), log_json (a JSON object a line), log_file (None: stderr).
    """

    model: Path | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lora_scales: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefill_assistant: bool | None = None
    pooling: str | None = None
    embd_normalize: int = 2
    spm_infill: bool = False

    host: str = "127.0.0.1"
    port: int = 8080
    aliases: tuple[str, ...] = ()
    api_keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
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

    embeddings: bool = False
    reranking: bool = False
    metrics: bool = True
    slots: bool = True
    props: bool = False
    docs: bool = True

    log_level: str = "info"
    log_json: bool = False
    log_file: Path | None = None

    @property
    def checks_hosts(self) -> bool:
        """Whether only certain names are answered to."""
        return bool(self.allowed_hosts) or not (self.api_keys or self.ssl_certfile)
