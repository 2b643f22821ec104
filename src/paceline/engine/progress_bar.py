"""The progress of a list of prompts or conversations: a bar on a terminal or in a notebook, or calls of a function.

Loads rich only if the bar is shown.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from paceline.errors import InvalidType

if TYPE_CHECKING:
    from rich.progress import Progress

_UPDATE_S: Final = 0.1  # between two pictures in a notebook, each of which is a message to the browser


def checked_progress(progress: object) -> bool | Callable[[int, int], object]:
    """Return the option `progress`: False for None. Raises `InvalidType` if it is neither a bool nor a function."""
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise InvalidType(f"progress must be True, False or a function progress(done, total), not {progress!r:.80}")
    return False if progress is None else progress


@contextmanager
def progress_bar(total: int, wanted: bool | Callable[[int, int], object]) -> Iterator[Callable[[], object]]:
    """Show a bar if stderr is a terminal or this is a notebook, or call the function that is `wanted`.

    Yields a function that advances by one prompt.
    """
    if callable(wanted):
        done = itertools.count(1)
        yield lambda: wanted(next(done), total)
        return
    is_terminal = sys.stderr.isatty()
    if not wanted or not (is_terminal or "IPython" in sys.modules):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    if console.is_jupyter:
        with _notebook_bar(Progress(*columns, console=console, auto_refresh=False), total) as advance:
            yield advance
    elif is_terminal:
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
    else:
        yield lambda: None


@contextmanager
def _notebook_bar(bar: Progress, total: int) -> Iterator[Callable[[], object]]:
    """Show the bar as an output of the cell that changes in place, which needs no ipywidgets; its last picture stays."""
    task, shown_s = bar.add_task("", total=total), time.monotonic()
    picture = importlib.import_module("IPython.display").display(bar, display_id=True)

    def advance() -> None:
        nonlocal shown_s
        bar.advance(task)
        if time.monotonic() - shown_s >= _UPDATE_S:
            picture.update(bar)
            shown_s = time.monotonic()

    try:
        yield advance
    finally:
        picture.update(bar)
