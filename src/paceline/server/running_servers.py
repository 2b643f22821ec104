"""The servers of this user on this machine: each keeps a file in the user's state folder, locked while it runs.

The lock goes with the process, however that ends, so a file without one is of a server that crashed. Blocking; any thread.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_SUFFIX = ".json"
_log = logging.getLogger("paceline.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server.

    Attributes:
        pid: Its process.
        urls: Its addresses, for clients on this machine; "unix://..." for a socket.
        model: The name of its model; None for a server of several models.
        started: When it began to listen, in Unix seconds.
        host: The name of the machine, as a home folder may be shared by several.
    """

    pid: int
    urls: Sequence[str]
    model: str | None
    started: float
    host: str


@contextmanager
def registered(urls: Sequence[str], model: str | None, started: float) -> Iterator[None]:
    """List this process as a server while the block runs. Without a folder that can be written, it is not listed."""
    server = RunningServer(pid=os.getpid(), urls=urls, model=model, started=started, host=socket.gethostname())
    try:
        descriptor, path = _create(server)
    except OSError as error:
        _log.info("`paceline ps` will not list this server: %s", error)
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):  # the folder may be read-only by now; without its lock the file counts for nothing
            path.unlink()
        os.close(descriptor)


def running_servers() -> list[RunningServer]:
    """Return the servers that run, the oldest first, and remove the files of servers that crashed."""
    found = []
    for path in _folder().glob(f"[!.]*{_SUFFIX}"):
        with suppress(OSError):  # it ended meanwhile
            server = _read(path)
            if server is not None and server.host == socket.gethostname():
                found.append(server)
    return sorted(found, key=lambda server: server.started)


def _folder() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 - pathlib's raises if there is no home
    return state / "paceline" / "servers"


def _create(server: RunningServer) -> tuple[int, Path]:
    """Write and lock a file, and only then give it the name by which it is found."""
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    running_servers()  # which removes stale files
    descriptor, name = tempfile.mkstemp(prefix=f".{server.pid}-", suffix=_SUFFIX, dir=folder)  # with mode 0600
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(asdict(server)).encode())
        path = folder / Path(name).name[1:]
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor, path


def _read(path: Path) -> RunningServer | None:
    """Return the server of a file; remove the file and return None if no process has it locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - of a descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            path.unlink(missing_ok=True)
            return None
        try:
            return RunningServer(**json.load(file))
        except (ValueError, TypeError):  # of another version of paceline
            return None
