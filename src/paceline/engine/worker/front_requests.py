"""The open requests of a front, apart from who computes them: what is known of each, delivered and finished.

One thread only, so it needs no locks.
"""

from __future__ import annotations

import logging

from paceline.clock import Clock
from paceline.engine.executor import as_paceline_error
from paceline.engine.output_router import OutputRouter
from paceline.engine.pending_results import end_each
from paceline.engine.worker.replay_log import ReplayLog
from paceline.engine.worker.worker_telemetry import RequestsWatch
from paceline.errors import PacelineError
from paceline.scheduling.records import Failed, Released, RequestEvent
from paceline.streaming.chunk import FinishReason

_log = logging.getLogger("paceline.engine")


class FrontRequests:
    """What is known of each open request (the replay log), with its readers and those who watch."""

    def __init__(self, router: OutputRouter, clock: Clock, watch: RequestsWatch) -> None:
        self._router, self._clock, self._watch = router, clock, watch
        self._replay_log = ReplayLog()

    def take(self, event: RequestEvent) -> None:
        """Record an event of a request, and deliver it."""
        if isinstance(event, Failed):
            if self._replay_log.is_unreleased(event.key):
                self._release(event.key)
            else:
                self.end(event.key, FinishReason.ERROR, event.error)
            return
        request = self._replay_log.find(event.key)
        events = self._replay_log.note(event)
        if request is not None or events:
            self._noted(event)
        self._deliver(events, request)

    def end(
        self, key: int, reason: FinishReason, error: PacelineError | None = None, *, keeps_slots: bool = False
    ) -> None:
        """End a request that no engine will end; do nothing if it has ended. keeps_slots: see `ReplayLog.end`."""
        request = self._replay_log.find(key)
        if request is None:
            return
        try:
            events = self._replay_log.end(key, reason, self._clock.now(), error, keeps_slots=keeps_slots)
        except Exception as failure:  # noqa: BLE001 - it fails alone
            _log.exception("a request could not be ended in order; its stream ends as it is")
            events = self._replay_log.drop(key, as_paceline_error(failure))
        self._ended_here(key, events)
        self._deliver(events, request)

    def end_all(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """End every request."""
        end_each(self._replay_log, lambda key: self.end(key, reason, error))

    def _release(self, key: int) -> None:
        """Release the slots of a request that this front has ended."""
        events = self._replay_log.release(key)
        self._ended_here(key, events)
        self._deliver(events, None)

    def _deliver(self, events: list[RequestEvent], request: object) -> None:
        for event in events:
            self._watch.saw(event, request)
            if isinstance(event, Released):
                self._forget(event.key)
        self._router.deliver(events)

    # ---- for subclasses

    def _noted(self, event: RequestEvent) -> None:
        """Look at an event that was recorded, before it is delivered."""

    def _ended_here(self, key: int, events: list[RequestEvent]) -> None:
        """Look at the events of a request that was ended by this front, before they are delivered."""

    def _forget(self, key: int) -> None:
        """Forget a request that has ended."""
