"""The one thread of an engine: `EngineThread`, and the `Runner`, which ticks. The front of a worker has a `Supervisor`.

Every accepted request ends on this thread with its terminal chunk, also if the engine itself fails.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cache
from typing import Protocol

from paceline.engine.backend import as_paceline_error
from paceline.engine.core import Drain, Engine, Stop
from paceline.engine.inbox import Inbox
from paceline.errors import Closed, EngineStopped, PacelineError
from paceline.observability.heartbeat import Heartbeat, Pulse, Sign, heartbeat_of
from paceline.scheduling.records import Event

_log = logging.getLogger("paceline.engine")
_MAX_FAILURES = 3  # ticks in a row
# From the engine's start to its calibration: callers that have just loaded it often continue at once.
_QUIET_S = 1.0
_EXIT_JOIN_S = 10.0  # for a strategy or an instrument that does not return
_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


class EngineThread(ABC):
    """Owns the thread, which runs `_run` until every request has ended.

    `ended` is done when every request has ended for good; its result is why the engine gave up, or None if it was closed.
    exit_join_s: how long the end of the process waits for the thread; None: no limit.
    """

    _gave_up: EngineStopped | None = None

    def __init__(self, name: str, inbox: Inbox, exit_join_s: float | None = None) -> None:
        self._inbox, self._exit_join_s = inbox, exit_join_s
        self._process = os.getpid()
        self.ended: Future[EngineStopped | None] = Future()
        self.ended.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _start_thread(self) -> None:
        _close_at_exit()
        _threads.add(self)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None: ...

    @abstractmethod
    def heartbeat(self) -> Heartbeat:
        """Return the state of the loop. Any thread; waits for nothing."""

    def check_process(self) -> None:
        """Raise `EngineStopped` in a forked child, which has none of the engine's threads."""
        if os.getpid() != self._process:
            raise EngineStopped("this process was forked from the engine's, and has none of its threads; make one here")

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self, *, drain: bool, timeout_s: float | None, join_s: float | None = None) -> None:
        """End the engine: accept no more requests, let open requests finish (drain) or cancel them, and wait.

        Requests that are open after timeout_s end with SHUTDOWN. Idempotent, any thread. Memory is free when it returns, unless
        it was called on the engine's own thread or join_s was not enough.
        """
        if os.getpid() != self._process:
            return
        is_own = threading.current_thread() is self._thread
        self._inbox.close()
        if drain and not is_own:
            self._inbox.put(Drain())
            self._inbox.wait_until_empty(timeout_s)
        self._inbox.put(Stop())
        self._interrupt()
        if not is_own:
            self._thread.join(join_s)

    @abstractmethod
    def _interrupt(self) -> None:
        """Abort the current work of the thread, after `Stop` was put into the inbox."""

    def abandon(self) -> None:
        """End the engine without waiting or taking a lock: for finalizers, which run on any thread at any time."""
        if os.getpid() == self._process:
            self._inbox.put(Stop())

    def end_when_lost(self, owner: object) -> None:
        """Abandon the engine when `owner` is garbage. The thread must not hold it while it runs.

        An engine that has ended is not kept alive for that, whatever the callbacks of `ended` refer to.
        """
        weakref.finalize(owner, _abandon, weakref.ref(self)).atexit = False

    def close_at_exit(self) -> None:
        """End the engine before the interpreter ends: passes and workers end, and every reader gets a terminal chunk."""
        self.close(drain=False, timeout_s=None, join_s=self._exit_join_s)


def _abandon(thread: weakref.ref[EngineThread]) -> None:
    running = thread()  # None after the thread has ended
    if running is not None:
        running.abandon()


@cache
def _close_at_exit() -> None:
    """Register once, with the first thread: after the native core, whose own exit handler then runs later."""

    def close_all() -> None:
        for thread in tuple(_threads):
            thread.close_at_exit()

    atexit.register(close_all)


class EventSink(Protocol):
    """The destination of a tick's events: an `OutputRouter`, or the socket of a worker. Engine's thread; no call waits."""

    def deliver(self, events: list[Event]) -> None:
        """Pass on the events of a tick, in order."""

    def end_all(self, error: PacelineError) -> None:
        """End every open request and question with an error."""

    def close(self) -> None:
        """End everything that is open, and every later question, as the thread has ended."""


