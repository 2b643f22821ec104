"""The server's lines on stderr and in its log, its reports to a service manager, and its signals.

A thread writes the lines: a full pipe or a slow disk holds up no other thread. The first SIGTERM or SIGINT asks the server to
end, a second one ends the process at once. SIGHUP asks it to read its settings again.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TextIO

from paceline.hub.references import visible

MAX_WAITING_CHARS: Final = 4 << 20
"""Most characters of lines that wait to be written; further lines are dropped and counted."""

_BATCH_CHARS: Final = 1 << 16  # written at once
_RETRY_S: Final = 1.0  # between two looks at a descriptor that cannot be written to
_MANAGER_S: Final = 1.0  # that a service manager may take to receive a state
_EXIT_S: Final = 1.0  # that the process waits at its end until its last lines are written


def describe_dropped(number: int) -> str:
    """Return the text that stands in place of dropped lines."""
    return f"{number} lines of the log were dropped, as they were not read or could not be written"


class LogQueue:
    """Lines in order, and the thread that writes them. Any thread.

    A line that finds no room is dropped. A line with the number of dropped lines takes their place.
    """

    def __init__(self, write: Callable[[str], None], on_closed: Callable[[], None] = lambda: None) -> None:
        """write: called by the thread with whole lines; they are dropped if it raises an error. on_closed: called at its end."""
        self.describe_dropped = describe_dropped
        self._write, self._on_closed = write, on_closed
        self._lines: deque[str] = deque()
        self._num_chars = self._num_dropped = 0
        self._is_writing = False
        self._changed = threading.Condition()  # its lock may be taken again: an object that is freed meanwhile may log
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, line: str) -> None:
        """Add a line, which has no newline at its end. Never waits for the thread's writing."""
        with self._changed:
            if self._is_closed:
                return
            if self._num_chars + len(line) > MAX_WAITING_CHARS:
                self._num_dropped += 1
                return
            self._append_dropped()
            self._append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="paceline-log", daemon=True)
                self._thread.start()
                atexit.register(self.flush)
            self._changed.notify_all()

    def flush(self, timeout_s: float = _EXIT_S) -> None:
        """Wait until all lines are written, at most for so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, timeout_s)

    def close(self) -> None:
        """Let the thread write the lines that wait, and end. Never waits for it. Later lines are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is None:
            self._on_closed()

    def _append(self, line: str) -> None:
        self._lines.append(line + "\n")
        self._num_chars += len(line) + 1

    def _append_dropped(self) -> None:
        if self._num_dropped:
            self._append(self.describe_dropped(self._num_dropped))
            self._num_dropped = 0

    def _run(self) -> None:
        while True:
            text, num_lines = self._next_batch()
            if not num_lines:
                break
            try:
                self._write(text)
            except Exception:  # noqa: BLE001 - a closed pipe, a full disk, or whatever a program's own stream raises
                with self._changed:
                    self._num_dropped += num_lines
        atexit.unregister(self.flush)
        self._on_closed()

    def _next_batch(self) -> tuple[str, int]:
        """Return lines as a text, and their number; 0 lines after `close`."""
        with self._changed:
            self._is_writing = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            if not self._lines:
                return "", 0
            batch: list[str] = []
            num_chars = 0
            while self._lines and num_chars < _BATCH_CHARS:
                batch.append(self._lines.popleft())
                num_chars += len(batch[-1])
            self._num_chars -= num_chars
            if not self._lines:
                self._append_dropped()
            self._is_writing = True
        return "".join(batch), len(batch)


class QueuedLines(logging.Handler):
    """Puts formatted log records into a queue."""

    def __init__(self, queue: LogQueue) -> None:
        super().__init__()
        self.queue = queue

    def emit(self, record: logging.LogRecord) -> None:
        """Put one record."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - as any handler
            line = f"paceline: a record of {record.name} cannot be formatted: {type(error).__name__}: {error}"
        self.queue.put(line)


def write_to(descriptor: int, text: str) -> None:
    """Write a text to a descriptor, which may be one that does not block. Raises `OSError`."""
    data = text.encode("utf-8", "backslashreplace")
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll(_RETRY_S * 1000)


def _write_to_stderr(text: str) -> None:
    """Write past the buffer of `sys.stderr`: a thread that waits with that buffer's lock would hold up the interpreter's end."""
    stream: TextIO | None = sys.stderr
    if stream is None:  # as the process was started
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # a stream without a descriptor
        stream.write(text)
        stream.flush()
    else:
        write_to(descriptor, text)


STDERR: Final = LogQueue(_write_to_stderr)
"""The lines that the server writes to stderr."""


_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class ServerSignals:
    """Handles the signals on the event loop after `install`.

    Attributes:
        requested: Set by the first signal that ends the server, or by `request`.
        reload_requested: Set by SIGHUP, and cleared when the reload begins.
    """

    def __init__(self) -> None:
        self.requested, self.reload_requested = asyncio.Event(), asyncio.Event()
        self._watches_terminal = False

    def install(self) -> None:
        """Handle the signals on the running loop, which is the main thread's."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if sys.platform != "win32":
            # `nohup` has it ignored: such a server outlives its terminal.
            self._watches_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        """Ask for a reload; end the server if its terminal was closed, which sends the same signal."""
        if not self._watches_terminal or _has_terminal():
            self.reload_requested.set()
        elif not self.requested.is_set():
            say("ending, as the terminal was closed")
            self.request()

    def request(self) -> None:
        """Ask the server to end, as the first signal does."""
        self.requested.set()

    def _on_signal(self, number: int) -> None:
        if not self.requested.is_set():
            say("ending: no new requests are accepted; a second signal ends at once")
            self.request()
            return
        say("ended at once")
        STDERR.flush()
        os._exit(128 + number)  # a worker process notices that its parent is gone


def _has_terminal() -> bool:
    """Return whether the process has a controlling terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def tell_manager(state: str) -> None:
    """Send a state to the service manager that started this process, if one did, as sd_notify(3) does."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.settimeout(_MANAGER_S)
            manager.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def watchdog_s() -> float | None:
    """Return the seconds after which the service manager ends this process unless it sends WATCHDOG=1; None: never."""
    timeout_us = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
    return int(timeout_us) / 1e6 if is_ours and timeout_us.isdecimal() and int(timeout_us) else None


def say(text: str) -> None:
    """Write a line of the server's own to stderr. Never waits. Characters of a stranger's name that do not print become "?"."""
    STDERR.put(f"paceline: {visible(text)}")
