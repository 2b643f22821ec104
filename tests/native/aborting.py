"""Aborts whatever a context computes, for as long as a block lasts, and checks that nothing is left of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from paceline.errors import Aborted
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


def check_aborted_passes(context: Context, start: list[int], more: list[int]) -> None:
    """Check that a sequence with the tokens `start` is unchanged, and goes on as without them, after aborts of `more`.

    context: empty; computes `more` in one pass.
    """
    context.decode(start)
    before = context.save_sequence(0)
    context.decode([5])
    expected = context.logits(0)
    context.load_sequence(0, before)
    for delay in (0, 0.001, 0.002, 0.003):
        with aborting(context, after_s=delay), pytest.raises(Aborted):
            for _ in range(1000):  # a fast machine may finish a pass before the abort comes
                context.decode(more)
                context.load_sequence(0, before)
        held = context.positions(0)
        assert held is not None
        assert held.last == len(start) - 1
    context.decode([5])
    assert np.allclose(context.logits(0), expected, atol=1e-5)
