"""The one thread of an engine: it ticks while there is work, delivers what comes of it, and sleeps otherwise.

Every accepted request ends here with its terminal chunk, also where the engine itself fails.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

from paceline.engine.core import Engine
from paceline.engine.engine_thread import EngineThread
from paceline.engine.executor import as_paceline_error
from paceline.engine.inbox import Inbox
from paceline.errors import EngineStopped, PacelineError
from paceline.observability.heartbeat import Heartbeat, Pulse, Sign, heartbeat_of
from paceline.scheduling.clock import Clock
from paceline.scheduling.events import Event

_log = logging.getLogger("paceline.engine")
_MOST_FAILURES = 3
_PATIENCE_S = 10.0  # at the end of the process, for a strategy or an instrument that does not come back


class EventSink(Protocol):
    """Where a tick's events go: a `OutputRouter`, or the socket of a worker. Engine's thread; no call waits."""

    def deliver(self, events: list[Event]) -> None:
        """Pass on what a tick brought, in order."""

    def end_all(self, error: PacelineError) -> None:
        """End whatever is still open with an error."""

    def close(self) -> None:
        """There is no thread any more: whatever is still asked ends at once."""


class Runner(EngineThread):
    """Owns the thread that ticks. abort: ends the current pass. at_end: called on the thread when all requests have ended."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        sink: EventSink,
        clock: Clock,
        abort: Callable[[], None],
        at_end: Sequence[Callable[[], None]],
    ) -> None:
        super().__init__("paceline-engine", inbox, _PATIENCE_S)
        self._engine, self._sink, self._clock = engine, sink, clock
        self._abort, self._at_end = abort, at_end
        self.pulse = Pulse(clock)
        self._is_abandoned = False
        self._num_failures = 0
        self._start_thread()

    def _interrupt(self) -> None:
        if self._inbox.num_open:
            self._abort()

    def abandon(self) -> None:
        """See `EngineThread`; the requests that were cancelled still end in order."""
        self._is_abandoned = True
        super().abandon()

    def heartbeat(self) -> Heartbeat:
        """Whether the loop turns. Any thread; waits for nothing."""
        sign, now = self.pulse.sign, self._clock.now()
        return heartbeat_of(sign if self._thread.is_alive() else Sign("ended", sign.since_s), now)

    def _run(self) -> None:
        with ExitStack() as ends:  # all of them are called, the last one first, whatever others raise
            for end in reversed(self._at_end):
                ends.callback(end)
            ends.callback(lambda: self.ended.set_result(self._gave_up))
            ends.callback(self._sink.close)
            ends.callback(self._end_requests, EngineStopped("the engine's thread has ended"))
            ends.callback(self._inbox.close)
            ends.callback(self.pulse.end)
            while not (self._inbox.is_closed and self._inbox.num_open == 0):
                self._turn()

    def _turn(self) -> None:
        self.pulse.tick()
        is_busy = self._tick()
        if self._is_abandoned:
            self._inbox.close()
        elif not is_busy:
            wait_s = self._engine.next_deadline_s() - self._clock.now()
            self.pulse.rest()
            self._inbox.wait(None if math.isinf(wait_s) else max(0.0, wait_s))

    def _tick(self) -> bool:
        """Run a tick and deliver its events; return whether the next one may have work at once."""
        try:
            events = self._engine.tick()
            self._sink.deliver(events)
        except Exception as error:  # noqa: BLE001 - the thread outlives its mistakes
            _log.exception("a tick failed; all requests end with an error")
            self._recover(as_paceline_error(error))
            return True
        self._num_failures = 0
        return bool(events) or not self._engine.is_idle

    def _recover(self, error: PacelineError) -> None:
        """End every request, with what it held back as far as that can be had, and begins anew; gives up after a few times."""
        self._num_failures += 1
        self._end_requests(error)
        if self._num_failures < _MOST_FAILURES:
            self._engine.reset()
        else:
            self._gave_up = EngineStopped(
                f"{self._num_failures} ticks in a row failed, the last one with {error!s:.500}"
            )
            _log.error("the engine stops: %s", self._gave_up)
            self._inbox.close()

    def _end_requests(self, error: PacelineError) -> None:
        """Raise what keeps a stream from being ended, after all others were; the thread cannot go on then."""
        failures: list[Exception] = []
        try:
            self._sink.deliver(self._engine.fail_all(error, failures))
        except Exception as failure:  # noqa: BLE001 - what follows ends them in any case
            failures.append(failure)
        try:
            for one in failures:
                _log.error("requests could not be ended in order; their streams end as they are", exc_info=one)
        finally:
            self._sink.end_all(error)
