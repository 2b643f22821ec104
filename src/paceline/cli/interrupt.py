"""Ctrl-C that is heard while the compiled core works.

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


class Stop:
    """The wish to stop, as the work sees it. `event` may be handed to whatever takes one."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._abort: Callable[[], object] | None = None

    @property
    def requested(self) -> bool:
        """Whether Ctrl-C was pressed."""
        return self.event.is_set()

    def request(self) -> None:
        """Asks the work to stop."""
        self.event.set()
        self.insist()

    def insist(self) -> None:
        """Ends the call that runs now, if a stop was requested: it may have begun just after the request."""
        abort = self._abort
        if self.requested and abort is not None:
            abort()

    @contextmanager
    def aborting(self, abort: Callable[[], object]) -> Iterator[None]:
        """Inside of the block a request calls `abort`, from another thread."""
        self._abort = abort
        try:
            yield
        finally:
            self._abort = None


def run(work: Callable[[Stop], T]) -> T:
    """Does the work on a thread of its own and answers its result, or raises what it raised.

    Raises `KeyboardInterrupt` after Ctrl-C, when the work has come to its end.
    """
    stop = Stop()
    outcome: Future[T] = Future()
    with _on_interrupt(stop):
        threading.Thread(target=_fulfil, args=(outcome, work, stop), name="paceline-work", daemon=True).start()
        while not _is_done(outcome):
            stop.insist()
    error = outcome.exception()
    if stop.requested and (error is None or isinstance(error, Aborted)):
        raise KeyboardInterrupt
    return outcome.result()


def _fulfil(outcome: Future[T], work: Callable[[Stop], T], stop: Stop) -> None:
    try:
        outcome.set_result(work(stop))
    except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
        outcome.set_exception(error)


def _is_done(outcome: Future[T]) -> bool:
    with suppress(TimeoutError):
        outcome.exception(_POLL_S)
    return outcome.done()


@contextmanager
def _on_interrupt(stop: Stop) -> Iterator[None]:
    """Ctrl-C reaches `stop` inside of the block, unless this process was started to ignore it."""
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
