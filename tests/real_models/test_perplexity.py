"""Perplexity of real models with paceline's kernels and with llama.cpp's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.real_models import texts
from tests.real_models.conftest import RealModel

MAX_DIFFERENCE, MAX_NOISE = 0.003, 0.004
VARIABLES = ("PACELINE_CPU_MATMUL", "PACELINE_CPU_ATTENTION")
MODELS = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma-3-270m-Q4_K_M.gguf",
    "qwen2.5-coder-0.5b-instruct-Q4_K_M.gguf",
    "qwen2.5-coder-1.5b-instruct-Q4_K_M.gguf",
)


@pytest.mark.parametrize("name", MODELS)
def test_perplexity_does_not_depend_on_the_kernels(real_model: RealModel, tmp_path: Path, name: str) -> None:
    """The perplexities of a text differ by less than 0.3 %, or by no more than the noise of its tokens."""
    text = tmp_path / "text.txt"
    text.write_text(texts.prose())
    ours = _log_probabilities(real_model(name), text, "paceline")
    theirs = _log_probabilities(real_model(name), text, "llama.cpp")
    assert len(ours) == len(theirs) > 5000
    differences = theirs - ours  # of the negated ones: above 0 if the text is less likely by our kernels
    noise = float(differences.std() / np.sqrt(len(differences)))
    difference = float(np.expm1(differences.mean()))
    perplexities = [float(np.exp(-scores.mean())) for scores in (ours, theirs)]
    print(f"{name}: {perplexities[0]:.4f}, by llama.cpp's {perplexities[1]:.4f}, {difference:+.2%} (noise {noise:.2%})")
    assert 1 < perplexities[1] < 500  # a text that the model can read
    assert noise < MAX_NOISE
    assert abs(difference) < max(MAX_DIFFERENCE, 3 * noise)


def _log_probabilities(model: Path, text: Path, kernels: str) -> npt.NDArray[np.float64]:
    """Return the log-probabilities of the scored tokens. Fails if the build or the processor lacks the kernels."""
    command = [sys.executable, "-m", "tests.real_models.perplexity", str(model), str(text), "1024"]
    done = subprocess.run(
        command, env=os.environ | dict.fromkeys(VARIABLES, kernels), cwd=texts.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout))
