"""The open requests of a front with a worker: handed over, their events delivered, blamed for crashes, and finished.

Supervising thread only, so it needs no locks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.clock import Clock
from paceline.engine.backend import as_paceline_error
from paceline.engine.core import Cancel, EndSlow, SetInterval, SetPaused
from paceline.engine.output_router import OutputRouter, end_each
from paceline.engine.worker import messages
from paceline.engine.worker.replay_log import FrontRequests
from paceline.engine.worker.worker_process import Death, WorkerProcess
from paceline.engine.worker.worker_telemetry import RequestsWatch
from paceline.errors import EngineDied, PacelineError
from paceline.scheduling.records import Delta, EmbeddingRequest, RequestEvent, due_reason
from paceline.sequence import GenerationState, Progress, Request, next_deadline_s
from paceline.streaming.chunk import FinishReason

PROBATION_TICKS = 2


class Blame:
    """Decides on the requests that the worker may have now, and on the request at fault when the worker dies."""

    def __init__(self) -> None:
        self._suspects: deque[int] = deque()
        self._free: deque[int] = deque()  # may be handed over whatever happens
        self._waiting: deque[int] = deque()  # may be handed over when no request is suspected
        self._handed: dict[int, None] = {}
        self._on_probation: int | None = None
        self._num_good = 0
        self._spared: set[int] = set()

    def add(self, key: int) -> None:
        """Add a new request."""
        self._waiting.append(key)

    def take(self) -> list[int]:
        """Return the requests to be handed to the worker now, in order."""
        taken = []
        if self._on_probation is None and self._suspects:
            self._on_probation, self._num_good = self._suspects.popleft(), 0
            taken.append(self._on_probation)
        taken += self._free
        self._free.clear()
        if self._on_probation is None:
            taken += self._waiting
            self._waiting.clear()
        self._handed.update(dict.fromkeys(taken))
        return taken

    def brought(self, key: int) -> None:
        """Note that a request has brought tokens."""
        if key == self._on_probation:
            self._num_good += 1
            if self._num_good >= PROBATION_TICKS:
                self._spared.discard(key)
                self.clear(key)

    def clear(self, key: int) -> None:
        """Suspect a request no longer, or, if it is paused, not for now."""
        if key == self._on_probation:
            self._on_probation = None

    def ended(self, key: int) -> None:
        """Forget a request that has ended."""
        self.clear(key)
        self._spared.discard(key)
        self._handed.pop(key, None)
        for queue in (self._suspects, self._free, self._waiting):
            if key in queue:
                queue.remove(key)

    def died(
        self, *, is_crash: bool, seen: Collection[int] | None, started: Collection[int], lost_server: bool = False
    ) -> int | None:
        """Hold all requests of the dead worker, and return the request at fault; None if it is not known.

        Args:
            is_crash: Whether the worker ended itself.
            seen: The requests that the worker computed or prepared; None if that is not known.
            started: The requests that ever ran.
            lost_server: Whether the worker ended itself because an RPC server was lost.
        """
        handed, on_probation = list(self._handed), self._on_probation
        self._handed.clear()
        self._on_probation = None
        if not is_crash:
            self._hold(handed, [] if on_probation is None else [on_probation], started)
            return None
        if on_probation is not None and seen is not None and on_probation in seen:
            if lost_server and on_probation not in self._spared:
                self._spared.add(on_probation)
                self._hold(handed, [on_probation], started)
                return None
            handed.remove(on_probation)
            self._hold(handed, [], started)
            return on_probation
        accused = [key for key in handed if (key in started if seen is None else key in seen)]
        if on_probation is not None and on_probation not in accused:
            accused.insert(0, on_probation)
        self._hold(handed, accused or handed, started)
        return None

    def _hold(self, handed: Iterable[int], accused: Collection[int], started: Collection[int]) -> None:
        self._suspects.extendleft(reversed([key for key in handed if key in accused]))
        others = [key for key in handed if key not in accused]
        self._free.extend(key for key in others if key in started)
        self._waiting.extendleft(reversed([key for key in others if key not in started]))

    @property
    def held(self) -> tuple[int, ...]:
        """Requests that are with the front."""
        return (*self._suspects, *self._free, *self._waiting)

    @property
    def handed(self) -> tuple[int, ...]:
        """Requests that are with the worker."""
        return tuple(self._handed)

    def is_handed(self, key: int) -> bool:
        """Whether a request is with the worker."""
        return key in self._handed


GRACE_S: Final = 1.0
"""Seconds that a worker has to end a request that was cancelled, or is past a deadline; then it ends without the worker."""

_LOOK_AGAIN_S = 0.25


TakeEvent = Callable[[RequestEvent], None]


@dataclass(frozen=True, slots=True)
class Relay:
    """A request that another front holds, and whose events go there as they come.

        front of a cluster ──EngineRequest──> this front ──> worker
        front of a cluster <─RequestEvents─── this front <── worker

    It is in the replay log and the blame as any other, so that a crash of the worker is over before the other front hears of it.

    Attributes:
        take: Called on the supervising thread with each event.
        states: Of its choices, from before.
    """

    take: TakeEvent
    states: Sequence[GenerationState | None] | None = None


class OpenRequests(FrontRequests):
    """The open requests of a front (the replay log), and the requests that a worker may have now (the blame)."""

    def __init__(self, router: OutputRouter, clock: Clock, watch: RequestsWatch) -> None:
        super().__init__(router, clock, watch)
        self.relays: dict[int, Relay] = {}  # put there by callers, before the request is submitted
        self._blame = Blame()
        self._waits_for_readers = True  # until the engine is drained
        self._overdue_s: dict[int, float] = {}  # cancelled requests: when they end without the worker
        self._look_s = math.inf  # no request that a worker has is overdue before

    # ---- callers

    def add(self, request: Request | EmbeddingRequest) -> None:
        """Add a new request."""
        relay = self.relays.get(request.key)
        self._replay_log.add(request, None if relay is None else relay.states)
        self._blame.add(request.key)
        self._watch.queued(request)

    def cancel(self, worker: WorkerProcess | None, command: Cancel) -> None:
        """Cancel a request. A request without a worker ends in the next `end_due`."""
        request = self._replay_log.find(command.key)
        if request is not None:
            request.cancelled = True
            self._expect_end(command.key)
        self.pass_on(worker, command.key, command)

    def set_paused(self, worker: WorkerProcess | None, key: int, *, is_paused: bool) -> None:
        """Pause a request, or continue it."""
        request, is_paused = self._replay_log.find(key), is_paused and self._waits_for_readers
        if not isinstance(request, Request) or request.is_paused == is_paused:
            return
        request.is_paused = is_paused
        self._watch.paused(key, is_paused)
        self.pass_on(worker, key, SetPaused(key, is_paused))
        if is_paused:
            self._blame.clear(key)

    def set_interval(self, worker: WorkerProcess | None, key: int, interval: int) -> None:
        """Change the number of tokens that a chunk of a request needs, here and in every worker that gets the request."""
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
            self._expect_end(key)
        self.pass_on(worker, key, EndSlow(key))

    def _expect_end(self, key: int) -> None:
        """Have the worker end a request within `GRACE_S`, if it has the request."""
        self._look_s = min(self._look_s, self._overdue_s.setdefault(key, self._clock.now() + GRACE_S))

    def drain(self, worker: WorkerProcess | None) -> None:
        """Stop waiting for slow readers."""
        self._waits_for_readers = False
        for key in self._replay_log:
            self.set_paused(worker, key, is_paused=False)

    # ---- a worker

    def pass_on(self, worker: WorkerProcess | None, key: int, message: messages.Down) -> None:
        """Send a message about a request to the worker, if the worker has the request."""
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
            if request is not None:
                self._look_s = min(self._look_s, request.deadline_s() + GRACE_S)

    def survive(self, death: Death) -> None:
        """End the request at fault after a worker's death, and hold all others for the next worker."""
        ended = self._release_ended()
        seen = None if death.seen.in_pass is None else set(death.seen.in_pass)
        for key in (death.seen.preparing, death.seen.encoding):
            if key is not None:
                seen = (seen or set()) | {key}
        lost = death.lost_server
        # If the worker died while it answered a question, no request is blamed: the question is asked once more only.
        is_crash = death.is_crash and not death.seen.is_asked and not (seen and seen <= ended)
        guilty = self._blame.died(
            is_crash=is_crash, seen=seen or None, started=self._replay_log.started(), lost_server=lost is not None
        )
        if guilty is None:
            return
        fault = (
            "ended the engine's process twice, the second time" if lost is None else "lost RPC servers, the last times"
        )
        error = EngineDied(f"this request {fault} as the only suspect; {death}", death.signal, death.last_words)
        error.__cause__ = lost
        self.end(guilty, FinishReason.ERROR, error)

    def die_with(self, death: Death) -> None:
        """End all requests of a dead worker, since nothing is to be replayed."""
        self._release_ended()

        def end(key: int) -> None:
            self.end(key, FinishReason.ERROR, EngineDied(str(death), death.signal, death.last_words))

        end_each([key for key in self._replay_log if self._blame.is_handed(key)], end)

    def _release_ended(self) -> frozenset[int]:
        """Release the requests that ended here before their worker died, and return them."""
        ended = frozenset(self._replay_log.unreleased)
        for key in ended:
            self._release(key)
        return ended

    # ---- ends

    def end_held(self, reason: FinishReason) -> None:
        """End the requests that no worker has."""
        end_each(self._blame.held, lambda key: self.end(key, reason))

    def end_due(self) -> None:
        """End the requests that no worker has and that are due; see `due_reason`."""
        for key, reason in self._replay_log.due(self._blame.held, self._clock.now()).items():
            self.end(key, reason)

    def end_overdue(self, ticking_since_s: float | None) -> None:
        """End the requests that the worker should have ended `GRACE_S` ago.

        ticking_since_s: when the worker's current tick began; None if no tick runs, or the worker is silent.
        """
        now_s = self._clock.now()
        if now_s < self._look_s:
            return
        self._look_s = math.inf
        for key in self._blame.handed:
            request = self._replay_log.find(key)
            if request is None:
                continue
            overdue_s = self._overdue_s.get(key, request.deadline_s() + GRACE_S)
            if now_s < overdue_s:
                self._look_s = min(self._look_s, overdue_s)
            elif self._may_have_started(request, ticking_since_s):
                self._look_s = min(self._look_s, now_s + _LOOK_AGAIN_S)
            elif (reason := due_reason(request, now_s)) is not None:
                self.end(key, reason, keeps_slots=True)

    def _may_have_started(self, request: Request | EmbeddingRequest, ticking_since_s: float | None) -> bool:
        """Return whether a request may have started before its queue timeout: a start is reported after the tick."""
        if request.cancelled or request.progress.started_s is not None or ticking_since_s is None:
            return False
        now_s = self._clock.now()
        started_deadline_s = next_deadline_s(request.options, request.submitted_s, Progress(started_s=now_s))
        return ticking_since_s < request.deadline_s() and now_s < started_deadline_s + GRACE_S

    def next_deadline_s(self) -> float:
        """Return when the next request has to end without a worker; infinite if no request has a deadline."""
        return min(self._look_s, self._replay_log.next_deadline_s(self._blame.held))

    # ---- see `FrontRequests`

    def _noted(self, event: RequestEvent) -> None:
        if isinstance(event, Delta) and event.drawn:
            self._blame.brought(event.key)
        relay = self.relays.get(event.key)
        if relay is not None:
            relay.take(event)

    def _ended_here(self, key: int, events: list[RequestEvent]) -> None:
        relay = self.relays.get(key)
        if relay is not None:
            for event in events:
                relay.take(event)

    def end(
        self, key: int, reason: FinishReason, error: PacelineError | None = None, *, keeps_slots: bool = False
    ) -> None:
        """See `FrontRequests`."""
        super().end(key, reason, error, keeps_slots=keeps_slots)
        if keeps_slots:
            self._forget_state(key)

    def _forget(self, key: int) -> None:
        self._forget_state(key)
        self.relays.pop(key, None)

    def _forget_state(self, key: int) -> None:
        self._blame.ended(key)
        self._overdue_s.pop(key, None)
