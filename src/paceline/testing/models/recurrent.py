"""Models with a recurrent state: Mamba, RWKV 6 and 7, and hybrids with attention (Falcon-H1, Granite 4, LFM2).

The state of RWKV is a matrix for each head and the activations of the last token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.testing.models.gguf_parts import (
    Sizes,
    Tensor,
    Value,
    attention,
    bias,
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
)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(Sizes):
    """Mamba: no attention at all, twice the width inside a layer."""

    architecture: ClassVar[str] = "mamba"
    n_layer: int = 3
    d_conv: int = 4
    d_state: int = 16
    dt_rank: int = 8

    def own_metadata(self) -> dict[str, Value]:
        return {
            "ssm.conv_kernel": self.d_conv,
            "ssm.inner_size": 2 * self.n_embd,
            "ssm.state_size": self.d_state,
            "ssm.time_step_rank": self.dt_rank,
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
            "feed_forward_length": 0,
        }

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        inner = 2 * self.n_embd
        yield norm(f"{block}.attn_norm.weight", self.n_embd)
        yield matrix(f"{block}.ssm_in.weight", 2 * inner, self.n_embd, gain=1.5)
        yield Tensor(f"{block}.ssm_conv1d.weight", (inner, self.d_conv), 0.5)
        yield bias(f"{block}.ssm_conv1d.bias", inner)
        yield matrix(f"{block}.ssm_x.weight", self.dt_rank + 2 * self.d_state, inner, gain=1.5)
        yield matrix(f"{block}.ssm_dt.weight", inner, self.dt_rank)
        yield bias(f"{block}.ssm_dt.bias", inner, centre=-2.0, spread=0.5)
        yield Tensor(f"{block}.ssm_a", (inner, self.d_state), 0.1, centre=-0.5)
        yield bias(f"{block}.ssm_d", inner, centre=1.0)
        yield matrix(f"{block}.ssm_out.weight", self.n_embd, inner, gain=2.0)


@dataclass(frozen=True, kw_only=True)
class FalconH1Spec(Sizes):
    """Falcon-H1: every layer has attention and a Mamba-2 mixer side by side, so it has both kinds of memory."""

    architecture: ClassVar[str] = "falcon-h1"
    d_conv: int = 4
    d_state: int = 16
    n_ssm_head: int = 8
    n_group: int = 1

    @property
    def inner(self) -> int:
        """Width inside the mixer."""
        return 2 * self.n_embd

    def own_metadata(self) -> dict[str, Value]:
        return {
            "attention.key_length": self.head_size,
            "attention.value_length": self.head_size,
            "rope.dimension_count": self.head_size,
            "rope.freq_base": 10000.0,
            "ssm.conv_kernel": self.d_conv,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.d_state,
            "ssm.time_step_rank": self.n_ssm_head,
            "ssm.group_count": self.n_group,
        }

    def head(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield output(self)
        yield norm("output_norm.weight", self.n_embd)

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        yield norm(f"{block}.attn_norm.weight", self.n_embd)
        yield from mamba2_mixer(self, block)
        yield from attention(self, block)
        yield norm(f"{block}.ffn_norm", self.n_embd)  # without ".weight" in this architecture
        yield from feed_forward(self, block)


@dataclass(frozen=True, kw_only=True)
class GraniteHybridSpec(Sizes):
    """Granite 4: Mamba-2, attention without positions in a few layers, and a mixture of experts with a shared one in all."""

    architecture: ClassVar[str] = "granitehybrid"
    n_layer: int = 4
    attention_layers: tuple[int, ...] = (1,)
    n_expert: int = 4
    n_expert_used: int = 2
    n_ff_shared: int = 64
    d_conv: int = 4
    d_state: int = 16
    n_ssm_head: int = 8
    n_group: int = 1
    tied: bool = False

    @property
    def inner(self) -> int:
        """Width inside the mixer."""
        return 2 * self.n_embd

    def own_metadata(self) -> dict[str, Value]:
        heads = [self.n_head_kv if layer in self.attention_layers else 0 for layer in range(self.n_layer)]
        return {
            "attention.head_count_kv": heads,
            "rope.dimension_count": self.head_size,
            "rope.scaling.finetuned": False,
            "expert_count": self.n_expert,
            "expert_used_count": self.n_expert_used,
            "expert_shared_feed_forward_length": self.n_ff_shared,
            "ssm.conv_kernel": self.d_conv,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.d_state,
            "ssm.time_step_rank": self.n_ssm_head,
            "ssm.group_count": self.n_group,
        }

    def head(self) -> Iterator[Tensor]:
        return head(self, tied=self.tied)

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
        yield from attention(self, block) if layer in self.attention_layers else mamba2_mixer(self, block)
        yield from experts(self, block, self.n_expert, self.n_ff)
        yield matrix(f"{block}.ffn_gate_shexp.weight", self.n_ff_shared, self.n_embd, gain=1.5)
        yield matrix(f"{block}.ffn_up_shexp.weight", self.n_ff_shared, self.n_embd, gain=1.5)
        yield matrix(f"{block}.ffn_down_shexp.weight", self.n_embd, self.n_ff_shared, gain=1.5)


def mamba2_mixer(size: FalconH1Spec | GraniteHybridSpec, block: str) -> Iterator[Tensor]:
    """Yield the mixer of one Mamba-2 layer."""
    convolved = size.inner + 2 * size.n_group * size.d_state
    yield matrix(f"{block}.ssm_in.weight", size.inner + convolved + size.n_ssm_head, size.n_embd, gain=1.5)
    yield Tensor(f"{block}.ssm_conv1d.weight", (convolved, size.d_conv), 0.5)
    yield bias(f"{block}.ssm_conv1d.bias", convolved)
    yield bias(f"{block}.ssm_dt.bias", size.n_ssm_head, centre=-1.0, spread=0.5)
    yield Tensor(f"{block}.ssm_a", (size.n_ssm_head, 1), 0.1, centre=-0.5)
    yield Tensor(f"{block}.ssm_d", (size.n_ssm_head, 1), 0.1, centre=1.0)
    yield Tensor(f"{block}.ssm_norm.weight", (size.n_group, size.inner // size.n_group), 0.05, centre=1.0)
    yield matrix(f"{block}.ssm_out.weight", size.n_embd, size.inner, gain=1.5)


@dataclass(frozen=True, kw_only=True)
class Lfm2Spec(Sizes):
    """LFM2: short convolutions, and attention in every `attention_every`-th layer only."""

    architecture: ClassVar[str] = "lfm2"
    n_layer: int = 4
    attention_every: int = 2
    d_conv: int = 3

    def own_metadata(self) -> dict[str, Value]:
        heads = [self.n_head_kv if self._attends(layer) else 0 for layer in range(self.n_layer)]
        return {
            "attention.head_count_kv": heads,
            "shortconv.l_cache": self.d_conv,
            "rope.freq_base": 1000000.0,
        }

    def head(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield output(self)
        yield norm("token_embd_norm.weight", self.n_embd)  # the norm before the output, whatever its name says

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        yield from norms(block, self.n_embd, "attn_norm", "ffn_norm")
        if self._attends(layer):
            yield from query_key_norms(self, block)
            yield from attention(self, block)
        else:
            yield from self._convolution(block)
        yield from feed_forward(self, block)

    def _attends(self, layer: int) -> bool:
        return (layer + 1) % self.attention_every == 0

    def _convolution(self, block: str) -> Iterator[Tensor]:
        yield Tensor(f"{block}.shortconv.conv.weight", (self.n_embd, self.d_conv), 0.6)
        yield matrix(f"{block}.shortconv.in_proj.weight", 3 * self.n_embd, self.n_embd, gain=1.5)
        yield matrix(f"{block}.shortconv.out_proj.weight", self.n_embd, self.n_embd, gain=1.5)


@dataclass(frozen=True, kw_only=True)
class _RwkvSizes(Sizes):
    """The shared parts of both: layer norms with biases, a time mix and a channel mix. llama.cpp computes heads of 64 values."""

    has_rms_norms: ClassVar[bool] = False
    n_embd: int = 128
    n_head: int = 2
    n_rank: int = 8

    def own_metadata(self) -> dict[str, Value]:
        return {
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
            "wkv.head_size": self.head_size,
            "token_shift_count": 2,
        }

    def head(self) -> Iterator[Tensor]:
        yield embedding(self)
        yield from layer_norm("token_embd_norm", self.n_embd)
        yield from layer_norm("output_norm", self.n_embd)
        yield output(self)

    def block(self, block: str, _: int) -> Iterator[Tensor]:
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            yield from layer_norm(f"{block}.{name}", self.n_embd)
        for name in ("key", "value", "receptance", "output"):
            yield matrix(f"{block}.time_mix_{name}.weight", self.n_embd, self.n_embd, gain=1.5)
        yield matrix(f"{block}.channel_mix_key.weight", self.n_ff, self.n_embd, gain=1.5)
        yield matrix(f"{block}.channel_mix_value.weight", self.n_embd, self.n_ff)

    def _vector(self, name: str, *, centre: float = 0.5, spread: float = 0.2) -> Tensor:
        return bias(f"{name}.weight", self.n_embd, centre=centre, spread=spread)

    def _low_rank(self, down: str, up: str) -> Iterator[Tensor]:
        yield matrix(f"{down}.weight", self.n_rank, self.n_embd)
        yield matrix(f"{up}.weight", self.n_embd, self.n_rank)


@dataclass(frozen=True, kw_only=True)
class Rwkv6Spec(_RwkvSizes):
    """RWKV 6."""

    architecture: ClassVar[str] = "rwkv6"

    def own_metadata(self) -> dict[str, Value]:
        ranks: dict[str, Value] = {"time_mix_extra_dim": self.n_rank, "time_decay_extra_dim": self.n_rank}
        return super().own_metadata() | ranks | {"rescale_every_n_layers": 0}

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        yield from super().block(block, layer)
        yield matrix(f"{block}.time_mix_w1.weight", 5 * self.n_rank, self.n_embd)
        yield matrix(f"{block}.time_mix_w2.weight", 5, self.n_embd, self.n_rank, gain=0.3)
        yield Tensor(f"{block}.time_mix_lerp_x.weight", (1, 1, self.n_embd), 0.2, centre=0.5)
        yield Tensor(f"{block}.time_mix_lerp_fused.weight", (5, 1, 1, self.n_embd), 0.2, centre=0.5)
        yield Tensor(f"{block}.time_mix_first.weight", (self.n_embd // self.head_size, self.head_size), 0.5)
        yield self._vector(f"{block}.time_mix_decay", centre=-2.0, spread=0.5)
        yield from self._low_rank(f"{block}.time_mix_decay_w1", f"{block}.time_mix_decay_w2")
        yield matrix(f"{block}.time_mix_gate.weight", self.n_embd, self.n_embd, gain=1.5)
        yield Tensor(f"{block}.channel_mix_lerp_k.weight", (1, 1, self.n_embd), 0.2, centre=0.5)
        yield Tensor(f"{block}.channel_mix_lerp_r.weight", (1, 1, self.n_embd), 0.2, centre=0.5)
        yield matrix(f"{block}.channel_mix_receptance.weight", self.n_embd, self.n_embd)


@dataclass(frozen=True, kw_only=True)
class Rwkv7Spec(_RwkvSizes):
    """RWKV 7."""

    architecture: ClassVar[str] = "rwkv7"

    def own_metadata(self) -> dict[str, Value]:
        ranks = ("decay", "iclr", "value_residual_mix", "gate")
        return super().own_metadata() | {f"attention.{name}_lora_rank": self.n_rank for name in ranks}

    def block(self, block: str, layer: int) -> Iterator[Tensor]:
        yield from super().block(block, layer)
        for part in "wav":
            yield self._vector(f"{block}.time_mix_{part}0", centre=-1.0, spread=0.5)
            yield from self._low_rank(f"{block}.time_mix_{part}1", f"{block}.time_mix_{part}2")
        yield from self._low_rank(f"{block}.time_mix_g1", f"{block}.time_mix_g2")
        yield Tensor(f"{block}.time_mix_lerp_fused.weight", (6, 1, 1, self.n_embd), 0.2, centre=0.5)
        for name in ("k_k", "k_a", "r_k"):
            yield self._vector(f"{block}.time_mix_{name}")
        yield Tensor(f"{block}.channel_mix_lerp_k.weight", (1, 1, self.n_embd), 0.2, centre=0.5)
