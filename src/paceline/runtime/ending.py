"""The end of the process while other threads are in calls.

Python takes down a daemon thread at the moment its call returns, in the middle of C++ that cannot be unwound, and that ends
the process with an abort. So the calls are ended before.
"""

from __future__ import annotations

import atexit
import contextlib
import threading

from paceline import _native

PATIENCE_S = 10.0  # for calls that no abort reaches, such as a wait for a mask


def end_calls(patience_s: float = PATIENCE_S) -> None:
    """Ends what runs in other threads: passes and loads raise `Aborted`, new calls `Closed`.

    Waits for the calls, at most patience_s. Those that take longer never return to Python.
    """
    came_back = _native.end_calls(patience_s)
    for thread in threading.enumerate():
        if thread.ident in came_back:
            # It may be about to print what the call raised; taken down while it holds the lock of stderr, it would make
            # Python abort. A thread that Python did not start cannot be joined.
            with contextlib.suppress(RuntimeError, AssertionError):
                thread.join(1.0)


def install() -> None:
    """Called once when `paceline.runtime` is imported."""
    atexit.register(end_calls)
