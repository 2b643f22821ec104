"""Tiny random multimodal projectors that make embeddings of audio, for a model of any width.

    write_model(tmp_path / "tiny.gguf", LlamaSpec())
    write_model(tmp_path / "mmproj-tiny.gguf", UltravoxAudioSpec())

Their encoders are Whisper's, which take audio in pieces of 30 seconds, silence at the end of the last one included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.testing.models.gguf_parts import Tensor, Value, bias, matrix, norm
from paceline.testing.models.projectors import encoder_block
from paceline.testing.models.vocabulary import SpecVocabulary

_NUM_POSITIONS = 1500  # of 30 seconds


@dataclass(frozen=True, kw_only=True)
class _WhisperSpec:
    """Whisper's encoder in front of a projector. n_embd_text: width of the model that it is for; n_mel: bands of the spectrum."""

    architecture: ClassVar[str] = "clip"
    projector: ClassVar[str]
    vocabulary: ClassVar[SpecVocabulary] = SpecVocabulary(0, (), ())
    n_embd_text: int = 64
    n_embd: int = 32
    n_head: int = 2
    n_layer: int = 1
    n_ff: int = 48
    n_mel: int = 40

    def metadata(self) -> dict[str, Value]:
        """Return what every projector's file says."""
        sizes: dict[str, Value] = {
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "block_count": self.n_layer,
            "projection_dim": self.n_embd_text,
            "attention.head_count": self.n_head,
            "attention.layer_norm_epsilon": 1e-5,
            "num_mel_bins": self.n_mel,
        }
        facts: dict[str, Value] = {"clip.has_audio_encoder": True, "clip.projector_type": self.projector}
        return facts | {"clip.use_gelu": True} | {f"clip.audio.{key}": value for key, value in sizes.items()}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the encoder's tensors. Keys have no bias, as in Whisper."""
        yield Tensor("a.position_embd.weight", (_NUM_POSITIONS, self.n_embd), 0.5)
        for number, width in ((1, self.n_mel), (2, self.n_embd)):
            yield Tensor(f"a.conv1d.{number}.weight", (self.n_embd, width, 3), 2.0 / (3 * width) ** 0.5)
            yield Tensor(f"a.conv1d.{number}.bias", (self.n_embd, 1), 0.1)
        for layer in range(self.n_layer):
            block = encoder_block(f"a.blk.{layer}", self.n_embd, self.n_ff)
            yield from (one for one in block if not one.name.endswith("attn_k.bias"))
        yield norm("a.post_ln.weight", self.n_embd)
        yield bias("a.post_ln.bias", self.n_embd)


@dataclass(frozen=True, kw_only=True)
class UltravoxAudioSpec(_WhisperSpec):
    """Ultravox: as many frames stacked to one embedding, without marks around them, for any architecture of text model."""

    projector: ClassVar[str] = "ultravox"
    stack_factor: int = 50

    def metadata(self) -> dict[str, Value]:
        """Return the metadata."""
        return super().metadata() | {"clip.audio.projector.stack_factor": self.stack_factor}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors."""
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
        """Yield the tensors."""
        yield from super().tensors()
        yield matrix("mm.a.fc.weight", self.n_embd_text, self.n_embd, gain=2.0)
        yield bias("mm.a.fc.bias", self.n_embd_text)