class Runner(EngineThread):
    """Owns the thread that ticks. abort: ends the current pass. at_end: called on the thread when all requests have ended."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        sink: EventSink,
        pulse: Pulse,
        abort: Callable[[], None],
        at_end: Sequence[Callable[[], None]],
    ) -> None:
        super().__init__("paceline-engine", inbox, _EXIT_JOIN_S)
        self._engine, self._sink, self.pulse, self._clock = engine, sink, pulse, pulse.clock
        self._abort, self._at_end = abort, at_end
        inbox.on_cancel = engine.note_cancelled
        self._is_abandoned = False
        self._num_failures = 0
        self._calibrate_at_s = self._clock.now() + _QUIET_S
        self._start_thread()

    def _interrupt(self) -> None:
        if self._inbox.num_open or self._engine.is_calibrating:
            with suppress(Closed):  # without requests the thread may have ended meanwhile
                self._abort()

    def abandon(self) -> None:
        """As `EngineThread.abandon`; the cancelled requests still end in order."""
        self._is_abandoned = True
        super().abandon()

    def heartbeat(self) -> Heartbeat:
        """Return the state of the loop."""
        sign, now = self.pulse.sign, self._clock.now()
        return heartbeat_of(sign if self._thread.is_alive() else Sign("ended", sign.since_s), now)

    def _run(self) -> None:
        with ExitStack() as ends:  # all of them are called, the last one first, whatever others raise
            for end in reversed(self._at_end):
                ends.callback(end)
            ends.callback(lambda: self.ended.set_result(self._gave_up))
            ends.callback(self._sink.close)
            ends.callback(self._engine.end_calibration)
            ends.callback(self._end_requests, EngineStopped("the engine's thread has ended"))
            ends.callback(self._inbox.close)
            ends.callback(self.pulse.end)
            while not self._has_ended:
                self._turn()

    @property
    def _has_ended(self) -> bool:
        return self._inbox.is_closed and self._inbox.num_open == 0

    def _turn(self) -> None:
        self.pulse.tick()
        is_busy = self._tick()
        if self._is_abandoned:
            self._inbox.close()
        elif not is_busy and not self._has_ended:  # `close` may have come within the tick, which took the last command
            self._idle()

    def _idle(self) -> None:
        """Wait for a command or a deadline; before the first request, time passes for the cost model."""
        now, at = self._clock.now(), min(self._engine.next_deadline_s(), self._inbox.next_deadline_s())
        if self._engine.is_calibrating:
            if now >= self._calibrate_at_s:
                self.pulse.announce()
                self._engine.calibrate()
                return
            at = min(at, self._calibrate_at_s)
        self.pulse.rest()
        beat_s = math.inf if self.pulse.beat_s is None else self.pulse.beat_s
        while True:
            left_s = max(0.0, at - self._clock.now())
            if self._inbox.wait(None if math.isinf(wait_s := min(left_s, beat_s)) else wait_s) or left_s <= beat_s:
                return
            self.pulse.beat()

    def _tick(self) -> bool:
        """Run a tick and deliver its events; return whether the next tick may have work at once."""
        try:
            self._inbox.end_overdue_waits(self._clock.now())
            events = self._engine.tick()
            self._sink.deliver(events)
        except Exception as error:  # noqa: BLE001 - the thread survives failures of a tick
            _log.exception("a tick failed; all requests end with an error")
            self._recover(as_paceline_error(error))
            return True
        self._num_failures = 0
        return bool(events) or not self._engine.is_idle

    def _recover(self, error: PacelineError) -> None:
        """End every request, with its undelivered output if possible, and reset the engine; give up after failures in a row."""
        self._num_failures += 1
        with self._inbox.holding_line():
            self._end_requests(error)
        if self._num_failures < _MAX_FAILURES:
            self._engine.reset()
        else:
            self._gave_up = EngineStopped(
                f"{self._num_failures} ticks in a row failed, the last one with {error!s:.500}"
            )
            _log.error("the engine stops: %s", self._gave_up)
            self._inbox.close()

    def _end_requests(self, error: PacelineError) -> None:
        """End all requests. Raises the error that kept a stream from being ended, after all others; the thread cannot go on."""
        failures: list[Exception] = []
        try:
            self._sink.deliver(self._engine.fail_all(error, failures))
        except Exception as failure:  # noqa: BLE001 - `end_all` ends them in any case
            failures.append(failure)
        try:
            for cause in failures:
                _log.error("requests could not be ended in order; their streams end as they are", exc_info=cause)
        finally:
            self._sink.end_all(error)
