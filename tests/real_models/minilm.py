"""all-MiniLM-L6-v2: its tensors and vocabulary, a forward pass in NumPy, and a GGUF file of it.

The architecture is BERT's (Devlin 2018): post-norm layers, absolute positions, mean pooling.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter, PoolingType

Array = npt.NDArray[np.float32]

NUM_LAYERS, NUM_HEADS, N_EMBD, N_FF, MAX_POSITIONS = 6, 12, 384, 1536, 512
EPSILON = 1e-12
CONTROL, NORMAL = 3, 1  # token types of GGUF
# llama.cpp's name of each tensor of a layer, by Hugging Face's.
LAYER_TENSORS = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


class MiniLM:
    """The model of a folder with model.safetensors and tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._tensors = _read_safetensors(folder / "model.safetensors")
        vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self._ids = vocabulary

    def tokenize(self, text: str) -> list[int]:
        """Return WordPiece ids of an English text, between [CLS] and [SEP]."""
        ids = [self._ids["[CLS]"]]
        for word in re.findall(r"\w+|[^\w\s]", text.lower()):
            ids += self._pieces(word)
        return [*ids, self._ids["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        ids, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            end = next((end for end in range(len(word), start, -1) if prefix + word[start:end] in self._ids), None)
            if end is None:
                return [self._ids["[UNK]"]]
            ids.append(self._ids[prefix + word[start:end]])
            start = end
        return ids

    def embed(self, text: str) -> Array:
        """Return the embedding of a text: float32 (384,), of length 1."""
        ids = self.tokenize(text)
        hidden = self._tensor("embeddings.word_embeddings.weight")[ids]
        hidden = hidden + self._tensor("embeddings.position_embeddings.weight")[: len(ids)]
        hidden = self._norm("embeddings.LayerNorm", hidden + self._tensor("embeddings.token_type_embeddings.weight")[0])
        for layer in range(NUM_LAYERS):
            hidden = self._layer(f"encoder.layer.{layer}", hidden)
        mean = hidden.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def _layer(self, name: str, hidden: Array) -> Array:
        query, key, value = (
            self._linear(f"{name}.attention.self.{part}", hidden).reshape(len(hidden), NUM_HEADS, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(N_EMBD / NUM_HEADS)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = weights / weights.sum(axis=-1, keepdims=True) @ value
        joined = attended.transpose(1, 0, 2).reshape(len(hidden), N_EMBD)
        hidden = self._norm(
            f"{name}.attention.output.LayerNorm", hidden + self._linear(f"{name}.attention.output.dense", joined)
        )
        inner = self._linear(f"{name}.intermediate.dense", hidden)
        gelu = (inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))).astype(np.float32)
        return self._norm(f"{name}.output.LayerNorm", hidden + self._linear(f"{name}.output.dense", gelu))

    def _linear(self, name: str, hidden: Array) -> Array:
        return hidden @ self._tensor(f"{name}.weight").T + self._tensor(f"{name}.bias")

    def _norm(self, name: str, hidden: Array) -> Array:
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + EPSILON)
        return scaled * self._tensor(f"{name}.weight") + self._tensor(f"{name}.bias")

    def _tensor(self, name: str) -> Array:
        return self._tensors[name]

    def write_gguf(self, path: Path) -> Path:
        """Write the model as a GGUF file in float32; return the path."""
        writer = GGUFWriter(path, "bert")
        writer.add_name("all-MiniLM-L6-v2")
        writer.add_context_length(MAX_POSITIONS)
        writer.add_embedding_length(N_EMBD)
        writer.add_block_count(NUM_LAYERS)
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(NUM_HEADS)
        writer.add_layer_norm_eps(EPSILON)
        writer.add_causal_attention(False)
        writer.add_pooling_type(PoolingType.MEAN)
        self._add_vocabulary(writer)
        for name, tensor in self._gguf_tensors().items():
            writer.add_tensor(name, np.ascontiguousarray(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def _gguf_tensors(self) -> dict[str, Array]:
        found = {
            "token_embd.weight": self._tensor("embeddings.word_embeddings.weight"),
            "position_embd.weight": self._tensor("embeddings.position_embeddings.weight"),
            "token_types.weight": self._tensor("embeddings.token_type_embeddings.weight"),
            "token_embd_norm.weight": self._tensor("embeddings.LayerNorm.weight"),
            "token_embd_norm.bias": self._tensor("embeddings.LayerNorm.bias"),
        }
        for layer in range(NUM_LAYERS):
            for name, ours in LAYER_TENSORS.items():
                for part in ("weight", "bias"):
                    found[f"blk.{layer}.{ours}.{part}"] = self._tensor(f"encoder.layer.{layer}.{name}.{part}")
        return found

    def _add_vocabulary(self, writer: Any) -> None:
        texts = sorted(self._ids, key=self._ids.__getitem__)
        special = [text.startswith("[") and text.endswith("]") and len(text) > 2 for text in texts]
        # llama.cpp marks the beginning of a word; WordPiece marks its continuation.
        tokens = [
            text if is_special else text[2:] if text.startswith("##") else "\u2581" + text
            for text, is_special in zip(texts, special, strict=True)
        ]
        writer.add_tokenizer_model("bert")
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL if item else NORMAL for item in special])
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_type_count(2)
        for name, text in {
            "padding": "[PAD]",
            "unknown": "[UNK]",
            "bos": "[CLS]",
            "cls": "[CLS]",
            "seperator": "[SEP]",
            "mask": "[MASK]",
        }.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", self._ids[text])


def _read_safetensors(path: Path) -> dict[str, Array]:
    """Read a file of float32 tensors: a header's length (uint64), the header as JSON, the values."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Array] = {}
    for name, tensor in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__" and tensor["dtype"] == "F32":
            begin, end = (8 + size + offset for offset in tensor["data_offsets"])
            found[name] = np.frombuffer(data[begin:end], np.float32).reshape(tensor["shape"])
    return found
