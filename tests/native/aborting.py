"""Aborts whatever a context computes, for as long as a block lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.runtime import Context


@contextmanager
def aborting(context: Context, *, after_s: float = 0.0) -> Iterator[None]:
    """From `after_s` on, another thread aborts again and again: the pass in the block cannot miss it."""
    over = threading.Event()

    def work() -> None:
        over.wait(after_s)
        while not over.wait(0.0005):
            context.abort()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
