"""Models with draft heads: HunYuan 3, MiMo 2 and Qwen 3.5 with next-token-prediction heads; EAGLE-3 and DFlash for a Llama.

Random heads predict nothing. With a small `layer_gain` the next token mostly follows from the newest one alone, and with `agrees`
the heads are made to compute just that, so that many of their drafts are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.testing.models.gguf_parts import (
    Sizes,
    Tensor,
    Value,
    attention,
    bias,
    embedding,
    feed_forward,
    matrix,
    norm,
    norms,
    output,
    query_key_norms,
)


@dataclass(frozen=True, kw_only=True)
class HunYuan3Spec(Sizes):
    """HunYuan 3, dense, with `n_heads` chained heads, each a layer of its own.

    layer_gain: the weight of the output of layers relative to their input. own_output: each head has an output layer of its own.
    """

    architecture: ClassVar[str] = "hy_v3"
    n_heads: int = 1
    layer_gain: float = 1.5
    agrees: bool = False
    own_output: bool = False

    def own_metadata(self) -> dict[str, Value]:
        return {
            "nextn_predict_layers": self.n_heads,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10000.0,
            "expert_feed_forward_length": self.n_ff,
        }

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        yield from feed_forward(self, block, gain=self.layer_gain)
        if layer >= self.n_layer:
            yield norm(f"{block}.nextn.shared_head_norm.weight", self.n_embd)
        if layer >= self.n_layer and self.own_output:
            name, size = f"{block}.nextn.shared_head_head.weight", self.vocabulary.size
            yield matrix(name, size, self.n_embd, gain=3.0, quiet_rows=self.vocabulary.control)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        for layer in range(
            self.n_layer + self.n_heads
        ):  # of a head, llama.cpp loads these only when it is asked for them
            block = f"blk.{layer}"
            yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
            yield from attention(self, block, gain=self.layer_gain)
            yield from query_key_norms(self, block)
            if layer >= self.n_layer:
                yield from next_token_head(self, block, agrees=self.agrees)


@dataclass(frozen=True, kw_only=True)
class Mimo2Spec(Sizes):
    """MiMo 2, dense: every second layer, and every head, has a sliding window; `n_heads` chained heads."""

    architecture: ClassVar[str] = "mimo2"
    n_layer: int = 4
    n_heads: int = 2
    n_swa: int = 16

    def own_metadata(self) -> dict[str, Value]:
        layers = self.n_layer + self.n_heads
        return {
            "nextn_predict_layers": self.n_heads,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10000.0,
            "expert_feed_forward_length": self.n_ff,
            "attention.sliding_window": self.n_swa,
            "attention.sliding_window_pattern": [layer % 2 == 1 or layer >= self.n_layer for layer in range(layers)],
        }

    def tensors(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield norm("output_norm.weight", self.n_embd)
        yield output(self)
        width = (self.n_head + 2 * self.n_head_kv) * self.head_size
        for layer in range(self.n_layer + self.n_heads):
            block = f"blk.{layer}"
            yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
            yield matrix(f"{block}.attn_qkv.weight", width, self.n_embd, gain=1.5)
            yield matrix(f"{block}.attn_output.weight", self.n_embd, self.n_embd, gain=1.5)
            yield from feed_forward(self, block)
            if layer >= self.n_layer:
                yield from next_token_head(self, block)


@dataclass(frozen=True, kw_only=True)
class Qwen35Spec(Sizes):
    """Qwen 3.5: every second layer is a recurrent gated delta net, and a dense head predicts the token after the next."""

    architecture: ClassVar[str] = "qwen35"
    n_heads: int = 1
    d_conv: int = 4
    d_state: int = 16
    n_key_head: int = 2
    n_value_head: int = 4
    layer_gain: float = 1.5
    agrees: bool = False

    def own_metadata(self) -> dict[str, Value]:
        return {
            "nextn_predict_layers": self.n_heads,
            "full_attention_interval": 2,
            "rope.dimension_count": self.head_size,
            "rope.dimension_sections": [self.head_size // 2, 0, 0, 0],
            "rope.freq_base": 10000.0,
            "ssm.conv_kernel": self.d_conv,
            "ssm.inner_size": self.n_value_head * self.d_state,
            "ssm.state_size": self.d_state,
            "ssm.time_step_rank": self.n_value_head,
            "ssm.group_count": self.n_key_head,
        }

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "post_attention_norm")
        if layer < self.n_layer and layer % 2 == 0:
            yield from self._delta_net(block)
        else:
            yield from self._gated_attention(block)
        yield from feed_forward(self, block, gain=self.layer_gain)
        if layer >= self.n_layer:
            yield from next_token_head(self, block, agrees=self.agrees)

    def _gated_attention(self, block: str) -> Iterator[Tensor]:
        for tensor in attention(self, block, gain=self.layer_gain):
            if tensor.name.endswith("attn_q.weight"):
                yield matrix(tensor.name, 2 * self.n_embd, self.n_embd, gain=self.layer_gain)  # and a gate
            else:
                yield tensor
        yield from query_key_norms(self, block)

    def _delta_net(self, block: str) -> Iterator[Tensor]:
        n_value = self.n_value_head * self.d_state
        n_all = 2 * self.n_key_head * self.d_state + n_value
        yield matrix(f"{block}.attn_qkv.weight", n_all, self.n_embd)
        yield matrix(f"{block}.attn_gate.weight", n_value, self.n_embd)
        yield Tensor(f"{block}.ssm_conv1d.weight", (n_all, self.d_conv), 0.5)
        yield bias(f"{block}.ssm_dt.bias", self.n_value_head)
        yield bias(f"{block}.ssm_a", self.n_value_head, centre=-0.5)
        yield matrix(f"{block}.ssm_beta.weight", self.n_value_head, self.n_embd)
        yield matrix(f"{block}.ssm_alpha.weight", self.n_value_head, self.n_embd)
        yield norm(f"{block}.ssm_norm.weight", self.d_state)
        yield matrix(f"{block}.ssm_out.weight", self.n_embd, n_value, gain=self.layer_gain)


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(Sizes):
    """EAGLE-3 for a model with hidden states of `n_target` values: one layer over the inputs of three layers of the model.

    borrows: takes embeddings and output layer from the model. draft_ids: the tokens of a draft vocabulary, with an output
    layer of its own; empty for the whole vocabulary.
    """

    architecture: ClassVar[str] = "eagle3"
    n_layer: int = 1
    n_head_kv: int = 4
    n_target: int = 64
    target_layers: tuple[int, int, int] = (0, 1, 2)
    borrows: bool = True
    draft_ids: tuple[int, ...] = field(default=())
    agrees: bool = False

    def own_metadata(self) -> dict[str, Value]:
        return {
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10000.0,
            "target_layers": list(self.target_layers),
            "target_hidden_size": self.n_target,
        }

    def tensors(self) -> Iterator[Tensor]:
        # A Llama's residual stream is its tokens' embeddings and what its layers add. Here the newest token is in attention
        # alone, which has to look at itself to pass it on.
        gain, through = (0.1, 1.0) if self.agrees else (1.5, 0.0)
        yield matrix("fc.weight", self.n_embd, 3 * self.n_target, gain=gain)
        yield norm("output_norm.weight", self.n_embd)
        if not self.borrows:
            yield embedding(self)
        if self.draft_ids:
            yield matrix("output.weight", len(self.draft_ids), self.n_embd, gain=3.0)
            yield Tensor("d2t", (len(self.draft_ids),), 0.0, integers=self.draft_ids)
        elif not self.borrows:
            yield output(self)
        yield from norms("blk.0", self.n_embd, "attn_norm", "attn_norm_2", "ffn_norm")
        for name, diagonal in (("attn_q", 3 * through), ("attn_k", 3 * through), ("attn_v", through)):
            n_out = (self.n_head if name == "attn_q" else self.n_head_kv) * self.head_size
            yield matrix(f"blk.0.{name}.weight", n_out, 2 * self.n_embd, gain=gain, diagonal=diagonal)
        yield matrix("blk.0.attn_output.weight", self.n_embd, self.n_head * self.head_size, gain=gain, diagonal=through)
        yield from feed_forward(self, "blk.0", gain=gain)


@dataclass(frozen=True, kw_only=True)
class DFlashSpec(Sizes):
    """DFlash for a model of as many values: layers over hidden states of `target_layers`, which draft blocks of `block_size`.

    borrows: takes embeddings and output layer from the model. draft_ids: the tokens of a draft vocabulary, with an output
    layer of its own; empty for the whole vocabulary. markov_rank: of the head that makes it a DSpark file; 0: none.
    confidence: that file's further head, which judges drafts. from_anchor: whether its first draft comes from the newest
    token's row; None: the file does not say. is_causal: attention within a block; None: the file does not say. window: of all
    layers; 0: none. is_mrope: positions as of a model with M-RoPE. layer_gain: the weight of the output of layers relative to
    their input.
    agrees: the mask tokens' rows pass on the newest token, which makes the first draft of a block right; for this the mask token
    has to be a quiet one, heads of keys as many as of queries, and the window short.
    """

    architecture: ClassVar[str] = "dflash"
    n_layer: int = 1
    target_layers: tuple[int, ...] = (0, 1)
    block_size: int = 8
    mask_id: int | None = 0
    borrows: bool = True
    draft_ids: tuple[int, ...] = field(default=())
    markov_rank: int = 0
    confidence: bool = False
    from_anchor: bool | None = None
    is_causal: bool | None = None
    window: int = 0
    is_mrope: bool = False
    layer_gain: float = 1.5
    agrees: bool = False

    def own_metadata(self) -> dict[str, Value]:
        values: dict[str, Value] = {
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10000.0,
            "target_layers": list(self.target_layers),
            "block_size": self.block_size,
        }
        if self.window:
            values |= {
                "attention.sliding_window": self.window,
                "attention.sliding_window_pattern": [True] * self.n_layer,
            }
        if self.is_mrope:
            values["rope.dimension_sections"] = [self.head_size // 2, 0, 0, 0]
        if self.from_anchor is not None:
            values["sample_from_anchor"] = self.from_anchor
        if self.is_causal is not None:
            values["attention.causal"] = self.is_causal
        if self.agrees:
            values["attention.layer_norm_rms_epsilon"] = 0.1  # leaves quiet what is quiet
        return values

    def metadata(self) -> dict[str, Value]:
        mask: dict[str, Value] = {} if self.mask_id is None else {"tokenizer.ggml.mask_token_id": self.mask_id}
        return super().metadata() | mask

    def head(self) -> Iterator[Tensor]:
        yield from self._heads()
        yield matrix("fc.weight", self.n_embd, len(self.target_layers) * self.n_embd)
        yield norm("enc.output_norm.weight", self.n_embd, scale=0.0 if self.agrees else 1.0)
        yield norm("output_norm.weight", self.n_embd)
        if not self.borrows:
            yield embedding(self)
        if self.draft_ids:
            yield matrix("output.weight", len(self.draft_ids), self.n_embd, gain=3.0)
            yield Tensor("d2t", (len(self.draft_ids),), 0.0, integers=self.draft_ids)
        elif not self.borrows:
            yield output(self)

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
        yield from self._attention(block)
        yield from query_key_norms(self, block)
        yield from feed_forward(self, block, gain=0.1 if self.agrees else self.layer_gain)

    def _heads(self) -> Iterator[Tensor]:
        if self.markov_rank:
            yield matrix("markov_w1.weight", self.vocabulary.size, self.markov_rank)
            yield matrix("markov_w2.weight", len(self.draft_ids) or self.vocabulary.size, self.markov_rank)
        if self.confidence:
            yield matrix("conf_proj.weight", 1, self.n_embd + self.markov_rank)

    def _attention(self, block: str) -> Iterator[Tensor]:
        for tensor in attention(self, block, gain=self.layer_gain):
            name = tensor.name
            if self.agrees and name.endswith(
                "attn_q.weight"
            ):  # looks at all alike, of which the newest token is loudest
                yield matrix(name, *tensor.shape, gain=0.0)
            elif self.agrees and not name.endswith("attn_k.weight"):
                yield matrix(name, *tensor.shape, gain=0.1, diagonal=1.0)
            else:
                yield tensor


def next_token_head(size: Sizes, block: str, *, agrees: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of a next-token-prediction head beside its layer: it joins the newest token with the last hidden state.

    agrees: it passes the token on, and little of the state.
    """
    gain, through = (0.1, 1.0) if agrees else (1.5, 0.0)
    yield matrix(f"{block}.nextn.eh_proj.weight", size.n_embd, 2 * size.n_embd, gain=gain, diagonal=through)
    yield from norms(block, size.n_embd, "nextn.enorm", "nextn.hnorm")
