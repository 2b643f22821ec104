"""Traces: one record for each hook of an instrument, its line of JSON, and files of these lines.

    {"trace": "paceline", "version": 2, "row": ["slot", "key", ...]}                      the first line
    {"event": "tick_finished", "index": 0, "start_s": 0.1, ..., "rows": [[0, 7, ...]]}    any other

A line has the fields of its event by name; a row of a tick is a list, in the order that the first line gives.
Seconds are rounded to 1e-6; times count from the beginning of the trace. The recorder's hooks write on the engine's thread;
any thread may close it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, Protocol, Self, TextIO, get_args, get_origin, get_type_hints

from paceline import validation
from paceline.errors import InvalidType, TraceError
from paceline.observability.metrics import Instrument
from paceline.scheduling.records import EndRecord, RequestRecord, RowRecord, TickRecord
from paceline.streaming.chunk import ENGINE_REASONS, FinishReason, Usage


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """A sequence got a slot."""

    key: int
    choice: int
    slot: int
    now_s: float


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """A sequence left its slot."""

    key: int
    choice: int
    slot: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence with num_computed computed tokens lost its slot and waits to continue."""

    key: int
    choice: int
    num_computed: int
    now_s: float


@dataclass(frozen=True, slots=True)
class PrefixShared:
    """Tokens of a prompt were reused from a prefix match, at some time between the events around this one."""

    key: int
    choice: int
    num_tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class PrefixInstability:
    """Only the beginning of a long cached prompt matched."""

    key: int
    num_cached: int
    num_matched: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """Tokens of a cached prefix were evicted from the device or from host memory."""

    num_tokens: int
    source: str
    now_s: float


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """The worker process died and a new one took over."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Paused:
    """A slow reader paused its request, or the request continues."""

    key: int
    is_paused: bool
    now_s: float


TraceEvent = (
    RequestRecord
    | RequestStarted
    | EndRecord
    | SlotFreed
    | Preempted
    | PrefixShared
    | PrefixInstability
    | Evicted
    | EngineRestarted
    | Paused
    | TickRecord
)

EVENTS: Final[dict[str, type[TraceEvent]]] = {
    "request_queued": RequestRecord,
    "request_started": RequestStarted,
    "request_ended": EndRecord,
    "slot_freed": SlotFreed,
    "preempted": Preempted,
    "prefix_shared": PrefixShared,
    "prefix_instability": PrefixInstability,
    "evicted": Evicted,
    "engine_restarted": EngineRestarted,
    "paused": Paused,
    "tick_finished": TickRecord,
}
"""The event of each hook. A hook takes either this record or its fields, in their order."""

_HOOKS: Final = {kind: name for name, kind in EVENTS.items()}
_TAKES_RECORD: Final = (RequestRecord, EndRecord, TickRecord)


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of an engine in order; times are seconds since its beginning. is_truncated: the last line was incomplete."""

    events: tuple[TraceEvent, ...]
    is_truncated: bool = False

    def replay(self, instrument: Instrument) -> None:
        """Call the instrument's hooks as the engine did."""
        for event in self.events:
            call_hook(instrument, event)


def call_hook(instrument: Instrument, event: TraceEvent) -> None:
    """Call the hook of an event."""
    hook: Callable[..., None] = getattr(instrument, hook_name(event))
    if isinstance(event, _TAKES_RECORD):
        hook(event)
    else:
        hook(*(getattr(event, field.name) for field in fields(event)))


def hook_name(event: TraceEvent) -> str:
    """Return the name of the hook that makes this event."""
    return _HOOKS[type(event)]


def event_time(event: TraceEvent) -> float | None:
    """Return the time of an event (of a tick: its beginning); None for one without a time."""
    match event:
        case RequestRecord():
            return event.submitted_s
        case TickRecord():
            return event.start_s
        case PrefixShared():
            return None
        case _:
            return event.now_s


class EventInstrument(Instrument, ABC):
    """An instrument with one method for all hooks, which takes their events."""

    @abstractmethod
    def take(self, event: TraceEvent) -> None:
        """Take the event of a hook that was called."""


def _taking(kind: Any) -> Callable[..., None]:
    if kind in _TAKES_RECORD:
        return lambda self, record: self.take(record)
    return lambda self, *values: self.take(kind(*values))


for _hook, _kind in EVENTS.items():
    setattr(EventInstrument, _hook, _taking(_kind))


VERSION: Final = 2

_DIGITS: Final = 6
_MOMENTS: Final = frozenset({"submitted_s", "now_s", "start_s"})  # times; other seconds are durations
_SIGNED: Final = _MOMENTS | {"priority"}
_HINTS: Final[dict[type, dict[str, Any]]] = {
    kind: get_type_hints(kind) for kind in (*EVENTS.values(), RowRecord, Usage)
}
_END: Final = 2**53  # exclusive bound of counts and times; a float holds every int below it
_ROW: Final = RowRecord.__struct_fields__
_row_values: Final = attrgetter(*_ROW)
_ROW_TYPES: Final = [_HINTS[RowRecord][name] for name in _ROW]

