"""The questions that a front has put to its worker: sent, answered, asked again after a death, given up.

A question with an idle answer resolves with `NO_WORKER` if there is no worker; other questions wait for the next worker. A
question without a reply in time fails with `WorkerUnresponsive`. Any thread may ask; the rest is the supervising thread's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from paceline.clock import Clock
from paceline.engine.pending_results import PendingResults
from paceline.engine.questions import Call, Question, Reply
from paceline.engine.worker.worker_process import WorkerProcess
from paceline.errors import EngineStopped, PacelineError, WorkerUnresponsive

NEW_WORKER_S: Final = 600.0
"""Seconds that a question about an image, a prefix or an adapter waits for a new worker, which may load a large model."""

NO_WORKER: Final = object()
"""The result of a question about state that no worker answered."""


@dataclass(slots=True)
class OpenCall:
    """A question without a reply. is_sent: to the present worker. was_sent: to an earlier worker, which died."""

    question: Question[Any, *tuple[Any, ...]]
    args: tuple[Any, ...]
    message: Call
    due_s: float
    is_sent: bool = False
    was_sent: bool = False

    @property
    def patience_s(self) -> float:
        """Seconds from sending it until its reply."""
        return self.question.patience_s + self.message.delay_s


class Calls:
    """The open questions by number. wake: wakes the supervising thread, which sends them."""

    def __init__(self, wake: Callable[[], None], clock: Clock) -> None:
        self._wake, self._clock = wake, clock
        self._is_over = False
        self._numbers = itertools.count(1)
        self._results = PendingResults()
        self._open: dict[int, OpenCall] = {}
        self._given_up: dict[int, OpenCall] = {}  # the present worker may reply yet

    def ask(
        self, question: Question[Any, *tuple[Any, ...]], args: tuple[Any, ...] = (), delay_s: float = 0.0
    ) -> Future[Any]:
        """Return a future of the answer. Any thread."""
        number = next(self._numbers)
        call = OpenCall(question, args, question.call(number, args, delay_s), math.inf)
        call.due_s = self._clock.now() + (NEW_WORKER_S if question.idle is None else call.patience_s)
        self._open[number] = call
        future = self._results.add(number)
        self._wake()
        if self._is_over:  # `end` sets this before it looks at the questions, so none is left
            self.end()
        return future

    @property
    def need_worker(self) -> bool:
        """Whether a question waits for a worker, or for its reply."""
        return any(call.question.idle is None for call in list(self._open.values()))

    def pass_on(self, worker: WorkerProcess | None) -> None:
        """Send the new questions to the worker, if there is one."""
        if worker is None or not worker.is_ready:
            self._end_idle()
            return
        for number in self._results:
            call = self._open.get(number)
            if call is not None and not call.is_sent:
                call.is_sent = True
                call.due_s = self._clock.now() + call.patience_s
                worker.send(call.message)

    def next_due_s(self) -> float:
        """Return when the first question has waited for too long; infinite without one."""
        return min([call.due_s for call in list(self._open.values())], default=math.inf)

    def end_overdue(self) -> None:
        """Fail the questions that have waited for too long."""
        now_s = self._clock.now()
        for number in self._results:
            call = self._open.get(number)
            if call is None or now_s < call.due_s:
                continue
            reason = f"is being started: it was not ready within {NEW_WORKER_S:g} s"
            if call.is_sent:
                reason = f"does not respond: no reply within {call.patience_s:g} s"
                self._given_up[number] = call
            self._resolve(number, None, WorkerUnresponsive(f"the engine's process {reason}; try again later"))

    def find(self, reply: Reply) -> OpenCall | None:
        """Return the question of a reply, open or given up."""
        return self._open.get(reply.number) or self._given_up.get(reply.number)

    def is_open(self, number: int) -> bool:
        """Return whether a question waits for its reply."""
        return number in self._open

    def take(self, reply: Reply) -> None:
        """Resolve a question by the worker's reply. Raises `EngineError` for a result that is none of this question."""
        self._given_up.pop(reply.number, None)
        call = self._open.get(reply.number)
        if call is not None:
            result = NO_WORKER if reply.result is None else call.question.result(reply)
            self._resolve(reply.number, result, reply.error)

    def died(self, error: PacelineError) -> None:
        """Give up the replies of a dead worker, or ask the next worker, as each question has it.

        A load is asked for twice at most: a file of which workers die must not use up all restarts.
        """
        self._given_up.clear()
        self._end_idle()
        for number in self._results:
            call = self._open.get(number)
            if call is None or not call.is_sent:
                continue
            is_second = call.was_sent and call.question.after_death != "ask until done"
            if call.question.after_death == "give up" or is_second:
                self._resolve(number, None, error)
            else:
                call.is_sent, call.was_sent = False, True
                call.due_s = self._clock.now() + NEW_WORKER_S

    def refuse(self, error: PacelineError) -> None:
        """Fail the questions that wait for a worker, as there is none and may be none for long.

        An adapter that was to be freed is gone: no later worker loads it (`Supervisor.forget_adapter`).
        """
        self._end_idle()
        for number in self._results:
            call = self._open.get(number)
            is_done = call is not None and call.question.after_death == "ask until done"
            self._resolve(number, None, None if is_done else error)

    def end(self) -> None:
        """Resolve the open questions and, from now on, every new one: there will be no worker any more. Any thread."""
        self._is_over = True
        self._end_idle()
        for number in self._results:
            self._resolve(number, None, EngineStopped("the engine was shut down; make a new one"))

    def _end_idle(self) -> None:
        for number in self._results:
            call = self._open.get(number)
            if call is not None and call.question.idle is not None:
                self._resolve(number, NO_WORKER)

    def _resolve(self, number: int, result: Any, error: PacelineError | None = None) -> None:
        self._results.resolve(number, result, error)
        self._open.pop(number, None)
