"""Perplexity of the demo model with paceline's matrix products on a CPU and with llama.cpp's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from demo_model.corpus import documents
from paceline.demo import demo_model_path
from paceline.runtime import Context, Model, build_info
from paceline.runtime.matmul import kernel, kernels, use_kernel
from paceline.testing.models import write_requantised

pytestmark = [
    pytest.mark.native,
    pytest.mark.full,
    pytest.mark.skipif(not build_info().own_matmul, reason="built without it: another tree or compiler"),
    pytest.mark.skipif(not kernels(), reason="this processor runs none of the kernels"),
]
HELD_OUT_SEED = 990_001  # of no corpus that the model was trained on
NUM_DOCUMENTS, N_CTX = 60, 1024
TYPES = ("Q8_0", "Q4_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q6_K")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = kernel()
    yield
    use_kernel(before)


def held_out(model: Model) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield tokens of stories, chats and tool calls, drawn anew, with flags of the tokens that the model learned to write."""
    for document in itertools.islice(documents(HELD_OUT_SEED), NUM_DOCUMENTS):
        ids: list[int] = []
        learned: list[bool] = []
        for segment in document:
            ids += model.tokenizer.encode(segment.text, add_special=False, parse_special=True)
            learned += [segment.learn] * (len(ids) - len(learned))
        yield ids[:N_CTX], learned[:N_CTX]


def surprise(logits: npt.NDArray[np.floating[Any]], token: int) -> float:
    """Minus the logarithm of a token's probability."""
    values = logits.astype(np.float64)
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum()) - values[token])


def perplexity(path: Path) -> float:
    """The perplexity of the model's own tokens in the held-out documents, each by itself."""
    found: list[float] = []
    with (
        Model.load(path) as model,
        Context(model, n_ctx=N_CTX, n_batch=N_CTX, n_outputs_max=N_CTX, n_threads=2) as context,
    ):
        for ids, learned in held_out(model):
            context.remove(0)
            context.decode(ids, wants_logits="all")
            found += [surprise(context.logits(i), ids[i + 1]) for i in range(len(ids) - 1) if learned[i + 1]]
    return float(np.exp(np.mean(found)))


@pytest.mark.parametrize("type_name", TYPES)
def test_perplexity_is_that_of_llama_cpp(tmp_path: Path, type_name: str) -> None:
    """On text that the model has not seen, to 0.1 %, with each kernel and type of weights."""
    path = (
        demo_model_path()
        if type_name == "Q8_0"
        else write_requantised(tmp_path / "model.gguf", demo_model_path(), type_name)
    )
    use_kernel("llama.cpp")
    theirs = perplexity(path)
    for name in kernels():
        use_kernel(name)
        ours = perplexity(path)
        assert abs(ours / theirs - 1) < 1e-3, f"{name}: {ours:.5f}, llama.cpp {theirs:.5f}"
