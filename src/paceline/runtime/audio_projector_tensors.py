"""Checks of the tensors of encoders of audio that are Whisper's: Ultravox, Voxtral, Qwen 2 Audio and Qwen 2.5 Omni.

libmtmd takes most tensors as optional, and asserts on them, or on how many embeddings they make, when it encodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from paceline.errors import ModelLoadError

_NUM_FRAMES: Final = 3000  # of the spectrum of 30 seconds, which is what it encodes at a time
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
    """Return how many embeddings stacking makes. llama.cpp pads by a formula for powers of two, and drops a part of one."""
    row = width * stack
    return (num_positions * width + row - 1 & ~(row - 1)) // row


def _check_rows(path: str | Path, name: str, width: int, shapes: Shapes) -> None:
    """Check that a matrix takes as many values."""
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
