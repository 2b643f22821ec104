"""Everything that opens a file of a user's takes regular files alone: nothing else is waited for, or read without an end."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, Conversation, Model, validation
from paceline.cli.config_file import read_config
from paceline.cli.inputs import text_file
from paceline.engine.saved_prefixes import StateFiles
from paceline.errors import PacelineError
from paceline.media.source_bytes import file_bytes
from paceline.model_manager.model_settings import read_models_file
from paceline.observability.trace_file import header, read_trace
from paceline.ray_serve.cluster_config import read_cluster_config
from paceline.runtime.gguf_file import content_fingerprint, file_fingerprint, read_gguf
from paceline.runtime.model import Adapter
from paceline.runtime.projector import MediaProjector
from paceline.server.flags.setters import DiskFiles
from paceline.server.listeners import CannotListen, tls_context
from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native
LONG_S = 20.0
HUGE = 1 << 40


TLS = Path(__file__).parents[1] / "server" / "tls"
TRACE = f"{header()}\n".encode()
NO_MODEL: Any = None  # files are checked before it is needed

OPENERS: dict[str, Callable[[Path], object]] = {
    "model": Model.load,
    "projector": lambda path: MediaProjector.load(path, NO_MODEL),
    "gguf header": read_gguf,
    "sampled fingerprint": lambda path: file_fingerprint([path]),
    "whole fingerprint": content_fingerprint,
    "saved prefix": lambda path: StateFiles(path.parent, b"f" * 16, b"", 1 << 30).read(path.name),
    "trace": read_trace,
    "adapter": lambda path: Adapter.load(NO_MODEL, path),
    "conversation": lambda path: Conversation.load(object.__new__(LLM), path),
    "image": lambda path: file_bytes("image", path, 1 << 20),
    "config file": read_config,
    "models file": read_models_file,
    "cluster file": read_cluster_config,
    "text of a command": lambda path: text_file("--file", path),
    "file of a flag": DiskFiles(lambda _: None).read,
    "certificate": lambda path: tls_context(ServerSettings(ssl_certfile=path, ssl_keyfile=path)),
}
TAKE_PIPES = ("config file", "models file", "text of a command", "file of a flag", "image", "trace", "certificate")
SENT = {"models file": b"[models.m]\nmodel = 'm.gguf'\n", "trace": TRACE}


def opened(name: str, path: Path) -> BaseException:
    """Return the error of an opener, which must come soon."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            OPENERS[name](path)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG_S)
    is_stuck = thread.is_alive()
    if is_stuck:  # the opening goes on once the other end is open
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        thread.join(LONG_S)
    assert not is_stuck, f"{name} waits"
    assert errors, f"{name} took it"
    (error,) = errors
    assert isinstance(error, (PacelineError, OSError, CannotListen)), error
    return error


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe without a writer is waited for briefly."""
    monkeypatch.setattr(validation, "PIPE_WAIT_S", 0.1)


@pytest.mark.parametrize("name", OPENERS)
def test_a_pipe_without_a_writer_is_an_error(tmp_path: Path, name: str) -> None:
    """At once, or after the wait for its first bytes if a shell may give a pipe."""
    path = tmp_path / "file"
    os.mkfifo(path)
    words = "no program has written to this pipe" if name in TAKE_PIPES else "not a regular file|no projector file"
    assert [None for word in words.split("|") if word in str(opened(name, path))]


@pytest.mark.parametrize("name", [name for name in TAKE_PIPES if name != "certificate"])
def test_a_pipe_of_a_shell_is_read(name: str) -> None:
    """As bash makes for <(command), also if the command writes after the wait for a writer."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(SENT.get(name, b"# nothing\n"))

    timer = threading.Timer(0.5, write)
    timer.start()
    try:
        assert OPENERS[name](Path(f"/dev/fd/{reading}"))
    finally:
        timer.join()
        os.close(reading)


def test_a_certificate_and_its_key_come_from_a_pipe_each() -> None:
    """OpenSSL opens a copy of them."""
    with ExitStack() as closing:
        pipes = [os.pipe() for _ in range(2)]
        for (reading, writing), name in zip(pipes, ("certificate.pem", "key.pem"), strict=True):
            closing.callback(os.close, reading)
            os.write(writing, (TLS / name).read_bytes())
            os.close(writing)
        certificate, key = (Path(f"/dev/fd/{reading}") for reading, _ in pipes)
        context = tls_context(ServerSettings(ssl_certfile=certificate, ssl_keyfile=key))
        assert context is not None and context.get_ca_certs() == []


@pytest.mark.parametrize("name", OPENERS)
def test_a_device_without_an_end_is_an_error(tmp_path: Path, name: str) -> None:
    """It is not read, or no further than a file of its kind may be."""
    path = tmp_path / "file"
    path.symlink_to("/dev/zero")
    error = opened(name, path)
    words = ["the most that are read", "not a regular file", "no projector file", "may have", "it has more than"]
    assert any(word in str(error) for word in words), error


@pytest.mark.parametrize("name", OPENERS)
@pytest.mark.parametrize("kind", ["folder", "loop", "socket", "missing"])
def test_invalid_file_is_an_error(tmp_path: Path, name: str, kind: str) -> None:
    """A folder, a loop of links, a socket, nothing at all."""
    path = tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path)
        elif kind == "socket":
            listener.bind(str(path))
        opened(name, path)


SPARSE = [
    name for name in OPENERS if not name.endswith(("fingerprint", "certificate", "header"))
]  # which have no format


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("magic", [b"", b"GGUF\3\0\0\0", struct.pack("<4sIII", b"PLPR", 2, 1, 0)])
def test_a_sparse_file_of_a_terabyte_is_refused_by_its_beginning(tmp_path: Path, name: str, magic: bytes) -> None:
    """Nobody reads it whole."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(magic)
        file.truncate(HUGE)
    opened(name, path)
