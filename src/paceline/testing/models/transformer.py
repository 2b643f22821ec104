"""Transformers with attention to all of the past: Llama, Mixtral, Qwen 2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from paceline.testing.models.gguf_parts import Tensor, Value, matrix, norm
from paceline.testing.models.spec import (
    Sizes,
    attention,
    embedding,
    experts,
    feed_forward,
    norms,
    output,
    query_key_norms,
)
from paceline.testing.models.vocabulary import copied


@dataclass(frozen=True, kw_only=True)
class LlamaSpec(Sizes):
    """Dense Llama with grouped queries; with `n_expert` > 0 a mixture of experts as Mixtral has it.

    layer_gain: how much layers add to what they pass on.
    """

    architecture: ClassVar[str] = "llama"
    n_expert: int = 0
    n_expert_used: int = 2
    layer_gain: float = 1.5

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {"rope.dimension_count": self.head_size, "rope.freq_base": 10000.0}
        if self.n_expert:
            values |= {"expert_count": self.n_expert, "expert_used_count": self.n_expert_used}
        return self.common_metadata() | self.prefixed(values)

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("output_norm.weight", self.n_embd)
        yield output(self)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
            yield from attention(self, block, gain=self.layer_gain)
            if self.n_expert:
                yield from experts(self, block, self.n_expert, self.n_ff, gain=self.layer_gain)
            else:
                yield from feed_forward(self, block, gain=self.layer_gain)


@dataclass(frozen=True, kw_only=True)
class Qwen2Spec(Sizes):
    """Qwen 2: Llama with biases on query, key and value; `tied` shares the embeddings with the output layer."""

    architecture: ClassVar[str] = "qwen2"
    tied: bool = False

    def metadata(self) -> dict[str, Value]:
        return self.common_metadata() | self.prefixed({"rope.freq_base": 1000000.0})

    def tensors(self) -> Iterator[Tensor]:
        # As an output layer tied embeddings make logits of spread sqrt(n_embd): far too sharp, so they are smaller.
        yield embedding(self, gain=3.0 / self.n_embd**0.5 if self.tied else 1.0)
        yield norm("output_norm.weight", self.n_embd)
        if not self.tied:
            yield output(self)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
            yield from attention(self, block, biases=True)
            yield from feed_forward(self, block)


@dataclass(frozen=True, kw_only=True)
class Qwen2VlSpec(Qwen2Spec):
    """Qwen 2 VL's text model: Qwen 2 with positions in three dimensions (M-RoPE)."""

    architecture: ClassVar[str] = "qwen2vl"

    def metadata(self) -> dict[str, Value]:
        third = self.head_size // 6
        sections = [self.head_size // 2 - 2 * third, third, third, 0]
        return super().metadata() | self.prefixed({"rope.dimension_sections": sections})


@dataclass(frozen=True, kw_only=True)
class Qwen3VlSpec(Sizes):
    """Qwen 3 VL's text model: norms of queries and keys, M-RoPE, and layers that add what deepstack layers of images saw."""

    architecture: ClassVar[str] = "qwen3vl"
    n_deepstack_layers: int = 1

    def metadata(self) -> dict[str, Value]:
        third = self.head_size // 6
        values: dict[str, Value] = {
            "rope.freq_base": 1000000.0,
            "rope.dimension_sections": [self.head_size // 2 - 2 * third, third, third, 0],
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "n_deepstack_layers": self.n_deepstack_layers,
        }
        return self.common_metadata() | self.prefixed(values)

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("output_norm.weight", self.n_embd)
        yield output(self)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
            yield from query_key_norms(self, block)
            yield from attention(self, block)
            yield from feed_forward(self, block)


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeSpec(Sizes):
    """Qwen 2 with a mixture of experts in every layer and one shared expert behind a gate."""

    architecture: ClassVar[str] = "qwen2moe"
    n_expert: int = 6
    n_expert_used: int = 2
    n_ff_expert: int = 64

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "rope.freq_base": 1000000.0,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_feed_forward_length": self.n_ff_expert,
            "expert_shared_feed_forward_length": self.n_ff_expert,
        }
        return self.common_metadata() | self.prefixed(values)

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("output_norm.weight", self.n_embd)
        yield output(self)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
            yield from attention(self, block, biases=True)
            yield from experts(self, block, self.n_expert, self.n_ff_expert)
            yield Tensor(f"{block}.ffn_gate_inp_shexp.weight", (self.n_embd,), self.n_embd**-0.5)
            yield matrix(f"{block}.ffn_gate_shexp.weight", self.n_ff_expert, self.n_embd, gain=1.5)
            yield matrix(f"{block}.ffn_up_shexp.weight", self.n_ff_expert, self.n_embd, gain=1.5)
            yield matrix(f"{block}.ffn_down_shexp.weight", self.n_embd, self.n_ff_expert, gain=1.5)


def qwen2_half_billion(vocabulary: str | Path) -> Qwen2Spec:
    """Return a spec with the shape of Qwen 2.5 0.5B (494 M parameters, 0.5 GB as Q8_0) and its vocabulary, for benchmarks.

    `vocabulary` is `models/ggml-vocab-qwen2.gguf` of a llama.cpp source tree.
    """
    return Qwen2Spec(n_layer=24, n_embd=896, n_head=14, n_head_kv=2, n_ff=4864, n_ctx_train=32768, tied=True,
                     vocabulary=copied(vocabulary))  # fmt: skip
