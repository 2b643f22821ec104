"""Models with a sliding window or a recurrent state: random weights in real shapes, Q8_0, with the vocabulary of Qwen 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.model import vocabulary_file, written
from paceline.testing.models import (
    FalconH1Spec,
    Gemma3Spec,
    GraniteHybridSpec,
    Lfm2Spec,
    ModelSpec,
    Qwen35Spec,
    copied,
    write_model,
)


@dataclass(frozen=True, kw_only=True)
class WideGemma3Spec(Gemma3Spec):
    """Gemma 3, with heads wider than its embeddings."""

    @property
    def head_size(self) -> int:
        """Values of a head."""
        return 256


_SPECS: Mapping[str, Callable[..., ModelSpec]] = {
    "gemma3-270m": partial(WideGemma3Spec, n_layer=18, n_embd=640, n_head=4, n_head_kv=1, n_ff=2048, n_swa=512),
    "gemma3-1b": partial(WideGemma3Spec, n_layer=26, n_embd=1152, n_head=4, n_head_kv=1, n_ff=6912, n_swa=512),
    "lfm2-350m": partial(Lfm2Spec, n_layer=16, n_embd=1024, n_head=16, n_head_kv=8, n_ff=4608, attention_every=3),
    "lfm2-1.2b": partial(Lfm2Spec, n_layer=16, n_embd=2048, n_head=32, n_head_kv=8, n_ff=8192, attention_every=3),
    "falcon-h1": partial(
        FalconH1Spec, n_layer=12, n_embd=768, n_head=12, n_head_kv=4, n_ff=2048, d_state=128, n_ssm_head=24
    ),
    # 10 experts where the original has 64: as much is computed, in a third of the file
    "granite4-tiny": partial(GraniteHybridSpec, n_layer=40, attention_layers=(5, 15, 25, 35), n_embd=1536, n_head=12,
                             n_head_kv=4, n_ff=512, n_expert=10, n_expert_used=6, n_ff_shared=1024, d_state=128,
                             n_ssm_head=48, tied=True),
    # every second layer a gated delta net, where the original has three of four
    "qwen3.5-0.8b": partial(Qwen35Spec, n_layer=24, n_heads=1, n_embd=1024, n_head=8, n_head_kv=2, n_ff=3584,
                            d_state=128, n_key_head=16, n_value_head=16),
}  # fmt: skip

MODELS = tuple(_SPECS)


def model_file(name: str, source: Path | None = None) -> Path:
    """Return the path of a model's file, written on first use."""
    return written(f"{name}-q8_0.gguf", lambda path: write_model(path, _spec(name, source), seed=1, weights="Q8_0"))


def _spec(name: str, source: Path | None) -> ModelSpec:
    return _SPECS[name](n_ctx_train=32768, vocabulary=copied(vocabulary_file(source)))
