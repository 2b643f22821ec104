"""`paceline serve`: its output, its settings for the server, and its errors."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli.app import build_app
from paceline.cli.serve import set_up_logging
from paceline.server.flags import SettingsSource
from paceline.server.operator_lines import STDERR, QueuedLines
from paceline.server.settings import ServerSettings

LONG_S = 60.0
LOGGERS = ("paceline", "uvicorn", "paceline.server.access")


class Server:
    """Stands in for the module that serves."""

    def __init__(self) -> None:
        self.settings: ServerSettings | None = None
        self.source: SettingsSource | None = None
        self.code = 0

    def serve(self, settings: ServerSettings, presets: object, source: SettingsSource) -> int:
        assert presets is None
        self.settings, self.source = settings, source
        return self.code


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    stand_in = Server()
    module = types.ModuleType("paceline.server.startup")
    module.serve = stand_in.serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.server.startup", module)
    return stand_in


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """The command changes the program's log."""
    kept = {
        name: (list(log.handlers), log.level, log.propagate) for name in LOGGERS if (log := logging.getLogger(name))
    }
    yield
    for name, (handlers, level, propagate) in kept.items():
        log = logging.getLogger(name)
        for handler in set(log.handlers) - set(handlers):
            handler.close()
        log.handlers[:], log.level, log.propagate = handlers, level, propagate


def invoke(*args: str, **env: str) -> Any:
    return CliRunner().invoke(build_app(), ["serve", *args], prog_name="paceline", env={"COLUMNS": "100", **env})


def test_settings_reach_the_server_and_its_code_is_the_commands(server: Server) -> None:
    """Flags of many letters, values that look like flags, and variables, of which all tests have PACELINE_NO_DISK_CACHE."""
    server.code = 1
    result = invoke("-np", "3", "-c", "512", "--temp", "0", "-n", "-1", "-ngl", "all", LLAMA_ARG_PORT="0")
    assert (result.exit_code, result.stderr) == (1, "")
    assert server.settings is not None and server.settings.port == 0
    options = {"num_slots": 3, "n_ctx": 512, "n_gpu_layers": -1, "isolation": "process", "disk_cache": None}
    assert server.settings.engine_options == options
    assert server.settings.sampling == {"temperature": 0.0, "max_tokens": None}


@pytest.mark.parametrize(
    ("flags", "folder"),
    [
        (["--port", "81"], Path("/state/paceline/batches/81")),
        (["--batch-folder", "/kept"], Path("/kept")),
        (["--batch-folder", "/kept", "--no-batches"], None),
    ],
)
def test_batches_have_a_folder_for_each_port(server: Server, flags: list[str], folder: Path | None) -> None:
    """In the user's state folder, unless a flag names one or switches batches off."""
    assert invoke(*flags, XDG_STATE_HOME="/state").exit_code == 0
    assert server.settings is not None and server.settings.batch_folder == folder


