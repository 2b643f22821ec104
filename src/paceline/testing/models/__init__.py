"""Tiny random models of many architectures as GGUF files, for tests: written in milliseconds, always the same bytes.

    from paceline.testing.models import LlamaSpec, write_model
    path = write_model(tmp_path / "llama.gguf", LlamaSpec(n_layer=3), seed=7)

A spec is a frozen record of an architecture and its sizes; `write_model` fills its tensors with random values. What
such a model writes is nonsense, but it depends on everything it has read, it does not repeat one token for ever, and it
hardly ever ends by itself: the control tokens have next to no weight. To see an end, declare a token that it does write
the end: `metadata={"tokenizer.ggml.eos_token_id": ...}`. Needs the package `gguf`.
"""

from paceline.testing.models.adapter import write_lora
from paceline.testing.models.encoder import BertSpec, T5Spec
from paceline.testing.models.kinds import KINDS
from paceline.testing.models.metadata import Typed, Value, every_value_type
from paceline.testing.models.recurrent import FalconH1Spec, Lfm2Spec, MambaSpec
from paceline.testing.models.spec import ModelSpec, Pooling
from paceline.testing.models.tensor import Tensor, WeightType
from paceline.testing.models.transformer import Gemma3Spec, LlamaSpec, Qwen2MoeSpec, Qwen2Spec, qwen2_half_billion
from paceline.testing.models.vocabulary import Vocabulary, byte_level, copied, numbered, word_pieces
from paceline.testing.models.writing import CHAT_TEMPLATE, write_model, write_split_model

__all__ = [
    "CHAT_TEMPLATE",
    "KINDS",
    "BertSpec",
    "FalconH1Spec",
    "Gemma3Spec",
    "Lfm2Spec",
    "LlamaSpec",
    "MambaSpec",
    "ModelSpec",
    "Pooling",
    "Qwen2MoeSpec",
    "Qwen2Spec",
    "T5Spec",
    "Tensor",
    "Typed",
    "Value",
    "Vocabulary",
    "WeightType",
    "byte_level",
    "copied",
    "every_value_type",
    "numbered",
    "qwen2_half_billion",
    "word_pieces",
    "write_lora",
    "write_model",
    "write_split_model",
]
