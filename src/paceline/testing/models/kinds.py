"""One small spec of every kind of model, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from paceline.testing.models.encoder import BertSpec, T5Spec
from paceline.testing.models.recurrent import FalconH1Spec, Lfm2Spec, MambaSpec
from paceline.testing.models.spec import ModelSpec
from paceline.testing.models.transformer import Gemma3Spec, LlamaSpec, Qwen2MoeSpec, Qwen2Spec

KINDS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "llama": LlamaSpec(),
        "mixtral": LlamaSpec(n_expert=4),
        "qwen2": Qwen2Spec(),
        "qwen2moe": Qwen2MoeSpec(),
        "gemma3": Gemma3Spec(),
        "mamba": MambaSpec(),
        "falcon-h1": FalconH1Spec(),
        "lfm2": Lfm2Spec(),
        "embedding-llama": LlamaSpec(pooling="last"),
        "bert": BertSpec(),
        "reranker": BertSpec(pooling="rank"),
        "t5": T5Spec(),
    }
)
"""gemma3 has sliding windows, mamba is recurrent, falcon-h1 and lfm2 are hybrids; bert and t5 have encoders."""
