"""The memory that a model with a context needs, by device, against the free memory: records, llama.cpp's plan, an estimate.

llama.cpp plans by building model and context without allocating (its `no_alloc`), except memory for recurrent states for a
moment. The plan of a broken file may abort like a load, so engines plan in a separate process. The estimate reads the header of
the file alone: weights by tensor, KV cache and states by layer, placed on devices as llama.cpp does (load_tensors in
src/llama-model.cpp), without the buffers of the forward pass.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, Unpack

from paceline import _native, validation
from paceline.errors import ModelLoadError
from paceline.keywords import ContextKeywords, with_keywords
from paceline.runtime.context import Context
from paceline.runtime.context_options import ContextOptions
from paceline.runtime.device import Device, available_memory, devices, usable_memory
from paceline.runtime.model import HOST_BUFFER, LoadMode, Model
from paceline.runtime.model_header import ModelHeader
from paceline.runtime.projector_file import projector_facts

HOST = "CPU"  # the name of host memory among devices


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The bytes of a device's memory that a model needs.

    Attributes:
        device: The device as `paceline info` names it; "CPU" is host memory.
        weights_bytes: Tensors of the model.
        mapped_bytes: The part of weights_bytes that is mapped from the file. The operating system reads it when needed, and
            may drop it when memory is short; it is therefore no part of needed_bytes.
        cache_bytes: The KV cache, and recurrent states.
        compute_bytes: Buffers of the forward pass and rows of logits; None if not measured.
        free_bytes: Bytes that can be allocated now, within a container's limit; None if unknown.
    """

    device: str
    weights_bytes: int
    mapped_bytes: int = 0
    cache_bytes: int = 0
    compute_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Bytes to allocate."""
        return self.total_bytes - self.mapped_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes needed to run without reading weights from the file again."""
        return self.weights_bytes + self.cache_bytes + (self.compute_bytes or 0)

    def fits(self, margin_bytes: int = 0) -> bool:
        """Whether the needed bytes and `margin_bytes` more are free."""
        return self.free_bytes is None or self.needed_bytes + margin_bytes <= self.free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The memory that a model with a KV cache of `n_ctx` cells for `num_slots` sequences needs.

    Attributes:
        n_ctx: KV cells.
        num_slots: Sequences that run at once.
        devices: The memory of each device, host memory last.
        is_measured: Whether llama.cpp planned it; otherwise it was computed from the file's header alone, without the
            buffers of the forward pass.
    """

    n_ctx: int
    num_slots: int
    devices: tuple[DeviceMemory, ...]
    is_measured: bool

    @property
    def weights_bytes(self) -> int:
        """The tensors of the model on all devices."""
        return sum(device.weights_bytes for device in self.devices)

    @property
    def cache_bytes(self) -> int:
        """KV cache and recurrent states on all devices."""
        return sum(device.cache_bytes for device in self.devices)

    @property
    def compute_bytes(self) -> int | None:
        """Buffers of the forward pass on all devices; None if not measured."""
        return sum(device.compute_bytes or 0 for device in self.devices) if self.is_measured else None

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds on all devices."""
        return sum(device.total_bytes for device in self.devices)

    @property
    def fits(self) -> bool:
        """Whether every device can allocate its needed bytes. Mapped weights may exceed the memory: they are read again."""
        return all(device.fits() for device in self.devices)

    @property
    def short_of_cache(self) -> bool:
        """Whether it fits, but not together with the mapped weights, which are then read from the file again and again."""
        return self.fits and any(
            device.mapped_bytes and device.free_bytes is not None and device.total_bytes > device.free_bytes
            for device in self.devices
        )

    def plus(self, other: MemoryEstimate) -> MemoryEstimate:
        """Return the memory of this model and another together, with the cells and slots of this model."""
        devices = {memory.device: memory for memory in self.devices}
        for added in other.devices:
            own = devices.get(added.device)
            devices[added.device] = added if own is None else _sum(own, added)
        host = devices.pop(HOST, None)
        found = (*devices.values(), *(() if host is None else (host,)))
        return dataclasses.replace(self, devices=found, is_measured=self.is_measured and other.is_measured)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Self:
        """Return the estimate from the result of `dataclasses.asdict`."""
        devices = tuple(DeviceMemory(**memory) for memory in found["devices"])
        return cls(**{**found, "devices": devices})


