"""How commands end: exit codes, one line on stderr for an error, and Ctrl-C that takes effect while the compiled core computes.

Python runs a signal handler only between steps of the main thread, and one forward pass can take seconds. So the work runs on a
thread of its own, and the main thread waits for it and for Ctrl-C. The first Ctrl-C asks the work to stop, the second one ends
the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeVar

from paceline.cli import terminal
from paceline.errors import Aborted, InvalidParams, PacelineError

FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130
READER_GONE: Final = 141


def error_text(error: BaseException) -> str:
    """Return an error as one line: of an `OSError` the file and the reason, without its number."""
    if isinstance(error, PacelineError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}" if error.filename else error.strerror


def report(error: BaseException) -> int | None:
    """Report the error of a command, and return its exit code; None for an error that keeps its traceback."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case PacelineError():
            terminal.report(str(error))
            return WRONG_USAGE if isinstance(error, InvalidParams) else FAILED
        case BrokenPipeError():
            terminal.abandon_output()
            return READER_GONE
        case OSError():
            terminal.abandon_output()
            place = f"{error.filename}" if error.filename else "cannot write to stdout"
            terminal.report(f"{place}: {error.strerror or error}")
            return FAILED
    return None


T = TypeVar("T")

_POLL_S = 0.1


class StopSignal:
    """A request to stop, as the work sees it. event: set once a stop is requested."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._abort: Callable[[], object] | None = None

    @property
    def requested(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self.event.is_set()

    def request(self) -> None:
        """Ask the work to stop."""
        self.event.set()
        self.insist()

    def insist(self) -> None:
        """Abort the running call if a stop was requested: it may have begun just after the request."""
        abort = self._abort
        if self.requested and abort is not None:
            abort()

    @contextmanager
    def aborting(self, abort: Callable[[], object]) -> Iterator[None]:
        """Have a request call `abort` while the block runs, from another thread."""
        self._abort = abort
        try:
            yield
        finally:
            self._abort = None


def run(work: Callable[[StopSignal], T]) -> T:
    """Do the work on a thread of its own; return its result or raise its error.

    Raises `KeyboardInterrupt` after Ctrl-C, once the work has ended.
    """
    stop = StopSignal()
    outcome: Future[T] = Future()

    def fulfil() -> None:
        try:
            outcome.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            outcome.set_exception(error)

    with _on_interrupt(stop):
        threading.Thread(target=fulfil, name="paceline-work", daemon=True).start()
        while not wait([outcome], _POLL_S).done:
            stop.insist()
    error = outcome.exception()
    if stop.requested and (error is None or isinstance(error, Aborted)):
        raise KeyboardInterrupt
    return outcome.result()


@contextmanager
def _on_interrupt(stop: StopSignal) -> Iterator[None]:
    """Pass Ctrl-C to `stop` while the block runs, unless this process was started to ignore it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stop.requested:
            terminal.restore()
            os._exit(128 + signal.SIGINT)
        stop.request()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
