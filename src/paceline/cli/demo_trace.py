"""The file of a demo's trace. What cannot be written spoils neither the picture nor the answers; it is told at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self


class TraceFile:
    """As much of a text file as a `TraceRecorder` needs. The first write that fails ends it. Use it as a context manager.

    Raises `OSError` where it cannot be opened, and never after.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._error: OSError | None = None

    def write(self, text: str) -> int:
        """Writes, where nothing has failed before."""
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Hands what was written to the system, where nothing has failed before."""
        self._try(self._file.flush)

    @property
    def problem(self) -> str | None:
        """Why the file is not whole, as a sentence; None where it is, or as far as one knows before it is closed."""
        if self._error is None:
            return None
        return f"the trace {self._path} is not whole: {self._error.strerror or self._error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = _failure(self._file.close)
        self._error = self._error or failure

    def _try(self, work: Callable[[], object]) -> None:
        if self._error is None:
            self._error = _failure(work)


def _failure(work: Callable[[], object]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    return None
