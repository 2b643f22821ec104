"""Models whose memory is a window or a state: random weights in real shapes, Q8_0, with the vocabulary of Qwen 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.model import vocabulary_file, written
from paceline.testing.models import (
    FalconH1Spec,
    Gemma3Spec,
    GraniteHybridSpec,
    Lfm2Spec,
    ModelSpec,
    copied,
    write_model,
)


@dataclass(frozen=True, kw_only=True)
class WideGemma3Spec(Gemma3Spec):
    """Gemma 3, whose heads are wider than its embeddings."""

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return 256


def spec(name: str, vocabulary: Path) -> ModelSpec:
    """Return the spec of a model by its name."""
    words = copied(vocabulary)
    match name:
        case "gemma3-270m":
            return WideGemma3Spec(n_layer=18, n_embd=640, n_head=4, n_head_kv=1, n_ff=2048, n_swa=512,
                                  n_ctx_train=32768, vocabulary=words)  # fmt: skip
        case "gemma3-1b":
            return WideGemma3Spec(n_layer=26, n_embd=1152, n_head=4, n_head_kv=1, n_ff=6912, n_swa=512,
                                  n_ctx_train=32768, vocabulary=words)  # fmt: skip
        case "lfm2-350m":
            return Lfm2Spec(n_layer=16, n_embd=1024, n_head=16, n_head_kv=8, n_ff=4608, attention_every=3,
                            n_ctx_train=32768, vocabulary=words)  # fmt: skip
        case "lfm2-1.2b":
            return Lfm2Spec(n_layer=16, n_embd=2048, n_head=32, n_head_kv=8, n_ff=8192, attention_every=3,
                            n_ctx_train=32768, vocabulary=words)  # fmt: skip
        case "falcon-h1":
            return FalconH1Spec(n_layer=12, n_embd=768, n_head=12, n_head_kv=4, n_ff=2048, d_state=128, n_ssm_head=24,
                                n_ctx_train=32768, vocabulary=words)  # fmt: skip
        case "granite4-tiny":  # 10 experts where the original has 64: as much is computed, in a third of the file
            return GraniteHybridSpec(n_layer=40, attention_layers=(5, 15, 25, 35), n_embd=1536, n_head=12, n_head_kv=4,
                                     n_ff=512, n_expert=10, n_expert_used=6, n_ff_shared=1024, d_state=128,
                                     n_ssm_head=48, tied=True, n_ctx_train=32768, vocabulary=words)  # fmt: skip
    raise SystemExit(f"no model {name!r}")


MODELS = ("gemma3-270m", "gemma3-1b", "lfm2-350m", "lfm2-1.2b", "falcon-h1", "granite4-tiny")


def model_file(name: str, source: Path | None = None) -> Path:
    """Return the path of a model's file, written on first use."""
    return written(
        f"{name}-q8_0.gguf", lambda path: write_model(path, spec(name, vocabulary_file(source)), seed=1, weights="Q8_0")
    )
