"""The commands put together: exit codes, errors, and how little is loaded for nothing."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import paceline
from paceline import cli
from paceline.cli import app as app_module
from paceline.cli import inputs
from paceline.cli.app import build_app
from paceline.cli.chat_command import chat
from paceline.cli.inputs import given_text
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


def all_commands(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command with the words that name it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from all_commands(inner, *path, name)


COMMANDS = dict(all_commands(get_command(build_app())))
SHOWN = {path: command for path, command in COMMANDS.items() if path != ("serve",)}  # its help is its own


@pytest.mark.parametrize("rich_help", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("path", SHOWN, ids="-".join)
def test_help_cuts_and_breaks_no_word(path: tuple[str, ...], rich_help: bool) -> None:
    """At 80 columns each word of a help, of its options and of its commands' first sentences stands on one line."""
    app = build_app(rich_help=rich_help)
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="paceline", env={"COLUMNS": "80", "TERM": "xterm"})
    assert result.exit_code == 0
    seen = set(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", result.stdout).split())
    command = SHOWN[path]
    texts = [command.help, *(parameter.help for parameter in command.params)]
    texts += [inner.short_help for inner in getattr(command, "commands", {}).values()]
    assert {word for text in texts for word in text.split()} - seen == set()
    assert "<bool>" not in result.stdout and "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_first_sentence_is_the_line_in_the_list_of_commands() -> None:
    """Everyday commands come first, each with a whole sentence."""
    lines = invoke("--help", env={"COLUMNS": "80"}).stdout.splitlines()
    assert lines.index("Everyday:") < lines.index("Models on this machine:")
    assert "  run       Chat with a model, or get one answer." in lines
    assert all(command.short_help.endswith(".") for path, command in COMMANDS.items() if path)


def test_without_a_command_it_says_how_to_start() -> None:
    """The commands to begin with, each of which exists, and no error."""
    result = invoke()
    assert (result.exit_code, result.stderr) == (0, "")
    named = re.findall(r"^  paceline (\S+)", result.stdout, re.MULTILINE)
    assert {"demo", "run", "serve"} < set(named) <= {*(path[0] for path in COMMANDS if path), "--help"}


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("rnu", ["run"]),
        ("serv", ["serve"]),
        ("gen", ["generate"]),
        ("ls", ["list"]),
        ("r", ["run", "rpc-serve"]),
        ("prunee", []),
        ("prun", []),
        ("rmm", []),
        ("x", []),
    ],
)
def test_a_suggestion_is_near_and_deletes_nothing(typed: str, suggested: list[str]) -> None:
    """An unknown command is refused with near commands, never with rm or prune."""
    result = invoke(typed)
    assert result.exit_code == 2
    hint = f" Did you mean {' or '.join(map(repr, suggested))}?" if suggested else ""
    assert f"No such command {typed!r}.{hint}\n" in result.stderr


def names_of(command: str) -> set[str]:
    return {name for each in COMMANDS[command,].params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("stop", "press Ctrl-C there; `paceline ps` lists the servers."),
        ("create", "Options take the place of a Modelfile, as flags or in the config file."),
        ("llama-server", "Did you mean 'serve'?"),
        ("cp", "A model is a file: "),
    ],
)
def test_a_command_of_another_program_is_answered_with_the_one_here(typed: str, message: str) -> None:
    """By its name, or by a sentence if there is none."""
    result = invoke(typed, "x")
    assert result.exit_code == 2 and f"Error: No such command {typed!r}. " in result.stderr and message in result.stderr


def test_commands_and_options_elsewhere_are_none_of_ours_and_name_some_of_ours() -> None:
    """Neither `chat` nor `generate` has them, and each option in a hint exists."""
    names = {name for path in ("chat", "generate") for name in names_of(path)}
    hints = app_module._OPTIONS_ELSEWHERE | app_module._COMMANDS_ELSEWHERE
    assert not set(hints) & (names | {path[0] for path in COMMANDS if path})
    named = {name for hint in hints.values() for name in re.findall(r"(?<![\w-])--[a-z-]+", hint)}
    assert named - names == {"--format", "--think", "--version"}  # what was typed, and an option of no command


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["run", "-m", "x", "hi"], "No such option '-m'. MODEL is an argument: paceline run MODEL."),
        (["show", "--model=x"], "No such option '--model'. MODEL is an argument: paceline show MODEL."),
        (["run", "x", "--format", "json"], "No such option '--format'. Use --json-schema; "),
        (["chat", "--think=false"], "Use --reasoning-effort, with none, low, medium or high; none is --think=false."),
        (["embed", "one", "--format", "json"], "No such option '--format'. `paceline embed --help` lists the options."),
        (["embed", "one", "--json-schema", "{}"], "No such option '--json-schema'. It is a flag of `paceline serve`."),
        (["chat", "--num_ctx", "5"], "No such option '--num_ctx'. Did you mean '--ctx-size'?"),
        (["chat", "--keepalive", "5m"], "Leave it out: the model is in memory until the command ends."),
        (["generate", "x", "--no-display-prompt"], "Did you mean '--no-echo'?"),
        (["chat", "-sys", "x"], "No such option '-sys'. Did you mean '--system'?"),
        (["chat", "-hf", "a/b"], "No such option '-hf'. Name the model hf:USER/REPO[:QUANT]."),
        (["chat", "-np", "2"], "No such option '-np'. It is a flag of `paceline serve`."),
        (["chat", "--mlock"], "No such option '--mlock'. It is a flag of `paceline serve`."),
        (["chat", "--tmep", "1"], "No such option '--tmep'. Did you mean '--temp'?"),
        (["chat", "--sede", "1"], "No such option '--sede'. Did you mean '--seed'?"),
        (["chat", "-z"], "No such option '-z'. `paceline chat --help` lists the options."),
        (["chat", "--xyzzy"], "No such option '--xyzzy'. `paceline chat --help` lists the options."),
    ],
)
@pytest.mark.parametrize("rich_help", [False, True], ids=["pipe", "terminal"])
def test_an_unknown_option_names_the_way_out(args: list[str], hint: str, rich_help: bool) -> None:
    """Of Ollama's, llama-cli's and `serve`'s, and of a slip; nothing runs."""
    result = CliRunner().invoke(build_app(rich_help=rich_help), args, prog_name="paceline", env={"COLUMNS": "200"})
    assert (result.exit_code, result.stdout) == (2, "")
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run"], "MODEL is missing; `paceline chat` uses the demo model"),
        (["show"], "MODEL is missing; `paceline list` has the names of the models on this machine"),
        (["rm"], "MODEL is missing; `paceline list` has the names of the models on this machine"),
        (["pull"], "MODEL is missing; name one such as ggml-org/gemma-3-1b-it-GGUF"),
        (["launch"], "AGENT is missing; `paceline launch --help` lists the agents"),
        (["generate"], "PROMPT is missing: give a text, or send one to stdin by a pipe; --help lists the options"),
        (["tokenize"], "TEXT is missing: give a text, or send one to stdin by a pipe; --help lists the options"),
    ],
)
def test_a_missing_argument_is_the_last_line(monkeypatch: pytest.MonkeyPatch, args: list[str], message: str) -> None:
    """After the usage at most, not after a page of help, on a terminal as well."""
    monkeypatch.setattr(inputs, "stdin_is_redirected", lambda: False)
    result = invoke(*args)
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, lines[-1]) == (2, "", f"Error: {message}")
    assert len(lines) <= 4


