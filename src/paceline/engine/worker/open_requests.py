"""The open requests of a front: accepted, handed to workers, their events delivered, blamed and finished.

Knows of workers only what is passed in. Supervising thread only, so it needs no locks.
"""

from __future__ import annotations

import logging

from paceline.clock import Clock
from paceline.engine.commands import EndSlow, SetInterval, SetPaused
from paceline.engine.executor import as_paceline_error
from paceline.engine.output_router import OutputRouter
from paceline.engine.pending_results import end_each
from paceline.engine.worker import messages
from paceline.engine.worker.blame import Blame
from paceline.engine.worker.replay_log import ReplayLog
from paceline.engine.worker.worker_process import Death, WorkerProcess
from paceline.engine.worker.worker_telemetry import RequestsWatch
from paceline.errors import EngineDied, PacelineError
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Event
from paceline.scheduling.sequence import Request
from paceline.streaming.chunk import FinishReason

_log = logging.getLogger("paceline.engine")


class OpenRequests:
    """What is known of each (the replay log), and which of them a worker may have (the blame)."""

    def __init__(self, router: OutputRouter, clock: Clock, watch: RequestsWatch) -> None:
        self._router, self._clock, self._watch = router, clock, watch
        self._replay_log, self._blame = ReplayLog(), Blame()
        self._heeds_readers = True  # until the engine is drained: then no request waits for one

    # ---- callers

    def add(self, request: Request | EmbeddingRequest) -> None:
        """Add a new request."""
        self._replay_log.add(request)
        self._blame.add(request.key)
        self._watch.queued(request)

    def set_paused(self, worker: WorkerProcess | None, key: int, *, is_paused: bool) -> None:
        """Pause a request, or continue it."""
        request, is_paused = self._replay_log.find(key), is_paused and self._heeds_readers
        if not isinstance(request, Request) or request.is_paused == is_paused:
            return
        request.is_paused = is_paused
        self._watch.paused(key, is_paused)
        self.pass_on(worker, key, SetPaused(key, is_paused))
        if is_paused:
            self._blame.clear(key)

    def set_interval(self, worker: WorkerProcess | None, key: int, interval: int) -> None:
        """Change how many tokens a chunk of a request needs, here and in every worker that gets the request."""
        request = self._replay_log.find(key)
        if not isinstance(request, Request):
            return
        request.set_interval(interval)
        if request.params.prompt_logprobs is None:  # else the worker's chunks have any size, see `RequestPreparer`
            self.pass_on(worker, key, SetInterval(key, interval))

    def end_slow(self, worker: WorkerProcess | None, key: int) -> None:
        """End a request whose reader is too slow."""
        request = self._replay_log.find(key)
        if isinstance(request, Request):
            request.is_slow = True
        self.pass_on(worker, key, EndSlow(key))

    def drain(self, worker: WorkerProcess | None) -> None:
        """Wait for slow readers no longer."""
        self._heeds_readers = False
        for key in self._replay_log:
            self.set_paused(worker, key, is_paused=False)

    # ---- a worker

    def pass_on(self, worker: WorkerProcess | None, key: int, message: messages.Down) -> None:
        """Send a message about a request to the worker, if it has it."""
        if worker is not None and self._blame.is_handed(key):
            worker.send(message)

    def hand_over(self, worker: WorkerProcess) -> None:
        """Send the requests that a worker may have now."""
        for key in self._blame.take():
            request = self._replay_log.find(key)
            try:
                worker.send(self._replay_log.message(key))
            except Exception as error:  # noqa: BLE001 - a request that cannot be encoded fails alone
                self.end(key, FinishReason.ERROR, as_paceline_error(error))
                continue
            if isinstance(request, Request) and request.is_paused:
                worker.send(SetPaused(key, True))
                self._blame.clear(key)

    def take(self, part: messages.Part) -> None:
        """Record what a worker reports of a request, and deliver it."""
        if isinstance(part, messages.Failed):
            self.end(part.key, FinishReason.ERROR, part.error)
            return
        request = self._replay_log.find(part.key)
        events = self._replay_log.note(part)
        if isinstance(part, messages.Chunk) and part.drawn:
            self._blame.brought(part.key)
        self._deliver(events, request)

    def survive(self, death: Death) -> None:
        """After a worker's death end the request that is at fault, and hold all others for the next worker."""
        seen = None if death.seen.in_pass is None else set(death.seen.in_pass)
        for key in (death.seen.preparing, death.seen.encoding):
            if key is not None:
                seen = (seen or set()) | {key}
        guilty = self._blame.died(is_crash=death.is_crash, seen=seen or None, started=self._replay_log.started())
        if guilty is not None:
            text = f"this request ended the engine's process twice, the second time as the only suspect; {death}"
            self.end(guilty, FinishReason.ERROR, EngineDied(text, death.signal, death.last_words))

    def die_with(self, death: Death) -> None:
        """After a worker's death end all requests that it had, if nothing is to be replayed."""

        def end(key: int) -> None:
            self.end(key, FinishReason.ERROR, EngineDied(str(death), death.signal, death.last_words))

        end_each([key for key in self._replay_log if self._blame.is_handed(key)], end)

    # ---- ends

    def end(self, key: int, reason: FinishReason, error: PacelineError | None = None) -> None:
        """End a request that no worker will end; do nothing if it has ended."""
        request = self._replay_log.find(key)
        if request is None:
            return
        try:
            events = self._replay_log.end(key, reason, self._clock.now(), error)
        except Exception as failure:  # noqa: BLE001 - it fails alone
            _log.exception("a request could not be ended in order; its stream ends as it is")
            events = self._replay_log.drop(key, as_paceline_error(failure))
        self._deliver(events, request)

    def end_all(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """End every request."""
        end_each(self._replay_log, lambda key: self.end(key, reason, error))

    def end_held(self, reason: FinishReason) -> None:
        """End those that no worker has."""
        end_each(self._blame.held, lambda key: self.end(key, reason))

    def end_due(self) -> None:
        """End those requests that no worker has and that are due; see `due_reason`."""
        for key, reason in self._replay_log.due(self._blame.held, self._clock.now()).items():
            self.end(key, reason)

    def next_deadline_s(self) -> float:
        """Return when the first of those that no worker has reaches a deadline; infinite if none has one."""
        return self._replay_log.next_deadline_s(self._blame.held)

    def _deliver(self, events: list[Event], request: object) -> None:
        for event in events:
            self._watch.saw(event, request)
            if self._replay_log.find(event.key) is None:
                self._blame.ended(event.key)
        self._router.deliver(events)
