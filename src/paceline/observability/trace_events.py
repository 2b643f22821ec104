"""The events of a trace, one record for each hook of an instrument, and their replay. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from paceline.observability.instruments import Instrument
from paceline.scheduling.telemetry import EndRecord, RequestRecord, TickRecord


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
