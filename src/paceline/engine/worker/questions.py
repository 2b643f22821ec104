"""What callers ask of the worker beside requests: its metrics, its slots, prefixes in files. Results are futures.

Asking may come from any thread; the rest is the supervising thread's.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from paceline.engine.worker import messages
from paceline.engine.worker.worker_process import WorkerProcess
from paceline.errors import EngineStopped, PacelineError
from paceline.scheduling.slots_snapshot import SlotsSnapshot

_StateQuestion = tuple[Callable[[int], messages.AskStats | messages.AskSlots], Future[Any]]
_PrefixQuestion = tuple[messages.Prefix, Future[messages.PrefixDone]]


class Questions:
    """wake: tells the supervising thread that there is a question."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_over = False
        self._num_asked = 0
        self._for_state: queue.SimpleQueue[_StateQuestion] = queue.SimpleQueue()
        self._for_prefixes: queue.SimpleQueue[_PrefixQuestion] = queue.SimpleQueue()
        self._state_asked: dict[int, Future[Any]] = {}
        self._prefixes_asked: dict[int, _PrefixQuestion] = {}

    # ---- any thread

    def ask_stats(self) -> Future[None]:
        """Return a future that is done when the worker has reported, or if there is no worker."""
        return self._ask_state(messages.AskStats)

    def ask_slots(self) -> Future[SlotsSnapshot | None]:
        """Return a future of what each slot does after the current tick; None if there is no worker."""
        return self._ask_state(messages.AskSlots)

    def ask_prefix(self, message: messages.Prefix) -> Future[messages.PrefixDone]:
        """Return a future of the result. Waits for a worker; if it dies, the next one loads; else `EngineDied`."""
        answer: Future[messages.PrefixDone] = Future()
        self._for_prefixes.put((message, answer))
        self._after_asking()
        return answer

    def _ask_state(self, question: Callable[[int], messages.AskStats | messages.AskSlots]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._for_state.put((question, answer))
        self._after_asking()
        return answer

    def _after_asking(self) -> None:
        self._wake()
        if self._is_over:  # `end` sets this before it looks at the questions, so none is left
            self.end()

    # ---- the supervising thread

    @property
    def need_worker(self) -> bool:
        """Whether one of them waits for a worker, or for what it does."""
        return not self._for_prefixes.empty() or bool(self._prefixes_asked)

    def pass_on(self, worker: WorkerProcess | None) -> None:
        """Hands the questions over, if there is a worker."""
        if worker is None or not worker.is_ready:
            self._give_up_on_state()
            return
        while not self._for_state.empty():
            question, waiting = self._for_state.get()
            self._state_asked[self._next()] = waiting
            worker.send(question(self._num_asked))
        while not self._for_prefixes.empty():
            message, answer = self._for_prefixes.get()
            self._prefixes_asked[self._next()] = (message, answer)
            worker.send(msgspec.structs.replace(message, number=self._num_asked))

    def answered(self, message: messages.Stats | messages.SlotsTold | messages.PrefixDone) -> None:
        """Resolve a question by the worker's reply, or take a report that no question asked for."""
        if isinstance(message, messages.PrefixDone):
            self._prefixes_asked.pop(message.number)[1].set_result(message)
        elif message.number in self._state_asked:
            told = message.snapshot if isinstance(message, messages.SlotsTold) else None
            self._state_asked.pop(message.number).set_result(told)

    def died(self, error: PacelineError) -> None:
        """Give up on replies of a dead worker. Loading is asked of the next one; the others may have been done already."""
        self._give_up_on_state()
        for message, answer in self._prefixes_asked.values():
            if message.action == "load":
                self._for_prefixes.put((message, answer))
            else:
                answer.set_exception(error)
        self._prefixes_asked.clear()

    def end(self) -> None:
        """There will be no worker any more."""
        self._is_over = True
        self._give_up_on_state()
        with suppress(queue.Empty):
            while True:
                _, answer = self._for_prefixes.get_nowait()
                answer.set_exception(EngineStopped("the engine was shut down; make a new one"))

    def _give_up_on_state(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._for_state.get_nowait()[1].set_result(None)
        with suppress(KeyError):
            while True:  # the thread that takes one out resolves it
                self._state_asked.popitem()[1].set_result(None)

    def _next(self) -> int:
        self._num_asked += 1
        return self._num_asked
