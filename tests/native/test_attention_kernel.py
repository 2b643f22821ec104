"""Which kernel computes attention on a CPU, paceline's or llama.cpp's, and models that are computed by ours."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.native.attention_cases import LARGE, make, reference
from tests.native.conftest import TinyModels

from paceline.errors import InvalidParams
from paceline.runtime import Context, Model, build_info
from paceline.runtime.attention import kernel, use_kernel, use_kernel_of_environment
from paceline.testing.models import Gemma3Spec, LlamaSpec, ModelSpec, Qwen2Spec

pytestmark = [
    pytest.mark.native,
    pytest.mark.usefixtures("own_attention"),
    pytest.mark.skipif(not build_info().own_attention, reason="built without it: another tree or compiler"),
]


def test_the_kernel_can_be_chosen() -> None:
    """Both compute the same but for rounding, and the last setting selects the kernel."""
    one = make(LARGE, "causal")
    ours, _ = one.run()
    use_kernel("llama.cpp")
    assert kernel() == "llama.cpp"
    theirs, _ = one.run()
    assert np.allclose(ours, theirs, atol=5e-3)
    assert not np.array_equal(ours, theirs)
    with pytest.raises(InvalidParams, match="kernel must be 'paceline' or 'llama.cpp', not 'vllm'"):
        use_kernel("vllm")  # type: ignore[arg-type]
    assert kernel() == "llama.cpp"


def test_the_choice_may_change_at_any_time() -> None:
    """While operations run on several threads: each is computed by a single kernel of the two."""
    passes = [make({**LARGE, "tokens": tokens, "cells": 700}, "causal") for tokens in (1, 9, 70)]
    wanted = [reference(item) for item in passes]
    is_over = threading.Event()

    def change() -> None:
        for number in itertools.count():
            use_kernel("paceline" if number % 2 else "llama.cpp")
            if is_over.is_set():
                return

    def run(index: int) -> bool:
        return all(np.allclose(passes[index].run(n_threads=3)[0], wanted[index], atol=2e-2) for _ in range(150))

    with ThreadPoolExecutor(4) as threads:
        changing = threads.submit(change)
        found = [threads.submit(run, index) for index in range(3)]
        try:
            results = [future.result() for future in found]
        finally:
            is_over.set()
        changing.result()
    assert results == [True, True, True]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("llama.cpp", "llama.cpp"), ("paceline", "paceline"), ("", "paceline"), ("best", "InvalidParams")],
)
def test_the_environment_chooses(word: str, expected: str) -> None:
    """PACELINE_CPU_ATTENTION selects the kernel; another name is refused."""
    script = (
        "from paceline.runtime.attention import kernel\n"
        "try:\n    print(kernel())\n"
        "except Exception as error:\n    print(type(error).__name__)"
    )
    environment = {**os.environ, "PACELINE_CPU_ATTENTION": word}
    completed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout.strip() == expected


def test_a_context_reads_the_environment(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown kernel name raises when a context is made, and changes nothing."""
    use_kernel_of_environment.cache_clear()
    monkeypatch.setenv("PACELINE_CPU_ATTENTION", "best")
    with pytest.raises(InvalidParams, match="PACELINE_CPU_ATTENTION must be 'paceline' or 'llama.cpp', not 'best'"):
        Context(llama, n_ctx=256)
    with pytest.raises(InvalidParams, match="PACELINE_CPU_ATTENTION must be 'paceline' or 'llama.cpp', not 'best'"):
        kernel()
    monkeypatch.delenv("PACELINE_CPU_ATTENTION")
    Context(llama, n_ctx=256).close()


def last_logits(model: Model, pieces: int, **options: Any) -> npt.NDArray[np.float32]:
    """Of the last of 150 tokens, given in pieces of so many."""
    tokens = [(7 * i) % 200 + 3 for i in range(150)]
    with Context(model, n_ctx=512, n_batch=256, n_ubatch=256, **options) as context:
        for start in range(0, len(tokens), pieces):
            piece = tokens[start : start + pieces]
            context.decode(piece)
        return context.logits(len(piece) - 1)


SPECS = [kind(n_head_kv=heads) for kind in (LlamaSpec, Gemma3Spec, Qwen2Spec) for heads in (1, 4)]  # of four heads


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.architecture}-{spec.n_head_kv}")
def test_a_models_logits_are_those_without_flash_attention(tiny_models: TinyModels, spec: ModelSpec) -> None:
    """Prompts in pieces, and token by token: the logits of plain attention, but for cells of half precision."""
    with Model.load(tiny_models(spec)) as model:
        wanted = last_logits(model, 150, flash_attn="off", type_k="f32", type_v="f32")
        for pieces in (150, 40, 1):
            assert np.allclose(last_logits(model, pieces, flash_attn="on"), wanted, atol=0.05)  # of logits up to 9


def test_logits_do_not_depend_on_how_a_prompt_was_cut(tiny_models: TinyModels) -> None:
    """In one pass or token by token the same, but for keys that round another way."""
    with Model.load(tiny_models(LlamaSpec(n_head_kv=1))) as model:
        whole = last_logits(model, 150, flash_attn="on")
        for pieces in (64, 7, 1):
            assert np.allclose(last_logits(model, pieces, flash_attn="on"), whole, atol=1e-3)