_encode: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


class LineError(ValueError):
    """A line that cannot be read as a trace's; the message has the reason."""


def header() -> str:
    """Return the first line of a trace. No line here has a line break."""
    return _encode({"trace": "paceline", "version": VERSION, "row": _ROW})


def check_header(line: str) -> None:
    """Raise `LineError` unless this is the first line of a trace of a version that can be read here."""
    found = _object(line)
    if found.get("trace") != "paceline":
        raise LineError("this is not the first line of a trace")
    if found.get("version") != VERSION or found.get("row") != list(_ROW):
        raise LineError(f"its version is {found.get('version')!r:.20}; this paceline reads version {VERSION}")


def to_line(event: TraceEvent, zero_s: float) -> str:
    """Return the event as a line. zero_s: the engine's clock at the beginning of the trace."""
    found: dict[str, Any] = {"event": hook_name(event)}
    for name in _HINTS[type(event)]:
        value = getattr(event, name)
        found[name] = _plain(value - zero_s if name in _MOMENTS else value)
    return _encode(found)


def from_line(line: str) -> TraceEvent:
    """Return the event of a line; raises `LineError`."""
    found = _object(line)
    name = found.pop("event", None)
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise LineError(f"unknown event {name!r:.40}")
    return kind(**_checked(kind, found))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, tuple):
        return list(map(_row_values, value))
    if isinstance(value, Usage):
        return {name: _plain(getattr(value, name)) for name in _HINTS[Usage]}
    return value


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise LineError("not valid JSON") from None
    if not isinstance(found, dict):
        raise LineError("not a JSON object")
    return found


def _checked(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    hints = _HINTS[kind]
    if found.keys() != hints.keys():
        names = ", ".join(sorted(found.keys() ^ hints.keys()))
        raise LineError(f"{kind.__name__} has missing or unknown fields: {names:.80}")
    return {name: _value(name, hint, found[name]) for name, hint in hints.items()}


def _value(name: str, hint: Any, value: Any) -> Any:
    if get_origin(hint) is UnionType:
        inner = next(each for each in get_args(hint) if each is not NoneType)
        return None if value is None else _value(name, inner, value)
    if get_origin(hint) is Literal:
        return value if isinstance(value, str) and value in get_args(hint) else _refuse(name, value)
    if get_origin(hint) is tuple:
        return tuple(_row(row) for row in value) if isinstance(value, list) else _refuse(name, value)
    if hint is Usage:
        return Usage(**_checked(Usage, value)) if isinstance(value, dict) else _refuse(name, value)
    if hint is FinishReason:
        return FinishReason(value) if value in ENGINE_REASONS else _refuse(name, value)
    return _number(name, value) if hint is float else _simple(name, hint, value)


def _row(values: Any) -> RowRecord:
    if (
        not isinstance(values, list)
        or list(map(type, values)) != _ROW_TYPES
        or not 0 <= min(values) <= max(values) < _END
    ):
        _refuse("rows", values)
    return RowRecord(**dict(zip(_ROW, values, strict=True)))


def _number(name: str, value: Any) -> float:
    """Return seconds, from a float or an int. NaN compares false and is refused as infinities are."""
    if type(value) not in (int, float) or not _lowest(name) <= value < _END:
        _refuse(name, value)
    return float(value)


def _simple(name: str, kind: Any, value: Any) -> Any:
    if type(value) is not kind or (kind is int and not _lowest(name) <= value < _END):
        _refuse(name, value)
    return value


def _lowest(name: str) -> int:
    return -_END if name in _SIGNED else 0


def _refuse(name: str, value: object) -> NoReturn:
    raise LineError(f"invalid {name}: {value!r:.40}")


_log = logging.getLogger("paceline.engine")
_MAX_LINE_BYTES = 16 << 20  # of a trace: the last line of a process that died may end anywhere


class TextSink(Protocol):
    """An open text file, or the two methods of one that a recorder needs."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class TraceRecorder(EventInstrument):
    """Write the events of an engine to a file. Close it after the engine, or use it as a context manager.

    A hook that cannot write raises `OSError`, and nothing is written afterwards: the engine removes the recorder and
    continues. Hooks after `close` do nothing.

    Args:
        target: a path, whose file is replaced, or an open text file, which stays open and belongs to the caller.
        start_s: the engine's clock at the beginning of the trace; None: the time of the first event.
        flush_interval_s: an event that comes this many seconds after the last flush flushes the file; 0: every event does.
            A process that dies loses at most the events since then.
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
        self._file: TextSink | None = _checked_sink(target) if self._own is None else self._own
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
    if not isinstance(target, (str, os.PathLike)):
        return None
    return Path(target).open("w", encoding="utf-8", newline="\n")


def _checked_sink(target: Any) -> TextSink:
    if not hasattr(target, "write") or not hasattr(target, "flush"):
        raise InvalidType(f"target must be a path or a text file, not a {type(target).__name__}")
    file: TextSink = target
    return file