def _sum(memory: DeviceMemory, other: DeviceMemory) -> DeviceMemory:
    measured = [size for size in (memory.compute_bytes, other.compute_bytes) if size is not None]
    return DeviceMemory(
        device=memory.device,
        weights_bytes=memory.weights_bytes + other.weights_bytes,
        mapped_bytes=memory.mapped_bytes + other.mapped_bytes,
        cache_bytes=memory.cache_bytes + other.cache_bytes,
        compute_bytes=sum(measured) if measured else None,
        free_bytes=other.free_bytes if memory.free_bytes is None else memory.free_bytes,
    )


def mebibytes(count: int) -> str:
    """Return bytes for a message."""
    return f"{count / 2**20:,.1f} MiB" if count < 10 << 20 else f"{count / 2**20:,.0f} MiB"


_LOGIT_BYTES = 4


@with_keywords(ContextOptions)
def plan_memory(
    model: Model,
    *,
    num_slots: int = 1,
    load_mode: LoadMode = "auto",
    draft_heads: Model | None = None,
    **options: Unpack[ContextKeywords],
) -> MemoryEstimate:
    """Return llama.cpp's plan for a model and a context with these options. The model may have been loaded with `no_alloc`.

    Args:
        model: The model.
        num_slots: Recorded in the estimate.
        load_mode: How the model will be loaded.
        draft_heads: As for `Context`.
        **options: The fields of `ContextOptions`.

    Raises as `Context`.
    """
    validation.reject_unknown(options, ContextOptions.names(), "ContextOptions")
    resolved = ContextOptions(**options).resolve(model, is_checked=False)
    given = resolved if draft_heads is None else {**resolved, "heads": draft_heads.native}
    uses = _native.plan_context(model.native, _native.ContextOptions(**given))
    rows = _LOGIT_BYTES * model.n_vocab * resolved["n_outputs_max"]
    return MemoryEstimate(
        n_ctx=resolved["n_ctx"],
        num_slots=num_slots,
        devices=_by_device(uses, rows, is_mapped=load_mode in ("auto", "mmap")),
        is_measured=True,
    )


def plan_projector(
    path: str | os.PathLike[str],
    *,
    use_gpu: bool,
    image_min_tokens: int | None = None,
    image_max_tokens: int | None = None,
) -> MemoryEstimate:
    """Return the memory that a multimodal projector needs beside a model, for the largest images.

    Raises `ModelLoadError`.
    """
    facts = projector_facts(Path(path))
    limits = (-1 if limit is None else limit for limit in (image_min_tokens, image_max_tokens))
    uses = _native.plan_projector(facts.path, use_gpu, *limits)
    main = max(range(len(uses)), key=lambda index: uses[index].compute)  # the device of its weights
    devices = tuple(
        dataclasses.replace(memory, weights_bytes=weights, compute_bytes=(memory.compute_bytes or 0) - weights)
        for index, use in enumerate(uses)
        for memory in _by_device([use], 0, is_mapped=False)
        if memory.compute_bytes
        for weights in (min(facts.weights_bytes, memory.compute_bytes) if index == main else 0,)
    )
    return MemoryEstimate(n_ctx=0, num_slots=0, devices=devices, is_measured=True)


def projector_weights(path: str | os.PathLike[str], device: str) -> MemoryEstimate:
    """Return the memory of a projector's weights on a device, from its header. Raises `ModelLoadError`."""
    found = DeviceMemory(device=device, weights_bytes=projector_facts(Path(path)).weights_bytes)
    return MemoryEstimate(n_ctx=0, num_slots=0, devices=(found,), is_measured=False)


def memory_in_use(context: Context) -> MemoryEstimate:
    """Return the memory that a context and its model have allocated, with the rows of logits of the largest pass."""
    rows = _LOGIT_BYTES * context.n_vocab * context.n_outputs_max
    return MemoryEstimate(
        n_ctx=context.n_ctx,
        num_slots=context.n_seq_max,
        devices=_by_device(context.native.memory_use(), rows, is_mapped=False),
        is_measured=True,
    )


