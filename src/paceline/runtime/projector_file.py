"""Checks of projectors' files (mmproj): refuses values on which libmtmd would abort, naming the key and the value.

libmtmd reads each number by one type, divides by sizes, and uses tensors, most of them optional, without checking their
presence or their size. Tensors are checked for the projectors that were tried with each tensor left out: LLaVA, Gemma, Qwen VL
and Pixtral for images, and the encoders of Whisper's kind for audio (Ultravox, Voxtral, Qwen 2 Audio, Qwen 2.5 Omni).
`docs/known-aborts.md` lists the values that are not caught.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline.errors import ModelLoadError
from paceline.runtime.gguf_file import GgufFile, ValueType, read_gguf, tensor_bytes

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
            bad = [value for value in values.value if not math.isfinite(value) or (key == "image_std" and value == 0)]
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
    end = max((begin + tensor.offset + tensor_bytes(path, tensor) for tensor in file.tensors), default=begin)
    size = Path(path).stat().st_size
    if end > size:
        raise ModelLoadError(f"{path}: the file is cut off: its tensors end at byte {end}, and it has {size}")


def _projector(file: GgufFile, modality: str) -> str:
    found = _value(file, "clip.projector_type", ValueType.STRING)
    found = found or _value(file, f"clip.{modality}.projector_type", ValueType.STRING) or b""
    return str(found, "utf-8", "replace")


def _value(file: GgufFile, key: str, kind: ValueType) -> Any:
    found = file.metadata.get(key.encode())
    return found.value if found is not None and found.type is kind else None


_NEEDED_BY_ALL: Final = ("v.patch_embd.weight",)
_NEEDED_VISION: Final = {
    "mlp": (*_NEEDED_BY_ALL, "v.position_embd.weight", "mm.0.weight", "mm.0.bias"),
    "gemma3": _NEEDED_BY_ALL,
    "gemma4v": (*_NEEDED_BY_ALL, "v.position_embd.weight"),
    "pixtral": _NEEDED_BY_ALL,
    "qwen3vl_merger": (*_NEEDED_BY_ALL, "v.patch_embd.weight.1", "v.patch_embd.bias", "v.position_embd.weight"),
    "qwen2vl_merger": (*_NEEDED_BY_ALL, "v.patch_embd.weight.1"),
    "qwen2.5vl_merger": (*_NEEDED_BY_ALL, "v.patch_embd.weight.1"),
}
_NEED_BIASES: Final = ("qwen2vl_merger", "qwen2.5vl_merger")
_QUARTER_HEADS: Final = (*_NEED_BIASES, "qwen3vl_merger", "gemma4v", "pixtral")  # rotated in two dimensions
_SQUARE_TABLES: Final = ("mlp", "gemma3", "qwen3vl_merger")
_MAX_TOKENS_GEMMA4: Final = 1120


def check_vision_tensors(
    path: str | Path,
    projector: str,
    numbers: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    max_tokens: int | None = None,
) -> None:
    """Check a vision encoder. numbers: of `clip.vision`, by their names; shapes: of all tensors, innermost first.

    max_tokens: of an image; None takes the value of the file.

    Raises `ModelLoadError`; does nothing for other projectors.
    """
    if projector not in _NEEDED_VISION:
        return
    needed = list(_NEEDED_VISION[projector])
    if projector == "mlp" and "mm.3.weight" not in shapes:  # the kind with norms has others
        needed += ["mm.2.weight", "mm.2.bias"]
    needed += _needed_of_layers(projector, numbers["block_count"], shapes)
    for name in needed:
        if name not in shapes and not ("attn_" in name and _fused(name) in shapes):
            raise ModelLoadError(f"{path}: the tensor {name} is missing")
    _check_vision_sizes(path, projector, numbers, shapes)
    if projector == "gemma4v":
        _check_places(path, numbers, shapes, max_tokens or _MAX_TOKENS_GEMMA4)


def _needed_of_layers(projector: str, count: int, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    needed: list[str] = []
    for layer in range(count):
        if projector == "qwen3vl_merger":
            needed += [f"v.blk.{layer}.attn_qkv.weight", f"v.blk.{layer}.attn_qkv.bias"]
            if f"v.deepstack.{layer}.fc1.weight" in shapes:
                needed.append(f"v.deepstack.{layer}.fc2.weight")
            continue
        for name in ("q", "k", "v"):
            needed.append(f"v.blk.{layer}.attn_{name}.weight")
            if projector in _NEED_BIASES:
                needed.append(f"v.blk.{layer}.attn_{name}.bias")
    return needed


def _check_places(
    path: str | Path, numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], max_tokens: int
) -> None:
    """Check Gemma 4's tables of positions: a side of an image may have as many patches as all of its tokens need."""
    width, places, *tables = shapes["v.position_embd.weight"]
    most = max_tokens * (numbers.get("projector.scale_factor") or 3)
    if width != numbers["embedding_length"] or tables != [2] or places < most:
        raise ModelLoadError(
            f"{path}: v.position_embd.weight has {places} places, but an image of {max_tokens} tokens may have {most} patches "
            "a side; lower image_max_tokens where it was raised"
        )


