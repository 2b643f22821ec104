"""The config file of all commands: its contents, the commands it holds for, and values that override it."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.sweeps import sampled
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import app as app_module
from paceline.cli.app import build_app
from paceline.cli.config_file import LOADING_COMMANDS, default_path, options_of
from paceline.server.flags.table import BY_KEY

COMMANDS: Any = vars(get_command(build_app()))["commands"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variables of the user; the folder of the default file."""
    for name in ("PACELINE_CONFIG", "PACELINE_MODEL", "PACELINE_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "paceline").mkdir()
    return tmp_path


def write(text: str) -> Path:
    path = default_path()
    path.write_text(text)
    return path


def invoke(*args: str, **env: str) -> Any:
    return CliRunner().invoke(build_app(), list(args), prog_name="paceline", env=env)


def received(monkeypatch: pytest.MonkeyPatch, name: str, *args: str, **env: str) -> dict[str, Any]:
    """Run a command and return the options that its function was called with."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(app_module, name, _recording(getattr(app_module, name), calls))
    result = invoke(name, *args, **env)
    assert result.exit_code == 0, result.output
    return calls[0]


def _recording(command: Any, calls: list[dict[str, Any]]) -> Any:
    @functools.wraps(command)
    def record(**options: Any) -> None:
        calls.append(options)

    return record


def test_a_section_and_the_top_level_are_defaults_of_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The section wins over the top level, a flag over both; names have - or _, and values their types."""
    write('temperature = 1\ntop_k = 5\nthreads = 3\n[chat]\ntemperature = 0.5\nstop = "x"\nplain = true\n')
    chat = received(monkeypatch, "chat")
    assert (chat["temperature"], chat["top_k"], chat["threads"]) == (0.5, 5, 3)
    assert (chat["stop"], chat["plain"]) == (["x"], True)
    assert received(monkeypatch, "generate", "Once")["temperature"] == 1.0
    flags = received(monkeypatch, "chat", "--temperature", "0", "--stop", "y", "-t", "2")
    assert (flags["temperature"], flags["stop"], flags["threads"]) == (0.0, ["y"], 2)


def test_model_of_flag_variable_section_and_top_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order; an empty variable counts as none, and `launch` and `top` do not take it for a server's model."""
    write('model = "top.gguf"\n[chat]\nmodel = "chat.gguf"\n')
    assert received(monkeypatch, "generate", "Once")["model"] == "top.gguf"
    assert received(monkeypatch, "chat", PACELINE_MODEL="")["model"] == "chat.gguf"
    assert received(monkeypatch, "chat", PACELINE_MODEL="env.gguf")["model"] == "env.gguf"
    assert received(monkeypatch, "chat", "-m", "flag.gguf", PACELINE_MODEL="env.gguf")["model"] == "flag.gguf"
    assert received(monkeypatch, "launch", "claude", PACELINE_MODEL="env.gguf")["model"] is None
    assert received(monkeypatch, "top", PACELINE_MODEL="env.gguf")["model"] is None


def test_a_key_of_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the server's key and the hub's token."""
    write('[top]\napi-key = "file"\n[pull]\nhf-token = "file"\n')
    assert received(monkeypatch, "top")["api_key"] == "file"
    assert received(monkeypatch, "top", PACELINE_API_KEY="env")["api_key"] == "env"
    assert received(monkeypatch, "pull", "a/b", HF_TOKEN="env")["hf_token"] == "env"


def test_the_file_of_the_flag_wins_over_that_of_the_variable(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """And that over the default one; only one is read."""
    write("threads = 1\ntop-k = 1\n")
    for number in (2, 3):
        (home / f"{number}.toml").write_text(f"threads = {number}\n")
    second, third = str(home / "2.toml"), str(home / "3.toml")
    assert received(monkeypatch, "chat")["threads"] == 1
    chat = received(monkeypatch, "chat", PACELINE_CONFIG=second)
    assert (chat["threads"], chat["top_k"]) == (2, 40)
    assert received(monkeypatch, "chat", "--config", third, PACELINE_CONFIG=second)["threads"] == 3
    assert received(monkeypatch, "chat", PACELINE_CONFIG="/dev/null")["threads"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("temprature = 1", "unknown option 'temprature'; did you mean 'temperature'?"),
        ("[chat]\ntemprature = 1", "[chat] unknown option 'temprature'; did you mean 'temperature'?"),
        ("[chaat]\ntemperature = 1", "unknown option 'chaat'; did you mean 'chat'?"),
        ("[chat]\nmessage = 'Hi'", "[chat] unknown option 'message'"),
        ("[chat]\nconfig = 'x'", "[chat] unknown option 'config'"),
        ("chat = 'x'", "chat is a command, whose options stand in a section [chat]"),
        ("threads = '3'", "threads must be an integer >= 1, not '3'"),
        ("threads = true", "threads must be an integer >= 1, not True"),
        ("[chat]\ntemperature = 'hot'", "[chat] temperature must be a finite number, not 'hot'"),
        ("[chat]\nplain = 1", "[chat] plain must be true or false, not 1"),
        ("model = 3", "model must be a text, not 3"),
        ("[chat]\ntemperature = -5", "[chat] temperature must be a finite number >= 0"),
        ("top-p = 2.0", "top_p must be a finite number"),
        ("[chat]\nlogit-bias = ['x']", "[chat] --logit-bias"),
        ("[chat]\nctx-size = 0", "[chat] ctx-size must be an integer >= 1, not 0"),
        ("[chat]\nstop = [3]", "[chat] stop must be a text, not 3"),
        ("threads = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str) -> None:
    """By its name, the section and the key, before anything runs."""
    path = write(text)
    result = invoke("chat", "Hi")
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(path) in result.stderr and message in result.stderr and result.stderr.count("\n") == 1


def test_a_number_out_of_range_names_the_file() -> None:
    """As the option has bounds."""
    path = write("[launch]\nparallel = 0")
    assert f"{path}: [launch] parallel must be an integer >= 1, not 0" in invoke("launch", "claude").stderr


def test_llama_cpps_names_are_keys_for_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of flags that all commands share on the top level, and of a section."""
    write("temp = 0.25\n[chat]\nn-predict = 5\n[generate]\nreverse_prompt = ['x']\n")
    chat, generate = received(monkeypatch, "chat"), received(monkeypatch, "generate")
    assert (chat["temperature"], chat["max_tokens"], chat["stop"]) == (0.25, 5, None)
    assert (generate["temperature"], generate["max_tokens"], generate["stop"]) == (0.25, 256, ["x"])
    assert re.search(r"temperature +0\.25 ", invoke("serve", "--print-config", COLUMNS="120").stdout)


def test_info_without_a_model_leaves_out_its_options_of_the_file() -> None:
    """They are for `info MODEL`; on the command line they need one."""
    write("[info]\nmetadata = true\nctx-size = 512\n")
    assert invoke("info").exit_code == 0
    assert "-c needs a MODEL" in invoke("info", "-c", "512").stderr


def test_a_named_file_must_be_there() -> None:
    """The default one need not."""
    assert "cannot read the config file none.toml" in invoke("tokenize", "a", "--config", "none.toml").stderr
    assert invoke("list").exit_code == 0


@pytest.mark.parametrize("is_whole", sampled([False, True], every=2))
def test_options_of_every_command_have_a_type_that_a_file_can_give(is_whole: bool) -> None:
    """A wrong type is reported for each of them, and none fails otherwise."""
    for name, command in COMMANDS.items():
        for key in list(options_of(command))[:: 1 if is_whole else 7]:
            write(f"[{name}]\n{key} = 1979-05-27\n")
            result = invoke(name, *(["a"] if name in ("run", "generate", "tokenize", "embed", "pull") else []))
            assert result.exit_code == 2, (name, key, result.output)


def test_no_section_has_the_name_of_a_flag() -> None:
    """A flag of `serve` on the top level is not taken for a section."""
    sections = {name for name, command in COMMANDS.items() if not hasattr(command, "commands")}
    assert sections & BY_KEY.keys() == set()
    assert set(LOADING_COMMANDS) <= sections


def test_serve_reads_its_section_and_its_flags_on_the_top_level() -> None:
    """Options of other commands there are passed over; a slip is refused with the nearest name of any command."""
    write("ctx-size = 512\nparallel = 2\ntop-k = 7\nmax-tokens = 5\n[serve]\nparallel = 3\n[chat]\nplain = true\n")
    shown = invoke("serve", "--print-config", COLUMNS="120").stdout
    assert f"{default_path()}: [serve] parallel" in shown and f"{default_path()}: ctx-size" in shown
    assert "max-tokens" not in shown
    for text, hint in (("maxtokens = 1", "max-tokens"), ("[serv]\nport = 1", "serve"), ("[serve]\nprt = 1", "port")):
        write(text)
        assert f"did you mean '{hint}'?" in invoke("serve", "--print-config").stderr


def test_info_shows_what_applies_and_checks_all_of_it() -> None:
    """The file, its values without keys, and the variables that win."""
    facts = json.loads(invoke("info", "--json").stdout)["configuration"]
    assert facts == {"file": None, "default_file": str(default_path()), "values": {}, "variables": {}}
    path = write('threads = 2\n[chat]\nplain = true\n[top]\napi-key = "secret"\n')
    shown = invoke("info", PACELINE_MODEL="m.gguf").stdout
    for line in (f"file +{path}", "threads +2", r"\[chat\] plain +true", r"PACELINE_MODEL +m.gguf, which wins"):
        assert re.search(line, shown)
    assert "secret" not in shown and "[top] api-key" in shown
    write("[chat]\ntemperature = -5")
    assert "[chat] temperature must be" in invoke("info").stderr
    write("[serve]\nport = 'x'")
    assert "[serve] port must be an integer" in invoke("info").stderr
