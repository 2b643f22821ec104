"""The one thread of an engine: it ticks while there is work, delivers what comes of it, and sleeps otherwise.

Every accepted request ends here with its terminal chunk, also where the engine itself fails.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.engine.commands import Drain, Stop
from paceline.engine.core import Engine
from paceline.engine.executor import as_paceline_error
from paceline.engine.heartbeat import Heartbeat, Pulse, Sign, heartbeat_of
from paceline.engine.inbox import Inbox
from paceline.errors import EngineStopped, PacelineError
from paceline.scheduling.clock import Clock
from paceline.scheduling.events import Event

_log = logging.getLogger("paceline.engine")
_MOST_FAILURES = 3
_PATIENCE_S = 10.0  # at the end of the process, for a strategy or an instrument that does not come back


class Outlet(Protocol):
    """Where a tick's events go: a `Delivery`, or the socket of a worker. Engine's thread; no call waits."""

    def deliver(self, events: list[Event]) -> None:
        """Passes on what a tick brought, in order."""

    def end_all(self, error: PacelineError) -> None:
        """Ends whatever is still open with an error."""

    def close(self) -> None:
        """There is no thread any more: whatever is still asked ends at once."""


_runners: weakref.WeakSet[Runner] = weakref.WeakSet()


class Runner:
    """Owns the thread. abort: ends the pass that is running. at_end: called on the thread when all has ended."""

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        outlet: Outlet,
        clock: Clock,
        abort: Callable[[], None],
        at_end: Sequence[Callable[[], None]],
    ) -> None:
        self._engine, self._inbox, self._outlet, self._clock = engine, inbox, outlet, clock
        self._abort, self._at_end = abort, at_end
        self._process = os.getpid()
        self.pulse = Pulse(clock)
        self._is_abandoned = False
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        _runners.add(self)
        self._thread.start()

    def check_process(self) -> None:
        """Raises `EngineStopped` in a forked child, which has no engine thread."""
        if os.getpid() != self._process:
            raise EngineStopped("this process was forked from the engine's, and has none of its threads; make one here")

    def close(self, *, drain: bool, timeout_s: float | None, join_s: float | None = None) -> None:
        """Ends the engine: takes no requests any more; lets those it has finish (drain) or cancels them; waits.

        After timeout_s what is left is ended with SHUTDOWN. Idempotent, any thread; memory is free when it returns, unless
        it was called on the engine's own thread, which goes on to its end then, or join_s was not enough.
        """
        if os.getpid() != self._process:
            return
        is_own = threading.current_thread() is self._thread
        self._inbox.close()
        if drain and not is_own:
            self._inbox.put(Drain())
            self._inbox.wait_until_empty(timeout_s)
        self._inbox.put(Stop())
        if self._inbox.num_open:
            self._abort()
        if not is_own:
            self._thread.join(join_s)

    def abandon(self) -> None:
        """Ends the engine without waiting or taking a lock: for finalizers, which run in the middle of anything."""
        self._is_abandoned = True
        self._inbox.put(Stop())

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def heartbeat(self) -> Heartbeat:
        """Whether the loop turns. Any thread; waits for nothing."""
        sign, now = self.pulse.sign, self._clock.now()
        return heartbeat_of(sign if self._thread.is_alive() else Sign("ended", sign.since_s), now)

    def _run(self) -> None:
        try:
            while not (self._inbox.is_closed and self._inbox.num_open == 0):
                self._turn()
        finally:
            self.pulse.end()
            self._inbox.close()
            self._end_requests(EngineStopped("the engine's thread has ended"))
            self._outlet.close()
            for end in self._at_end:
                end()

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
        """A tick and its events; answers whether another may have something to do at once."""
        try:
            events = self._engine.tick()
            self._outlet.deliver(events)
        except Exception as error:  # noqa: BLE001 - the thread outlives its mistakes
            _log.exception("a tick failed; all requests end with an error")
            self._recover(as_paceline_error(error))
            return True
        self._num_failures = 0
        return bool(events) or not self._engine.is_idle

    def _recover(self, error: PacelineError) -> None:
        """Ends every request, with what it held back as far as that can be had, and begins anew; gives up after a few times."""
        self._num_failures += 1
        self._end_requests(error)
        if self._num_failures < _MOST_FAILURES:
            self._engine.begin_anew()
        else:
            _log.error("%d ticks in a row failed; the engine stops", self._num_failures)
            self._inbox.close()

    def _end_requests(self, error: PacelineError) -> None:
        try:
            self._outlet.deliver(self._engine.fail_all(error))
        except Exception:  # noqa: BLE001 - what follows ends them in any case
            _log.exception("requests could not be ended in order; their streams end as they are")
        self._outlet.end_all(error)


@atexit.register
def _end_all() -> None:
    """Before Python goes down: no thread is left in a pass, no reader without an ending."""
    for runner in tuple(_runners):
        runner.close(drain=False, timeout_s=None, join_s=_PATIENCE_S)
