"""all-MiniLM-L6-v2 as a GGUF file of our own making, beside a forward pass in NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.real_models import texts
from tests.real_models.conftest import RealModel
from tests.real_models.minilm import MiniLM

from paceline import LLM


@pytest.fixture(scope="module")
def minilm(real_model: RealModel) -> MiniLM:
    """Read the safetensors and the vocabulary."""
    return MiniLM(real_model("minilm"))


@pytest.fixture(scope="module")
def llm(minilm: MiniLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Load the model from a GGUF file written from the same tensors."""
    with LLM(minilm.write_gguf(tmp_path_factory.mktemp("minilm") / "minilm.gguf"), isolation="thread") as loaded:
        yield loaded


def test_embeddings_equal_numpy(minilm: MiniLM, llm: LLM) -> None:
    """All cosines are at least 0.9999."""
    sentences = [sentence for triple in texts.TRIPLES for sentence in triple]
    ours, theirs = llm.embed(sentences), np.stack([minilm.embed(sentence) for sentence in sentences])
    cosines = (ours * theirs).sum(axis=1)
    print(f"smallest cosine of {len(sentences)} sentences: {cosines.min():.6f}")
    assert cosines.min() > 0.9999


def test_a_paraphrase_is_nearer_than_another_topic(llm: LLM) -> None:
    """The order holds for each triple of sentences."""
    for sentence, paraphrase, other in texts.TRIPLES:
        vectors = llm.embed([sentence, paraphrase, other])
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.1
