"""Hooks of the native core into the Python process: its log goes to `logging`, its calls end before the interpreter does.

Log lines go to `logging.getLogger("paceline.llama")`, on the thread whose native call just returned, in the order they were
logged. llama.cpp logs the details of loading a model as "info"; they become DEBUG, so that an application that logs at INFO
stays readable.

At exit Python ends a daemon thread when its native call returns, in the middle of C++ frames that cannot be unwound, which
aborts the process. So the calls are ended before.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading

from paceline import _native

logger = logging.getLogger("paceline.llama")

END_TIMEOUT_S = 10.0  # for calls that no abort reaches, such as a wait for a mask

_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}


def install() -> None:
    """Install both hooks; called once, when `paceline.runtime` is imported."""
    # Without a handler, Python writes warnings to stderr; a library stays silent.
    logger.addHandler(logging.NullHandler())
    _native.set_log_sink(_log_line)
    atexit.register(end_calls)


def end_calls(timeout_s: float = END_TIMEOUT_S) -> None:
    """End native calls in other threads: passes and loads raise `Aborted`, new calls raise `Closed`.

    Waits for the calls, at most timeout_s. Those that take longer never return to Python.
    """
    returned = _native.end_calls(timeout_s)
    for thread in threading.enumerate():
        if thread.ident in returned:
            # It may be about to print what the call raised; ended while it holds the lock of stderr, it would make
            # Python abort. A thread that Python did not start cannot be joined.
            with contextlib.suppress(RuntimeError, AssertionError):
                thread.join(1.0)


def _log_line(level: int, line: str) -> None:
    logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)
