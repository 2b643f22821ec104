"""`paceline trace show`: figures on stdout, errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.observability.recorded import busy, two_requests
from typer.testing import CliRunner

from paceline.cli.app import build_app
from paceline.observability.trace_file import TraceRecorder


def invoke(*args: object) -> Any:
    return CliRunner().invoke(build_app(), ["trace", *map(str, args)], prog_name="paceline")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with TraceRecorder(tmp_path / "run.jsonl", start_s=0.0) as recorder:
        two_requests().replay(recorder)
    return tmp_path / "run.jsonl"


def test_show_prints_the_figures(path: Path) -> None:
    """The summary has two columns, and no file is written."""
    result = invoke("show", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "run.jsonl",
        "  ticks        4 in 0.051 s",
        "  requests     2 (2 length)",
        "  generated    5 tokens, 97.5 a second",
        "  prefilled    110 tokens",
        "  first token  p50 31.0 ms, p95 31.0 ms",
        "  next token   p50 10.2 ms, p99 10.2 ms",
    ]
    assert list(path.parent.iterdir()) == [path]


def test_show_prints_embeddings_and_preemptions(tmp_path: Path) -> None:
    """Embeddings and preemptions have lines only if there were any."""
    with TraceRecorder(tmp_path / "run.jsonl", start_s=0.0) as recorder:
        busy(30).replay(recorder)
    text = invoke("show", tmp_path / "run.jsonl").stdout
    assert "of them embedding" in text and "  embedded " in text and "  preemptions " in text
    assert "30 (10 error, 10 cancelled, 10 stop)" in text


def test_a_truncated_trace_is_shown_with_a_note(path: Path) -> None:
    """A note on stderr reports an incomplete last line, and the summary is printed."""
    path.write_bytes(path.read_bytes()[:-9])
    result = invoke("show", path)
    assert result.exit_code == 0 and "4 in 0.051 s" in result.stdout
    assert "ends within a line, which was left out" in result.stderr


def test_invalid_trace_is_one_line_and_exit_1(tmp_path: Path) -> None:
    """A file that is not a trace is an error, and no page is written."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF\n")
    result = invoke("show", tmp_path / "model.gguf", "--html", tmp_path / "out.html")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ") and result.stderr.endswith("model.gguf, line 1: not valid JSON\n")
    assert not (tmp_path / "out.html").exists()


def test_a_file_that_cannot_be_read_is_one_line(path: Path) -> None:
    """The error has the path and the reason, and no summary is printed."""
    result = invoke("show", path.parent / "nothing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: {path.parent / 'nothing'}: No such file or directory\n"


@pytest.mark.parametrize("args", [["draw"], ["show"], ["show", "a", "--width"], ["show", "a", "b"]])
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    """A usage error exits with 2 before any file is read."""
    result = invoke(*args)
    assert result.exit_code == 2
    assert "Error: " in result.stderr or "Usage: " in result.stdout + result.stderr


def test_help_names_the_command() -> None:
    """The help is plain text and lists the command."""
    text = invoke("--help").stdout
    assert text.isascii() and "show" in text
    assert "--html" in invoke("show", "--help").stdout
