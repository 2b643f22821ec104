"""Instruments of the demo: ticks slow enough for the eye with figures that leave the rests out, and a trace that may fail.

Hooks run on the engine's thread, the other methods on any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, replace

import msgspec

from paceline.clock import Clock, MonotonicClock
from paceline.observability.metrics import Metrics
from paceline.observability.trace_file import EventInstrument, PrefixShared, TraceEvent, TraceRecorder, call_hook
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord


@dataclass(frozen=True, slots=True)
class _Rest:
    """A pause between two ticks, on the engine's clock. rested_s: the length of all earlier pauses."""

    start_s: float
    end_s: float
    rested_s: float


class Pacer(EventInstrument):
    """Slow an engine down for the eye, and measure it as if it had not rested.

    A tiny model takes a millisecond a tick. This instrument rests after each tick, on the engine's thread, and passes every
    time on to its metrics without the earlier rests.

    Args:
        ticks_per_s: Most ticks a second; 0: no limit, and no rests.
        clock: The engine's clock.
    """

    def __init__(self, ticks_per_s: float, clock: Clock | None = None) -> None:
        self.metrics = Metrics()
        self._least_s = 1 / ticks_per_s if ticks_per_s else 0.0
        self._clock = MonotonicClock() if clock is None else clock
        self._rests: list[_Rest] = []
        self._hurry = threading.Event()
        self._first_s: float | None = None
        self._last_s = 0.0

    def hurry(self) -> None:
        """Take no more rests, and end the present one. Any thread."""
        self._hurry.set()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first submit to the last end, without the rests."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s

    @property
    def rested_s(self) -> float:
        """Seconds of all rests."""
        return 0.0 if not self._rests else self._rests[-1].rested_s + self._rests[-1].end_s - self._rests[-1].start_s

    def take(self, event: TraceEvent) -> None:
        """Pass an event on to the metrics, without the rests; after a tick, rest until the next one may begin."""
        shifted = self._shifted(event)
        call_hook(self.metrics, shifted)
        if isinstance(shifted, RequestRecord) and self._first_s is None:
            self._first_s = shifted.submitted_s
        elif isinstance(shifted, EndRecord):
            self._last_s = shifted.now_s
        if isinstance(event, TickRecord):
            start_s, until_s = self._clock.now(), event.start_s + self._least_s
            if self._least_s and start_s < until_s and not self._hurry.is_set():
                self._hurry.wait(until_s - start_s)
                self._rests.append(_Rest(start_s, self._clock.now(), self.rested_s))

    def _shifted(self, event: TraceEvent) -> TraceEvent:
        match event:
            case RequestRecord():
                return replace(event, submitted_s=self._without_rests(event.submitted_s))
            case TickRecord():
                return msgspec.structs.replace(event, start_s=self._without_rests(event.start_s))
            case PrefixShared():
                return event
            case _:
                return replace(event, now_s=self._without_rests(event.now_s))

    def _without_rests(self, now_s: float) -> float:
        """Convert a time to a clock that stands still while the engine rests."""
        index = bisect_right(self._rests, now_s, key=lambda rest: rest.start_s) - 1
        if index < 0:
            return now_s
        rest = self._rests[index]
        return now_s - rest.rested_s - min(now_s, rest.end_s) + rest.start_s


class LenientRecorder(TraceRecorder):
    """A recorder whose failed write ends the trace and not the demo. error: why the trace is incomplete."""

    error: OSError | None = None

    def take(self, event: TraceEvent) -> None:
        """Write an event, unless a write has failed."""
        try:
            super().take(event)
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Flush and close, and keep an error."""
        try:
            super().close()
        except OSError as error:
            self.error = self.error or error
