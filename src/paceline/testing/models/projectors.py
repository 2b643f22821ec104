"""Tiny random multimodal projectors (mmproj files), which make embeddings of images or audio for a model of any width.

    write_model(tmp_path / "tiny.gguf", Qwen2VlSpec())
    write_model(tmp_path / "mmproj-tiny.gguf", Qwen25VisionSpec())

An image changes the generated text, as every part of a prompt does. The audio encoders are Whisper's, which take pieces of 30
seconds, including the silence at the end of the last piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.testing.models.gguf_parts import SpecVocabulary, Tensor, Value, bias, biased, layer_norm, matrix, norm


@dataclass(frozen=True, kw_only=True)
class _ProjectorSpec:
    """An encoder and a projector. n_embd_text: width of the model that it is for."""

    architecture: ClassVar[str] = "clip"
    projector: ClassVar[str]
    encoder: ClassVar[str]
    vocabulary: ClassVar[SpecVocabulary] = SpecVocabulary(0, (), ())
    n_embd_text: int = 64
    n_embd: int = 32
    n_head: int = 2
    n_layer: int = 2
    n_ff: int = 48

    def own_sizes(self) -> dict[str, Value]:
        """Return the sizes that this kind of encoder alone has."""
        return {}

    def metadata(self) -> dict[str, Value]:
        """Return the metadata of every projector's file."""
        sizes: dict[str, Value] = {
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "block_count": self.n_layer,
            "projection_dim": self.n_embd_text,
            "attention.head_count": self.n_head,
            "attention.layer_norm_epsilon": 1e-5,
        }
        facts: dict[str, Value] = {f"clip.has_{self.encoder}_encoder": True, "clip.projector_type": self.projector}
        sizes |= self.own_sizes()
        return facts | {"clip.use_gelu": True} | {f"clip.{self.encoder}.{key}": value for key, value in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class _VisionSpec(_ProjectorSpec):
    """A vision transformer and a projector."""

    encoder: ClassVar[str] = "vision"
    image_size: int = 56
    patch_size: int = 14

    def own_sizes(self) -> dict[str, Value]:
        mean, spread = [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]
        return {
            "image_size": self.image_size, "patch_size": self.patch_size, "image_mean": mean, "image_std": spread,
        }  # fmt: skip

    def _patches(self, name: str = "v.patch_embd.weight") -> Tensor:
        shape = (self.n_embd, 3, self.patch_size, self.patch_size)
        return Tensor(name, shape, 4.0 / (3 * self.patch_size**2) ** 0.5)

    def _positions(self, count: int) -> Tensor:
        return Tensor("v.position_embd.weight", (count, self.n_embd), 0.5)

    def _block(self, block: str) -> Iterator[Tensor]:
        return encoder_block(block, self.n_embd, self.n_ff)


def encoder_block(block: str, n_embd: int, n_ff: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer of a transformer that encodes."""
    for name in ("ln1", "ln2"):
        yield from layer_norm(f"{block}.{name}", n_embd)
    for name in ("attn_q", "attn_k", "attn_v", "attn_out"):
        yield from biased(f"{block}.{name}", n_embd, n_embd, gain=1.5)
    yield from biased(f"{block}.ffn_up", n_ff, n_embd, gain=1.5)
    yield from biased(f"{block}.ffn_down", n_embd, n_ff, gain=1.5)


@dataclass(frozen=True, kw_only=True)
class LlavaVisionSpec(_VisionSpec):
    """LLaVA 1.5: an embedding a patch of a square image, attended to causally, for any architecture of text model."""

    projector: ClassVar[str] = "mlp"

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors. The encoder's last layer is there and not used, as in the real files."""
        yield Tensor("v.class_embd", (self.n_embd,), 1.0)
        yield self._patches()
        yield self._positions((self.image_size // self.patch_size) ** 2 + 1)
        yield from layer_norm("v.pre_ln", self.n_embd)
        for layer in range(self.n_layer):
            yield from self._block(f"v.blk.{layer}")
        yield from biased("mm.0", self.n_embd_text, self.n_embd, gain=2.0)
        yield from biased("mm.2", self.n_embd_text, self.n_embd_text, gain=2.0)


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionSpec(_VisionSpec):
    """Gemma 3: a square image of few embeddings with attention that is not causal."""

    projector: ClassVar[str] = "gemma3"
    image_size: int = 64
    patch_size: int = 8
    scale_factor: int = 2

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | {"clip.vision.projector.scale_factor": self.scale_factor}

    def tensors(self) -> Iterator[Tensor]:
        yield self._patches()
        yield bias("v.patch_embd.bias", self.n_embd)
        yield self._positions((self.image_size // self.patch_size) ** 2)
        for layer in range(self.n_layer):
            yield from self._block(f"v.blk.{layer}")
        yield from layer_norm("v.post_ln", self.n_embd)
        yield norm("mm.soft_emb_norm.weight", self.n_embd)
        yield Tensor("mm.input_projection.weight", (self.n_embd, self.n_embd_text), 2.0 / self.n_embd**0.5)


@dataclass(frozen=True, kw_only=True)
class Qwen25VisionSpec(_VisionSpec):
    """Qwen 2.5 VL: images of any shape; embeddings have places in two dimensions (M-RoPE); for `Qwen2VlSpec`."""

    projector: ClassVar[str] = "qwen2.5vl_merger"
    full_attention_every: int = 2

    def metadata(self) -> dict[str, Value]:
        silu: dict[str, Value] = {"clip.use_gelu": False, "clip.use_silu": True}
        return super().metadata() | silu | {"clip.vision.n_wa_pattern": self.full_attention_every}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors: a patch of two equal frames has two kernels."""
        yield self._patches()
        yield self._patches("v.patch_embd.weight.1")
        for layer in range(self.n_layer):
            yield from self._block(f"v.blk.{layer}")
            yield from biased(f"v.blk.{layer}.ffn_gate", self.n_ff, self.n_embd, gain=1.5)
        yield norm("v.post_ln.weight", self.n_embd)
        width = 4 * self.n_embd
        yield from biased("mm.0", width, width, gain=2.0)
        yield from biased("mm.2", self.n_embd_text, width, gain=2.0)


@dataclass(frozen=True, kw_only=True)
class PixtralVisionSpec(_VisionSpec):
    """Pixtral: images of any shape, positions by rotation alone, an embedding after each row; for `LlamaSpec`."""

    projector: ClassVar[str] = "pixtral"

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | {"clip.use_gelu": False, "clip.use_silu": True}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors, none of the encoder with a bias."""
        yield self._patches()
        yield norm("v.pre_ln.weight", self.n_embd)
        for layer in range(self.n_layer):
            yield from _gated_block(f"v.blk.{layer}", self.n_embd, self.n_ff)
        for name, width in (("mm.1", self.n_embd), ("mm.2", self.n_embd_text)):
            yield from biased(f"{name}", self.n_embd_text, width, gain=2.0)
        yield Tensor("v.token_embd.img_break", (self.n_embd_text,), 1.0)


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionSpec(_VisionSpec):
    """Gemma 4: images of any shape, pooled, several of one size at once; for `Gemma4Spec`."""

    projector: ClassVar[str] = "gemma4v"
    patch_size: int = 8
    scale_factor: int = 2
    num_places: int = 2240  # patches of a side that an image of 1120 tokens may have

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | {"clip.vision.projector.scale_factor": self.scale_factor}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors: positions are two tables, of columns and of rows."""
        yield self._patches()
        yield Tensor("v.position_embd.weight", (2, self.num_places, self.n_embd), 0.5)
        for layer in range(self.n_layer):
            yield from _gated_block(f"v.blk.{layer}", self.n_embd, self.n_ff)
        yield matrix("mm.input_projection.weight", self.n_embd_text, self.n_embd, gain=2.0)


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionSpec(_VisionSpec):
    """Qwen 3 VL: as Qwen 2.5 VL, and the output of a middle layer goes to the first layers of `Qwen3VlSpec` (deepstack)."""

    projector: ClassVar[str] = "qwen3vl_merger"
    deepstack_layers: tuple[int, ...] = (0,)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors: a patch of two equal frames has two kernels."""
        yield self._patches()
        yield self._patches("v.patch_embd.weight.1")
        yield bias("v.patch_embd.bias", self.n_embd)
        yield self._positions((self.image_size // self.patch_size) ** 2)
        for layer in range(self.n_layer):
            yield from self._fused_block(f"v.blk.{layer}")
        yield from layer_norm("v.post_ln", self.n_embd)
        width = 4 * self.n_embd
        for layer in self.deepstack_layers:
            yield from layer_norm(f"v.deepstack.{layer}.norm", width)
            yield from self._merger(f"v.deepstack.{layer}.fc1", f"v.deepstack.{layer}.fc2")
        yield from self._merger("mm.0", "mm.2")

    def _fused_block(self, block: str) -> Iterator[Tensor]:
        for tensor in self._block(block):
            if not any(f".attn_{name}." in tensor.name for name in "qkv"):
                yield tensor
        yield from biased(f"{block}.attn_qkv", 3 * self.n_embd, self.n_embd, gain=1.5)

    def _merger(self, first: str, second: str) -> Iterator[Tensor]:
        width = 4 * self.n_embd
        yield from biased(f"{first}", width, width, gain=2.0)
        yield from biased(f"{second}", self.n_embd_text, width, gain=2.0)


def _gated_block(block: str, n_embd: int, n_ff: int) -> Iterator[Tensor]:
    """Yield the tensors of a layer without biases and with a gated feed-forward layer."""
    for tensor in encoder_block(block, n_embd, n_ff):
        if not tensor.name.endswith(".bias"):
            yield tensor
    yield matrix(f"{block}.ffn_gate.weight", n_ff, n_embd, gain=1.5)


_NUM_POSITIONS = 1500  # of 30 seconds


@dataclass(frozen=True, kw_only=True)
class _WhisperSpec(_ProjectorSpec):
    """Whisper's encoder and a projector. n_mel: bands of the spectrum."""

    encoder: ClassVar[str] = "audio"
    n_layer: int = 1
    n_mel: int = 40

    def own_sizes(self) -> dict[str, Value]:
        return {"num_mel_bins": self.n_mel}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the encoder's tensors. Keys have no bias, as in Whisper."""
        yield Tensor("a.position_embd.weight", (_NUM_POSITIONS, self.n_embd), 0.5)
        for number, width in ((1, self.n_mel), (2, self.n_embd)):
            yield Tensor(f"a.conv1d.{number}.weight", (self.n_embd, width, 3), 2.0 / (3 * width) ** 0.5)
            yield Tensor(f"a.conv1d.{number}.bias", (self.n_embd, 1), 0.1)
        for layer in range(self.n_layer):
            block = encoder_block(f"a.blk.{layer}", self.n_embd, self.n_ff)
            yield from (tensor for tensor in block if not tensor.name.endswith("attn_k.bias"))
        yield from layer_norm("a.post_ln", self.n_embd)


@dataclass(frozen=True, kw_only=True)
class UltravoxAudioSpec(_WhisperSpec):
    """Ultravox: as many frames stacked to one embedding, without marks around them, for any architecture of text model."""

    projector: ClassVar[str] = "ultravox"
    stack_factor: int = 50

    def metadata(self) -> dict[str, Value]:
        return super().metadata() | {"clip.audio.projector.stack_factor": self.stack_factor}

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        width = self.n_embd * self.stack_factor
        yield norm("mm.a.norm_pre.weight", width)
        yield matrix("mm.a.mlp.1.weight", 2 * self.n_embd_text, width, gain=2.0)
        yield norm("mm.a.norm_mid.weight", self.n_embd_text)
        yield matrix("mm.a.mlp.2.weight", self.n_embd_text, self.n_embd_text, gain=2.0)


@dataclass(frozen=True, kw_only=True)
class Qwen2AudioSpec(_WhisperSpec):
    """Qwen 2 Audio: 750 embeddings of 30 seconds, between marks."""

    projector: ClassVar[str] = "qwen2a"

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield from biased("mm.a.fc", self.n_embd_text, self.n_embd, gain=2.0)