@pytest.mark.parametrize("args", [[], ["run"], ["serve"], ["trace", "show"]])
def test_help_of_a_command_may_come_first(capfd: pytest.CaptureFixture[str], args: list[str]) -> None:
    """`paceline help COMMAND` is `paceline COMMAND --help`."""
    first, last = invoke("help", *args), invoke(*args, "--help")
    assert first.exit_code == last.exit_code == 0
    out = capfd.readouterr().out
    assert first.stdout == last.stdout and (first.stdout or out)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_the_words_of_a_message_are_joined(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Quotes may be left out, as after `run MODEL`."""
    texts: list[str | None] = []
    module = importlib.import_module({"chat": "paceline.cli.chat_command", "generate": "paceline.cli.texts"}[command])

    def record(*given: Any) -> NoReturn:
        texts.append(given_text(*given))
        raise typer.Exit

    monkeypatch.setattr(module, "given_text", record)
    assert invoke(command, "hello", "there").exit_code == 0
    assert texts == ["hello there"]


def test_run_has_the_options_of_chat() -> None:
    """All of them but the model, which is an argument."""
    run, chat = ({name for each in COMMANDS[path,].params for name in each.opts} for path in ("run", "chat"))
    assert run == chat - {"--model", "-m", "message"} | {"model", "prompt"}


def record_chats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str] | None, str]]:
    """Record message and model of each chat in place of running it."""
    calls: list[tuple[list[str] | None, str]] = []

    @functools.wraps(chat)
    def record(message: list[str] | None, *, model: str, **_: Any) -> None:
        calls.append((message, model))

    monkeypatch.setattr(app_module, "chat", record)
    return calls


@pytest.mark.parametrize(
    ("given", "loaded"),
    [
        ("user/repo", "hf:user/repo"),
        ("user/repo:Q8_0", "hf:user/repo:Q8_0"),
        ("hf:user/repo", "hf:user/repo"),
        ("ollama:llama3.2", "ollama:llama3.2"),
        ("https://host/model.gguf", "https://host/model.gguf"),
        ("models/model.gguf", "models/model.gguf"),
        ("llama3.2", "llama3.2"),
    ],
)
def test_run_takes_paths_and_names(monkeypatch: pytest.MonkeyPatch, given: str, loaded: str) -> None:
    """A repository of the hub needs no scheme, and the words after it are the message."""
    calls = record_chats(monkeypatch)
    assert invoke("run", given).exit_code == invoke("run", given, "why", "blue?").exit_code == 0
    assert calls == [(None, loaded), (["why", "blue?"], loaded)]


def test_run_prefers_a_file_to_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file without an extension in a folder is no repository of the hub."""
    calls = record_chats(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "file").touch()
    assert invoke("run", "models/file").exit_code == 0
    assert calls == [(None, "models/file")]


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
    """One line for the error, none for an interrupt or a reader that has gone, no traceback for any."""

    def failing() -> None:
        """Fail."""
        raise error

    monkeypatch.setattr(app_module, "info", failing)
    result = CliRunner().invoke(build_app(), ["info"])
    assert result.exit_code == code
    assert result.stderr == ("Error: no model\n" if code < 100 else "")


def test_ctrl_c_while_stdin_is_read_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that never comes can be given up, before anything runs on a thread."""

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(inputs, "stdin_text", interrupted)
    assert invoke("generate", "-").exit_code == 130


def test_an_output_that_cannot_be_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is reported in one line."""

    def failing() -> None:
        """Fail."""
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(app_module, "info", failing)
    result = CliRunner().invoke(build_app(), ["info"])
    assert (result.exit_code, result.stderr) == (1, "Error: cannot write to stdout: No space left on device\n")


def test_a_programming_error_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception keeps its traceback."""

    def failing() -> None:
        """Fail."""
        raise ZeroDivisionError

    monkeypatch.setattr(app_module, "info", failing)
    assert isinstance(CliRunner().invoke(build_app(), ["info"]).exception, ZeroDivisionError)
