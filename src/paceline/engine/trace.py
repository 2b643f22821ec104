"""A trace of an engine: written as it runs, one line of JSON an event, and read again. `trace_lines` has the format.

The recorder's hooks run on the engine's thread and write there; it may be closed on any.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from paceline import validation
from paceline.engine.trace_events import (
    EngineRestarted,
    Evicted,
    Paused,
    Preempted,
    PrefixInstability,
    PrefixShared,
    SlotFreed,
    Started,
    Trace,
    TraceEvent,
    moment_s,
)
from paceline.engine.trace_lines import LineError, check_header, from_line, header, to_line
from paceline.errors import InvalidType, TraceError
from paceline.scheduling.instrument import EndRecord, Instrument, RequestRecord, TickRecord


class TextSink(Protocol):
    """What a trace can be written to: a text file that is open, or as much of one."""

    def write(self, text: str, /) -> object: ...  # noqa: D102
    def flush(self) -> object: ...  # noqa: D102


class TraceRecorder(Instrument):
    """Writes what an engine does to a file. Close it after the engine, or leave its `with`.

    target: a path, whose file is replaced, or a text file that is open, which stays open and belongs to the caller.
    start_s: the engine's clock at the beginning of the trace; None: the moment of the first event.
    flush_interval_s: what is written reaches the system when an event comes that much later than the last flush, 0: at
        every event. A process that dies loses at most what came since.

    Raises `OSError` where the file cannot be opened. A hook that cannot write raises as well, and nothing is written after;
    in an engine this ends the trace and nothing else. Hooks after `close` do nothing.
    """

    def __init__(
        self, target: str | os.PathLike[str] | TextSink, *, start_s: float | None = None, flush_interval_s: float = 1.0
    ) -> None:
        self._start_s = start_s if start_s is None else validation.number("start_s", start_s)
        self._flush_interval_s = validation.number("flush_interval_s", flush_interval_s, 0)
        self._lock = threading.Lock()
        self._own = _opened(target)
        self._flushed_s = float("-inf")
        self._file: TextSink | None = _checked(target) if self._own is None else self._own
        self._put(self._file, header())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Writes what is left. Raises `OSError` where that fails; a second time does nothing."""
        with self._lock:
            file, self._file = self._file, None
            if file is not None and self._own is not None:
                self._own.close()
            elif file is not None:
                file.flush()

    def request_queued(self, record: RequestRecord) -> None:
        """Writes it."""
        self._write(record)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Writes it."""
        self._write(Started(key, choice, slot, now_s))

    def request_ended(self, record: EndRecord) -> None:
        """Writes it."""
        self._write(record)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Writes it."""
        self._write(SlotFreed(key, choice, slot, now_s))

    def preempted(self, key: int, choice: int, num_computed: int, now_s: float) -> None:
        """Writes it."""
        self._write(Preempted(key, choice, num_computed, now_s))

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        """Writes it."""
        self._write(PrefixShared(key, choice, num_tokens, source))

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Writes it."""
        self._write(PrefixInstability(key, num_cached, num_matched, now_s))

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Writes it."""
        self._write(Evicted(num_tokens, source, now_s))

    def engine_restarted(self, now_s: float) -> None:
        """Writes it."""
        self._write(EngineRestarted(now_s))

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        """Writes it."""
        self._write(Paused(key, is_paused, now_s))

    def tick_finished(self, record: TickRecord) -> None:
        """Writes it."""
        self._write(record)

    def _write(self, event: TraceEvent) -> None:
        with self._lock:
            now_s = moment_s(event)
            if self._start_s is None:
                self._start_s = now_s
            if self._file is not None:
                self._put(self._file, to_line(event, self._start_s or 0.0), now_s)

    def _put(self, file: TextSink, line: str, now_s: float | None = None) -> None:
        try:
            file.write(line + "\n")
            if now_s is not None and now_s - self._flushed_s >= self._flush_interval_s:
                self._flushed_s = now_s
                file.flush()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """What could not be written once is not tried again: the error is on its way to the caller."""
        file, self._file = self._file, None
        if file is not None and self._own is not None:
            with contextlib.suppress(OSError):
                self._own.close()


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The events of a trace, as they were recorded.

    A last line that is not whole, as a process leaves it that dies, is left out and told in `is_cut`. Raises `TraceError`
    for whatever else is wrong, with the number of the line, and `OSError` where the file cannot be read.
    """
    lines = Path(path).read_bytes().split(b"\n")
    tail = lines.pop()  # what stands after the last line break; a whole trace ends with one
    if not lines:
        raise TraceError(f"{path} is no trace: it has no first line")
    events = [_parsed(path, number, line) for number, line in enumerate(lines, start=1)]
    return Trace(tuple(event for event in events if event is not None), is_cut=tail != b"")


def _parsed(path: str | os.PathLike[str], number: int, line: bytes) -> TraceEvent | None:
    """The event of a line; None for the first one, which has none."""
    try:
        text = line.decode()
        if number > 1:
            return from_line(text)
        check_header(text)
    except (LineError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}, line {number}: {_why(error)}") from None
    return None


def _why(error: LineError | UnicodeDecodeError) -> str:
    return "it is no UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _opened(target: object) -> TextIO | None:
    """The file of a path; None where it is none."""
    if not isinstance(target, (str, os.PathLike)):
        return None
    return Path(target).open("w", encoding="utf-8", newline="\n")


def _checked(target: Any) -> TextSink:
    if not hasattr(target, "write") or not hasattr(target, "flush"):
        raise InvalidType(f"target must be a path or a text file, not a {type(target).__name__}")
    file: TextSink = target
    return file
