"""Checks of the tensors of those projectors that were tried with every one left out: LLaVA, Gemma, Qwen VL, Pixtral.

libmtmd takes most tensors as optional, and then uses them without looking whether they are there or of the size that the
metadata say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.errors import ModelLoadError

_ALL: Final = ("v.patch_embd.weight",)
_NEEDED: Final = {
    "mlp": (*_ALL, "v.position_embd.weight", "mm.0.weight", "mm.0.bias"),
    "gemma3": _ALL,
    "gemma4v": (*_ALL, "v.position_embd.weight"),
    "pixtral": _ALL,
    "qwen3vl_merger": (*_ALL, "v.patch_embd.weight.1", "v.patch_embd.bias", "v.position_embd.weight"),
    "qwen2vl_merger": (*_ALL, "v.patch_embd.weight.1"),
    "qwen2.5vl_merger": (*_ALL, "v.patch_embd.weight.1"),
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

    max_tokens: of an image, where it is not what the file says.

    Raises `ModelLoadError`; does nothing for other projectors.
    """
    if projector not in _NEEDED:
        return
    needed = list(_NEEDED[projector])
    if projector == "mlp" and "mm.3.weight" not in shapes:  # the kind with norms has others
        needed += ["mm.2.weight", "mm.2.bias"]
    needed += _needed_of_layers(projector, numbers["block_count"], shapes)
    for name in needed:
        if name not in shapes and not ("attn_" in name and _fused(name) in shapes):
            raise ModelLoadError(f"{path}: the tensor {name} is missing")
    _check_sizes(path, projector, numbers, shapes)
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


def _check_sizes(
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
