"""An engine held back so that one can follow it, and its figures as if it had not been.

A tiny model takes a millisecond a tick, and eight stories are over before anybody has seen one begin. `Pace` rests after
each tick, on the engine's thread, and tells its metrics of every moment without the rests before it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from dataclasses import dataclass, replace

import msgspec

from paceline.engine.metrics import Metrics
from paceline.engine.metrics_snapshot import MetricsSnapshot
from paceline.engine.monotonic_clock import MonotonicClock
from paceline.scheduling.clock import Clock
from paceline.scheduling.instrument import EndRecord, Instrument, RequestRecord, TickRecord


@dataclass(frozen=True, slots=True)
class _Rest:
    """From one moment to another on the engine's clock; rested_s: in all the rests before it."""

    start_s: float
    end_s: float
    rested_s: float


class Pace(Instrument):
    """Counts what an engine does. ticks_per_s: most ticks a second; 0: no limit, and no rests."""

    def __init__(self, ticks_per_s: float, clock: Clock | None = None) -> None:
        self._least_s = 1 / ticks_per_s if ticks_per_s else 0.0
        self._clock = MonotonicClock() if clock is None else clock
        self._metrics = Metrics()
        self._rests: list[_Rest] = []
        self._hurry = threading.Event()
        self._first_s: float | None = None
        self._last_s = 0.0

    def hurry(self) -> None:
        """No rests from now on; ends the one that is. Any thread."""
        self._hurry.set()

    def snapshot(self) -> MetricsSnapshot:
        """The figures without the rests."""
        return self._metrics.snapshot()

    @property
    def elapsed_s(self) -> float:
        """From the first request's submit to the last one's end, without the rests."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s

    @property
    def rested_s(self) -> float:
        """Of all rests."""
        return self._total_s()

    def request_queued(self, record: RequestRecord) -> None:
        """Tells the metrics."""
        submitted_s = self._without_rests(record.submitted_s)
        self._first_s = submitted_s if self._first_s is None else self._first_s
        self._metrics.request_queued(replace(record, submitted_s=submitted_s))

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.request_started(key, choice, slot, self._without_rests(now_s))

    def request_ended(self, record: EndRecord) -> None:
        """Tells the metrics."""
        self._last_s = self._without_rests(record.now_s)
        self._metrics.request_ended(replace(record, now_s=self._last_s))

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.slot_freed(key, choice, slot, self._without_rests(now_s))

    def preempted(self, key: int, choice: int, num_computed: int, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.preempted(key, choice, num_computed, self._without_rests(now_s))

    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None:
        """Tells the metrics."""
        self._metrics.prefix_shared(key, choice, num_tokens, source)

    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.prefix_instability(key, num_cached, num_matched, self._without_rests(now_s))

    def evicted(self, num_tokens: int, source: str, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.evicted(num_tokens, source, self._without_rests(now_s))

    def engine_restarted(self, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.engine_restarted(self._without_rests(now_s))

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:
        """Tells the metrics."""
        self._metrics.paused(key, is_paused, self._without_rests(now_s))

    def tick_finished(self, record: TickRecord) -> None:
        """Tells the metrics, and rests until the next tick may begin."""
        self._metrics.tick_finished(msgspec.structs.replace(record, start_s=self._without_rests(record.start_s)))
        rest_s = record.start_s + self._least_s - self._clock.now()
        if self._least_s and rest_s > 0 and not self._hurry.is_set():
            start_s = self._clock.now()
            self._hurry.wait(rest_s)
            self._rests.append(_Rest(start_s, self._clock.now(), self._total_s()))

    def _total_s(self) -> float:
        if not self._rests:
            return 0.0
        last = self._rests[-1]
        return last.rested_s + last.end_s - last.start_s

    def _without_rests(self, now_s: float) -> float:
        """A moment on a clock that stands still while the engine rests."""
        index = bisect_right(self._rests, now_s, key=lambda rest: rest.start_s) - 1
        if index < 0:
            return now_s
        rest = self._rests[index]
        return now_s - rest.rested_s - min(now_s, rest.end_s) + rest.start_s
