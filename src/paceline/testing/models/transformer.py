"""Transformers: Llama, Mixtral, Qwen 2, Gemma 3 and 4 with sliding windows, and the encoders BERT, ModernBERT and T5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from paceline.testing.models.gguf_parts import (
    Pooling,
    Sizes,
    SpecVocabulary,
    Tensor,
    Value,
    attention,
    bias,
    biased,
    copied,
    embedding,
    experts,
    feed_forward,
    head,
    layer_norm,
    matrix,
    norm,
    norms,
    output,
    query_key_norms,
    word_pieces,
)


@dataclass(frozen=True, kw_only=True)
class LlamaSpec(Sizes):
    """Dense Llama with grouped queries; with `n_expert` > 0 a mixture of experts like Mixtral.

    layer_gain: the weight of the output of layers relative to their input.
    """

    architecture: ClassVar[str] = "llama"
    n_expert: int = 0
    n_expert_used: int = 2
    layer_gain: float = 1.5

    def own_metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {"rope.dimension_count": self.head_size, "rope.freq_base": 10000.0}
        if self.n_expert:
            values |= {"expert_count": self.n_expert, "expert_used_count": self.n_expert_used}
        return values

    def block(self, block: str, _: int) -> Iterator[Tensor]:
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

    def own_metadata(self) -> dict[str, Value]:
        return {"rope.freq_base": 1000000.0}

    def head(self) -> Iterator[Tensor]:
        return head(self, tied=self.tied)

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
        yield from attention(self, block, biases=True)
        yield from feed_forward(self, block)


@dataclass(frozen=True, kw_only=True)
class Qwen2VlSpec(Qwen2Spec):
    """Qwen 2 VL's text model: Qwen 2 with positions in three dimensions (M-RoPE)."""

    architecture: ClassVar[str] = "qwen2vl"

    def own_metadata(self) -> dict[str, Value]:
        third = self.head_size // 6
        sections = [self.head_size // 2 - 2 * third, third, third, 0]
        return super().own_metadata() | {"rope.dimension_sections": sections}


@dataclass(frozen=True, kw_only=True)
class Qwen3VlSpec(Sizes):
    """Qwen 3 VL's text model: norms of queries and keys, M-RoPE, and layers that add the output of deepstack layers."""

    architecture: ClassVar[str] = "qwen3vl"
    n_deepstack_layers: int = 1

    def own_metadata(self) -> dict[str, Value]:
        third = self.head_size // 6
        return {
            "rope.freq_base": 1000000.0,
            "rope.dimension_sections": [self.head_size // 2 - 2 * third, third, third, 0],
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "n_deepstack_layers": self.n_deepstack_layers,
        }

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
        yield from query_key_norms(self, block)
        yield from attention(self, block)
        yield from feed_forward(self, block)


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeSpec(Sizes):
    """Qwen 2 with a mixture of experts in every layer and a shared expert with a gate."""

    architecture: ClassVar[str] = "qwen2moe"
    n_expert: int = 6
    n_expert_used: int = 2
    n_ff_expert: int = 64

    def own_metadata(self) -> dict[str, Value]:
        return {
            "rope.freq_base": 1000000.0,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_feed_forward_length": self.n_ff_expert,
            "expert_shared_feed_forward_length": self.n_ff_expert,
        }

    def block(self, block: str, _: int) -> Iterator[Tensor]:
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


@dataclass(frozen=True, kw_only=True)
class Gemma3Spec(Sizes):
    """Gemma 3: all but every sixth layer see the last `n_swa` tokens only, so windows matter in short texts already."""

    architecture: ClassVar[str] = "gemma3"
    n_layer: int = 6
    n_swa: int = 32

    def own_metadata(self) -> dict[str, Value]:
        return {
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.sliding_window": self.n_swa,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
        }

    def head(self) -> Iterator[Tensor]:
        return head(self, gain=self.n_embd**-0.5)  # the model multiplies them by the root of n_embd

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        yield from query_key_norms(self, block)
        yield from attention(self, block)
        yield from feed_forward(self, block)


@dataclass(frozen=True, kw_only=True)
class Gemma4Spec(Sizes):
    """Gemma 4 as in its small sizes: windows, embeddings of every layer, last layers that use the cache of others.

    Layers with full attention have heads twice as wide as those with a window.
    """

    architecture: ClassVar[str] = "gemma4"
    n_layer: int = 6
    n_swa: int = 32
    full_every: int = 3
    n_shared: int = 3
    n_embd_per_layer: int = 16

    @property
    def head_size_full(self) -> int:
        """Values of a head in layers with full attention."""
        return 2 * self.head_size

    def own_metadata(self) -> dict[str, Value]:
        return {
            "attention.key_length": self.head_size_full,
            "attention.value_length": self.head_size_full,
            "attention.key_length_swa": self.head_size,
            "attention.value_length_swa": self.head_size,
            "attention.sliding_window": self.n_swa,
            "attention.sliding_window_pattern": [not self._is_full(layer) for layer in range(self.n_layer)],
            "attention.shared_kv_layers": self.n_shared,
            "embedding_length_per_layer_input": self.n_embd_per_layer,
            "final_logit_softcapping": 30.0,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.dimension_count": self.head_size_full,
            "rope.dimension_count_swa": self.head_size,
        }

    def head(self) -> Iterator[Tensor]:
        width = self.n_embd_per_layer
        yield from head(self, gain=self.n_embd**-0.5)  # the model multiplies them by the root of n_embd
        # Multiplied by the root of their width.
        yield Tensor(
            "per_layer_token_embd.weight", (self.vocabulary.size, width * self.n_layer), width**-0.5, matrix=True
        )
        yield matrix("per_layer_model_proj.weight", width * self.n_layer, self.n_embd)
        yield norm("per_layer_proj_norm.weight", width)
        yield Tensor("rope_freqs.weight", (self.head_size_full // 2,), 0.2, centre=2.0)

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        head_size = self.head_size_full if self._is_full(layer) else self.head_size
        yield from norms(
            block, self.n_embd, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"
        )
        # Scores are not divided by the root of the head size.
        yield norm(f"{block}.attn_q_norm.weight", head_size, scale=3.0 / head_size**0.5)
        yield norm(f"{block}.attn_k_norm.weight", head_size)
        yield from attention(self, block, head_size=head_size)
        yield from feed_forward(self, block)
        yield matrix(f"{block}.inp_gate.weight", self.n_embd_per_layer, self.n_embd)
        yield matrix(f"{block}.proj.weight", self.n_embd, self.n_embd_per_layer)
        yield norm(f"{block}.layer_output_scale.weight", 1)

    def _is_full(self, layer: int) -> bool:
        return (layer + 1) % self.full_every == 0


@dataclass(frozen=True, kw_only=True)
class BertSpec(Sizes):
    """BERT: bidirectional attention, no KV cache. With `pooling="rank"` it has a classifier and scores pairs.

    class_labels: names of the classifier's outputs; none: one output without a name.
    """

    architecture: ClassVar[str] = "bert"
    has_rms_norms: ClassVar[bool] = False
    n_head_kv: int = 4
    n_ctx_train: int = 256
    pooling: Pooling | None = "mean"
    class_labels: tuple[str, ...] = ()
    vocabulary: SpecVocabulary = field(default_factory=word_pieces)

    def own_metadata(self) -> dict[str, Value]:
        labels: dict[str, Value] = {"classifier.output_labels": list(self.class_labels)} if self.class_labels else {}
        return {"attention.causal": False, **labels}

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield Tensor("token_types.weight", (2, self.n_embd), 0.5)
        yield Tensor("position_embd.weight", (self.n_ctx_train, self.n_embd), 0.5)
        yield from layer_norm("token_embd_norm", self.n_embd)
        for layer in range(self.n_layer):
            yield from self._layer(f"blk.{layer}")
        if self.pooling == "rank":
            yield from biased("cls", self.n_embd, self.n_embd)
            yield from biased("cls.output", max(1, len(self.class_labels)), self.n_embd, gain=3.0)

    def _layer(self, block: str) -> Iterator[Tensor]:
        yield from attention(self, block, biases=True)
        yield bias(f"{block}.attn_output.bias", self.n_embd)
        yield from layer_norm(f"{block}.attn_output_norm", self.n_embd)
        yield from biased(f"{block}.ffn_up", self.n_ff, self.n_embd)
        yield from biased(f"{block}.ffn_down", self.n_embd, self.n_ff)
        yield from layer_norm(f"{block}.layer_output_norm", self.n_embd)


@dataclass(frozen=True, kw_only=True)
class ModernBertSpec(Sizes):
    """ModernBERT: an encoder of which most layers see a window of `n_swa` tokens, half of them before and half after."""

    architecture: ClassVar[str] = "modern-bert"
    has_rms_norms: ClassVar[bool] = False
    n_layer: int = 4
    n_head_kv: int = 4
    n_ctx_train: int = 256
    n_swa: int = 32
    full_every: int = 3
    pooling: Pooling | None = "mean"
    vocabulary: SpecVocabulary = field(default_factory=word_pieces)

    def own_metadata(self) -> dict[str, Value]:
        return {
            "attention.causal": False,
            "attention.sliding_window": self.n_swa,
            "attention.sliding_window_pattern": self.full_every,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
        }

    def head(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("token_embd_norm.weight", self.n_embd)
        yield norm("output_norm.weight", self.n_embd)

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        if layer > 0:
            yield norm(f"{block}.attn_norm.weight", self.n_embd)
        yield matrix(f"{block}.attn_qkv.weight", 3 * self.n_embd, self.n_embd, gain=1.5)
        yield matrix(f"{block}.attn_output.weight", self.n_embd, self.n_embd, gain=1.5)
        yield norm(f"{block}.ffn_norm.weight", self.n_embd)
        yield matrix(f"{block}.ffn_up.weight", 2 * self.n_ff, self.n_embd, gain=1.5)
        yield matrix(f"{block}.ffn_down.weight", self.n_embd, self.n_ff, gain=1.5)


@dataclass(frozen=True, kw_only=True)
class T5Spec(Sizes):
    """T5: an encoder, and a decoder that attends to the encoder's output."""

    architecture: ClassVar[str] = "t5"
    n_head_kv: int = 4
    n_bucket: int = 32

    def own_metadata(self) -> dict[str, Value]:
        return {
            "attention.relative_buckets_count": self.n_bucket,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "decoder_start_token_id": self.vocabulary.control[0],
        }

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("enc.output_norm.weight", self.n_embd)
        yield norm("dec.output_norm.weight", self.n_embd)
        yield output(self)
        for layer in range(self.n_layer):
            yield from self._layer(f"enc.blk.{layer}", layer, "attn")
            yield from self._layer(f"dec.blk.{layer}", layer, "attn")
            yield norm(f"dec.blk.{layer}.cross_attn_norm.weight", self.n_embd)
            yield from self._attention(f"dec.blk.{layer}.cross_attn")

    def _layer(self, block: str, layer: int, name: str) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
        if layer == 0:
            yield Tensor(f"{block}.attn_rel_b.weight", (self.n_bucket, self.n_head), 1.0)
        yield from self._attention(f"{block}.{name}")
        yield from feed_forward(self, block)

    def _attention(self, prefix: str) -> Iterator[Tensor]:
        for part in "qkvo":
            gain = 1.5 if part in "vo" else 0.4  # T5 does not divide by the root of the head size
            yield matrix(f"{prefix}_{part}.weight", self.n_embd, self.n_embd, gain=gain)
