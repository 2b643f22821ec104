"""Writers of GGUF files: a spec as a model, as a split set, or as a LoRA adapter for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.testing.models.gguf_parts import Tensor, Value, WeightType, add_metadata, fill, gguf_type
from paceline.testing.models.spec import ModelSpec

if TYPE_CHECKING:
    from gguf import GGUFWriter

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A ChatML template; use it as `metadata={"tokenizer.chat_template": CHAT_TEMPLATE}`."""

_FILE_TYPES: dict[WeightType, int] = {"F32": 0, "F16": 1, "Q8_0": 7}  # llama.cpp's numbers


def write_model(path: str | Path, spec: ModelSpec, *, seed: int = 0, weights: WeightType = "F32",
                metadata: Mapping[str, Value | None] | None = None) -> Path:  # fmt: skip
    """Write a random model: the same arguments give the same bytes.

    `metadata` adds keys, replaces those of the spec, or leaves them out (None). Needs the package `gguf`.
    """
    return _write(Path(path), spec, seed, weights, metadata or {})[0]


def write_split_model(path: str | Path, spec: ModelSpec, *, parts: int = 3, seed: int = 0, weights: WeightType = "F32",
                      metadata: Mapping[str, Value | None] | None = None) -> list[Path]:  # fmt: skip
    """Write the same model as `parts` files, `tiny.gguf` as `tiny-00001-of-00003.gguf` and so on; return their paths."""
    count = len(list(spec.tensors()))
    per_part = math.ceil(count / parts)
    if parts < 2 or math.ceil(count / per_part) != parts:
        raise ValueError(
            f"{count} tensors cannot be split evenly into {parts} parts of at least one: pass 2 to {count // 2} parts"
        )
    return _write(Path(path), spec, seed, weights, metadata or {}, per_part)


def write_lora(
    path: str | Path,
    spec: ModelSpec,
    *,
    rank: int = 4,
    seed: int = 1,
    targets: tuple[str, ...] = ("attn_q", "attn_v", "ffn_down"),
    metadata: Mapping[str, Value | None] | None = None,
) -> Path:
    """Write an adapter that changes the matrices `targets` of every layer, enough to change what is generated.

    Its alpha is twice its rank; `metadata` adds keys, replaces them or leaves them out (None).
    """
    from gguf import GGUFWriter

    path = Path(path)
    changed = [tensor for tensor in spec.tensors() if len(tensor.shape) == 2 and tensor.name.split(".")[-2] in targets]
    if not changed:
        raise ValueError(f"targets {targets} name no matrix of a {spec.architecture} model")
    writer = GGUFWriter(path, spec.architecture)
    facts: dict[str, Value | None] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 2.0 * rank,
    }
    add_metadata(writer, facts | dict(metadata or {}))
    for tensor in changed:
        for half in _halves(tensor, rank):
            writer.add_tensor(half.name, fill(half, seed, "F32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write(path: Path, spec: ModelSpec, seed: int, weights: WeightType, metadata: Mapping[str, Value | None],
           tensors_per_part: int = 0) -> list[Path]:  # fmt: skip
    from gguf import GGUFWriter

    tensors = list(spec.tensors())
    writer = GGUFWriter(path, spec.architecture, split_max_tensors=tensors_per_part)
    general: dict[str, Value | None] = {
        "general.name": f"tiny random {spec.architecture}",
        "general.file_type": _FILE_TYPES[weights],
    }
    add_metadata(writer, general | spec.metadata() | dict(spec.vocabulary.metadata) | dict(metadata))
    for tensor in tensors:
        _announce(writer, tensor, weights)
    paths = writer.format_shard_names(path)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:  # one at a time: a large model needs the memory of its largest tensor only
            writer.write_tensor_data(fill(tensor, seed, tensor.stored_type(weights)))
    finally:
        writer.close()
    return paths


def _announce(writer: GGUFWriter, tensor: Tensor, weights: WeightType) -> None:
    from gguf import GGML_QUANT_SIZES

    stored = tensor.stored_type(weights)
    values, size = GGML_QUANT_SIZES[gguf_type(stored)]
    n_bytes = math.prod(tensor.shape) // values * size
    writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), n_bytes, raw_dtype=gguf_type(stored))


def _halves(tensor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    n_out, n_in = tensor.shape
    return (
        Tensor(f"{tensor.name}.lora_a", (rank, n_in), n_in**-0.5),
        Tensor(f"{tensor.name}.lora_b", (n_out, rank), rank**-0.5),
    )
