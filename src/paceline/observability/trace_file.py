"""Trace files: one line of JSON for each event of an engine, written by a recorder and read back. See `trace_events`.

The recorder's hooks write on the engine's thread; it may be closed on any thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from paceline import validation
from paceline.errors import InvalidType, TraceError
from paceline.observability.trace_events import (
    EventInstrument,
    LineError,
    Trace,
    TraceEvent,
    check_header,
    event_time,
    from_line,
    header,
    to_line,
)

_log = logging.getLogger("paceline.engine")
_MAX_LINE_BYTES = 16 << 20  # of a trace: the last line of a process that died may end anywhere


class TextSink(Protocol):
    """An open text file, or the two methods of one that a recorder needs."""

    def write(self, text: str, /) -> object: ...  # noqa: D102 - as of a file
    def flush(self) -> object: ...  # noqa: D102


class TraceRecorder(EventInstrument):
    """Write the events of an engine to a file. Close it after the engine, or use it as a context manager.

    A hook that cannot write raises `OSError`, and nothing is written afterwards: the engine removes the recorder and
    continues. Hooks after `close` do nothing.

    Args:
        target: a path, whose file is replaced, or an open text file, which stays open and belongs to the caller.
        start_s: the engine's clock at the beginning of the trace; None: the time of the first event.
        flush_interval_s: an event that comes this many seconds after the last flush flushes the file; 0: every event does.
            A process that dies loses at most what was written since.
        max_bytes: the file ends before the event that would exceed this size, and a warning is logged; None: no limit.

    Raises:
        OSError: the file cannot be opened.
        InvalidParams: an option is out of range.
        InvalidType: target is neither a path nor a text file.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | TextSink,
        *,
        start_s: float | None = None,
        flush_interval_s: float = 1.0,
        max_bytes: int | None = None,
    ) -> None:
        self._start_s = start_s if start_s is None else validation.number("start_s", start_s)
        self._flush_interval_s = validation.number("flush_interval_s", flush_interval_s, 0)
        self._bytes_left = (
            math.inf if max_bytes is None else validation.integer("max_bytes", max_bytes, len(header()) + 1)
        )
        self._lock = threading.Lock()
        self._own, self._name = _opened(target), target
        self._flushed_s = float("-inf")
        self._file: TextSink | None = _checked(target) if self._own is None else self._own
        self._put(self._file, header())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close; idempotent. Raises `OSError` if that fails."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None and self._own is not None:
                self._own.close()
            elif file is not None:
                file.flush()

    def write_lines(self, lines: Iterable[str], now_s: float) -> None:
        """Write events that another recorder with the same start_s has formatted. now_s: on the engine's clock."""
        with self._lock:
            for line in lines:
                if self._file is not None:
                    self._put(self._file, line, now_s)

    def take(self, event: TraceEvent) -> None:
        """Write an event."""
        with self._lock:
            now_s = event_time(event)
            if self._start_s is None:
                self._start_s = now_s
            if self._file is not None:
                self._put(self._file, to_line(event, self._start_s or 0.0), now_s)

    def _put(self, file: TextSink, line: str, now_s: float | None = None) -> None:
        self._bytes_left -= len(line) + 1  # lines are ASCII
        if self._bytes_left < 0:
            _log.warning("the trace %s has reached max_bytes and ends here", self._name)
            self._abandon()
            return
        try:
            file.write(line + "\n")
            if now_s is not None and now_s - self._flushed_s >= self._flush_interval_s:
                self._flushed_s = now_s
                file.flush()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Write nothing more, after a failed write or at the size limit."""
        file, self._file = self._file, None
        if file is not None and self._own is not None:
            with contextlib.suppress(OSError):
                self._own.close()


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read the events of a trace file.

    An incomplete last line, as a process that dies leaves it, is omitted and sets `is_truncated`.

    Raises:
        TraceError: the file is no trace, or a line is invalid; the message has the line's number.
        OSError: the file cannot be read.
    """
    events: list[TraceEvent] = []
    number = 0
    with validation.open_file(Path(path), pipes=True) as file:
        while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
            number += 1
            if (event := _parsed(path, number, line[:-1])) is not None:
                events.append(event)
    if len(line) == _MAX_LINE_BYTES:
        raise TraceError(f"{path}, line {number + 1}: it has more than {_MAX_LINE_BYTES} bytes")
    if not number:
        raise TraceError(f"{path} is not a trace: it has no complete first line")
    return Trace(tuple(events), is_truncated=line != b"")


def _parsed(path: str | os.PathLike[str], number: int, line: bytes) -> TraceEvent | None:
    """Return the event of a line, None for the first line, which has none."""
    try:
        text = line.decode()
        if number > 1:
            return from_line(text)
        check_header(text)
    except (LineError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}, line {number}: {_why(error)}") from None
    return None


def _why(error: LineError | UnicodeDecodeError) -> str:
    return "not valid UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _opened(target: object) -> TextIO | None:
    """Open a path for writing; None if target is no path."""
    if not isinstance(target, (str, os.PathLike)):
        return None
    return Path(target).open("w", encoding="utf-8", newline="\n")


def _checked(target: Any) -> TextSink:
    if not hasattr(target, "write") or not hasattr(target, "flush"):
        raise InvalidType(f"target must be a path or a text file, not a {type(target).__name__}")
    file: TextSink = target
    return file
