"""Perplexity of real models with paceline's kernels and with llama.cpp's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.real_models import texts
from tests.real_models.conftest import RealModel

MAX_DIFFERENCE = 0.003
VARIABLES = ("PACELINE_CPU_MATMUL", "PACELINE_CPU_ATTENTION")
MODELS = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-Q4_K_M.gguf",
    "qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf",
    "qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf",
)


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_does_not_depend_on_the_kernels(real_model: RealModel, tmp_path: Path, name: str) -> None:
    """The perplexities of a text differ by less than 0.3 %."""
    text = tmp_path / "text.txt"
    text.write_text(texts.prose())
    ours, num_ours = _perplexity(real_model(name), text, "paceline")
    theirs, num_theirs = _perplexity(real_model(name), text, "llama.cpp")
    print(f"{name}: {ours:.4f} by paceline's kernels, {theirs:.4f} by llama.cpp's, {num_ours} tokens")
    assert num_ours == num_theirs > 5000
    assert 1 < ours < 500  # a text that the model can read
    assert abs(ours / theirs - 1) < MAX_DIFFERENCE


def _perplexity(model: Path, text: Path, kernels: str) -> tuple[float, int]:
    """Return the perplexity and the number of scored tokens. Fails if the build or the processor lacks the kernels."""
    command = [sys.executable, "-m", "tests.real_models.perplexity", str(model), str(text), "1024"]
    done = subprocess.run(
        command, env=os.environ | dict.fromkeys(VARIABLES, kernels), cwd=texts.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    perplexity, count = done.stdout.split()
    return float(perplexity), int(count)
