"""Single keys from the terminal, as they are pressed; the terminal is as it was afterwards, whatever ends the process.

Made, entered and left on the main thread, since it listens to signals; `read` and `wait` are for one thread, any.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import termios
import threading
import tty
from types import FrameType, TracebackType
from typing import Any, Self

from paceline.cli import terminal

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def can_read_keys() -> bool:
    """Return whether stdin and stdout are a terminal."""
    return sys.stdin is not None and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stdout)


class Keys:
    """A terminal in cbreak mode: keys are read one by one and not echoed; Ctrl-C stays a signal.

    file_descriptor: of the terminal. Inside of a `with` block the mode holds. It ends with the block, with
    `terminal.restore`, and with a signal that ends the process; after a stop (Ctrl-Z) it is set again.
    """

    def __init__(self, file_descriptor: int) -> None:
        self._terminal = file_descriptor
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._terminal)
        terminal.undo_at_exit(self.restore)
        if threading.current_thread() is threading.main_thread():
            self._listen()
        tty.setcbreak(self._terminal, termios.TCSADRAIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        terminal.forget_undo(self.restore)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def restore(self) -> None:
        """Restore the terminal's mode. Idempotent; safe in signal handlers."""
        if self._before is not None and self._has_terminal():
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)

    def read(self) -> str:
        """Return the keys pressed since the last call, in order; never wait. Leave out what is not ASCII."""
        if not self._has_terminal() or not select.select([self._terminal], [], [], 0)[0]:
            return ""
        try:
            return os.read(self._terminal, 1024).decode("ascii", "ignore")
        except OSError:  # the terminal has gone
            return ""

    def wait(self, timeout_s: float) -> None:
        """Sleep until a key is pressed, or the time is over."""
        select.select([self._terminal] if self._has_terminal() else [], [], [], timeout_s)

    def _has_terminal(self) -> bool:
        """Return whether this process may use the terminal; in the background of a shell it would be stopped."""
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError as error:  # a terminal without job control, or one that has gone
            return error.errno == errno.ENOTTY and os.isatty(self._terminal)

    def _listen(self) -> None:
        for number in _ENDING_SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._end)
        self._handlers[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._go_on)

    def _end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        terminal.restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _go_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._has_terminal():
            tty.setcbreak(self._terminal, termios.TCSANOW)
