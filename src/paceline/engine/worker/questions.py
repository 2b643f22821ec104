"""What callers ask of the worker beside requests: metrics, slots, cached and saved prefixes, adapters. Results are futures.

A question about state is resolved with None if there is no worker; any other waits for the next worker. A question
without a reply in time fails with `WorkerUnresponsive`. Asking may come from any thread; the rest is the supervising thread's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from paceline.clock import Clock
from paceline.engine.pending_results import PendingResults
from paceline.engine.worker import messages
from paceline.engine.worker.worker_process import WorkerProcess
from paceline.errors import EngineStopped, PacelineError, WorkerUnresponsive
from paceline.kv_cache import PrefixDigest
from paceline.media import MediaExtent
from paceline.scheduling.activity import EngineActivity
from paceline.scheduling.telemetry import SlotsSnapshot

_StateQuestion = messages.AskStats | messages.AskSlots | messages.AskDigest | messages.AskActivity
_Question = _StateQuestion | messages.Prefix | messages.AdapterQuestion | messages.MeasureMedia
_Reply = (
    messages.Stats
    | messages.SlotsReply
    | messages.DigestReply
    | messages.ActivityReply
    | messages.PrefixDone
    | messages.AdapterDone
    | messages.MediaMeasured
)


REPLY_S: Final = 10.0
"""Seconds for the reply to a question about state, which comes after the current tick."""

MEASURE_REPLY_S: Final = 60.0
"""Seconds for the reply to how many cells an image or audio takes."""

FILE_REPLY_S: Final = 600.0
"""Seconds for saving, loading or erasing a prefix and for loading or freeing an adapter."""

NEW_WORKER_S: Final = 600.0
"""Seconds that a question about an image, a prefix or an adapter waits for a new worker, which may load a large model."""


class Questions:
    """The questions without a reply, by number. wake: wakes the supervising thread, which sends them."""

    def __init__(self, wake: Callable[[], None], clock: Clock) -> None:
        self._wake, self._clock = wake, clock
        self._due_s: dict[int, float] = {}
        self._is_over = False
        self._numbers = itertools.count(1)
        self._results = PendingResults()
        self._messages: dict[int, _Question] = {}
        self._sent: set[int] = set()  # to the present worker; supervising thread only
        self._asked_again: set[int] = set()  # after the death of a worker that was asked first

    # ---- any thread

    def ask_stats(self) -> Future[None]:
        """Return a future that is done when the worker has reported, or if there is no worker."""
        return self._ask(messages.AskStats)

    def ask_slots(self) -> Future[SlotsSnapshot | None]:
        """Return a future of what each slot does after the current tick; None if there is no worker."""
        return self._ask(messages.AskSlots)

    def ask_digest(self, max_prefixes: int, block_tokens: int | None) -> Future[PrefixDigest | None]:
        """Return a future of hashes of the cached prefixes after the current tick; None if there is no worker."""
        return self._ask(lambda number: messages.AskDigest(number, max_prefixes, block_tokens))

    def ask_activity(self, after: int, max_nodes: int | None, delay_s: float) -> Future[EngineActivity | None]:
        """Return a future of what the engine does after the first tick from delay_s on; None if there is no worker."""
        return self._ask(lambda number: messages.AskActivity(number, after, max_nodes, delay_s))

    def ask_prefix(self, message: messages.Prefix) -> Future[messages.PrefixDone]:
        """Return a future of the result. Waits for a worker; if it dies, the next one loads, once; else `EngineDied`."""
        return self._ask(lambda number: msgspec.structs.replace(message, number=number))

    def ask_load_adapter(self, adapter: str, path: str) -> Future[messages.AdapterDone]:
        """Return a future of the result. Waits for a worker; if it dies, the next one loads, once; else `EngineDied`."""
        return self._ask(lambda number: messages.LoadAdapter(number, adapter, path))

    def ask_free_adapter(self, adapter: str) -> Future[messages.AdapterDone]:
        """Return a future of the result. Waits for a worker; if it dies, the next one frees what it may have loaded."""
        return self._ask(lambda number: messages.FreeAdapter(number, adapter))

    def ask_media(self, extent: MediaExtent) -> Future[messages.MediaMeasured]:
        """Return a future of what an image or audio becomes. Waits for a worker; if it dies, the next one is asked, once."""
        return self._ask(lambda number: messages.MeasureMedia(number, extent))

    def _ask(self, question: Callable[[int], _Question]) -> Future[Any]:
        number = next(self._numbers)
        message = self._messages[number] = question(number)
        is_state = isinstance(message, _StateQuestion)
        self._due_s[number] = self._clock.now() + (_patience_s(message) if is_state else NEW_WORKER_S)
        future = self._results.add(number)
        self._wake()
        if self._is_over:  # `end` sets this before it looks at the questions, so none is left
            self.end()
        return future

    # ---- the supervising thread

    @property
    def need_worker(self) -> bool:
        """Whether one of them waits for a worker, or for its reply."""
        waiting = (self._messages.get(number) for number in self._results)
        return any(one is not None and not isinstance(one, _StateQuestion) for one in waiting)

    def pass_on(self, worker: WorkerProcess | None) -> None:
        """Send the new questions to the worker, if there is one."""
        if worker is None or not worker.is_ready:
            self._give_up_on_state()
            return
        for number in self._results:
            message = self._messages.get(number)
            if message is not None and number not in self._sent:
                self._sent.add(number)
                self._due_s[number] = self._clock.now() + _patience_s(message)
                worker.send(message)

    def next_due_s(self) -> float:
        """Return when the first question has waited for too long; infinite without one."""
        return min(list(self._due_s.values()), default=math.inf)

    def end_overdue(self) -> None:
        """Fail the questions that have waited for too long."""
        now_s = self._clock.now()
        if now_s < self.next_due_s():
            return
        for number in self._results:
            message = self._messages.get(number)
            if message is not None and now_s >= self._due_s.get(number, math.inf):
                reason = f"does not respond: no reply within {_patience_s(message):g} s"
                if number not in self._sent:
                    reason = f"is being started: it was not ready within {NEW_WORKER_S:g} s"
                self._resolve(number, None, WorkerUnresponsive(f"the engine's process {reason}; try again later"))

    def is_open(self, number: int) -> bool:
        """Return whether a question waits for its reply."""
        return number in self._messages

    def take(self, reply: _Reply) -> None:
        """Resolve a question by the worker's reply; do nothing for a report that no question asked for."""
        self._sent.discard(reply.number)
        match reply:
            case (
                messages.PrefixDone(number, error=error)
                | messages.AdapterDone(number, error=error)
                | messages.MediaMeasured(number, error=error)
            ):
                self._resolve(number, reply, error)
            case (
                messages.SlotsReply(number, state)
                | messages.DigestReply(number, state)
                | messages.ActivityReply(number, state)
            ):
                self._resolve(number, state)
            case messages.Stats(number):
                self._resolve(number, None)

    def died(self, error: PacelineError) -> None:
        """Give up on replies of a dead worker. Saved and erased prefixes may be done; the next worker is asked for the rest.

        A load is asked for twice at most: a file of which workers die must not use up all restarts.
        """
        sent, self._sent = self._sent, set()
        self._give_up_on_state()
        for number in sent:
            message = self._messages.get(number)
            may_be_done = isinstance(message, messages.Prefix) and message.action != "load"
            is_second = number in self._asked_again and not isinstance(message, messages.FreeAdapter)
            if may_be_done or is_second:
                self._resolve(number, None, error)
            elif number in self._messages:
                self._asked_again.add(number)
                self._due_s[number] = self._clock.now() + NEW_WORKER_S

    def refuse(self, error: PacelineError) -> None:
        """Fail those that wait for a worker, as there is none and may be none for long.

        An adapter that was to be freed is gone: no later worker loads it (`Supervisor.forget_adapter`).
        """
        self._give_up_on_state()
        for number in self._results:
            is_done = isinstance(self._messages.get(number), messages.FreeAdapter)
            self._resolve(number, None, None if is_done else error)

    def end(self) -> None:
        """Resolve what is left and, from now on, every new question: there will be no worker any more. Any thread."""
        self._is_over = True
        self._give_up_on_state()
        for number in self._results:
            self._resolve(number, None, EngineStopped("the engine was shut down; make a new one"))

    def _give_up_on_state(self) -> None:
        for number in self._results:
            if isinstance(self._messages.get(number), _StateQuestion):
                self._resolve(number, None)

    def _resolve(self, number: int, result: Any, error: PacelineError | None = None) -> None:
        self._results.resolve(number, result, error)
        self._messages.pop(number, None)
        self._due_s.pop(number, None)
        self._asked_again.discard(number)


def _patience_s(question: _Question) -> float:
    """Return how long a question may wait for its reply."""
    match question:
        case messages.AskActivity(delay_s=delay_s):
            return delay_s + REPLY_S
        case messages.AskStats() | messages.AskSlots() | messages.AskDigest():
            return REPLY_S
        case messages.MeasureMedia():
            return MEASURE_REPLY_S
        case messages.Prefix() | messages.LoadAdapter() | messages.FreeAdapter():
            return FILE_REPLY_S
