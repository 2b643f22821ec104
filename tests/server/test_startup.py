"""From settings to a running server: the order of its start, refusals, and an end in the middle of it."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.possessions import children, is_gone
from tests.server.running import LONG_S

from paceline import demo_model_path
from paceline.engine.spare_workers import SPARE_WORKERS
from paceline.errors import InvalidParams
from paceline.server import application, startup
from paceline.server.model_front import ModelFront
from paceline.server.settings import ServerSettings
from paceline.server.startup import serve

# Builds its application when a line comes, and says so before; its first line has the worker that was started first.
SLOW_TO_BUILD = """
import sys
from paceline.engine.spare_workers import SPARE_WORKERS
from paceline.server import application, startup
from paceline.server.settings import ServerSettings

build, launch = application.build_app, SPARE_WORKERS.launch

def build_late(settings, front):
    print("building", flush=True)
    sys.stdin.readline()
    return build(settings, front)

def launch_and_tell():
    launch()
    print("worker", SPARE_WORKERS.pid, flush=True)

application.build_app, SPARE_WORKERS.launch = build_late, launch_and_tell
sys.exit(startup.serve(ServerSettings(port=0, engine_options={"num_slots": 2, "n_ctx": 512})))
"""


@contextmanager
def slow_to_build() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that waits for a line on stdin before it builds its application, and its worker."""
    program = subprocess.Popen(
        [sys.executable, "-c", SLOW_TO_BUILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert program.stdout is not None
        worker = int(program.stdout.readline().split()[1])
        assert program.stdout.readline() == "building\n"
        yield program, worker
    finally:
        program.kill()
        program.communicate()


# Runs `paceline serve`; the line that it prints for each launch of a worker is what `{tell}` prints.
SERVE = """
import sys
from paceline.engine.spare_workers import SPARE_WORKERS

launch = SPARE_WORKERS.launch
HEAVY = (
    "paceline.server.flags", "numpy", "fastapi", "starlette", "uvicorn", "pydantic", "paceline.async_llm", "paceline._native"
)

def launch_and_tell():
    {tell}

SPARE_WORKERS.launch = launch_and_tell
sys.argv = ["paceline", "serve", *{flags!r}]
from paceline.cli import main

main()
"""
TELL_MODULES = "print(*(name for name in HEAVY if name in sys.modules), sep=',')"
TELL_PID = "launch(); print(SPARE_WORKERS.pid, flush=True)"


def serve_command(tell: str, *flags: str) -> list[str]:
    return [sys.executable, "-c", SERVE.format(tell=tell, flags=list(flags))]


def launched(*flags: str) -> list[list[str]]:
    """Start `paceline serve` with flags that end it; return which heavy modules were there at each launch of a worker."""
    command = serve_command(TELL_MODULES, *flags)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert done.returncode != 0
    return [line.split(",") for line in done.stdout.splitlines()]


def test_a_worker_is_started_before_what_it_does_not_need_is_imported() -> None:
    """If a model's file is named, before the flags are known; else after them, before framework and engine's front."""
    assert launched("-m", "x.gguf", "--no-such-flag") == launched("--model=x.gguf", "--no-such-flag") == [[""]]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert launched("--port", str(taken.getsockname()[1])) == [["paceline.server.flags"]]


@pytest.mark.parametrize(
    "flags",
    [
        ("--isolation", "thread"),
        ("--help",),
        ("-h",),
        ("--usage",),
        ("--version",),
        ("--print-config",),
        ("--print_config",),
    ],
    ids=lambda case: case[0],
)
def test_no_worker_is_started_ahead_where_none_will_load(flags: tuple[str, ...]) -> None:
    """By the flags that say so at first sight."""
    assert launched("-m", "x.gguf", *flags, "--no-such-flag") == []


def test_no_worker_is_started_ahead_of_a_thread_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the flag."""
    monkeypatch.setenv("PACELINE_ISOLATION", "thread")
    assert launched("-m", "x.gguf", "--no-such-flag") == []


@pytest.mark.native
def test_the_worker_that_was_started_ahead_loads_the_model() -> None:
    """Nothing that the flags do between makes it another process than an engine would start."""
    command = serve_command(TELL_PID, "-m", str(demo_model_path()), "--port", "0", "-c", "512")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        try:
            ahead = int(program.stdout.readline())
            assert any("is ready" in line for line in program.stderr)
            assert children(program.pid) == {str(ahead)}
            program.terminate()
            assert program.wait(LONG_S) == 0
        finally:
            program.kill()
    assert is_gone(ahead)


def test_a_worker_that_was_started_ahead_of_wrong_flags_ends_with_the_program() -> None:
    """It has waited for its setup in vain."""
    command = serve_command(TELL_PID, "-m", "x.gguf", "--no-such-flag")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG_S)
    assert done.returncode == 2
    assert is_gone(int(done.stdout))


def test_a_worker_that_was_started_in_vain_is_ended_before_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the engine is to run in a thread after all, for example by a configuration file."""
    waiting: list[int | None] = []
    monkeypatch.setattr(startup, "_serve_model", lambda *_: waiting.append(SPARE_WORKERS.pid) or 0)
    SPARE_WORKERS.launch()
    pid = SPARE_WORKERS.pid
    assert pid is not None
    assert serve(ServerSettings(port=0, engine_options={"isolation": "thread"})) == 0
    assert waiting == [None]
    assert is_gone(pid)


def test_invalid_options_are_refused_before_anything_is_loaded_or_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that was started ahead is gone."""
    monkeypatch.setattr("paceline.server.startup.Listeners", _never)
    with pytest.raises(InvalidParams, match="num_slots"):
        serve(ServerSettings(port=0, engine_options={"num_slots": 0}))
    assert SPARE_WORKERS.pid is None


def _never(*_: object) -> None:
    raise AssertionError("this is not reached")


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one line and the code 1."""
    monkeypatch.setattr(ModelFront, "begin", _never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert serve(ServerSettings(port=taken.getsockname()[1])) == 1
    assert re.fullmatch(r"paceline: cannot listen on 127\.0\.0\.1 port \d+: .*\n", capsys.readouterr().err)
    assert SPARE_WORKERS.pid is None


@pytest.mark.native
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_is_an_application_ends_server_and_worker(number: int) -> None:
    """In order, with the code 0, as at any other time."""
    with slow_to_build() as (program, worker):
        assert program.stdin is not None
        assert program.stderr is not None
        program.send_signal(number)
        assert "ending: no new requests" in program.stderr.readline()
        program.stdin.write("go\n")
        program.stdin.flush()
        assert program.wait(LONG_S) == 0
        assert is_gone(worker)


def test_an_application_is_built_without_collecting_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of it, garbage is collected afterwards."""
    collects: list[bool] = []

    def failing(*_: object) -> None:
        collects.append(gc.isenabled())
        raise KeyError("built")

    monkeypatch.setattr(application, "build_app", failing)
    monkeypatch.setattr(ModelFront, "begin", lambda _: None)
    assert gc.isenabled()
    with pytest.raises(KeyError, match="built"):
        serve(ServerSettings(port=0))
    assert collects == [False]
    assert gc.isenabled()


@pytest.mark.native
def test_a_model_that_fails_early_ends_the_server_before_it_accepts_requests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason and the code 1; nothing says that it listens."""
    build = application.build_app

    def build_after_the_failure(settings: ServerSettings, front: ModelFront) -> object:
        while front.failure is None:
            time.sleep(0.01)
        return build(settings, front)

    monkeypatch.setattr(application, "build_app", build_after_the_failure)
    assert serve(ServerSettings(port=0, model=Path("/no/where/m.gguf"))) == 1
    error = capsys.readouterr().err
    assert "paceline: cannot load the model: " in error
    assert "m.gguf" in error
    assert "listening" not in error
