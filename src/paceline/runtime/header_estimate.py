"""What a model needs, from the header of its file alone: weights by tensor, KV cache and states by layer, on their devices.

Layers are placed as llama.cpp places them (load_tensors in src/llama-model.cpp). Buffers of the forward pass are not known
here; a plan has them, see `plan_memory`.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline import _native
from paceline.errors import ModelLoadError
from paceline.runtime.device import Device
from paceline.runtime.memory_estimate import HOST, DeviceMemory, MemoryEstimate
from paceline.runtime.model_header import ModelHeader

_LAYER: Final = re.compile(rb"blk\.(\d+)\.")
_PAD: Final = 256  # llama.cpp rounds windows up to it


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What options of a context decide about its cache. Types are llama.cpp's numbers; n_seq_max is its own count.

    num_states: of each sequence, at most: some architectures keep one alone.
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
    """What decides where layers and tensors are. gpus: those in use; patterns: of `tensor_placements`.

    draft_heads: whether the layers that predict further tokens are loaded and have a cache.
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
    """Return the device of each layer, and at the end that of the output."""
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
    """Compile a pattern of llama.cpp's; None where Python's regular expressions do not have it."""
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
    """Return the cells of draft heads: full attention in a context of their own."""
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
