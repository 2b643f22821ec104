"""The model that speed is measured on: random weights in the shape of Qwen 2.5 0.5B, Q8_0, with its real vocabulary."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.testing.models import qwen2_half_billion, write_model

_VOCABULARY = "models/ggml-vocab-qwen2.gguf"


def cache_folder() -> Path:
    """Where the build keeps llama.cpp, and this its model."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def vocabulary_file(source: Path | None) -> Path:
    """Return the vocabulary in a llama.cpp source tree: the given one, or the one that the build unpacked."""
    trees = [source] if source is not None else sorted(cache_folder().glob("sources/llama.cpp-*"))
    for tree in trees:
        if (tree / _VOCABULARY).is_file():
            return tree / _VOCABULARY
    raise SystemExit(f"no {_VOCABULARY} found; give --llama-cpp-source a tree of llama.cpp")


def half_billion(source: Path | None) -> Path:
    """Return the path of the model's file, written on first use (half a gigabyte)."""
    path = cache_folder() / "benchmarks" / "qwen2-half-billion-q8_0.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        write_model(aside, qwen2_half_billion(vocabulary_file(source)), seed=1, weights="Q8_0")
        aside.replace(path)
    return path
