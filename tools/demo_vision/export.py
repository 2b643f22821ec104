"""Writes a checkpoint as two GGUF files: the language model, and the encoder as llama.cpp's projector file (mmproj)."""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from demo_model.export import write_model
from demo_model.model import BIG
from demo_vision.encoder import EncoderConfig


def projector_name(name: str) -> str:
    """GGUF's name of a weight of the encoder."""
    if name == "position_embd":
        return "v.position_embd.weight"
    name = name.replace("mm_0", "mm.0").replace("mm_2", "mm.2")
    return name if name.startswith("mm.") else f"v.{name}"


def _metadata(writer: gguf.GGUFWriter, c: EncoderConfig) -> None:
    writer.add_name("mmproj-paceline-demo-vision")
    writer.add_license("Apache-2.0")
    writer.add_author("The paceline authors")
    writer.add_description("Encoder of paceline's demo model, trained on pictures of shapes that a script draws")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "mlp")
    sizes = {
        "image_size": c.side,
        "patch_size": c.patch,
        "embedding_length": c.width,
        "feed_forward_length": c.hidden,
        "projection_dim": c.width_text,
        "block_count": c.layers,
        "attention.head_count": c.heads,
    }
    for key, size in sizes.items():
        writer.add_uint32(f"clip.vision.{key}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", c.eps)
    writer.add_array("clip.vision.feature_layer", [c.layers])  # the last, where LLaVA takes the one before
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])


def write_projector(path: Path, config: EncoderConfig, weights: dict[str, Tensor]) -> None:
    """Write the encoder's file, matrices in F16."""
    temporary = path.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, "clip")
    _metadata(writer, config)
    for name, weight in weights.items():
        array = weight.float().numpy()
        if name == "patch_embd.weight":
            array = array.reshape(config.width, 3, config.patch, config.patch)
        is_matrix = array.ndim > 1 and name != "position_embd"
        writer.add_tensor(projector_name(name), array.astype(np.float16 if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(path)
    print(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Read the arguments and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("folder", type=Path)
    a = parser.parse_args()
    state = torch.load(a.checkpoint, weights_only=True)
    parts: dict[str, dict[str, Tensor]] = {"encoder": {}, "llama": {}}
    for name, weight in state["weights"].items():
        part, _, rest = name.partition(".")
        parts[part][rest] = weight
    write_model(a.folder / "paceline-demo-vision.gguf", "paceline-demo-vision", a.tokenizer, BIG, parts["llama"])
    write_projector(a.folder / "mmproj-paceline-demo-vision.gguf", EncoderConfig(**state["config"]), parts["encoder"])


if __name__ == "__main__":
    main()
