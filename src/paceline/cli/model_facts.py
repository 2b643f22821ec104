"""What a GGUF file says of its model, without loading the weights.

llama.cpp reads the shape of a model only together with its weights, so widths and counts come from the metadata here.
What a file leaves to llama.cpp's code is known for the few architectures that are named below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.runtime import Model

# general.file_type: most of the tensors are of this type.
# fmt: off
_FILE_TYPES: dict[int | None, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}
# fmt: on
_WINDOW_UNSAID = {"gemma2": 4096, "llama4": 8192}  # llama.cpp knows their window where the file names none
_WINDOW_UNUSED = {"phi3"}  # the file may name one, and llama.cpp does not use it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model as its file describes it; None where it does not say."""

    name: str | None
    architecture: str
    size_bytes: int
    n_params: int
    quantisation: str | None
    n_ctx_train: int | None
    n_layer: int | None
    n_embd: int | None
    n_ff: int | None
    n_head: int | None
    n_head_kv: int | None
    n_expert: int | None
    n_expert_used: int | None
    n_swa: int
    memory_class: str
    has_encoder: bool
    can_generate: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyFacts:
    """The vocabulary. `special_tokens`: role to id; `end_of_generation`: every token that ends an answer."""

    type: str
    pre_tokenizer: str | None
    n_vocab: int
    add_bos: bool
    add_eos: bool
    special_tokens: Mapping[str, int]
    end_of_generation: tuple[int, ...]
    names: Mapping[int, str]


def model_facts(model: Model) -> ModelFacts:
    """Facts of a model that may have been loaded with `vocab_only`."""
    metadata = model.metadata
    architecture = metadata.get("general.architecture", "unknown")

    def number(key: str) -> int | None:
        return _number(metadata.get(f"{architecture}.{key}"))

    n_swa = _window(architecture, number("attention.sliding_window"))
    memory = model.memory_class.value
    return ModelFacts(
        name=metadata.get("general.name"),
        architecture=architecture,
        size_bytes=model.size_bytes,
        n_params=model.n_params,
        quantisation=_FILE_TYPES.get(_number(metadata.get("general.file_type"))),
        n_ctx_train=number("context_length"),
        n_layer=number("block_count"),
        n_embd=number("embedding_length"),
        n_ff=number("feed_forward_length"),
        n_head=number("attention.head_count"),
        n_head_kv=number("attention.head_count_kv"),
        n_expert=number("expert_count"),
        n_expert_used=number("expert_used_count"),
        n_swa=n_swa,
        memory_class="sliding_window" if n_swa and memory == "attention" else memory,
        has_encoder=model.has_encoder,
        can_generate=model.has_decoder and memory != "none",
    )


def vocabulary_facts(model: Model) -> VocabularyFacts:
    """Facts of the vocabulary."""
    tokenizer = model.tokenizer
    special = dict(tokenizer.special_tokens)
    ends = tuple(sorted(tokenizer.eog_ids))
    return VocabularyFacts(
        type=tokenizer.vocab_type,
        pre_tokenizer=model.metadata.get("tokenizer.ggml.pre"),
        n_vocab=tokenizer.n_vocab,
        add_bos=tokenizer.add_bos,
        add_eos=tokenizer.add_eos,
        special_tokens=special,
        end_of_generation=ends,
        names={token: tokenizer.token_text(token) for token in sorted({*special.values(), *ends})},
    )


def _number(text: str | None) -> int | None:
    """A count of the metadata; None where it is not there or no count (some models have one a layer)."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _window(architecture: str, said: int | None) -> int:
    if architecture in _WINDOW_UNUSED:
        return 0
    return _WINDOW_UNSAID.get(architecture, 0) if said is None else said