def test_notes_are_printed_before_the_server_starts(server: Server) -> None:
    """A line each, on stderr."""
    result = invoke("--threads-http", "4")
    assert result.stderr == "Note: --threads-http has no effect: one event loop serves all connections\n"
    assert (result.exit_code, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ctx-sise", "1"], "unknown option '--ctx-sise'; did you mean '--ctx-size'?"),
        (["--control-vector", "x"], "--control-vector: control vectors are not supported yet; leave it out"),
        (["-c", "many"], "-c must be an integer >= 0"),
        (["-m", "/no/such/file.gguf"], "-m: there is no file"),
        (["--", "x"], "unexpected '--'"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(server: Server, args: list[str], message: str) -> None:
    """The command exits without serving."""
    result = invoke(*args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(f"Error: {message}")
    assert server.settings is None


def test_version_is_one_line(server: Server) -> None:
    """The version is that of the whole command."""
    assert invoke("--version").stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.parametrize("columns", [60, 80, 300])
def test_help_is_grouped_and_fits_into_the_terminal(server: Server, columns: int) -> None:
    """No line is wider, except for long names."""
    result = invoke("-h", COLUMNS=str(columns))
    assert result.exit_code == 0 and "\x1b" not in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= max(columns, 60) <= 300
    for text in (
        "Model and memory\n",
        "Sampling, where a request does not say\n",
        "  -c, --ctx-size N ",
        "-np, --parallel N",
    ):
        assert text in result.stdout


def test_help_loads_neither_the_core_nor_the_web_framework() -> None:
    """It returns at once."""
    import subprocess

    code = (
        "import atexit, sys\n"
        "heavy = {'paceline._native', 'paceline.runtime', 'numpy', 'fastapi', 'starlette', 'uvicorn'}\n"
        "atexit.register(lambda: print('loaded', sorted(heavy & sys.modules.keys())))\n"
        "sys.argv = ['paceline', 'serve', '--help']\n"
        "from paceline.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded []")


def test_a_signal_ends_a_server_that_does_not_listen_yet() -> None:
    """By a handler, without which the first process of a container ignores the signal. The code is the signal's."""
    import signal
    import subprocess

    code = (
        "import os, signal, sys\n"
        "from paceline.cli import main, serve\n"
        "serve.run_server = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or signal.pause()\n"
        "sys.argv = ['paceline', 'serve', '--isolation', 'thread']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


def test_the_configuration_names_the_source_of_everything(server: Server, tmp_path: Path) -> None:
    """Every source, derived values, no secrets, and the notes."""
    file = tmp_path / "serve.toml"
    file.write_text("slots = false\n")
    args = ["--config", str(file), "-b", "64", "-ub", "128", "--temp", "0.3", "--api-key", "hidden,other", "-r", "a\nb"]
    result = invoke("--print-config", *args, LLAMA_ARG_FLASH_ATTN="on", PACELINE_STRATEGY="balanced")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        "model the demo model default",
        "port 8080 default",
        "api_keys 2 (not shown) --api-key",
        f"slots off {file}: slots",
        "flash_attn on LLAMA_ARG_FLASH_ATTN",
        "strategy balanced PACELINE_STRATEGY",
        "n_ubatch 64 derived: -ub 128, lowered to the size of n_batch",
        "isolation process default",
        "temperature 0.3 --temp",
        'stop ["a\\nb"] -r',
        "all others the model's own, else the API's default",
        "-ub 128 is lowered to 64, the size of n_batch",
    ):
        assert line in lines
    assert "hidden" not in result.stdout
    assert server.settings is None


def test_the_log_has_a_time_a_level_and_a_name_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The access log's lines are JSON and stand alone."""
    set_up_logging(ServerSettings())
    logging.getLogger("paceline.engine").warning("short of %s", "memory")
    logging.getLogger("paceline.engine").debug("not shown")
    logging.getLogger("paceline.server.access").info('{"status": 200}')
    STDERR.flush(LONG_S)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("+00:00 WARNING paceline.engine: short of memory")
    assert second == '{"status": 200}'


def test_the_log_can_be_json_in_a_file(tmp_path: Path) -> None:
    """An object a line, tracebacks in it."""
    path = tmp_path / "server.log"
    set_up_logging(ServerSettings(log_level="error", log_json=True, log_file=path))
    try:
        int("no")
    except ValueError:
        logging.getLogger("paceline.server").exception("failed\nbadly")
    logging.getLogger("paceline.server.access").info("{}")
    (handler,) = logging.getLogger("paceline").handlers
    assert isinstance(handler, QueuedLines)
    handler.queue.flush(LONG_S)
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["level"], line["logger"], line["message"]) == ("error", "paceline.server", "failed\nbadly")
    assert "ValueError: invalid literal" in line["traceback"]


def test_a_log_file_is_opened_anew_and_the_former_one_closed(tmp_path: Path) -> None:
    """As after a rotation: the lines before are in the renamed file, later lines in a new one."""
    path, renamed = tmp_path / "server.log", tmp_path / "server.log.1"
    settings, others = ServerSettings(log_file=path), set(threading.enumerate())
    set_up_logging(settings)
    log = logging.getLogger("paceline.server")
    log.warning("before")
    (former,) = logging.getLogger("paceline").handlers
    assert isinstance(former, QueuedLines)
    former.queue.flush(LONG_S)
    (writer,) = set(threading.enumerate()) - others
    path.rename(renamed)
    set_up_logging(settings)
    log.warning("after")
    (handler,) = logging.getLogger("paceline").handlers
    assert isinstance(handler, QueuedLines)
    handler.queue.flush(LONG_S)
    writer.join(LONG_S)
    assert not writer.is_alive()
    assert [text.read_text().rpartition(" ")[2] for text in (renamed, path)] == ["before\n", "after\n"]


def test_the_log_can_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Then nothing is written, whatever it is."""
    set_up_logging(ServerSettings(log_level="off"))
    logging.getLogger("paceline.server").critical("gone")
    STDERR.flush(LONG_S)
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_written_ends_the_command(server: Server) -> None:
    """With the file's name, before anything is served."""
    result = invoke("--log-file", "/no/such/folder/x.log")
    assert (result.exit_code, server.settings) == (1, None)
    assert result.stderr == "Error: /no/such/folder/x.log: No such file or directory\n"


STRANGE = (
    "a\x1b[2J\x07\x85\x7f\u202egpj.exe\u2028\u2066\n2026-01-01T00:00:00 ERROR paceline.server: forged\r\t"
    "\ud800 \U000e0041 日本"
)


def test_a_pipe_without_a_reader_is_no_log_file(tmp_path: Path) -> None:
    """It is an error at once: the server would wait for a reader before it begins."""
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="No such device"):
        set_up_logging(ServerSettings(log_file=tmp_path / "log"))


@pytest.mark.parametrize("as_json", [False, True])
def test_no_name_of_a_strangers_can_forge_a_line_of_a_log(tmp_path: Path, as_json: bool) -> None:
    """In messages, errors with tracebacks, and routes: all characters print, and further lines of a record are indented."""
    path = tmp_path / "server.log"
    set_up_logging(ServerSettings(log_file=path, log_json=as_json))
    log = logging.getLogger("paceline.server")
    log.warning("the model %s", STRANGE)
    log.error("request %s: internal server error", STRANGE, exc_info=ValueError(STRANGE))
    line = msgspec.json.encode({"route": STRANGE.encode("utf-8", "replace").decode()}).decode()
    logging.getLogger("paceline.server.access").info("%s", line)
    (handler,) = log.parent.handlers if log.parent is not None else []
    assert isinstance(handler, QueuedLines)
    handler.queue.flush(LONG_S)
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert all(each.isprintable() for each in lines)
    assert not [each for each in lines if each.startswith("2026-01-01")]
    assert "日本" in lines[0 if as_json else 1] and "\\u001b[2J" in lines[0]
    if as_json:
        found = [json.loads(each) for each in lines]
        assert found[0]["message"] == f"the model {STRANGE}"
        assert STRANGE in found[1]["traceback"]
        assert len(found) == 3
    else:
        assert len([each for each in lines if not each.startswith("  ")]) == 3
    assert json.loads(lines[-1])["route"].startswith("a\x1b[2J\x07\x85\x7f\u202e")
