"""RWKV 6 and 7: no attention; the state is a matrix a head and the last token's activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.testing.models.gguf_parts import Tensor, Value, bias, matrix, norm
from paceline.testing.models.spec import Sizes, embedding, output


@dataclass(frozen=True, kw_only=True)
class _RwkvSizes(Sizes, ABC):
    """What both have: layer norms with biases, a time mix and a channel mix. llama.cpp computes heads of 64 values."""

    n_embd: int = 128
    n_head: int = 2
    n_rank: int = 8

    def _shared_metadata(self, values: dict[str, Value]) -> dict[str, Value]:
        sizes: dict[str, Value] = {
            "attention.head_count": 0,
            "attention.head_count_kv": 0,
            "wkv.head_size": self.head_size,
            "token_shift_count": 2,
        }
        return self.common_metadata(rms=False) | self.prefixed(sizes | values)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor, in the order of the file."""
        yield embedding(self)
        yield from self._norm("token_embd_norm")
        yield from self._norm("output_norm")
        yield output(self)
        for layer in range(self.n_layer):
            block = f"blk.{layer}"
            yield from self._norm(f"{block}.attn_norm")
            yield from self._norm(f"{block}.attn_norm_2")
            yield from self._norm(f"{block}.time_mix_ln")
            for name in ("key", "value", "receptance", "output"):
                yield matrix(f"{block}.time_mix_{name}.weight", self.n_embd, self.n_embd, gain=1.5)
            yield matrix(f"{block}.channel_mix_key.weight", self.n_ff, self.n_embd, gain=1.5)
            yield matrix(f"{block}.channel_mix_value.weight", self.n_embd, self.n_ff)
            yield from self._own(block)

    @abstractmethod
    def _own(self, block: str) -> Iterator[Tensor]:
        """Yield the tensors of a layer that this version alone has."""

    def _norm(self, name: str) -> Iterator[Tensor]:
        yield norm(f"{name}.weight", self.n_embd)
        yield bias(f"{name}.bias", self.n_embd)

    def _vector(self, name: str, *, centre: float = 0.5, spread: float = 0.2) -> Tensor:
        return bias(f"{name}.weight", self.n_embd, centre=centre, spread=spread)

    def _low_rank(self, down: str, up: str) -> Iterator[Tensor]:
        yield matrix(f"{down}.weight", self.n_rank, self.n_embd)
        yield matrix(f"{up}.weight", self.n_embd, self.n_rank)


@dataclass(frozen=True, kw_only=True)
class Rwkv6Spec(_RwkvSizes):
    """RWKV 6."""

    architecture: ClassVar[str] = "rwkv6"

    def metadata(self) -> dict[str, Value]:
        return self._shared_metadata(
            {"time_mix_extra_dim": self.n_rank, "time_decay_extra_dim": self.n_rank, "rescale_every_n_layers": 0}
        )

    def _own(self, block: str) -> Iterator[Tensor]:
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

    def metadata(self) -> dict[str, Value]:
        ranks = ("decay", "iclr", "value_residual_mix", "gate")
        return self._shared_metadata({f"attention.{name}_lora_rank": self.n_rank for name in ranks})

    def _own(self, block: str) -> Iterator[Tensor]:
        for part in "wav":
            yield self._vector(f"{block}.time_mix_{part}0", centre=-1.0, spread=0.5)
            yield from self._low_rank(f"{block}.time_mix_{part}1", f"{block}.time_mix_{part}2")
        yield from self._low_rank(f"{block}.time_mix_g1", f"{block}.time_mix_g2")
        yield Tensor(f"{block}.time_mix_lerp_fused.weight", (6, 1, 1, self.n_embd), 0.2, centre=0.5)
        for name in ("k_k", "k_a", "r_k"):
            yield self._vector(f"{block}.time_mix_{name}")
        yield Tensor(f"{block}.channel_mix_lerp_k.weight", (1, 1, self.n_embd), 0.2, centre=0.5)