def _fused(name: str) -> str:
    block, _, kind = name.rpartition(".attn_")
    return f"{block}.attn_qkv.{kind.partition('.')[2]}"


def _check_vision_sizes(
    path: str | Path, projector: str, numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    width, heads, patch = numbers["embedding_length"], numbers["attention.head_count"], numbers["patch_size"]
    if shapes["v.patch_embd.weight"] != (patch, patch, 3, width):
        found = " x ".join(map(str, shapes["v.patch_embd.weight"]))
        raise ModelLoadError(
            f"{path}: v.patch_embd.weight is {found}, but patch_size is {patch} and embedding_length {width}"
        )
    if heads < 1 or numbers["block_count"] < 1:
        raise ModelLoadError(
            f"{path}: attention.head_count is {heads} and block_count {numbers['block_count']}, but each must be 1 at least"
        )
    side = numbers["image_size"] // patch
    table = shapes.get("v.position_embd.weight", (width, side * side))
    if projector in _SQUARE_TABLES and table != (width, side * side + ("v.class_embd" in shapes)):
        raise ModelLoadError(
            f"{path}: v.position_embd.weight has {table[-1]} rows, but image_size and patch_size make {side} x {side} patches"
        )
    if projector == "gemma3" and side % (numbers.get("projector.scale_factor") or 4):
        raise ModelLoadError(f"{path}: clip.vision.projector.scale_factor does not divide the {side} patches of a side")
    head_size = width // heads
    if projector in _QUARTER_HEADS and head_size % 4:
        raise ModelLoadError(f"{path}: a head has {head_size} values, but it must have a multiple of 4")
    if projector in _NEED_BIASES:
        _check_windows(path, numbers, shapes)


def _check_windows(path: str | Path, numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    rows, wanted = shapes.get("mm.2.weight", (0, 0))[-1], numbers.get("projection_dim")
    if rows != wanted:
        raise ModelLoadError(f"{path}: clip.vision.projection_dim is {wanted}, but mm.2.weight makes {rows} values")
    if numbers.get("n_wa_pattern") == 1:
        raise ModelLoadError(
            f"{path}: clip.vision.n_wa_pattern is 1, which leaves no layer a window; it must be 2 at least"
        )


_NUM_FRAMES: Final = 3000  # of the spectrum of 30 seconds, the length of an encoder's pass
_MAX_MEL: Final = 256
_STACKED: Final = ("ultravox", "voxtral")
_WHISPER: Final = (*_STACKED, "qwen2a", "qwen2.5o")

Shapes = Mapping[str, tuple[int, ...]]


def check_audio_tensors(path: str | Path, projector: str, numbers: Mapping[str, Any], shapes: Shapes) -> None:
    """Check an encoder of audio. numbers: of `clip.audio`, by their names; shapes: of all tensors, innermost first.

    Raises `ModelLoadError`; does nothing for other projectors.
    """
    if projector not in _WHISPER:
        return
    for key in ("attention.head_count", "block_count", "num_mel_bins"):
        if not numbers[key]:
            raise ModelLoadError(f"{path}: clip.audio.{key} is {numbers[key]}, but it must be 1 at least")
    if numbers["num_mel_bins"] > _MAX_MEL:
        raise ModelLoadError(
            f"{path}: clip.audio.num_mel_bins is {numbers['num_mel_bins']}, but {_MAX_MEL} is the most"
        )
    for name, wanted in _encoder_shapes(numbers).items():
        _check_shape(path, name, wanted, shapes)
    for layer in range(numbers["block_count"]):
        if f"a.blk.{layer}.attn_k.bias" in shapes:
            raise ModelLoadError(f"{path}: the tensor a.blk.{layer}.attn_k.bias must not be there: keys have no bias")
    _check_projection(path, projector, numbers, shapes)


def _encoder_shapes(numbers: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    width, hidden = numbers["embedding_length"], numbers["feed_forward_length"]
    found: dict[str, tuple[int, ...]] = {
        "a.position_embd.weight": (width, _NUM_FRAMES // 2),
        "a.conv1d.1.weight": (3, numbers["num_mel_bins"], width),
        "a.conv1d.2.weight": (3, width, width),
        "a.conv1d.1.bias": (1, width),
        "a.conv1d.2.bias": (1, width),
    }
    for layer in range(numbers["block_count"]):
        block = f"a.blk.{layer}"
        vectors = ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias", "attn_q.bias", "attn_v.bias")
        found |= {f"{block}.{name}": (width,) for name in vectors}
        found |= {f"{block}.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "out")}
        found |= {f"{block}.ffn_up.weight": (width, hidden), f"{block}.ffn_down.weight": (hidden, width)}
    return found


def _check_projection(path: str | Path, projector: str, numbers: Mapping[str, Any], shapes: Shapes) -> None:
    width = numbers["embedding_length"]
    if projector not in _STACKED:
        _check_rows(path, "mm.a.fc.weight", width, shapes)
        return
    stack, pooled = numbers.get("projector.stack_factor") or 0, 4 if projector == "voxtral" else 2
    made = _num_stacked(_NUM_FRAMES // pooled, width, stack) if stack else 0
    counted = -(-_NUM_FRAMES // stack) // pooled if stack else 0
    if not 1 <= made == counted:
        raise ModelLoadError(
            f"{path}: clip.audio.projector.stack_factor is {stack}, with which llama.cpp makes {made} embeddings of "
            f"{_NUM_FRAMES // pooled} and counts {counted}; the numbers must be equal"
        )
    _check_rows(path, "mm.a.mlp.1.weight", width * stack, shapes)
    rows = shapes["mm.a.mlp.1.weight"][-1]
    if projector == "ultravox":
        _check_shape(path, "mm.a.norm_pre.weight", (width * stack,), shapes)
        _check_shape(path, "mm.a.norm_mid.weight", (rows // 2,), shapes)
        rows //= 2
    _check_rows(path, "mm.a.mlp.2.weight", rows, shapes)


def _num_stacked(num_positions: int, width: int, stack: int) -> int:
    """Return the number of stacked embeddings. llama.cpp pads by a formula for powers of two, and drops an incomplete one."""
    row = width * stack
    return (num_positions * width + row - 1 & ~(row - 1)) // row


def _check_rows(path: str | Path, name: str, width: int, shapes: Shapes) -> None:
    found = shapes.get(name, ())
    _check_shape(path, name, (width, *found[1:]) if len(found) == 2 else (width, 1), shapes)


def _check_shape(path: str | Path, name: str, wanted: tuple[int, ...], shapes: Shapes) -> None:
    found = shapes.get(name)
    if found is None:
        raise ModelLoadError(f"{path}: the tensor {name} is missing")
    if found != wanted:
        raise ModelLoadError(f"{path}: the tensor {name} is {_shown(found)}, but the metadata make it {_shown(wanted)}")


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorFacts:
    """Facts about a projector.

    Attributes:
        path: The file.
        modalities: "image", "audio" or both, sorted.
        kinds: llama.cpp's names of its projectors.
        weights_bytes: Bytes of its tensors.
        image_size: Pixels of a side of the encoder's image; None without an encoder of images.
        patch_size: Pixels of a side of a patch; None without an encoder of images.
    """

    path: str
    modalities: tuple[str, ...]
    kinds: tuple[str, ...]
    weights_bytes: int
    image_size: int | None
    patch_size: int | None


def projector_facts(path: Path) -> ProjectorFacts:
    """Return the facts in a projector's header. Raises `ModelLoadError` if the file is no projector or damaged."""
    check_projector(path)
    file = read_gguf(path)
    names = {"image": "vision", "audio": "audio"}
    found = {name: bool(_value(file, f"clip.has_{encoder}_encoder", ValueType.BOOL)) for name, encoder in names.items()}
    keys = ("clip.projector_type", *(f"clip.{encoder}.projector_type" for encoder in names.values()))
    kinds = (_value(file, key, ValueType.STRING) for key in keys)
    return ProjectorFacts(
        path=str(path),
        modalities=tuple(sorted(name for name, is_there in found.items() if is_there)),
        kinds=tuple(dict.fromkeys(kind.decode(errors="replace") for kind in kinds if kind)),
        weights_bytes=sum(tensor_bytes(path, tensor) for tensor in file.tensors),
        image_size=_value(file, "clip.vision.image_size", ValueType.UINT32) if found["image"] else None,
        patch_size=_value(file, "clip.vision.patch_size", ValueType.UINT32) if found["image"] else None,
    )
