"""Tells instruments in the front what the front sees: requests from their submit to their end, and restarts."""

from __future__ import annotations

from paceline.engine.isolation.ledger import usage_of, worst_reason
from paceline.errors import PacelineError
from paceline.scheduling.clock import Clock
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Embedded, Ended, Event, Started
from paceline.scheduling.instrument import EndRecord, Instrument
from paceline.scheduling.sequence import Request
from paceline.streaming.chunk import FinishReason


class RequestsWatch:
    """Calls the hooks of one instrument that are about whole requests. Supervising thread.

    Slots are the worker's: a request is said to have slot 0 from its start to its end, whatever dies in between.
    """

    def __init__(self, instrument: Instrument, clock: Clock) -> None:
        self._instrument, self._clock = instrument, clock

    def queued(self, request: Request | EmbeddingRequest) -> None:
        """It was accepted."""
        self._instrument.request_queued(request.record())

    def paused(self, key: int, is_paused: bool) -> None:
        """Its reader is too slow, or has caught up."""
        self._instrument.paused(key, is_paused, self._clock.now())

    def restarted(self) -> None:
        """Another worker took over."""
        self._instrument.engine_restarted(self._clock.now())

    def saw(self, event: Event, request: object) -> None:
        """An event of this request is about to be delivered."""
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
