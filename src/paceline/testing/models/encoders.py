"""Models with encoders: BERT and ModernBERT for embeddings and as rerankers; T5."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.testing.models.gguf_parts import Tensor, Value, bias, matrix, norm
from paceline.testing.models.spec import Pooling, Sizes, attention, embedding, feed_forward, norms, output
from paceline.testing.models.vocabulary import SpecVocabulary, word_pieces


@dataclass(frozen=True, kw_only=True)
class BertSpec(Sizes):
    """BERT: bidirectional attention, no KV cache. With `pooling="rank"` it has a classifier and scores pairs.

    class_labels: names of the classifier's outputs; none: one output without a name.
    """

    architecture: ClassVar[str] = "bert"
    n_head_kv: int = 4
    n_ctx_train: int = 256
    pooling: Pooling | None = "mean"
    class_labels: tuple[str, ...] = ()
    vocabulary: SpecVocabulary = field(default_factory=word_pieces)

    def metadata(self) -> dict[str, Value]:
        labels: dict[str, Value] = {"classifier.output_labels": list(self.class_labels)} if self.class_labels else {}
        return self.common_metadata(rms=False) | self.prefixed({"attention.causal": False, **labels})

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield Tensor("token_types.weight", (2, self.n_embd), 0.5)
        yield Tensor("position_embd.weight", (self.n_ctx_train, self.n_embd), 0.5)
        yield from _layer_norm("token_embd_norm", self.n_embd)
        for layer in range(self.n_layer):
            yield from self._layer(f"blk.{layer}")
        if self.pooling == "rank":
            yield matrix("cls.weight", self.n_embd, self.n_embd)
            yield bias("cls.bias", self.n_embd)
            yield matrix("cls.output.weight", max(1, len(self.class_labels)), self.n_embd, gain=3.0)
            yield bias("cls.output.bias", max(1, len(self.class_labels)))

    def _layer(self, block: str) -> Iterator[Tensor]:
        yield from attention(self, block, biases=True)
        yield bias(f"{block}.attn_output.bias", self.n_embd)
        yield from _layer_norm(f"{block}.attn_output_norm", self.n_embd)
        yield matrix(f"{block}.ffn_up.weight", self.n_ff, self.n_embd)
        yield bias(f"{block}.ffn_up.bias", self.n_ff)
        yield matrix(f"{block}.ffn_down.weight", self.n_embd, self.n_ff)
        yield bias(f"{block}.ffn_down.bias", self.n_embd)
        yield from _layer_norm(f"{block}.layer_output_norm", self.n_embd)


@dataclass(frozen=True, kw_only=True)
class ModernBertSpec(Sizes):
    """ModernBERT: an encoder of which most layers see a window of `n_swa` tokens, half of them before and half behind."""

    architecture: ClassVar[str] = "modern-bert"
    n_layer: int = 4
    n_head_kv: int = 4
    n_ctx_train: int = 256
    n_swa: int = 32
    full_every: int = 3
    pooling: Pooling | None = "mean"
    vocabulary: SpecVocabulary = field(default_factory=word_pieces)

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "attention.causal": False,
            "attention.sliding_window": self.n_swa,
            "attention.sliding_window_pattern": self.full_every,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
        }
        return self.common_metadata(rms=False) | self.prefixed(values)

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("token_embd_norm.weight", self.n_embd)
        yield norm("output_norm.weight", self.n_embd)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
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

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "attention.relative_buckets_count": self.n_bucket,
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "decoder_start_token_id": self.vocabulary.control[0],
        }
        return self.common_metadata() | self.prefixed(values)

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


def _layer_norm(name: str, size: int) -> Iterator[Tensor]:
    yield norm(f"{name}.weight", size)
    yield bias(f"{name}.bias", size)
