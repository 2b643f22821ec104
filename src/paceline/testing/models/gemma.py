"""Models with sliding windows: Gemma 3 and Gemma 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.testing.models.gguf_parts import Tensor, Value, matrix, norm
from paceline.testing.models.spec import Sizes, attention, embedding, feed_forward, norms, output, query_key_norms


@dataclass(frozen=True, kw_only=True)
class Gemma3Spec(Sizes):
    """Gemma 3: all but every sixth layer see the last `n_swa` tokens only, so windows matter in short texts already."""

    architecture: ClassVar[str] = "gemma3"
    n_layer: int = 6
    n_swa: int = 32

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "attention.sliding_window": self.n_swa,
            "rope.freq_base": 1000000.0,
            "rope.freq_base_swa": 10000.0,
        }
        return self.common_metadata() | self.prefixed(values)

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self, gain=self.n_embd**-0.5)  # the model multiplies them by the root of n_embd
        yield norm("output_norm.weight", self.n_embd)
        yield output(self)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
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

    def metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
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
        return self.common_metadata() | self.prefixed(values)

    def tensors(self) -> Iterator[Tensor]:
        width = self.n_embd_per_layer
        yield embedding(self, gain=self.n_embd**-0.5)  # the model multiplies them by the root of n_embd
        yield norm("output_norm.weight", self.n_embd)
        yield output(self)
        # Multiplied by the root of their width.
        yield Tensor(
            "per_layer_token_embd.weight", (self.vocabulary.size, width * self.n_layer), width**-0.5, matrix=True
        )
        yield matrix("per_layer_model_proj.weight", width * self.n_layer, self.n_embd)
        yield norm("per_layer_proj_norm.weight", width)
        yield Tensor("rope_freqs.weight", (self.head_size_full // 2,), 0.2, centre=2.0)
        for layer in range(self.n_layer):
            yield from self._layer(f"blk.{layer}", layer)

    def _layer(self, block: str, layer: int) -> Iterator[Tensor]:
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
