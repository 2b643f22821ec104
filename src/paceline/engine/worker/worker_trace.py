"""A worker's part of its engine's trace: events as lines, sent to the front after each tick. Engine's thread."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine.runner import EventSink
from paceline.errors import PacelineError
from paceline.observability.instruments import Instrument
from paceline.observability.trace_events import (
    Evicted,
    Preempted,
    PrefixInstability,
    PrefixShared,
    RequestStarted,
    SlotFreed,
    TraceEvent,
    to_line,
)
from paceline.scheduling.events import Event
from paceline.scheduling.telemetry import TickRecord


class WorkerTrace(Instrument):
    """Keeps the lines of what happened since the last `flush`. zero_s: the clock at the beginning of the trace."""

    def __init__(self, zero_s: float, send: Callable[[list[str]], None]) -> None:
        self._zero_s, self._send = zero_s, send
        self._lines: list[str] = []

    def flush(self) -> None:
        """Send them."""
        if self._lines:
            self._send(self._lines)
            self._lines = []

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Keep it."""
        self._keep(RequestStarted(key, choice, slot, now_s))

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Keep it."""
        self._keep(SlotFreed(key, choice, slot, now_s))

    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None:
        """Keep it."""
        self._keep(Preempted(key, choice, num_computed_tokens, now_s))

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        """Keep it."""
        self._keep(PrefixShared(key, choice, num_tokens, source))

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Keep it."""
        self._keep(PrefixInstability(key, num_cached, num_matched, now_s))

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Keep it."""
        self._keep(Evicted(num_tokens, source, now_s))

    def tick_finished(self, record: TickRecord) -> None:
        """Keep it."""
        self._keep(record)

    def _keep(self, event: TraceEvent) -> None:
        self._lines.append(to_line(event, self._zero_s))


class TracingSink:
    """A sink that sends a tick's lines before its events, so that the front has them when a request has ended."""

    def __init__(self, sink: EventSink, trace: WorkerTrace) -> None:
        self._sink, self._trace = sink, trace

    def deliver(self, events: list[Event]) -> None:
        """See `EventSink`."""
        self._trace.flush()
        self._sink.deliver(events)

    def end_all(self, error: PacelineError) -> None:
        """See `EventSink`."""
        try:
            self._trace.flush()
        finally:
            self._sink.end_all(error)

    def close(self) -> None:
        """See `EventSink`."""
        self._sink.close()
