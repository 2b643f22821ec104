"""Tiny random models of many architectures as GGUF files, for tests: written in milliseconds, always the same bytes.

    from paceline.testing.models import LlamaSpec, write_model
    path = write_model(tmp_path / "llama.gguf", LlamaSpec(n_layer=3), seed=7)

A spec is a frozen record of an architecture and its sizes; `write_model` fills its tensors with random values. The model
generates nonsense, but the output depends on all input, does not repeat one token forever, and hardly ever ends: the control
tokens have next to no weight. To see an end, declare a token that it does generate the end token:
`metadata={"tokenizer.ggml.eos_token_id": ...}`. Needs the package `gguf`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from paceline.testing.models.draft_heads import DFlashSpec, Eagle3Spec, HunYuan3Spec, Mimo2Spec, Qwen35Spec
from paceline.testing.models.gguf_parts import (
    CHAT_TEMPLATE,
    ModelSpec,
    Pooling,
    SpecVocabulary,
    Tensor,
    Typed,
    Value,
    WeightType,
    byte_level,
    copied,
    every_value_type,
    numbered,
    word_pieces,
    write_lora,
    write_model,
    write_requantised,
    write_split_model,
)
from paceline.testing.models.projectors import (
    Gemma3VisionSpec,
    Gemma4VisionSpec,
    LlavaVisionSpec,
    PixtralVisionSpec,
    Qwen2AudioSpec,
    Qwen3VisionSpec,
    Qwen25VisionSpec,
    UltravoxAudioSpec,
)
from paceline.testing.models.recurrent import FalconH1Spec, GraniteHybridSpec, Lfm2Spec, MambaSpec, Rwkv6Spec, Rwkv7Spec
from paceline.testing.models.transformer import (
    BertSpec,
    Gemma3Spec,
    Gemma4Spec,
    LlamaSpec,
    ModernBertSpec,
    Qwen2MoeSpec,
    Qwen2Spec,
    Qwen2VlSpec,
    Qwen3VlSpec,
    T5Spec,
    qwen2_half_billion,
)

__all__ = [
    "CHAT_TEMPLATE",
    "KINDS",
    "BertSpec",
    "DFlashSpec",
    "Eagle3Spec",
    "FalconH1Spec",
    "Gemma3Spec",
    "Gemma3VisionSpec",
    "Gemma4Spec",
    "Gemma4VisionSpec",
    "GraniteHybridSpec",
    "HunYuan3Spec",
    "Lfm2Spec",
    "LlamaSpec",
    "LlavaVisionSpec",
    "MambaSpec",
    "Mimo2Spec",
    "ModelSpec",
    "ModernBertSpec",
    "PixtralVisionSpec",
    "Pooling",
    "Qwen2AudioSpec",
    "Qwen2MoeSpec",
    "Qwen2Spec",
    "Qwen2VlSpec",
    "Qwen3VisionSpec",
    "Qwen3VlSpec",
    "Qwen25VisionSpec",
    "Qwen35Spec",
    "Rwkv6Spec",
    "Rwkv7Spec",
    "SpecVocabulary",
    "T5Spec",
    "Tensor",
    "Typed",
    "UltravoxAudioSpec",
    "Value",
    "WeightType",
    "byte_level",
    "copied",
    "every_value_type",
    "numbered",
    "qwen2_half_billion",
    "word_pieces",
    "write_lora",
    "write_model",
    "write_requantised",
    "write_split_model",
]

KINDS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "llama": LlamaSpec(),
        "mixtral": LlamaSpec(n_expert=4),
        "qwen2": Qwen2Spec(),
        "qwen2moe": Qwen2MoeSpec(),
        "gemma3": Gemma3Spec(),
        "gemma4": Gemma4Spec(),
        "mamba": MambaSpec(),
        "rwkv6": Rwkv6Spec(),
        "rwkv7": Rwkv7Spec(),
        "falcon-h1": FalconH1Spec(),
        "lfm2": Lfm2Spec(),
        "granitehybrid": GraniteHybridSpec(),
        "hy_v3": HunYuan3Spec(),
        "qwen35": Qwen35Spec(),
        "embedding-llama": LlamaSpec(pooling="last"),
        "bert": BertSpec(),
        "modern-bert": ModernBertSpec(),
        "reranker": BertSpec(pooling="rank"),
        "t5": T5Spec(),
    }
)
"""gemma3 and gemma4 have sliding windows, mamba and rwkv are recurrent, falcon-h1, lfm2, granitehybrid and qwen35 are
hybrids; hy_v3 and qwen35 have draft heads; bert, modern-bert and t5 have encoders.
"""
