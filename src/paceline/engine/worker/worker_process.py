"""One worker process, as its front sees it: started, sent messages, and reaped. Supervising thread only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import dataclass

from paceline.engine.worker import messages
from paceline.engine.worker.black_box import Beat, BlackBox, LastSeen
from paceline.engine.worker.blame import FATAL_SIGNALS
from paceline.engine.worker.last_words import LastWords
from paceline.engine.worker.link import Link

_PATIENCE_S = 5.0  # from the end of the socket to the end of the process, core dumps included
_children: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended. code: its exit status; negative: the signal that ended it."""

    code: int
    seen: LastSeen
    last_words: str

    @property
    def is_crash(self) -> bool:
        """Whether the process ended itself; otherwise another process did, or it left in good order."""
        return -self.code in FATAL_SIGNALS

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"

    def __str__(self) -> str:
        how = f"exited with status {self.code}" if self.signal is None else f"was ended by {self.signal}"
        return f"the engine's process {how}" + (f"; its last words:\n{self.last_words}" if self.last_words else "")


class WorkerProcess:
    """Starts a worker, which sets up what it is told to."""

    def __init__(self, setup: messages.Setup) -> None:
        ours, theirs = socket.socketpair()
        self.box = BlackBox.create()
        read_end, write_end = os.pipe()
        self.last_words = LastWords(read_end)
        self.makes_sense = True  # all that it has said
        self.ready_s: float | None = None  # when it said that its engine runs
        self.link = Link(ours)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter, with numbers
                [
                    *(sys.executable, "-P", "-m", "paceline.engine.worker"),
                    *(str(theirs.fileno()), str(self.box.fileno()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stderr=write_end,
                pass_fds=(theirs.fileno(), self.box.fileno()),
                env={**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(setup.path)},
            )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(write_end)
        _children.add(self)
        self.send(setup)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether its engine runs."""
        return self.ready_s is not None

    def send(self, message: messages.Down) -> None:
        """Tells the worker something; never waits."""
        self.link.send(messages.encode(message))

    def beat(self) -> Beat | None:
        """Its last sign of life. Any thread."""
        return self.box.read_beat()

    def reap(self, patience_s: float = _PATIENCE_S) -> Death:
        """Wait for the end of the process, kills it where it takes longer, and gives everything back."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self.last_words.read()
        death = Death(code, self.box.read(), self.last_words.text)
        self._close()
        return death

    def kill(self) -> None:
        """End the process at once; it is still to be reaped."""
        self._process.kill()

    def _close(self) -> None:
        self.link.close()
        self.last_words.close()
        self.box.close()

    def forget(self) -> None:
        """In a forked child of the front: the worker is not ours, and must see its own front's end."""
        self._process.returncode = 0
        self.box.forget()
        with contextlib.suppress(OSError):
            self._close()


def _forget_all() -> None:
    for child in tuple(_children):
        child.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
