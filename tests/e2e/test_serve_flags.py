"""The flags of `paceline serve` as a user meets them: help on a terminal, the configuration, slips."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.commands import ESCAPE, Terminal, output, paceline_

pytestmark = pytest.mark.native


def test_help_on_a_terminal_has_headings_in_bold() -> None:
    """The help fits into 80 columns."""
    screen = Terminal("serve", "--help")
    assert screen.finish() == 0
    assert ESCAPE in screen.text and "Model and memory" in screen.plain_text
    assert max(map(len, screen.plain_text.splitlines())) <= 80


def test_the_configuration_of_a_model_has_its_own_context(long_model: Path, tmp_path: Path) -> None:
    """-c 0 takes the file's length; the file of flags is named at the value."""
    file = tmp_path / "serve.toml"
    file.write_text("parallel = 3\n")
    text = output("serve", "-m", str(long_model), "-c", "0", "--config", str(file), "--print-config")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "n_ctx 131072 derived: -c 0, as many as the model was trained with" in lines
    assert f"num_slots 3 {file}: parallel" in lines


def test_a_slip_is_one_line() -> None:
    """Exit code 2, and the nearest flag."""
    done = paceline_("serve", "--ctx-sise", "1")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"Error: unknown option '--ctx-sise'; did you mean '--ctx-size'?\n"
