"""Ctrl-C that takes effect while the compiled core computes.

Python runs a signal's handler only between steps of the main thread, and one forward pass can take seconds. So the
work runs on a thread of its own, and the main thread waits for it and for Ctrl-C: the first asks the work to stop, the
second ends the process where it stands.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from paceline.cli import terminal
from paceline.errors import Aborted

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
    with _on_interrupt(stop):
        threading.Thread(target=_fulfil, args=(outcome, work, stop), name="paceline-work", daemon=True).start()
        while not _is_done(outcome):
            stop.insist()
    error = outcome.exception()
    if stop.requested and (error is None or isinstance(error, Aborted)):
        raise KeyboardInterrupt
    return outcome.result()


def _fulfil(outcome: Future[T], work: Callable[[StopSignal], T], stop: StopSignal) -> None:
    try:
        outcome.set_result(work(stop))
    except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
        outcome.set_exception(error)


def _is_done(outcome: Future[T]) -> bool:
    with suppress(TimeoutError):
        outcome.exception(_POLL_S)
    return outcome.done()


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
