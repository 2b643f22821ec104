"""Tells instruments in the front what the front sees: requests from their submit to their end, and restarts."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.engine.worker.front_trace import FrontTrace
from paceline.engine.worker.replay_log import usage_of, worst_reason
from paceline.errors import PacelineError
from paceline.observability.instruments import Instrument
from paceline.scheduling.clock import Clock
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Embedded, Ended, Event, Started
from paceline.scheduling.sequence import Request
from paceline.scheduling.telemetry import EndRecord
from paceline.streaming.chunk import FinishReason


class RequestsWatch:
    """Calls the hooks of one instrument that are about whole requests, and hands lines to a trace. Supervising thread.

    Slots are the worker's: a request is said to have slot 0 from its start to its end, whatever dies in between.
    """

    def __init__(self, instrument: Instrument, clock: Clock, trace: FrontTrace | None = None) -> None:
        self._instrument, self._clock, self._trace = instrument, clock, trace

    def queued(self, request: Request | EmbeddingRequest) -> None:
        """Report that a request was accepted."""
        self._instrument.request_queued(request.record())

    def paused(self, key: int, is_paused: bool) -> None:
        """Its reader is too slow, or has caught up."""
        self._instrument.paused(key, is_paused, self._clock.now())

    def restarted(self) -> None:
        """Another worker took over."""
        self._instrument.engine_restarted(self._clock.now())

    def traced(self, lines: Iterable[str]) -> None:
        """Write what a worker sent for the trace."""
        if self._trace is not None:
            self._trace.write_lines(lines, self._clock.now())

    def close(self) -> None:
        """End the trace; idempotent."""
        if self._trace is not None:
            self._trace.close()

    def saw(self, event: Event, request: object) -> None:
        """Report an event of a request that is about to be delivered."""
        match event, request:
            case Started(key), Request():
                self._instrument.request_started(key, 0, 0, request.started_s or self._clock.now())
            case Ended(key, chunk), Request():
                self._ended(request, worst_reason(request), chunk.error)
                self._instrument.slot_freed(key, 0, 0, self._clock.now())
            case Embedded(key, _, error), EmbeddingRequest():
                self._ended(request, _reason(error), error)

    def _ended(self, request: Request | EmbeddingRequest, reason: FinishReason, error: PacelineError | None) -> None:
        now = self._clock.now()
        code = None if error is None else error.code
        usage = usage_of(request, now) if isinstance(request, Request) else request.usage(now)
        self._instrument.request_ended(
            EndRecord(key=request.key, reason=reason, usage=usage, now_s=now, error_code=code)
        )


_REASONS = {
    "cancelled": FinishReason.CANCELLED,
    "deadline_exceeded": FinishReason.DEADLINE,
    "engine_stopped": FinishReason.SHUTDOWN,
}


def _reason(error: PacelineError | None) -> FinishReason:
    return FinishReason.END if error is None else _REASONS.get(error.code, FinishReason.ERROR)
