"""Writes random LoRA adapters for a spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.testing.models.metadata import Value, add_metadata
from paceline.testing.models.spec import ModelSpec
from paceline.testing.models.tensor import Tensor, fill


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


def _halves(tensor: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    n_out, n_in = tensor.shape
    return (
        Tensor(f"{tensor.name}.lora_a", (rank, n_in), n_in**-0.5),
        Tensor(f"{tensor.name}.lora_b", (n_out, rank), rank**-0.5),
    )
