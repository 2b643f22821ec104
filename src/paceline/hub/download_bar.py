"""Progress of downloads on a terminal: a bar with size, rate and rest; elsewhere lines of text. Loads rich when it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from paceline.hub.download import DownloadObserver
from paceline.hub.hub_settings import is_on
from paceline.hub.references import visible

if TYPE_CHECKING:
    from rich.progress import Progress

_SHOWN = 40  # characters of a file's name


@contextmanager
def download_bar(stream: TextIO, note: Callable[[str], object]) -> Iterator[DownloadObserver]:
    """Show downloads on a stream while the block runs, as a bar if it is a terminal. note: shows the lines beside it.

    Names and notes have words of the server, whose control characters could drive a terminal: they become question marks.
    HF_HUB_DISABLE_PROGRESS_BARS=1 leaves the bar out, as huggingface_hub does.
    """
    if not stream.isatty() or is_on("HF_HUB_DISABLE_PROGRESS_BARS"):
        yield LineObserver(note)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    with Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as progress:
        yield _Bar(progress)


class LineObserver:
    """Writes one line where a file begins, and the notes."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self._name: str | None = None

    def begin(self, name: str, total: int | None) -> None:
        """See `DownloadObserver`."""
        if name != self._name:
            self._name = name
            self._note(f"downloading {visible(name)}" + ("" if total is None else f" ({total:,} bytes)"))

    def reached(self, num_bytes: int) -> None:
        """Do nothing: a log has no use for it."""

    def end(self) -> None:
        """See `DownloadObserver`."""
        self._name = None

    def note(self, text: str) -> None:
        """See `DownloadObserver`."""
        self._note(visible(text))


class _Bar:
    """Draws one row a file. Bytes of an earlier attempt do not count for the rate."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._name: str | None = None
        self._task = progress.add_task("", visible=False, start=False)
        self._is_new = False

    def begin(self, name: str, total: int | None) -> None:
        if name == self._name:
            self._progress.update(self._task, total=total)
            return
        self._name, self._is_new = name, True
        shown = visible(name.rpartition("/")[2])
        self._task = self._progress.add_task(shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…", total=total)

    def reached(self, num_bytes: int) -> None:
        if self._is_new:
            self._progress.reset(self._task, completed=num_bytes)
            self._is_new = False
        else:
            self._progress.update(self._task, completed=num_bytes)

    def end(self) -> None:
        self._name = None
        self._progress.stop_task(self._task)

    def note(self, text: str) -> None:
        self._progress.console.print(visible(text), style="dim")