def on_empty_machine(estimate: MemoryEstimate) -> MemoryEstimate:
    """Return an estimate as if all memory of each device were free. An unknown free memory stays unknown."""
    totals = {**{device.name: device.total_bytes for device in devices()}, HOST: usable_memory()}
    found = tuple(
        memory
        if memory.free_bytes is None
        else dataclasses.replace(memory, free_bytes=totals.get(memory.device, memory.free_bytes))
        for memory in estimate.devices
    )
    return dataclasses.replace(estimate, devices=found)


def _by_device(uses: Iterable[_native.BufferUse], rows_bytes: int, *, is_mapped: bool) -> tuple[DeviceMemory, ...]:
    sums: dict[str, list[int]] = {HOST: [0, 0, 0, rows_bytes]}
    for use in uses:
        at = sums.setdefault(HOST if use.is_host or not use.device else use.device, [0, 0, 0, 0])
        at[0] += use.weights
        at[1] += use.weights if is_mapped and use.buffer == HOST_BUFFER else 0
        at[2] += use.cache
        at[3] += use.compute
    # With unified memory a CUDA device allocates beyond its own.
    bounded = not os.environ.get("GGML_CUDA_ENABLE_UNIFIED_MEMORY")
    free: dict[str, int | None] = {device.name: device.free_bytes for device in devices()} if bounded else {}
    free[HOST] = available_memory()
    return tuple(
        DeviceMemory(
            device=name,
            weights_bytes=weights,
            mapped_bytes=mapped,
            cache_bytes=cache,
            compute_bytes=compute,
            free_bytes=free.get(name),
        )
        for name, (weights, mapped, cache, compute) in sorted(sums.items(), key=lambda entry: entry[0] == HOST)
    )


_LAYER: Final = re.compile(rb"blk\.(\d+)\.")
_PAD: Final = 256  # llama.cpp rounds windows up to it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The options of a context that decide the size of its cache.

    Attributes:
        n_ctx: KV cells.
        n_seq_max: Sequences by llama.cpp's count.
        n_ubatch: Most tokens computed at once.
        type_k: The type of keys, by llama.cpp's number.
        type_v: The type of values, by llama.cpp's number.
        swa_full: Whether sliding window layers keep n_ctx cells.
        kv_unified: Whether all sequences share one pool of cells.
        num_states: Most recurrent states of each sequence; some architectures keep a single state.
        offload_kqv: Whether the cache is on the device of its layer.
    """

    n_ctx: int
    n_seq_max: int
    n_ubatch: int
    type_k: int
    type_v: int
    swa_full: bool = False
    kv_unified: bool = True
    num_states: int = 1
    offload_kqv: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The options that place layers and tensors on devices.

    Attributes:
        gpus: The GPUs in use.
        n_gpu_layers: Layers on GPUs; None and -1 mean all.
        tensor_split: Shares of the GPUs; by default by their free memory.
        patterns: Patterns of tensor names with buffers, from `tensor_placements`.
        is_mapped: Whether weights in host memory are mapped from the file.
        draft_heads: Whether the layers that predict further tokens are loaded and have a cache.
    """

    gpus: Sequence[Device] = ()
    n_gpu_layers: int | None = None
    tensor_split: Sequence[float] = ()
    patterns: Sequence[tuple[str, str]] = ()
    is_mapped: bool = True
    draft_heads: bool = False


def estimate_from_header(
    header: ModelHeader, shape: CacheShape | None, placement: Placement, *, num_slots: int, free_host: int | None
) -> MemoryEstimate:
    """Return weights and cache by device, without buffers of the forward pass. shape: None without a context."""
    layers = _devices_of_layers(header.n_layer, placement)
    weights = _weights(header, layers, placement)
    cache = Counter[str]() if shape is None else _cache(header, shape, layers)
    if shape is not None and placement.draft_heads:
        cache += _cache_of_heads(header, shape, layers)
    free = {device.name: device.free_bytes for device in placement.gpus}
    devices = [
        DeviceMemory(
            device=name,
            weights_bytes=weights[name],
            mapped_bytes=weights[name] if name == HOST and placement.is_mapped else 0,
            cache_bytes=cache[name],
            free_bytes=free_host if name == HOST else free.get(name),
        )
        for name in (*free, HOST)
    ]
    n_ctx = 0 if shape is None else shape.n_ctx
    return MemoryEstimate(n_ctx=n_ctx, num_slots=num_slots, devices=tuple(devices), is_measured=False)


