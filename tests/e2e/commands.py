"""Commands as a user runs them: processes, pipes and terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

PROMPT = "Once upon a time"
COMMAND = (sys.executable, "-m", "paceline")
TIMEOUT_S = 60
ESCAPE = "\x1b"


def environment(**changes: str) -> dict[str, str]:
    unset = {"NO_COLOR", "FORCE_COLOR", "COLORTERM", "PYTHONIOENCODING", "PACELINE_CONFIG", "PACELINE_MODEL"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    kept.setdefault("XDG_CONFIG_HOME", os.devnull)  # not the file of the user who runs the tests
    return kept | {"TERM": "xterm-256color", "COLUMNS": "80"} | changes


def paceline_(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command with pipes on all sides."""
    return subprocess.run(
        [*COMMAND, *args], input=stdin, capture_output=True, check=False, timeout=TIMEOUT_S, env=environment()
    )


@contextmanager
def started(*args: str, stdin: bytes = b"") -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs inside of the block, with its output in pipes; it is always gone afterwards.

    The pipes are unbuffered: `communicate` reads past a buffer, and the rest of an earlier `read` would be lost.
    """
    command = [*COMMAND, *args]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, env=environment()) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            process.stdin = None  # communicate() would write to it
            yield process
        finally:
            process.kill()


def endless(model: Path) -> tuple[str, ...]:
    """A generation that takes minutes."""
    return ("generate", PROMPT, "-m", str(model), "-t", "1", "-n", "30000", "-c", "32768", "--ignore-eos")


def output(*args: str, stdin: bytes = b"") -> str:
    """The output of a successful command on stdout."""
    done = paceline_(*args, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def generate(*args: str) -> dict[str, Any]:
    """The JSON object of a generation."""
    return json.loads(output("generate", PROMPT, "-t", "1", "--json", *args))


class Terminal:
    """A command that believes to be on a terminal. `tests/e2e/conftest.py` ends it if its test fails before its end."""

    running: ClassVar[set[Terminal]] = set()

    def __init__(self, *args: str, **env: str) -> None:
        self.seen = b""
        self.last_mode: list[Any] = []
        self._keyboard, screen = pty.openpty()
        self._process = subprocess.Popen(
            [*COMMAND, *args],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment(**env),
            start_new_session=True,
        )
        os.close(screen)
        self.running.add(self)

    def kill(self) -> None:
        """End it at once, with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        self.running.discard(self)

    def read_until(self, text: bytes) -> None:
        """Wait for a text to show up."""
        while text not in self.seen:
            assert self._read(), f"ended without {text!r}: {self.seen!r}"

    def read_until_seen(self, pattern: str) -> None:
        """Wait for something to be seen, escapes aside."""
        while not re.search(pattern, self.plain_text):
            assert self._read(), f"ended without {pattern!r}: {self.plain_text!r}"

    def interrupt(self) -> None:
        """Interrupt the command as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def interrupt_until_seen(self, pattern: str) -> None:
        """Interrupt at a prompt. Until the next signal or key, Python's `input` misses one that comes just before it waits."""
        while not re.search(pattern, self.plain_text):
            self.interrupt()
            while not re.search(pattern, self.plain_text) and select.select([self._keyboard], [], [], 1)[0]:
                assert self._read(), f"ended without {pattern!r}: {self.plain_text!r}"

    def press(self, keys: str) -> None:
        """Send keys as a keyboard would."""
        os.write(self._keyboard, keys.encode())

    def mode(self) -> list[Any]:
        """The mode of the terminal for typed input."""
        return termios.tcgetattr(self._keyboard)

    def finish(self) -> int:
        """Read to the end; the exit code. `last_mode` is how it left the terminal."""
        while self._read():
            pass
        self.last_mode = self.mode()
        os.close(self._keyboard)
        code = self._process.wait(TIMEOUT_S)
        self.running.discard(self)
        return code

    def _read(self) -> bool:
        try:
            data = os.read(self._keyboard, 65536)
        except OSError:  # Linux raises EIO once the last process has left the terminal
            return False
        self.seen += data
        return bool(data)

    @property
    def text(self) -> str:
        """The output, escapes included."""
        return re.sub("\r+\n", "\n", self.seen.decode(errors="replace"))

    @property
    def plain_text(self) -> str:
        """Return the output without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
