"""What a trace consists of: an event for each hook. Records, and their way back into an instrument. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from paceline.scheduling.instrument import EndRecord, Instrument, RequestRecord, TickRecord


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence got a slot."""

    key: int
    choice: int
    slot: int
    now_s: float


@dataclass(frozen=True, slots=True)
class SlotFreed:
    """A sequence gave its slot back."""

    key: int
    choice: int
    slot: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence lost its slot, with the tokens that it had computed, and waits to go on."""

    key: int
    choice: int
    num_computed: int
    now_s: float


@dataclass(frozen=True, slots=True)
class PrefixShared:
    """Tokens of a prompt were taken from memory. It happened between the events around it."""

    key: int
    choice: int
    num_tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class PrefixInstability:
    """Of a long cached prompt only the beginning matched."""

    key: int
    num_cached: int
    num_matched: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """Tokens of an idle prefix made way: on the device, or in host memory."""

    num_tokens: int
    source: str
    now_s: float


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """The engine's process died and another one took over."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Paused:
    """A slow reader made its request pause, or go on."""

    key: int
    is_paused: bool
    now_s: float


TraceEvent = (
    RequestRecord
    | Started
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
    "request_started": Started,
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
"""Which event a hook becomes. A hook takes either this record or its fields, in their order."""

_HOOKS: Final = {kind: name for name, kind in EVENTS.items()}
_TAKES_RECORD: Final = (RequestRecord, EndRecord, TickRecord)


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of an engine in their order; seconds since the trace began. is_cut: whether its last line was not whole."""

    events: tuple[TraceEvent, ...]
    is_cut: bool = False

    def replay(self, instrument: Instrument) -> None:
        """Calls the instrument's hooks as the engine did."""
        for event in self.events:
            hook: Callable[..., None] = getattr(instrument, hook_name(event))
            if isinstance(event, _TAKES_RECORD):
                hook(event)
            else:
                hook(*(getattr(event, field.name) for field in fields(event)))


def hook_name(event: TraceEvent) -> str:
    """The hook that the event came from."""
    return _HOOKS[type(event)]


def moment_s(event: TraceEvent) -> float | None:
    """When it happened; None where it does not say. A tick: when it began."""
    match event:
        case RequestRecord():
            return event.submitted_s
        case TickRecord():
            return event.start_s
        case PrefixShared():
            return None
        case _:
            return event.now_s
