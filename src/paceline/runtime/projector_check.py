"""Checks of projectors' files (mmproj): refuses values on which libmtmd would abort, naming the key and the value.

It reads numbers by one type each, divides by sizes, and takes tensors as the metadata promise them. What is not caught:
`docs/known-aborts.md`.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline import _native
from paceline.errors import ModelLoadError
from paceline.runtime.audio_projector_tensors import check_audio_tensors
from paceline.runtime.gguf_file import GgufFile, TensorInfo, ValueType, read_gguf
from paceline.runtime.projector_tensors import check_vision_tensors

MAX_LAYERS: Final = 512
_MAX_SIDE: Final = 16384
_MAX_WIDTH: Final = 1 << 20
_ALIGNMENT: Final = 32
_INTEGERS: Final = frozenset(
    {ValueType.UINT8, ValueType.INT8, ValueType.UINT16, ValueType.INT16, ValueType.UINT32, ValueType.INT32,
     ValueType.UINT64, ValueType.INT64}
)  # fmt: skip
_TYPES: Final = {
    "clip.minicpmv_version": ValueType.INT32,
    "clip.projector_type": ValueType.STRING,
    "clip.vision.projector_type": ValueType.STRING,
    "clip.audio.projector_type": ValueType.STRING,
    "clip.gen.audio.projector_type": ValueType.STRING,
    "clip.vision.mm_patch_merge_type": ValueType.STRING,
    "clip.gen.audio.model_variant": ValueType.STRING,
    "clip.vision.swiglu_clamp": ValueType.FLOAT32,
    "clip.has_vision_encoder": ValueType.BOOL,
    "clip.has_audio_encoder": ValueType.BOOL,
    "clip.has_gen_audio_encoder": ValueType.BOOL,
    "clip.use_gelu": ValueType.BOOL,
    "clip.use_silu": ValueType.BOOL,
    "general.name": ValueType.STRING,
    "general.description": ValueType.STRING,
}
# Of clip.vision and clip.audio, read as UINT32 whatever they are.
_NUMBERS: Final = (
    "embedding_length", "feed_forward_length", "block_count", "projection_dim", "attention.head_count",
    "attention.head_count_kv", "attention.head_dim", "image_size", "patch_size", "n_wa_pattern", "window_size",
    "spatial_merge_size", "projector.scale_factor", "image_min_pixels", "image_max_pixels", "num_mel_bins",
    "projector.stack_factor",
)  # fmt: skip
_LEAST_ONE: Final = ("window_size", "spatial_merge_size", "projector.scale_factor", "num_mel_bins")


def check_projector(path: str | Path, image_max_tokens: int | None = None) -> None:
    """Check the header of a projector's file, for images of as many tokens. Raises `ModelLoadError`."""
    file = read_gguf(path)
    architecture = _value(file, "general.architecture", ValueType.STRING)
    if architecture != b"clip":
        shown = architecture.decode(errors="replace") if isinstance(architecture, bytes) else "unknown"
        raise ModelLoadError(
            f"{path} is not a multimodal projector: its general.architecture is {shown!r}, not 'clip'; "
            "the projectors of a model are named mmproj-*.gguf"
        )
    _check_types(path, file)
    modalities = [name for name in ("vision", "audio") if _value(file, f"clip.has_{name}_encoder", ValueType.BOOL)]
    if not modalities:
        raise ModelLoadError(f"{path}: neither clip.has_vision_encoder nor clip.has_audio_encoder is true")
    for name in modalities:
        _check_sizes(path, file, name)
    _check_tensors(path, file, image_max_tokens)


def _check_types(path: str | Path, file: GgufFile) -> None:
    for raw, found in file.metadata.items():
        key = raw.decode(errors="replace")
        wanted = _TYPES.get(key)
        if wanted is None and key.startswith("clip.") and key.endswith("epsilon"):
            wanted = ValueType.FLOAT32
        if wanted is None and key.startswith(("clip.vision.", "clip.audio.")) and key.split(".", 2)[2] in _NUMBERS:
            wanted = ValueType.UINT32
        if wanted is None and key.startswith("clip.") and found.type in _INTEGERS:
            wanted = ValueType.UINT32
        if wanted is not None and found.type is not wanted:
            raise ModelLoadError(f"{path}: {key} has the type {found.type.name}, but it must have {wanted.name}")
        if (
            key.startswith("clip.")
            and key.endswith("epsilon")
            and not (math.isfinite(found.value) and found.value >= 0)
        ):
            raise ModelLoadError(f"{path}: {key} is {found.value}, but it must be finite and at least 0")


