"""Greedy generation against llama.cpp's own tool, built from the same source, token for token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native.reference_tool import ReferenceTool, build_reference_tool

from paceline.params import SamplingParams
from paceline.runtime import Context, Model, Sampler
from paceline.testing.models import (
    FalconH1Spec,
    Gemma3Spec,
    Lfm2Spec,
    LlamaSpec,
    MambaSpec,
    ModelSpec,
    Qwen2MoeSpec,
    Qwen2Spec,
    T5Spec,
    WeightType,
    numbered,
)

TinyModels = Callable[..., Path]

pytestmark = pytest.mark.native

PROMPT = [(7 * place * place + 3) % 290 for place in range(45)]  # longer than the window of the sliding window model
COUNT = 100
KINDS: dict[str, tuple[ModelSpec, WeightType]] = {
    "llama": (LlamaSpec(vocabulary=numbered()), "F32"),
    "llama-q8": (LlamaSpec(vocabulary=numbered()), "Q8_0"),
    "qwen2": (Qwen2Spec(vocabulary=numbered()), "F16"),
    "mixture of experts": (Qwen2MoeSpec(vocabulary=numbered()), "F32"),
    "sliding window": (Gemma3Spec(vocabulary=numbered()), "F32"),
    "recurrent": (MambaSpec(vocabulary=numbered()), "F32"),
    "hybrid": (FalconH1Spec(vocabulary=numbered()), "F32"),
    "convolutions": (Lfm2Spec(vocabulary=numbered()), "F32"),
    "encoder and decoder": (T5Spec(vocabulary=numbered()), "F32"),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ReferenceTool:
    return build_reference_tool(tmp_path_factory.mktemp("reference"))


@pytest.mark.usefixtures("llama_cpp_kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_output_equals_that_of_llama_cpp(tiny_models: TinyModels, reference: ReferenceTool, kind: str) -> None:
    """`Context.generate` at temperature 0 yields the very tokens that llama.cpp's own tool writes."""
    spec, weights = KINDS[kind]
    path = tiny_models(spec, weights=weights)
    expected = reference.generate(path, PROMPT, COUNT)
    with (
        Model.load(path) as model,
        Context(model, n_ctx=512, n_threads=1) as context,
        Sampler(SamplingParams(temperature=0), model) as sampler,
    ):
        ours = list(context.generate(sampler, PROMPT, max_tokens=len(expected)))
    assert len(expected) >= COUNT
    assert ours == expected
