"""llama.cpp's own plan of the memory of a model and a context: both are built without allocating (its `no_alloc`).

The plan of a broken file may abort like a load, so engines plan in a process of its own. Memory for recurrent states is
allocated for the moment.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Unpack

from paceline import _native, validation
from paceline.keywords import ContextKeywords, with_keywords
from paceline.runtime.context import Context
from paceline.runtime.context_options import ContextOptions
from paceline.runtime.device import available_memory, devices, usable_memory
from paceline.runtime.memory_estimate import HOST, DeviceMemory, MemoryEstimate
from paceline.runtime.model import LoadMode, Model
from paceline.runtime.projector_facts import projector_facts
from paceline.runtime.tensor_placement import HOST_BUFFER

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
    """Return what a model and a context with these options would need. The model may have been loaded with `no_alloc`.

    num_slots: noted in the estimate. load_mode: how the model will be loaded. draft_heads: as of `Context`. options: those
    of `ContextOptions`.
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
    """Return what a multimodal projector would need, for the images that take most of it, beside a model.

    Raises `ModelLoadError`.
    """
    facts = projector_facts(Path(path))
    limits = (-1 if one is None else one for one in (image_min_tokens, image_max_tokens))
    uses = _native.plan_projector(facts.path, use_gpu, *limits)
    main = max(range(len(uses)), key=lambda index: uses[index].compute)  # where its weights are
    devices = tuple(
        dataclasses.replace(one, weights_bytes=weights, compute_bytes=(one.compute_bytes or 0) - weights)
        for index, use in enumerate(uses)
        for one in _by_device([use], 0, is_mapped=False)
        if one.compute_bytes
        for weights in (min(facts.weights_bytes, one.compute_bytes) if index == main else 0,)
    )
    return MemoryEstimate(n_ctx=0, num_slots=0, devices=devices, is_measured=True)


def projector_weights(path: str | os.PathLike[str], device: str) -> MemoryEstimate:
    """Return the weights alone, from the header, on a device. Raises `ModelLoadError`."""
    found = DeviceMemory(device=device, weights_bytes=projector_facts(Path(path)).weights_bytes)
    return MemoryEstimate(n_ctx=0, num_slots=0, devices=(found,), is_measured=False)


def memory_in_use(context: Context) -> MemoryEstimate:
    """Return what a context and its model have allocated, rows of logits included that are allocated when needed."""
    rows = _LOGIT_BYTES * context.n_vocab * context.n_outputs_max
    return MemoryEstimate(
        n_ctx=context.n_ctx,
        num_slots=context.n_seq_max,
        devices=_by_device(context.native.memory_use(), rows, is_mapped=False),
        is_measured=True,
    )


def on_empty_machine(estimate: MemoryEstimate) -> MemoryEstimate:
    """Return an estimate for which each device has all its memory free. What is not bounded stays so."""
    totals = {**{device.name: device.total_bytes for device in devices()}, HOST: usable_memory()}
    found = tuple(
        one if one.free_bytes is None else dataclasses.replace(one, free_bytes=totals.get(one.device, one.free_bytes))
        for one in estimate.devices
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
