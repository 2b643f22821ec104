"""The events of a trace, one record for each hook of an instrument: their replay, and their lines of JSON. Pure.

    {"trace": "paceline", "version": 2, "row": ["slot", "key", ...]}                      the first line
    {"event": "tick_finished", "index": 0, "start_s": 0.1, ..., "rows": [[0, 7, ...]]}    any other

A line has the fields of its event by name; a row of a tick is a list, in the order that the first line gives.
Seconds are rounded to 1e-6; times count from the beginning of the trace.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Final, Literal, NoReturn, get_args, get_origin, get_type_hints

from paceline.observability.instruments import Instrument
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

    def request_queued(self, record: RequestRecord) -> None:
        self.take(record)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self.take(RequestStarted(key, choice, slot, now_s))

    def request_ended(self, record: EndRecord) -> None:
        self.take(record)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        self.take(SlotFreed(key, choice, slot, now_s))

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        self.take(Preempted(key, choice, num_computed_tokens, now_s))

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        self.take(PrefixShared(key, choice, num_tokens, source))

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        self.take(PrefixInstability(key, num_cached, num_matched, now_s))

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        self.take(Evicted(num_tokens, source, now_s))

    def engine_restarted(self, now_s: float) -> None:
        self.take(EngineRestarted(now_s))

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        self.take(Paused(key, is_paused, now_s))

    def tick_finished(self, record: TickRecord) -> None:
        self.take(record)


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
    """Return the value as JSON types."""
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
    """Return the value as the field's type, which is one of those that occur in events."""
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
    """Return an int, a bool or a str."""
    if type(value) is not kind or (kind is int and not _lowest(name) <= value < _END):
        _refuse(name, value)
    return value


def _lowest(name: str) -> int:
    return -_END if name in _SIGNED else 0


def _refuse(name: str, value: object) -> NoReturn:
    raise LineError(f"invalid {name}: {value!r:.40}")