def _devices_of_layers(n_layer: int, placement: Placement) -> list[str]:
    """Return the device of each layer, and of the output as the last entry."""
    if not placement.gpus or placement.n_gpu_layers == 0:
        return [HOST] * (n_layer + 1)
    wanted = n_layer + 1 if placement.n_gpu_layers in (None, -1) else min(placement.n_gpu_layers or 0, n_layer + 1)
    shares = list(placement.tensor_split)[: len(placement.gpus)]
    if not any(shares):
        shares = [float(device.free_bytes) for device in placement.gpus]
    ends = list(itertools.accumulate(shares))
    points = [end / ends[-1] if ends[-1] else 1.0 for end in ends]
    first = n_layer + 1 - wanted
    names = [HOST] * first
    for place in range(wanted):
        index = min(bisect.bisect_right(points, place / wanted), len(placement.gpus) - 1)
        names.append(placement.gpus[index].name)
    return names


def _weights(header: ModelHeader, layers: Sequence[str], placement: Placement) -> Counter[str]:
    overrides = [(_compiled(pattern), buffer) for pattern, buffer in placement.patterns]
    found: Counter[str] = Counter()
    names = {tensor.name for tensor in header.tensors}
    for tensor in header.tensors:
        size = header.tensor_bytes(tensor)
        if header.is_unused(tensor) and not placement.draft_heads:
            continue
        match = _LAYER.match(tensor.name)
        if match:
            at = layers[int(match[1])] if int(match[1]) < len(layers) - 1 else HOST
        else:
            at = layers[-1] if tensor.name.startswith((b"output", b"cls")) else HOST
        name = tensor.name.decode("utf-8", "replace")
        at = next((buffer for pattern, buffer in overrides if pattern is not None and pattern.search(name)), at)
        found[at] += size
        if tensor.name == b"token_embd.weight" and b"output.weight" not in names and layers[-1] != HOST:
            found[layers[-1]] += size  # tied weights have a copy for the output there
    return found


def _compiled(pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern of llama.cpp; None if Python's regular expressions do not support it."""
    try:
        return re.compile(pattern)
    except re.error:
        return None


def _cache(header: ModelHeader, shape: CacheShape, layers: Sequence[str]) -> Counter[str]:
    window_cells = _window_cells(header.n_swa, shape)
    found: Counter[str] = Counter()
    for layer in range(header.n_running):
        at = layers[layer] if shape.offload_kqv else HOST
        key, value = header.cell_widths(layer)
        cells = window_cells if header.slides(layer) else shape.n_ctx
        found[at] += cells * (_row_bytes(shape.type_k, key) + _row_bytes(shape.type_v, value))
        found[at] += shape.n_seq_max * shape.num_states * header.state_bytes(layer)
    return found


def _cache_of_heads(header: ModelHeader, shape: CacheShape, layers: Sequence[str]) -> Counter[str]:
    """Return the bytes of the draft heads' cells: full attention in a separate context."""
    found: Counter[str] = Counter()
    for layer in range(header.n_running, header.n_layer):
        key, value = header.widths_of_heads(layer)
        at = layers[layer] if shape.offload_kqv else HOST
        found[at] += shape.n_ctx * (_row_bytes(shape.type_k, key) + _row_bytes(shape.type_v, value))
    return found


def _window_cells(n_swa: int, shape: CacheShape) -> int:
    if shape.swa_full:
        return shape.n_ctx
    streams = 1 if shape.kv_unified else shape.n_seq_max
    cells = min(shape.n_ctx // streams, n_swa * (shape.n_seq_max if shape.kv_unified else 1) + shape.n_ubatch)
    return -(-cells // _PAD) * _PAD * streams


def _row_bytes(cache_type: int, width: int) -> int:
    size = _native.tensor_type_size(cache_type)
    if size is None:
        raise ModelLoadError(f"the cache type {cache_type} is unknown to llama.cpp")
    block_bytes, block_values = size
    return -(-width // block_values) * block_bytes
