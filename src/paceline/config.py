"""The configuration of an engine: one frozen record, checked once. Standard library only."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.keywords import EngineConfigKeywords, set_constructor

_MAX_DRAFT = 64
MAX_RPC_SERVERS = 15  # llama.cpp's scheduler has 16 backends, and the CPU is one
_MAX_SLOTS = 250  # llama.cpp has 256 sequence ids, and some are for cached prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine schedules, isolates and caches. Immutable. None is the default of every field.

    `LLM` takes the fields as keywords; options of the model and of llama.cpp's context are separate.

    Attributes:
        num_slots: Sequences that run at once.
        chunk_size: Most prompt tokens of one sequence in a tick.
        strategy: The batch strategy: "paced", "decode_maximal", "prefill_priority", "balanced", "module:attr", or an object
            with a `plan` method (see `BatchStrategy`). A name may have options: "paced:patience=4", or
            {"name": "paced", "patience": 4}.
        speculation: The drafter, which proposes tokens that the ordinary tick verifies: "ngram" (prompt lookup), "draft-model"
            (the default with draft_model), "mtp" (the model's own heads), "eagle3:model=FILE", "dflash:model=FILE", a name with
            options like "ngram:size_n=6" or {"name": "ngram", "size_n": 6}, "module:attr", or an object with the methods of
            `Drafter`. Several drafters, as "ngram,draft-model" or in a list, are asked in order until one proposes tokens for a
            sequence. None: no drafter. A model with memory that cannot take wrong drafts back is refused.
        max_draft: Most tokens that are proposed for a sequence in a tick, 1 to 64; fewer are proposed if more do not pay.
        min_draft: Least tokens of a proposal that is verified at all, 0 to 64.
        itl_target_ms: Inter-token latency that "paced" aims at; None: 250 on a CPU, 50 if a GPU computes (for a `Model` that
            was loaded before: if there is one).
        max_tick_ms: Longest tick of "paced" while no sequence decodes, so that admission and cancelling stay prompt; also the
            most that its target yields to while too much time is lost to small batches.
        max_queue: Requests that may be open beyond num_slots. A request is open until it has ended, waiting or running,
            embeddings included; it counts once, whatever its n. For further requests see when_full.
        max_queue_tokens: Prompt tokens that may wait; None: no limit. An empty queue takes a prompt of any length. If requests
            have tenants, a tenant has a share of the places and of these tokens, see the guide to servers.
        when_full: How `LLM` and `AsyncLLM` treat a request beyond these two limits: "wait" keeps it until earlier requests
            make room, in order of arrival, with tenants in turn; "refuse" raises `QueueFull`. Servers always refuse.
        max_embedding_tokens: Most tokens of a text to embed or rerank; None: as many as the model was trained for. A text is
            computed in one tick, which delays streams; memory for more than 2048 tokens is allocated when it is first needed.
        isolation: "thread" computes in this process, "process" in a worker process, so that this process survives a crash.
        on_engine_death: How requests go on after the death of their worker: "replay" (the default) continues them in a new
            worker, "fail" ends them with `EngineDied`. Needs isolation="process".
        max_restarts: Restarts of the worker in a row, each after twice the previous wait (0.1 to 10 s); a worker that ran for
            a minute ends the row. A further crash stops the engine (`EngineStopped`). None: no limit. Needs
            isolation="process".
        hang_timeout_s: Seconds for which the heartbeats of the worker may stop, at least 3: then it is killed, and its requests
            go on as `on_engine_death` has it. A pass may take 20 times as long as the cost model expects, and loading, timing
            passes or moving saved states 10 times as long as this. `math.inf`: a hung worker is not replaced. Used with
            isolation="process".
        rpc: RPC servers that compute a part of the model, in a list of "host:port" or a text with commas; see `paceline
            rpc-serve`. Needs isolation="process" and a build with PACELINE_RPC=ON.
        rpc_timeout_s: Seconds without a reply after which an RPC server counts as lost. It does not reply while it computes, so
            this must be longer than its part of the longest pass. Requests wait as long for a lost server, but at most 30 s,
            before they end with `RpcServerUnavailable`.
        trace: File to write a trace to, one JSON object a line, for `paceline trace show`; an existing file is replaced.
        trace_max_bytes: Size at which the trace ends; the engine continues. At 16 streams and 20 ticks a second it grows by
            some 15 kB a second.
        sleep_idle_s: Seconds without a request after which the worker is stopped and its memory freed, cached prefixes
            included. The next request starts it again, and waits for that within its deadlines. None: never. Needs
            isolation="process".
        fit: Whether the model's memory is planned before it is loaded, if memory may be short: n_ctx, num_slots and the layers
            on GPUs are chosen to fit unless they are set, and a load that needs more than the free memory raises
            `NotEnoughMemory`.
        fit_target_bytes: Memory that this choice leaves free: of each GPU, or a list with a number for each GPU; without a GPU,
            of host memory. None: 1 GiB of a GPU, or an eighth of the free host memory, at most 1 GiB.
        fit_ctx: The least n_ctx that is chosen; None: 512.
        fit_cache_bytes: Most memory of the KV cache if n_ctx is left open: the cache has as many cells as the model was trained
            with and as this holds, but at least 4,096 a slot. None: a quarter of the free memory.
        cache_prompt: Whether prefixes are shared and cached at all.
        host_cache_bytes: Most host memory that cached prefixes may take; None: an eighth of the machine's memory.
        mmproj: The file of the model's multimodal projector, with which prompts may have images; True: the projector beside the
            model; None: the projector beside the model if there is exactly one and it fits; False: no projector.
        mmproj_offload: Whether it computes on a GPU, if there is one.
        image_min_tokens: Least tokens of an image, for projectors that take images of any size; None: as its file has it.
        image_max_tokens: Most tokens of an image, likewise.
        media_cache_bytes: Memory for embeddings of images that no running request needs.
        state_folder: Folder of `save_prefix`; None: prefixes cannot be saved.
        disk_cache: Folder in which cached prefixes survive the engine, shared by any number of processes; "auto": `paceline/kv`
            in the user's cache folder; None: prefixes are in memory alone. What is saved to host memory is written there, and
            read again if that takes less time than computing it. Its files hold token ids and keys and values of prompts; only
            the user can read them.
        disk_cache_bytes: Most bytes of this folder, of all models; the least recently used files leave. None: a tenth of the
            free space, at most 16 GiB.

    Raises:
        InvalidParams: A value is out of its range; the message names the field.
        InvalidType: A value has the wrong type, or a field is unknown.
    """

    num_slots: int = 8
    chunk_size: int = 512
    strategy: Any = "paced"
    speculation: Any = None
    max_draft: int = 64
    min_draft: int = 0
    itl_target_ms: float | None = None
    max_tick_ms: float = 1000.0
    max_queue: int = 256
    max_queue_tokens: int | None = None
    when_full: Literal["wait", "refuse"] = "wait"
    max_embedding_tokens: int | None = None
    isolation: Literal["thread", "process"] = "thread"
    on_engine_death: Literal["replay", "fail"] | None = None
    max_restarts: int | None = None
    hang_timeout_s: float = 20.0
    rpc: str | Sequence[str] = ()
    rpc_timeout_s: float = 300.0
    trace: str | os.PathLike[str] | None = None
    trace_max_bytes: int = 1 << 30
    sleep_idle_s: float | None = None
    fit: bool = True
    fit_target_bytes: int | Sequence[int] | None = None
    fit_ctx: int | None = None
    fit_cache_bytes: int | None = None
    cache_prompt: bool = True
    host_cache_bytes: int | None = None
    mmproj: str | os.PathLike[str] | bool | None = None
    mmproj_offload: bool = True
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    media_cache_bytes: int = 256 << 20
    state_folder: str | os.PathLike[str] | None = None
    disk_cache: str | os.PathLike[str] | None = None
    disk_cache_bytes: int | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[EngineConfigKeywords]) -> None: ...

    def __new__(cls, **options: Any) -> Self:
        """Refuse unknown options, naming the nearest known one."""
        validation.reject_unknown(options, CONFIG_NAMES, "EngineConfig")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        validation.set_defaults(self)
        validation.integer("num_slots", self.num_slots, 1, _MAX_SLOTS)
        validation.integer("chunk_size", self.chunk_size, 1)
        validation.integer("max_draft", self.max_draft, 1, _MAX_DRAFT)
        validation.integer("min_draft", self.min_draft, 0, self.max_draft)
        if self.itl_target_ms is not None:
            validation.number("itl_target_ms", self.itl_target_ms, above=0)
        validation.number("max_tick_ms", self.max_tick_ms, above=0)
        validation.integer("max_queue", self.max_queue, 0)
        if self.max_queue_tokens is not None:
            validation.integer("max_queue_tokens", self.max_queue_tokens, 1)
        validation.choice("when_full", self.when_full, ("wait", "refuse"))
        if self.max_embedding_tokens is not None:
            validation.integer("max_embedding_tokens", self.max_embedding_tokens, 1)
        validation.choice("isolation", self.isolation, ("thread", "process"))
        self._check_process_options()
        validation.addresses("rpc", self.rpc, MAX_RPC_SERVERS)
        validation.number("rpc_timeout_s", self.rpc_timeout_s, low=1, high=86400)
        if self.trace is not None:
            validation.path("trace", self.trace)
        validation.integer("trace_max_bytes", self.trace_max_bytes, 4096)
        validation.boolean("cache_prompt", self.cache_prompt)
        self._check_fit()
        if self.state_folder is not None and not isinstance(self.state_folder, (str, os.PathLike)):
            raise InvalidType(f"state_folder must be a path, not {type(self.state_folder).__name__}")
        if self.disk_cache is not None:
            validation.path("disk_cache", self.disk_cache)
        if self.disk_cache_bytes is not None:
            validation.integer("disk_cache_bytes", self.disk_cache_bytes, 1)
        if self.host_cache_bytes is not None:
            validation.integer("host_cache_bytes", self.host_cache_bytes, 0)
        self._check_images()

    @property
    def fit_targets(self) -> tuple[int, ...]:
        """fit_target_bytes as a sequence; empty for the defaults."""
        if self.fit_target_bytes is None:
            return ()
        return (self.fit_target_bytes,) if isinstance(self.fit_target_bytes, int) else tuple(self.fit_target_bytes)

    @property
    def rpc_addresses(self) -> tuple[str, ...]:
        """`rpc` as a sequence."""
        return validation.addresses("rpc", self.rpc, MAX_RPC_SERVERS) if self.rpc else ()

    def _check_images(self) -> None:
        if self.mmproj is not None and not isinstance(self.mmproj, bool):
            validation.path("mmproj", self.mmproj)
        validation.boolean("mmproj_offload", self.mmproj_offload)
        for name in ("image_min_tokens", "image_max_tokens"):
            if getattr(self, name) is not None:
                validation.integer(name, getattr(self, name), 1)
        validation.integer("media_cache_bytes", self.media_cache_bytes, 0)

    def _check_fit(self) -> None:
        validation.boolean("fit", self.fit)
        if self.fit_ctx is not None:
            validation.integer("fit_ctx", self.fit_ctx, 1, 2**31 - 256)
        if self.fit_cache_bytes is not None:
            validation.integer("fit_cache_bytes", self.fit_cache_bytes, 0)
        given = self.fit_target_bytes
        if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
            if not given:
                raise InvalidParams("fit_target_bytes is an empty list; leave it out for the defaults")
            for place, size in enumerate(given):
                validation.integer(f"fit_target_bytes[{place}]", size, 0)
        elif given is not None:
            validation.integer("fit_target_bytes", given, 0)

    def _check_process_options(self) -> None:
        if self.on_engine_death is not None:
            validation.choice("on_engine_death", self.on_engine_death, ("replay", "fail"))
            if self.isolation == "thread":
                raise InvalidParams(
                    f'on_engine_death={self.on_engine_death!r} needs isolation="process": a thread dies with its program'
                )
        if self.max_restarts is not None:
            validation.integer("max_restarts", self.max_restarts, 0)
            if self.isolation == "thread":
                raise InvalidParams(
                    f'max_restarts={self.max_restarts} needs isolation="process": a thread is not started again'
                )
        if self.hang_timeout_s != math.inf:
            hint = "math.inf leaves a hung worker alone"
            validation.number("hang_timeout_s", self.hang_timeout_s, low=3, high=86400, hint=hint)
        if self.sleep_idle_s is not None:
            validation.number("sleep_idle_s", self.sleep_idle_s, above=0, high=1e9)
            if self.isolation == "thread":
                raise InvalidParams(
                    f'sleep_idle_s={self.sleep_idle_s:g} needs isolation="process": the memory of a process is given back as '
                    "a whole, that of a thread is not"
                )


CONFIG_NAMES = frozenset(field.name for field in dataclasses.fields(EngineConfig))
set_constructor(EngineConfig, EngineConfigKeywords)
