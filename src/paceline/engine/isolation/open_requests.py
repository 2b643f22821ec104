"""The requests of a front that have not ended: taken in, handed to workers, told to their readers, blamed and ended.

Knows of workers only what it is told. Supervising thread only, so it needs no locks.
"""

from __future__ import annotations

from paceline.engine.delivery import Delivery
from paceline.engine.executor import as_paceline_error
from paceline.engine.isolation import messages
from paceline.engine.isolation.blame import Blame
from paceline.engine.isolation.child import Child, Death
from paceline.engine.isolation.ledger import Ledger
from paceline.engine.isolation.requests_watch import RequestsWatch
from paceline.errors import EngineDied, PacelineError
from paceline.scheduling.clock import Clock
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.events import Event
from paceline.scheduling.sequence import Request
from paceline.streaming.chunk import FinishReason


class OpenRequests:
    """What is known of each (the ledger), and which of them a worker may have (the blame)."""

    def __init__(self, delivery: Delivery, clock: Clock, watch: RequestsWatch) -> None:
        self._delivery, self._clock, self._watch = delivery, clock, watch
        self._ledger, self._blame = Ledger(), Blame()
        self._heeds_readers = True  # until the engine is drained: then nobody waits for one

    # ---- callers

    def add(self, request: Request | EmbeddingRequest) -> None:
        """A new one."""
        self._ledger.add(request)
        self._blame.add(request.key)
        self._watch.queued(request)

    def set_paused(self, child: Child | None, key: int, *, is_paused: bool) -> None:
        """Lets one sit out ticks, or go on."""
        request, is_paused = self._ledger.find(key), is_paused and self._heeds_readers
        if not isinstance(request, Request) or request.is_paused == is_paused:
            return
        request.is_paused = is_paused
        self._watch.paused(key, is_paused)
        self.pass_on(child, key, messages.SetPaused(key, is_paused))
        if is_paused:
            self._blame.clear(key)

    def end_slow(self, child: Child | None, key: int) -> None:
        """Ends one whose reader is too slow, wherever it is."""
        request = self._ledger.find(key)
        if isinstance(request, Request):
            request.is_slow = True
        self.pass_on(child, key, messages.EndSlow(key))

    def drain(self, child: Child | None) -> None:
        """From now on nobody waits for a reader."""
        self._heeds_readers = False
        for key in self._ledger:
            self.set_paused(child, key, is_paused=False)

    # ---- a worker

    def pass_on(self, child: Child | None, key: int, message: messages.Down) -> None:
        """Tells the worker what is asked of a request, where it has it."""
        if child is not None and self._blame.is_handed(key):
            child.send(message)

    def hand_over(self, child: Child) -> None:
        """Gives a worker that is ready what it may have."""
        for key in self._blame.take():
            request = self._ledger.find(key)
            try:
                child.send(self._ledger.message(key))
            except Exception as error:  # noqa: BLE001 - what cannot go to another process is one request's misfortune
                self.end(key, FinishReason.ERROR, as_paceline_error(error))
                continue
            if isinstance(request, Request) and request.is_paused:
                child.send(messages.SetPaused(key, True))
                self._blame.clear(key)

    def take(self, part: messages.Part) -> None:
        """What a worker says of one."""
        if isinstance(part, messages.Failed):
            self.end(part.key, FinishReason.ERROR, part.error)
            return
        request = self._ledger.find(part.key)
        events = self._ledger.note(part)
        if isinstance(part, messages.Chunk) and part.drawn:
            self._blame.brought(part.key)
        self._deliver(events, request)

    def survive(self, death: Death) -> None:
        """A worker is dead: whoever is at fault ends, all others are held for the next one."""
        seen = None if death.seen.in_pass is None else set(death.seen.in_pass)
        if death.seen.preparing is not None:
            seen = (seen or set()) | {death.seen.preparing}
        guilty = self._blame.died(is_crash=death.is_crash, seen=seen or None, started=self._ledger.started())
        if guilty is not None:
            text = f"this request ended the engine's process twice, the second time as the only suspect; {death}"
            self.end(guilty, FinishReason.ERROR, EngineDied(text, death.signal, death.last_words))

    def die_with(self, death: Death) -> None:
        """The same where nothing is to be replayed: what the worker had ends."""
        for key in [key for key in self._ledger if self._blame.is_handed(key)]:
            self.end(key, FinishReason.ERROR, EngineDied(str(death), death.signal, death.last_words))

    # ---- ends

    def end(self, key: int, reason: FinishReason, error: PacelineError | None = None) -> None:
        """Ends one that no worker will end; nothing where it has ended."""
        request = self._ledger.find(key)
        if request is not None:
            self._deliver(self._ledger.end(key, reason, self._clock.now(), error), request)

    def end_all(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """Ends every one."""
        for key in self._ledger:
            self.end(key, reason, error)

    def end_held(self, reason: FinishReason) -> None:
        """Ends those that no worker has."""
        for key in self._blame.held:
            self.end(key, reason)

    def end_due(self) -> None:
        """Of those that no worker has, ends who was cancelled, is too late, or whose reader is too slow."""
        for key, reason in self._ledger.due(self._blame.held, self._clock.now()).items():
            self.end(key, reason)

    def next_deadline_s(self) -> float:
        """When the first of those that no worker has ends for want of time; infinite where none has a limit."""
        return self._ledger.next_deadline_s(self._blame.held)

    def _deliver(self, events: list[Event], request: object) -> None:
        for event in events:
            self._watch.saw(event, request)
            if self._ledger.find(event.key) is None:
                self._blame.ended(event.key)
        self._delivery.deliver(events)
