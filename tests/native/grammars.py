"""Parts that tests of grammars share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.runtime import Model, Sampler

LIST = 'root ::= "[" [0-9]{1,3} ("," [0-9]{1,3}){0,3} "]"'
OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def spm(llama_cpp_source: Path) -> Path:
    """Return the file of `vocabulary`."""
    return llama_cpp_source / "models" / "ggml-vocab-llama-spm.gguf"


def row(seed: int, n: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=n) * 3).astype(np.float32)


def text_of(sampler: Sampler, model: Model, num_tokens: int = 60) -> str:
    """Generate on random logits until the model would end."""
    ids = []
    for k in range(num_tokens):
        token = sampler.sample(row(k, sampler.n_vocab))
        sampler.accept(token)
        if sampler.is_eog(token):
            return model.tokenizer.decode(ids)
        ids.append(token)
    return model.tokenizer.decode(ids) + "..."


def accept_all(sampler: Sampler, token_ids: list[int]) -> None:
    for token in token_ids:
        sampler.accept(token)


def bits(mask: np.ndarray, n: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:n]).tolist())
