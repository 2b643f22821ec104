"""Model, contexts and numbers of an engine: what follows from its options, its model and this machine."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import validation
from paceline.config import EngineConfig
from paceline.engine.arguments import EngineArguments
from paceline.errors import InvalidParams, InvalidType, NotEnoughMemory, Unsupported
from paceline.runtime import Adapter, Context, Device, MemoryClass, Model, devices, total_memory
from paceline.scheduling.limits import Limits

_log = logging.getLogger("paceline.engine")

_CTX_PER_SLOT = 4096
_LEAST_CTX = 512
_MAX_SCORED = 32  # rows of logits for prompt tokens in a tick: each costs 8 bytes x vocabulary, for ever
_MOST_RECURRENT_SLOTS = 127
_MOST_SEQ_IDS = 256
_HOST_SHARE = 8  # of the machine's memory, the part that idle prefixes may take
_ITL_TARGET_MS = {"cpu": 250.0, "gpu": 50.0}
# Context options that embedders take over; the others are about a memory that they do not have.
_EMBEDDER_OPTIONS = frozenset(
    (
        "n_threads",
        "n_threads_batch",
        "flash_attn",
        "offload_kqv",
        "op_offload",
        "rope_scaling",
        "rope_freq_base",
        "rope_freq_scale",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
        "yarn_orig_ctx",
    )
)


@dataclass(frozen=True, slots=True)
class Built:
    """The parts that a backend and a scheduler are made of. context: None for a model that cannot generate."""

    model: Model
    owns_model: bool
    context: Context | None
    adapters: Mapping[str, Adapter]
    embedder_options: Mapping[str, Any]
    limits: Limits


def build(model: Model | str | os.PathLike[str] | None, arguments: EngineArguments) -> Built:
    """Loads what has to be loaded. Raises as `Model.load` and `Context` do; gives everything back where it fails."""
    loaded, owns = _model(model, arguments.model)
    adapters: dict[str, Adapter] = {}
    try:
        adapters = _adapters(loaded, arguments.lora)
        context = _context(loaded, arguments.config, dict(arguments.context)) if _can_generate(loaded) else None
    except BaseException:
        for adapter in adapters.values():
            adapter.close()
        if owns:
            loaded.close()
        raise
    options = {name: value for name, value in arguments.context.items() if name in _EMBEDDER_OPTIONS}
    limits = _limits(loaded, context, arguments)
    _log.info(
        "%s with %s memory: %d slots, %d cells, %d of them for one sequence, %d sequence ids, %d rows of logits, "
        "%d MiB of host memory",
        loaded.desc,
        loaded.memory_class.value,
        limits.num_slots,
        limits.num_cells or 0,
        limits.max_positions,
        limits.num_seq_ids,
        0 if context is None else context.n_outputs_max,
        limits.host_bytes >> 20,
    )
    return Built(loaded, owns, context, adapters, options, limits)


def _model(model: Model | str | os.PathLike[str] | None, options: Mapping[str, Any]) -> tuple[Model, bool]:
    if isinstance(model, Model):
        if options:
            raise InvalidParams(f"{next(iter(options))} is an option of loading, and model is loaded already")
        return model, False
    if model is None:
        from paceline.demo import demo_model_path

        model = demo_model_path()
    return Model.load(model, **options), True


def _can_generate(model: Model) -> bool:
    if model.has_encoder and model.has_decoder:
        raise Unsupported(
            "an encoder-decoder model keeps one text a context, so an engine cannot share it; use Context.generate"
        )
    return model.has_decoder


def _adapters(model: Model, lora: object) -> dict[str, Adapter]:
    """By name: given as a mapping of names to paths, or as a list of paths whose stems are the names."""
    named: dict[str, Any]
    if isinstance(lora, Mapping):
        named = {validation.text("lora: the name", name): path for name, path in lora.items()}
    elif isinstance(lora, Sequence) and not isinstance(lora, (str, bytes)):
        named = {Path(path).stem: path for path in lora}
        if len(named) < len(lora):
            raise InvalidParams("lora has two files of the same name; give a mapping of names to paths")
    else:
        raise InvalidType(f"lora must be a list of paths or a mapping of names to paths, not {type(lora).__name__}")
    loaded: dict[str, Adapter] = {}
    try:
        for name, path in named.items():
            loaded[name] = model.load_adapter(path)
    except BaseException:
        for adapter in loaded.values():
            adapter.close()
        raise
    return loaded


def _context(model: Model, config: EngineConfig, options: dict[str, Any]) -> Context:
    """The context for generation. Where n_ctx was left to us and memory is short, it is halved until it fits."""
    num_slots = config.num_slots
    if model.memory_class in (MemoryClass.RECURRENT, MemoryClass.HYBRID) and num_slots > _MOST_RECURRENT_SLOTS:
        raise InvalidParams(f"num_slots must be at most {_MOST_RECURRENT_SLOTS} for a recurrent model, not {num_slots}")
    asked = options.pop("n_ctx", None)
    trained = model.n_ctx_train if model.n_ctx_train > 0 else _CTX_PER_SLOT
    n_ctx = min(trained, _CTX_PER_SLOT) * num_slots if asked is None else asked
    while True:
        try:
            return _sized_context(model, num_slots, n_ctx, options)
        except NotEnoughMemory:
            if asked is not None or n_ctx <= _LEAST_CTX:
                raise
            n_ctx //= 2
            _log.warning("memory is short: the KV cache gets n_ctx=%d cells", n_ctx)


def _sized_context(model: Model, num_slots: int, n_ctx: int, options: dict[str, Any]) -> Context:
    num_seqs = _num_seq_ids(model, num_slots) + 1
    n_batch = options.get("n_batch")
    room = n_batch if isinstance(n_batch, int) else _MAX_SCORED + num_slots
    outputs = max(num_seqs, min(num_slots + _MAX_SCORED, room))
    return Context(model, n_ctx=n_ctx, n_seq_max=num_seqs, n_outputs_max=outputs, **options)


def _num_seq_ids(model: Model, num_slots: int) -> int:
    """Those of running sequences; where prefixes can stay on the device as they are, as many again and at least four.

    One more is the backend's own. Every id costs memory where windows or states are kept for it, so others have no more.
    """
    if model.memory_class is not MemoryClass.ATTENTION:
        return num_slots
    return min(num_slots + max(4, num_slots), _MOST_SEQ_IDS - 1)


def uses_gpu(options: Mapping[str, Any], machine: Sequence[Device]) -> bool:
    """Whether a model that is loaded with these options on this machine computes on a GPU."""
    names = {device.name.lower() for device in machine if device.kind in ("gpu", "igpu")}
    wanted = options.get("devices")
    if wanted is not None:
        names &= {name.lower() for name in wanted}
    return bool(names) and options.get("n_gpu_layers") != 0


def _limits(model: Model, context: Context | None, arguments: EngineArguments) -> Limits:
    """A sequence gets no further than the model was trained for, unless options of RoPE stretch it."""
    config, target_ms = arguments.config, arguments.config.itl_target_ms
    if target_ms is None:
        target_ms = _ITL_TARGET_MS["gpu" if uses_gpu(arguments.model, devices()) else "cpu"]
    common = Limits(
        num_slots=config.num_slots,
        n_batch=1,
        chunk_size=config.chunk_size,
        max_positions=0,
        num_cells=None,
        max_scored=1,
        can_share_part=model.memory_class is MemoryClass.ATTENTION,
        itl_target_s=target_ms / 1000,
        max_tick_s=config.max_tick_ms / 1000,
    )
    if context is None:
        return common
    stretched = {"rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"} & arguments.context.keys()
    trained = model.n_ctx_train if model.n_ctx_train > 0 and not stretched else context.max_positions
    return dataclasses.replace(
        common,
        n_batch=context.n_batch,
        n_ubatch=context.n_ubatch,
        max_positions=min(context.max_positions, trained),
        num_cells=None if model.memory_class is MemoryClass.RECURRENT else context.n_ctx,
        num_seq_ids=_num_seq_ids(model, config.num_slots),
        host_bytes=_host_bytes(config),
        max_scored=max(1, context.n_outputs_max - config.num_slots),
    )


def _host_bytes(config: EngineConfig) -> int:
    if not config.cache_prompt:
        return 0
    return total_memory() // _HOST_SHARE if config.host_cache_bytes is None else config.host_cache_bytes
