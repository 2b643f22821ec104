"""The list of servers of this machine: running servers, ended servers, and the contents of its files."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from pathlib import Path

import pytest

from paceline.server.listeners import RunningServer, registered, running_servers

URLS = ["http://127.0.0.1:8080"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "paceline" / "servers"


def test_a_server_is_listed_while_it_runs(folder: Path) -> None:
    """With its process, addresses, model and start; the oldest first."""
    with registered(URLS, "a", 2.0), registered(["http://[::1]:1"], None, 1.0):
        older, newer = running_servers()
        assert (older.urls, older.model, older.started) == (["http://[::1]:1"], None, 1.0)
        assert newer == RunningServer(pid=os.getpid(), urls=URLS, model="a", started=2.0, host=socket.gethostname())
    assert running_servers() == [] and list(folder.iterdir()) == []


def test_only_its_user_can_read_it(folder: Path) -> None:
    """Neither the file nor the folder is open to others, whatever the umask."""
    before = os.umask(0)
    try:
        with registered(URLS, "a", 1.0):
            (file,) = folder.iterdir()
            assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
            assert set(json.loads(file.read_text())) == {"pid", "urls", "model", "started", "host"}
    finally:
        os.umask(before)


def entry(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_the_file_of_a_crashed_server_is_removed(folder: Path) -> None:
    """By the next list, and by the next server."""
    for look in (running_servers, lambda: registered(URLS, "a", 1.0).__enter__()):
        stale = entry(
            folder, "1-x.json", json.dumps({"pid": 1, "urls": URLS, "model": "a", "started": 1.0, "host": "h"})
        )
        look()
        assert not stale.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1}', "\xff"])
def test_a_live_file_that_says_something_else_is_passed_over(folder: Path, text: str) -> None:
    """As that of another version; it is not removed."""
    path = entry(folder, "1-x.json", text)
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert running_servers() == [] and path.exists()


def test_a_server_of_another_machine_is_passed_over(folder: Path) -> None:
    """A home folder may be shared."""
    facts = {"pid": 1, "urls": URLS, "model": "a", "started": 1.0, "host": "elsewhere"}
    path = entry(folder, "1-x.json", json.dumps(facts))
    with path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert running_servers() == [] and path.exists()


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """It does not end the list."""
    target = entry(tmp_path, "other.json", "{}")
    folder.mkdir(parents=True)
    (folder / "1-x.json").symlink_to(target)
    with registered(URLS, "a", 1.0):
        assert len(running_servers()) == 1
    assert target.exists()


def test_without_a_folder_the_server_runs_unlisted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says why."""
    (tmp_path / "paceline").write_text("a file")
    with caplog.at_level(logging.INFO, "paceline.server"), registered(URLS, "a", 1.0):
        assert running_servers() == []
    assert "`paceline ps` will not list this server" in caplog.text