def _check_sizes(path: str | Path, file: GgufFile, name: str) -> None:
    ranges = {"embedding_length": (1, _MAX_WIDTH), "block_count": (0, MAX_LAYERS), "attention.head_count": (0, 4096)}
    if name == "vision":
        ranges |= {"image_size": (1, _MAX_SIDE), "patch_size": (1, _MAX_SIDE)}
    ranges |= {key: (1, _MAX_SIDE) for key in _LEAST_ONE if f"clip.{name}.{key}".encode() in file.metadata}
    numbers = {key: _number(path, file, f"clip.{name}.{key}", bounds) for key, bounds in ranges.items()}
    width, heads = numbers["embedding_length"], numbers["attention.head_count"]
    if heads and width % heads:
        raise ModelLoadError(
            f"{path}: clip.{name}.embedding_length is {width}, but it must be a multiple of the {heads} heads"
        )
    if name == "vision":
        _check_pixels(path, file, numbers["image_size"], numbers["patch_size"])


def _number(path: str | Path, file: GgufFile, key: str, bounds: tuple[int, int]) -> int:
    number: int | None = _value(file, key, ValueType.UINT32)
    if number is None:
        raise ModelLoadError(f"{path}: {key} is missing, which a projector must have")
    if not bounds[0] <= number <= bounds[1]:
        raise ModelLoadError(f"{path}: {key} is {number}, but it must be {bounds[0]} to {bounds[1]}")
    return number


def _check_pixels(path: str | Path, file: GgufFile, image_size: int, patch_size: int) -> None:
    if patch_size > image_size:
        raise ModelLoadError(f"{path}: clip.vision.patch_size is {patch_size}, but an image has {image_size} pixels")
    for key in ("image_mean", "image_std"):
        values = file.metadata.get(f"clip.vision.{key}".encode())
        if values is not None and values.type is ValueType.ARRAY and values.item_type is ValueType.FLOAT32:
            bad = [one for one in values.value if not math.isfinite(one) or (key == "image_std" and one == 0)]
            if bad:
                raise ModelLoadError(
                    f"{path}: clip.vision.{key} has the value {bad[0]}, by which no pixel can be scaled"
                )


def _check_tensors(path: str | Path, file: GgufFile, image_max_tokens: int | None) -> None:
    shapes = {tensor.name.decode(errors="replace"): tensor.shape for tensor in file.tensors}
    check_vision = partial(check_vision_tensors, max_tokens=image_max_tokens)
    for modality, check in (("vision", check_vision), ("audio", check_audio_tensors)):
        if _value(file, f"clip.has_{modality}_encoder", ValueType.BOOL):
            numbers = {name: _value(file, f"clip.{modality}.{name}", ValueType.UINT32) for name in _NUMBERS}
            check(path, _projector(file, modality), numbers, shapes)
    alignment = _value(file, "general.alignment", ValueType.UINT32) or _ALIGNMENT
    begin = -(-file.header_bytes // alignment) * alignment
    end = max((begin + tensor.offset + _tensor_bytes(path, tensor) for tensor in file.tensors), default=begin)
    size = Path(path).stat().st_size
    if end > size:
        raise ModelLoadError(f"{path}: the file is cut off: its tensors end at byte {end}, and it has {size}")


def _projector(file: GgufFile, modality: str) -> str:
    """Return the kind of projector of an encoder."""
    found = _value(file, "clip.projector_type", ValueType.STRING)
    found = found or _value(file, f"clip.{modality}.projector_type", ValueType.STRING) or b""
    return str(found, "utf-8", "replace")


def tensors_bytes(path: str | Path, file: GgufFile) -> int:
    """Return the bytes of all tensors of a file. Raises `ModelLoadError` for a type that is not known."""
    return sum(_tensor_bytes(path, tensor) for tensor in file.tensors)


def _tensor_bytes(path: str | Path, tensor: TensorInfo) -> int:
    found = _native.tensor_type_size(tensor.type)
    if found is None:
        name = tensor.name.decode(errors="replace")
        raise ModelLoadError(f"{path}: tensor {name!r} has the type {tensor.type}, which is unknown")
    block_bytes, block_values = found
    return math.prod(tensor.shape) // block_values * block_bytes


def _value(file: GgufFile, key: str, kind: ValueType) -> Any:
    found = file.metadata.get(key.encode())
    return found.value if found is not None and found.type is kind else None
