"""`paceline quantize`, as a user runs it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.e2e.commands import TIMEOUT_S, Terminal, paceline_, started

from paceline.testing.models import LlamaSpec, write_model

pytestmark = pytest.mark.native

SPEC = LlamaSpec(n_embd=256, n_head=4, n_head_kv=2, n_ff=512)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32."""
    return write_model(tmp_path_factory.mktemp("source") / "tiny-F32.gguf", SPEC)


def test_it_writes_a_file_and_prints_its_types(source: Path, tmp_path: Path) -> None:
    """Sizes before and after, the path, and a line for each type; the model answers."""
    done = paceline_("quantize", str(source), "q4_k_m", "-o", str(tmp_path), "--tensor-type", "ffn_up=q8_0", "-t", "1")
    text, path = done.stdout.decode(), tmp_path / "tiny-Q4_K_M.gguf"
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.search(r"^  before +\d+\.\d MiB, 32\.00 bits per weight$", text, re.MULTILINE)
    assert re.search(r"^  after +\d+\.\d MiB, \d\.\d\d bits per weight$", text, re.MULTILINE)
    assert f"  file     {path}\n" in text
    assert re.search(r"^TYPE +TENSORS +SIZE +SHARE\nQ4_K +\d+ +\d+\.\d MiB +\d+\.\d%\n", text, re.MULTILINE)
    assert re.search(r"^Q8_0 +2 ", text, re.MULTILINE)
    assert b"mostly Q4_K_M" in paceline_("info", str(path)).stdout
    assert paceline_("generate", "x", "-m", str(path), "-n", "2").returncode == 0


def test_a_dry_run_notes_what_is_missing(source: Path, tmp_path: Path) -> None:
    """The sizes come on stdout, and nothing is written."""
    done = paceline_("quantize", str(source), "IQ2_XS", "-o", str(tmp_path), "--dry-run")
    assert done.returncode == 0 and b"\nIQ2_XS " in done.stdout and b"would write" in done.stdout
    assert b"Without --dry-run this is refused" in done.stderr and b"needs an importance matrix" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    """The command ends with 130 after the tensor that it computes."""
    source = write_model(tmp_path / "large.gguf", LlamaSpec(n_layer=24, n_embd=512, n_head=4, n_head_kv=4, n_ff=2048))
    with started("quantize", str(source), "Q3_K_M", "-v", "-t", "1", "-o", str(tmp_path / "new.gguf")) as process:
        assert process.stderr is not None
        while not (tmp_path / ".new.gguf.partial" / "new.gguf").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and b"Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["large.gguf"]


def test_a_terminal_shows_a_bar(source: Path, tmp_path: Path) -> None:
    """Its title names the model, and it is gone in the end."""
    terminal = Terminal("quantize", str(source), "Q8_0", "-o", str(tmp_path))
    assert terminal.finish() == 0
    assert "Quantising tiny-F32.gguf" in terminal.plain_text and "bits per weight" in terminal.plain_text


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["SOURCE", "Q4_K_N"], 2, "did you mean 'Q4_K_S'"),
        (
            ["SOURCE"],
            2,
            "TYPE is missing; name a GGUF file and a type, as in `paceline quantize model-F16.gguf Q4_K_M`",
        ),
        (["SOURCE", "Q8_0", "--tensor-type", "ffn_up"], 2, "--tensor-type must be PATTERN=TYPE, such as ffn_down=Q6_K"),
        (["SOURCE", "IQ1_S"], 2, "needs an importance matrix"),
        (["SOURCE", "Q8_0", "-o", "SOURCE", "--force"], 2, "is the model itself"),
        (["/no/such.gguf", "Q8_0"], 1, "/no/such.gguf: No such file or directory"),
        (["someone/model", "Q8_0"], 1, "is named hf:someone/model"),
        (["SOURCE", "Q8_0", "--imatrix", "SOURCE"], 1, "is no importance matrix"),
    ],
)
def test_an_error_is_one_line(source: Path, args: list[str], code: int, message: str) -> None:
    """With its exit code, and no file."""
    done = paceline_("quantize", *(str(source) if arg == "SOURCE" else arg for arg in args))
    assert done.returncode == code and message in " ".join(done.stderr.decode().split())
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_llama_quantize_is_named(source: Path) -> None:
    """The name of llama.cpp's program leads here."""
    assert b"Did you mean 'quantize'?" in paceline_("llama-quantize", str(source), "Q8_0").stderr
