"""Worker processes that are started ahead of the models that they will load, to have their imports done by then.

A spare worker waits for its setup and has no model. This module imports little, so that a program can start a worker first and
import everything else meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

BOX_BYTES: Final = 16384  # of the memory that both processes map, see `worker.black_box`


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """The environment that a process inherits. path: where Python finds modules; folder: device and inode of the folder."""

    environment: dict[str, str]
    path: tuple[str, ...]
    folder: tuple[int, int]


class LaunchedWorker:
    """A worker process, and this side's ends of its connections, owned by the caller.

    stderr: the descriptor of its stderr. path: where Python finds modules.
    """

    def __init__(self, path: Sequence[str]) -> None:
        """Start the process. Raises `OSError` if it cannot be started."""
        self.box = box_file()
        self.socket, theirs = socket.socketpair()
        self.stderr, write_end = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603 - our own interpreter, with numbers
                [
                    *(sys.executable, "-P", "-m", "paceline.engine.worker"),
                    *(str(theirs.fileno()), str(self.box.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stderr=write_end,
                pass_fds=(theirs.fileno(), self.box.fileno()),
                env={
                    "OPENBLAS_NUM_THREADS": "1",
                    **os.environ,
                    "GGML_NO_BACKTRACE": "1",
                    "PYTHONPATH": os.pathsep.join(path),
                },
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(write_end)

    def end(self) -> None:
        """End the process, which has no model yet, and close its connections."""
        self.process.kill()
        self.process.wait()
        self._close()

    def forget(self) -> None:
        """Close the connections that a forked child has inherited."""
        self.process.returncode = 0
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        self.box.close()
        self.socket.close()
        os.close(self.stderr)


class SpareWorkers:
    """At most one idle worker process. Any thread; the thread that calls `launch` should last as long as this process.

    On Linux a worker ends with the thread that started it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: tuple[LaunchedWorker, _Surroundings] | None = None

    def launch(self) -> None:
        """Start a spare worker, unless there is one. If it cannot be started, the engine that needs a worker reports it."""
        with self._lock, contextlib.suppress(OSError):
            if self._spare is None:
                surroundings = _surroundings(module_path())
                self._spare = LaunchedWorker(surroundings.path), surroundings

    def take(self, path: Sequence[str]) -> LaunchedWorker:
        """Return the idle spare worker if it is alive and its environment still matches; otherwise start a worker.

        path: where Python finds modules. Raises `OSError` if no process can be started.
        """
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            launched, surroundings = spare
            if launched.process.poll() is None and _are_still(surroundings, path):
                return launched
            launched.end()
        return LaunchedWorker(path)

    @property
    def pid(self) -> int | None:
        """The process id of the spare worker; None without one."""
        spare = self._spare
        return None if spare is None else spare[0].process.pid

    def end(self) -> None:
        """End the spare worker; idempotent."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare[0].end()

    def forget(self) -> None:
        """Leave the spare worker to the process that this one was forked from."""
        self._lock = threading.Lock()  # a thread that does not exist here may hold it
        spare, self._spare = self._spare, None
        if spare is not None:
            spare[0].forget()


def module_path() -> list[str]:
    """Return the absolute folders in which this process finds modules."""
    return [str(Path(entry).absolute()) for entry in sys.path]


def box_file() -> IO[bytes]:
    """Return an unnamed file of zeros, for memory that two processes map."""
    file = os.fdopen(os.memfd_create("paceline"), "r+b") if sys.platform == "linux" else tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(BOX_BYTES)
    return file


def _surroundings(path: Sequence[str]) -> _Surroundings:
    folder = Path().stat()
    return _Surroundings(dict(os.environ), tuple(path), (folder.st_dev, folder.st_ino))


def _are_still(surroundings: _Surroundings, path: Sequence[str]) -> bool:
    try:
        return surroundings == _surroundings(path)
    except OSError:  # an unreadable folder counts as changed
        return False


SPARE_WORKERS: Final = SpareWorkers()
"""The spare worker of this process."""

atexit.register(SPARE_WORKERS.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SPARE_WORKERS.forget)
