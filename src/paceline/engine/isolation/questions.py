"""What callers ask of the worker beside requests: its metrics, its slots, prefixes in files. Answers are futures.

Asking may come from any thread; the rest is the supervising thread's.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from paceline.engine.isolation import messages
from paceline.engine.isolation.child import Child
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
        """Done when the worker has reported, or where nobody can be asked."""
        return self._ask_state(messages.AskStats)

    def ask_slots(self) -> Future[SlotsSnapshot | None]:
        """What each slot does, after the tick that runs; None where nobody can be asked."""
        return self._ask_state(messages.AskSlots)

    def ask_prefix(self, message: messages.Prefix) -> Future[messages.PrefixDone]:
        """What comes of it. Waits for a worker where there is none; where it dies, another one loads; else `EngineDied`."""
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
        if self._is_over:  # whoever sets this looks at the questions afterwards, so nobody waits for ever
            self.end()

    # ---- the supervising thread

    def pass_on(self, child: Child | None) -> None:
        """Hands the questions over, as far as there is somebody to answer them."""
        if child is None or not child.is_ready:
            self._give_up_on_state()
            return
        while not self._for_state.empty():
            question, waiting = self._for_state.get()
            self._state_asked[self._next()] = waiting
            child.send(question(self._num_asked))
        while not self._for_prefixes.empty():
            message, answer = self._for_prefixes.get()
            self._prefixes_asked[self._next()] = (message, answer)
            child.send(msgspec.structs.replace(message, number=self._num_asked))

    def answered(self, message: messages.Stats | messages.SlotsTold | messages.PrefixDone) -> None:
        """The worker has answered one of them, or reports by itself."""
        if isinstance(message, messages.PrefixDone):
            self._prefixes_asked.pop(message.number)[1].set_result(message)
        elif message.number in self._state_asked:
            told = message.snapshot if isinstance(message, messages.SlotsTold) else None
            self._state_asked.pop(message.number).set_result(told)

    def died(self, error: PacelineError) -> None:
        """The worker will not answer. Loading is asked of the next one; the others may have been done, or can be no more."""
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
            while True:  # whoever takes one out answers it, be it one of several threads at the end
                self._state_asked.popitem()[1].set_result(None)

    def _next(self) -> int:
        self._num_asked += 1
        return self._num_asked
