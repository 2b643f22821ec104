"""What callers ask of the worker beside requests: its metrics, prefixes in files. Answers are futures.

Asking may come from any thread; the rest is the supervising thread's.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from paceline.engine.isolation import messages
from paceline.engine.isolation.child import Child
from paceline.errors import EngineStopped, PacelineError

_PrefixQuestion = tuple[messages.Prefix, Future[messages.PrefixDone]]


class Questions:
    """wake: tells the supervising thread that there is a question."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_over = False
        self._num_asked = 0
        self._for_stats: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        self._for_prefixes: queue.SimpleQueue[_PrefixQuestion] = queue.SimpleQueue()
        self._stats_asked: dict[int, Future[None]] = {}
        self._prefixes_asked: dict[int, _PrefixQuestion] = {}

    # ---- any thread

    def ask_stats(self) -> Future[None]:
        """Done when the worker has reported, or where nobody can be asked."""
        answer: Future[None] = Future()
        self._for_stats.put(answer)
        self._after_asking()
        return answer

    def ask_prefix(self, message: messages.Prefix) -> Future[messages.PrefixDone]:
        """What comes of it. Waits for a worker where there is none; where it dies, another one loads; else `EngineDied`."""
        answer: Future[messages.PrefixDone] = Future()
        self._for_prefixes.put((message, answer))
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
            self._give_up_on_stats()
            return
        while not self._for_stats.empty():
            self._stats_asked[self._next()] = self._for_stats.get()
            child.send(messages.AskStats(self._num_asked))
        while not self._for_prefixes.empty():
            message, answer = self._for_prefixes.get()
            self._prefixes_asked[self._next()] = (message, answer)
            child.send(msgspec.structs.replace(message, number=self._num_asked))

    def answered(self, message: messages.Stats | messages.PrefixDone) -> None:
        """The worker has answered one of them, or reports by itself."""
        if isinstance(message, messages.PrefixDone):
            self._prefixes_asked.pop(message.number)[1].set_result(message)
        elif message.number in self._stats_asked:
            self._stats_asked.pop(message.number).set_result(None)

    def died(self, error: PacelineError) -> None:
        """The worker will not answer. Loading is asked of the next one; the others may have been done, or can be no more."""
        self._give_up_on_stats()
        for message, answer in self._prefixes_asked.values():
            if message.action == "load":
                self._for_prefixes.put((message, answer))
            else:
                answer.set_exception(error)
        self._prefixes_asked.clear()

    def end(self) -> None:
        """There will be no worker any more."""
        self._is_over = True
        self._give_up_on_stats()
        with suppress(queue.Empty):
            while True:
                _, answer = self._for_prefixes.get_nowait()
                answer.set_exception(EngineStopped("the engine was shut down; make a new one"))

    def _give_up_on_stats(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._for_stats.get_nowait().set_result(None)
        for answer in self._stats_asked.values():
            answer.set_result(None)
        self._stats_asked.clear()

    def _next(self) -> int:
        self._num_asked += 1
        return self._num_asked
