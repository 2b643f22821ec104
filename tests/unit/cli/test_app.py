"""The commands put together: exit codes, errors, and how little is loaded for nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline import cli
from paceline.cli import app as app_module
from paceline.cli import options
from paceline.cli.app import build_app
from paceline.errors import InvalidParams, ModelLoadError


def invoke(*args: str, **options: Any) -> Any:
    return CliRunner().invoke(build_app(), list(args), prog_name="paceline", **options)


def test_the_installed_command_is_main() -> None:
    """The name `paceline` on the shell runs `paceline.cli:main`."""
    (script,) = entry_points(group="console_scripts", name="paceline")
    assert script.load() is cli.main


def test_version_is_one_line() -> None:
    """The package's version, for people and scripts."""
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"paceline {paceline.__version__}\n")


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["generate", "--help"], ["demo", "--help"]])
def test_help_and_version_load_neither_the_core_nor_numpy(args: list[str]) -> None:
    """They return at once: nothing heavy is imported for them."""
    code = (
        "import atexit, sys\n"
        "heavy = {'paceline._native', 'paceline.runtime', 'numpy'}\n"
        "atexit.register(lambda: print('loaded', sorted(heavy & sys.modules.keys())))\n"
        "from paceline.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded []")


def test_help_is_plain_text_where_no_terminal_is() -> None:
    """No boxes, no escapes; the commands and the exit codes are there."""
    text = invoke("--help").stdout
    assert text.isascii() and "\x1b" not in text
    for word in ("demo", "chat", "generate", "tokenize", "embed", "info", "130 interrupted"):
        assert word in text


@pytest.mark.parametrize(
    "args",
    [
        ["nothing"],
        ["generate"],
        ["generate", "a", "--nothing"],
        ["generate", "a", "--top-k", "many"],
        ["generate", "a", "--temperature", "-1"],
        ["generate", "a", "--temperature", "nan"],
        ["generate", "a", "-n", "-2"],
        ["generate", "a", "--seed", "-2"],
        ["generate", "a", "--stop", ""],
        ["generate", "a", "--grammar-file", "/no/such/file"],
        ["generate", "a\udcff"],
        ["demo", "a"],
        ["demo", "--plain", "--json"],
        ["demo", "--requests", "/no/such/file"],
        ["demo", "--num-slots", "0"],
        ["demo", "--pace", "nan"],
        ["tokenize", "a", "--ids", "--count"],
        ["tokenize", "--decode", "a"],
        ["embed"],
        ["embed", "a", "--normalize", "l3"],
        ["embed", "a", "--json", "--npy", "x.npy"],
        ["info", "--metadata"],
    ],
)
def test_wrong_usage_exits_with_2(args: list[str]) -> None:
    """Nothing is loaded and nothing written to stdout; stderr names the error."""
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Error: " in result.stderr or "Usage: " in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelLoadError("no\nmodel"), 1),
        (InvalidParams("no\nmodel"), 2),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_errors_become_a_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    """One line for what went wrong, none for an interrupt or a reader that has gone, no traceback for any."""

    def failing() -> None:
        """Fail."""
        raise error

    monkeypatch.setattr(app_module, "info", failing)
    result = CliRunner().invoke(build_app(), ["failing"])
    assert result.exit_code == code
    assert result.stderr == ("Error: no model\n" if code < 100 else "")


def test_ctrl_c_while_stdin_is_read_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that never comes can be given up, before anything runs on a thread."""

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "stdin_text", interrupted)
    assert invoke("generate", "-").exit_code == 130


def test_an_output_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is reported in one line."""

    def failing() -> None:
        """Fail."""
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app_module, "info", failing)
    result = CliRunner().invoke(build_app(), ["failing"])
    assert (result.exit_code, result.stderr) == (1, "Error: cannot write to stdout: No space left on device\n")


def test_a_programming_error_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception keeps its traceback."""

    def failing() -> None:
        """Fail."""
        raise ZeroDivisionError

    monkeypatch.setattr(app_module, "info", failing)
    assert isinstance(CliRunner().invoke(build_app(), ["failing"]).exception, ZeroDivisionError)
