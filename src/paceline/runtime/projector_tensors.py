"""Checks of the tensors of those projectors that were tried with every one left out: LLaVA, Gemma 3, Qwen 2 VL and 2.5 VL.

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
    "qwen2vl_merger": (*_ALL, "v.patch_embd.weight.1"),
    "qwen2.5vl_merger": (*_ALL, "v.patch_embd.weight.1"),
}
_NEED_BIASES: Final = ("qwen2vl_merger", "qwen2.5vl_merger")


def check_vision_tensors(
    path: str | Path, projector: str, numbers: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Check a vision encoder. numbers: of `clip.vision`, by their names; shapes: of all tensors, innermost first.

    Raises `ModelLoadError`; does nothing for other projectors.
    """
    if projector not in _NEEDED:
        return
    needed = list(_NEEDED[projector])
    if projector == "mlp" and "mm.3.weight" not in shapes:  # the kind with norms has others
        needed += ["mm.2.weight", "mm.2.bias"]
    for layer in range(numbers["block_count"]):
        for name in ("q", "k", "v"):
            needed.append(f"v.blk.{layer}.attn_{name}.weight")
            if projector in _NEED_BIASES:
                needed.append(f"v.blk.{layer}.attn_{name}.bias")
    for name in needed:
        if name not in shapes and not ("attn_" in name and _fused(name) in shapes):
            raise ModelLoadError(f"{path}: the tensor {name} is missing")
    _check_sizes(path, projector, numbers, shapes)


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
    if projector in ("mlp", "gemma3") and table != (width, side * side + ("v.class_embd" in shapes)):
        raise ModelLoadError(
            f"{path}: v.position_embd.weight has {table[-1]} rows, but image_size and patch_size make {side} x {side} patches"
        )
    if projector == "gemma3" and side % (numbers.get("projector.scale_factor") or 4):
        raise ModelLoadError(f"{path}: clip.vision.projector.scale_factor does not divide the {side} patches of a side")
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
    head_size = numbers["embedding_length"] // numbers["attention.head_count"]
    if head_size % 4:
        raise ModelLoadError(f"{path}: a head has {head_size} values, but it must have a multiple of 4")
