"""Writes a checkpoint as GGUF, with the matrices in Q8_0 (or F32 for comparing)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from demo_model.model import Config
from demo_model.tokenizer import CONTROL, USER_DEFINED

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "attn.q.weight": "attn_q.weight",
    "attn.k.weight": "attn_k.weight",
    "attn.v.weight": "attn_v.weight",
    "attn.o.weight": "attn_output.weight",
    "attn_norm.weight": "attn_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "gate.weight": "ffn_gate.weight",
    "up.weight": "ffn_up.weight",
    "down.weight": "ffn_down.weight",
}


def tensor_name(name: str) -> str:
    """GGUF's name of a weight; the output weights are left out, they are the embedding."""
    if not name.startswith("blocks."):
        return NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{NAMES[rest]}"


def _shape(writer: gguf.GGUFWriter, c: Config) -> None:
    writer.add_context_length(c.context)
    writer.add_block_count(c.layers)
    writer.add_embedding_length(c.dim)
    writer.add_feed_forward_length(c.hidden)
    writer.add_head_count(c.heads)
    writer.add_head_count_kv(c.kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_base)
    writer.add_layer_norm_rms_eps(c.eps)
    writer.add_vocab_size(c.vocab)


def _describe(writer: gguf.GGUFWriter, name: str, kind: gguf.LlamaFileType) -> None:
    writer.add_name(name)
    writer.add_license("Apache-2.0")
    writer.add_author("The paceline authors")
    writer.add_description("Demo model of paceline, trained on a corpus written by its own grammar")
    writer.add_file_type(kind)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _token_type(token: str) -> gguf.TokenType:
    if token in CONTROL:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.USER_DEFINED if token in USER_DEFINED else gguf.TokenType.NORMAL


def _tokens(writer: gguf.GGUFWriter, path: Path) -> None:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    number = dict(data["model"]["vocab"]) | {t["content"]: t["id"] for t in data["added_tokens"]}
    tokens = sorted(number, key=number.__getitem__)
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([_token_type(t) for t in tokens])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    writer.add_bos_token_id(number["<|endoftext|>"])
    writer.add_eos_token_id(number["<|im_end|>"])
    writer.add_eot_token_id(number["<|im_end|>"])
    writer.add_pad_token_id(number["<|endoftext|>"])
    writer.add_uint32("tokenizer.ggml.fim_pre_token_id", number["<|fim_prefix|>"])
    writer.add_uint32("tokenizer.ggml.fim_suf_token_id", number["<|fim_suffix|>"])
    writer.add_uint32("tokenizer.ggml.fim_mid_token_id", number["<|fim_middle|>"])
    writer.add_chat_template(TEMPLATE.read_text(encoding="utf-8").rstrip("\n"))


def _weights(writer: gguf.GGUFWriter, weights: dict[str, torch.Tensor], quantize: bool) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, weight in weights.items():
        array = weight.float().numpy().astype(np.float32)
        if quantize and array.ndim == 2:
            writer.add_tensor(tensor_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor_name(name), array)


def write_model(
    out: Path, name: str, tokenizer: Path, config: Config, weights: dict[str, torch.Tensor], *, quantize: bool = True
) -> None:
    """Write one GGUF file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, "llama")
    kind = gguf.LlamaFileType.MOSTLY_Q8_0 if quantize else gguf.LlamaFileType.ALL_F32
    _describe(writer, name, kind)
    _shape(writer, config)
    _tokens(writer, tokenizer)
    _weights(writer, weights, quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.replace(out)
    print(f"{out.name}: {out.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    """Read the arguments and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", default="paceline-demo")
    parser.add_argument("--f32", action="store_true", help="do not quantize")
    a = parser.parse_args()
    state = torch.load(a.checkpoint, weights_only=True)
    write_model(a.out, a.name, a.tokenizer, Config(**state["config"]), state["weights"], quantize=not a.f32)


if __name__ == "__main__":
    main()
