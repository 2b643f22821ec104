"""The models that speed is measured on: random weights in the shapes of Qwen 2.5, Q8_0, with its real vocabulary."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.testing.models import (
    Qwen2Spec,
    copied,
    numbered,
    qwen2_half_billion,
    write_lora,
    write_model,
    write_requantised,
)

_VOCABULARY = "models/ggml-vocab-qwen2.gguf"


def cache_folder() -> Path:
    """Return the cache folder of the build, for llama.cpp and this model."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def vocabulary_file(source: Path | None) -> Path:
    """Return the vocabulary in a llama.cpp source tree: the given tree, or the tree that the build unpacked."""
    trees = [source] if source is not None else sorted(cache_folder().glob("sources/llama.cpp-*"))
    for tree in trees:
        if (tree / _VOCABULARY).is_file():
            return tree / _VOCABULARY
    raise SystemExit(f"no {_VOCABULARY} found; give --llama-cpp-source a tree of llama.cpp")


def half_billion(source: Path | None) -> Path:
    """Return the path of the model's file, written on first use (half a gigabyte)."""
    return written(
        "qwen2-half-billion-q8_0.gguf", lambda path: write_model(path, _half_billion(source), seed=1, weights="Q8_0")
    )


def half_billion_of(type_name: str) -> Path:
    """Return the path of a model of about the same size with matrices of another type, such as "Q4_K".

    Its rows of 2048 and 8192 columns are whole blocks of every type, unlike the rows of Qwen 2.5 0.5B.
    """
    spec = Qwen2Spec(
        n_layer=8, n_embd=2048, n_head=16, n_head_kv=2, n_ff=8192, n_ctx_train=4096, vocabulary=numbered(32000)
    )
    source = written("wide-half-billion-q8_0.gguf", lambda path: write_model(path, spec, seed=1, weights="Q8_0"))
    if type_name == "Q8_0":
        return source
    name = f"wide-half-billion-{type_name.lower()}.gguf"
    return written(name, lambda path: write_requantised(path, source, type_name))


def _half_billion(source: Path | None) -> Qwen2Spec:
    return qwen2_half_billion(vocabulary_file(source))


def _seven_billion(source: Path | None) -> Qwen2Spec:
    return Qwen2Spec(n_layer=28, n_embd=3584, n_head=28, n_head_kv=4, n_ff=18944, n_ctx_train=32768,
                     vocabulary=copied(vocabulary_file(source)))  # fmt: skip


_SPECS: Mapping[str, Callable[[Path | None], Qwen2Spec]] = {
    "half-billion": _half_billion,
    "seven-billion": _seven_billion,
}

SIZES: Mapping[str, str] = {"cpu": "half-billion", "cuda": "seven-billion"}
"""The size of the model by the device that it is to keep busy."""


def qwen2(size: str) -> Path:
    """Return the path of a model of a size of `SIZES`, written on first use (0.5 or 8 gigabytes)."""
    return written(
        f"qwen2-{size}-q8_0.gguf", lambda path: write_model(path, _SPECS[size](None), seed=1, weights="Q8_0")
    )


def adapter(size: str, number: int) -> Path:
    """Return the path of a LoRA adapter of rank 16 for that model, written on first use; the numbers differ in their values."""
    return written(
        f"qwen2-{size}-lora-{number}.gguf",
        lambda path: write_lora(path, _SPECS[size](None), rank=16, seed=100 + number),
    )


def written(name: str, write: Callable[[Path], object]) -> Path:
    """Return the path of a file of the cache, written on first use: whole, or not there."""
    path = cache_folder() / "benchmarks" / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        write(aside)
        aside.replace(path)
    return path
