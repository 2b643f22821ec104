"""The fuzzers in a short form; by hand they run for as long as one likes (`python -m tests.fuzz.fuzz_gguf --help`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.tool_building import source_folder

from paceline.runtime import build_info

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="every case is run in a forked process"),
    pytest.mark.skipif(
        build_info().assertions, reason="debug builds of ggml end the process where a weight is no number"
    ),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("fuzzer", "count"),
    [
        ("fuzz_gguf", 30),
        ("fuzz_adapter", 12),
        ("fuzz_state", 12),
        ("fuzz_media", 60),
        pytest.param("fuzz_gguf", 150, marks=pytest.mark.full),
        pytest.param("fuzz_adapter", 60, marks=pytest.mark.full),
        pytest.param("fuzz_state", 60, marks=pytest.mark.full),
        pytest.param("fuzz_media", 300, marks=pytest.mark.full),
    ],
)
def test_damaged_files_end_in_typed_errors(fuzzer: str, count: int) -> None:
    """Damaged models, adapters, states, images and sounds are taken or refused by an error of ours; no process dies or hangs."""
    command = [sys.executable, "-m", f"tests.fuzz.{fuzzer}", "--count", str(count), "--seed", "2026"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    counts = run.stdout.splitlines()[-1]
    assert "'fine'" in counts, counts  # else nothing would have been tried
    assert "error" in counts or fuzzer == "fuzz_state", counts


@pytest.mark.full
@pytest.mark.skipif(not (source_folder() / "src").is_dir(), reason="llama.cpp's source is not on this machine")
def test_files_under_the_names_of_other_architectures_end_in_typed_errors() -> None:
    """Tensors and sizes of a Llama under every name that llama.cpp knows: computed or refused; no process dies."""
    command = [sys.executable, "-m", "tests.fuzz.fuzz_gguf", "--names", "--kind", "llama"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "'typed error': 1" in run.stdout.splitlines()[-1]  # a hundred and more
