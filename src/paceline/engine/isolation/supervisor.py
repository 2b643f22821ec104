"""The one thread of a front: it starts the worker, hands it requests, takes in what it says, and answers for its death.

    commands of callers ──inbox──> [this thread] ──socket──> worker
    channels, futures  <─delivery─ [this thread] <─socket──  worker

It alone touches the open requests and the child, so they need no locks. Nobody waits for it, and it waits for nobody: what
the socket does not take is kept. Every accepted request ends here, whatever becomes of workers.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from paceline.engine.commands import Cancel, Command, Drain, EndSlow, Export, Import, Inspect, SetPaused, Stop, Submit
from paceline.engine.delivery import Delivery
from paceline.engine.heartbeat import Heartbeat, Pulse, Sign, heartbeat_of, starting
from paceline.engine.isolation import messages
from paceline.engine.isolation.child import Child
from paceline.engine.isolation.front_inbox import FrontInbox
from paceline.engine.isolation.open_requests import OpenRequests
from paceline.engine.isolation.questions import Questions
from paceline.engine.isolation.requests_watch import RequestsWatch
from paceline.engine.isolation.restarts import RestartLimits, Restarts
from paceline.engine.isolation.statistics import WorkerTotals
from paceline.engine.isolation.watching import Watching
from paceline.errors import EngineDied, EngineError, EngineStopped, PacelineError
from paceline.scheduling.clock import Clock
from paceline.streaming.chunk import FinishReason

_log = logging.getLogger("paceline.engine")

_STOP_PATIENCE_S = 10.0  # for a worker to end its requests, and then itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What to do about a death."""

    on_engine_death: Literal["replay", "fail"] = "replay"
    restarts: RestartLimits = field(default_factory=RestartLimits)


class Supervisor:
    """Owns the thread and the worker. `ready` is done when the first worker runs, or fails with why it does not."""

    def __init__(
        self,
        setup: messages.Setup,
        policy: Policy,
        inbox: FrontInbox,
        delivery: Delivery,
        clock: Clock,
        watch: RequestsWatch,
    ) -> None:
        self._setup, self._policy = setup, policy
        self._inbox, self._delivery, self._clock, self._watch = inbox, delivery, clock, watch
        self._requests, self._restarts = OpenRequests(delivery, clock, watch), Restarts(policy.restarts)
        self.totals, self.questions = WorkerTotals(), Questions(inbox.wake)
        self.ready: Future[messages.Ready] = Future()
        self.loading: queue.SimpleQueue[float | None] = queue.SimpleQueue()  # None, last: loading is over
        self.ready.add_done_callback(lambda _: self.loading.put(None))
        self._child: Child | None = None
        self._pulse = Pulse(clock)
        self._since_s = clock.now()  # the last worker was started, or died
        self._start_at: float | None = clock.now()
        self._stop_by: float | None = None
        self._refusal: PacelineError | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="paceline-supervisor", daemon=True)
        self._thread.start()

    # ---- any thread

    def check_process(self) -> None:
        """Raises `EngineStopped` in a forked child, which has neither this thread nor the worker."""
        if os.getpid() != self._process:
            raise EngineStopped("this process was forked from the engine's, and has none of its threads; make one here")

    def close(self, *, drain: bool, timeout_s: float | None) -> None:
        """As `Runner.close`; afterwards the worker is gone."""
        if os.getpid() != self._process:
            return
        is_own = threading.current_thread() is self._thread
        self._inbox.close()
        if drain and not is_own:
            self._inbox.put(Drain())
            self._inbox.wait_until_empty(timeout_s)
        self._inbox.put(Stop())
        if not is_own:
            self._thread.join()

    def abandon(self) -> None:
        """Ends everything without waiting or taking a lock: for finalizers."""
        if os.getpid() == self._process:
            self._inbox.put(Stop())

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        child = self._child
        return None if child is None else child.pid

    def heartbeat(self) -> Heartbeat:
        """Whether this thread and the worker's engine turn, or another worker is on its way. Waits for nothing."""
        own, child, now = self._pulse.sign, self._child, self._clock.now()
        num_restarts = self._restarts.num_all
        if not self._thread.is_alive():
            return heartbeat_of(Sign("ended", own.since_s), now, num_restarts=num_restarts)
        beat = None if child is None or not child.is_ready else child.beat()
        pid = None if child is None else child.pid
        if beat is None or beat.sign is None:
            return starting(now - self._since_s, worker_pid=pid, num_restarts=num_restarts)
        own_s = now - own.since_s if own.state == "ticking" else 0.0
        silent_s = max(0.0, own_s, now - beat.listened_s)
        return heartbeat_of(beat.sign, now, worker_pid=pid, num_restarts=num_restarts, silent_s=silent_s)

    # ---- the thread

    def _run(self) -> None:
        try:
            with Watching(self._inbox) as self._watching:
                while not (self._inbox.is_closed and self._inbox.num_open == 0):
                    self._turn()
        except Exception as error:  # noqa: BLE001 - nobody else would end what is open
            _log.exception("the supervisor of an engine failed; its requests end with an error")
            self._inbox.close_for(EngineStopped(f"the engine's supervisor failed: {error!r}"))
        finally:
            self._inbox.close()
            self._dismiss()
            self._delivery.close()
            self.questions.died(EngineStopped("the engine was shut down; make a new one"))
            self.questions.end()
            self._refuse_to_start(EngineStopped("the engine was shut down while it was starting"))

    def _turn(self) -> None:
        self._pulse.rest()
        ready = self._watching.wait(self._wait_s())
        self._pulse.tick()
        if self._inbox in ready:
            self._inbox.calm()
        for command in self._inbox.take():
            self._do(command)
        child = self._child
        if child is not None and child.last_words in ready:
            child.last_words.read()
        if child is not None and child.link in ready:
            self._listen(child)
        self._mind_the_time()
        if self._child is not None and self._child.is_ready and self._stop_by is None:
            self._requests.hand_over(self._child)
        self.questions.pass_on(self._child)
        self._flush()

    def _wait_s(self) -> float | None:
        """How long there is nothing to do unless somebody says something."""
        times = [time for time in (self._start_at, self._stop_by) if time is not None]
        at = min([*times, self._requests.next_deadline_s()])
        return None if math.isinf(at) else max(0.0, at - self._clock.now())

    def _do(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._requests.add(request)
            case Cancel(key):
                self._requests.pass_on(self._child, key, messages.Cancel(key))
            case SetPaused(key, is_paused):
                self._requests.set_paused(self._child, key, is_paused=is_paused)
            case EndSlow(key):
                self._requests.end_slow(self._child, key)
            case Drain():
                self._requests.drain(self._child)
            case Stop():
                self._stop()
            case Export() | Import() | Inspect():
                raise AssertionError("the worker is asked by questions")

    def _stop(self) -> None:
        self._inbox.close()
        if self._stop_by is not None:
            return
        self._stop_by = self._clock.now() + _STOP_PATIENCE_S
        self._start_at = None
        if self._child is not None and self._child.is_ready:
            self._child.send(messages.StopAll())
        elif self._child is not None:
            self._child.kill()  # it is loading, and nothing ends that sooner

    # ---- what the worker says

    def _listen(self, child: Child) -> None:
        try:
            received = child.link.receive()
            for data in received or ():
                if child.makes_sense:  # a part of what it said is lost: what comes behind has a gap before it
                    self._hear(child, messages.decode_up(data))
        except EngineError as error:  # it goes the way of those that say nothing
            child.makes_sense = False
            self._refusal = error
            child.kill()
            return
        if received is None:
            self._bury(child)

    def _hear(self, child: Child, message: messages.Up) -> None:
        match message:
            case messages.Happened(parts):
                for part in parts:
                    self._requests.take(part)
            case messages.Ready(protocol):
                messages.check_protocol(protocol)
                child.is_ready = True
                self._refusal = None
                if self.ready.done():
                    self._watch.restarted()
                    _log.warning("a new process has taken the engine over")
                else:
                    self.ready.set_result(message)
            case messages.Refused(_, error):
                self._refusal = error
                child.kill()
            case messages.Logged(logger, level, text):
                logging.getLogger(logger).log(level, "%s", text)
            case messages.Stats(_, samples):
                self.totals.report(samples)
                self.questions.answered(message)
            case messages.PrefixDone() | messages.SlotsTold():
                self.questions.answered(message)
            case messages.Loading(fraction):
                self.loading.put(fraction)

    # ---- death

    def _bury(self, child: Child) -> None:
        self._watching.remove(child)
        self._child, self._since_s = None, self._clock.now()
        death = child.bury()
        self.totals.died()
        self.questions.died(EngineDied(str(death), death.signal, death.last_words))
        reason = self._refusal or EngineDied(str(death), death.signal, death.last_words)
        if self._policy.on_engine_death == "fail" and self._stop_by is None:
            self._requests.die_with(death)
        else:
            self._requests.survive(death)
        if self._stop_by is None:
            self._start_later(reason)

    def _give_up(self, reason: PacelineError) -> None:
        limits = self._policy.restarts
        stopped = EngineStopped(
            f"the engine's process died more than {limits.max_restarts} times within {limits.window_s:g} s, and no other "
            f"is started; {reason}"
        )
        _log.error("%s", stopped)
        self._inbox.close_for(stopped)
        for command in self._inbox.take():
            self._do(command)
        self._requests.end_all(FinishReason.ERROR, stopped)

    # ---- what this side does by itself

    def _mind_the_time(self) -> None:
        now = self._clock.now()
        if self._start_at is not None and now >= self._start_at:
            self._start()
        if self._stop_by is not None:
            self._mind_the_end(now)
        self._requests.end_due()

    def _mind_the_end(self, now_s: float) -> None:
        """Nothing is handed over any more: what is held ends here; a worker that takes too long is ended."""
        if self._child is None:
            self._requests.end_all(FinishReason.SHUTDOWN)
            return
        self._requests.end_held(FinishReason.SHUTDOWN)
        if now_s >= (self._stop_by or 0):
            self._stop_by = math.inf
            self._child.kill()

    def _start(self) -> None:
        self._start_at, self._since_s = None, self._clock.now()
        try:
            child = Child(messages.restarted(self._setup, self._restarts.num_all))
        except OSError as error:  # no more processes or descriptors to be had
            self._start_later(EngineError(f"no process could be started: {error}"))
            return
        self._child = child
        self._watching.add(child)

    def _start_later(self, reason: PacelineError) -> None:
        """After a death: when limits allow, or never."""
        if not self.ready.done():
            self._refuse_to_start(reason)
            return
        _log.error("%s", reason)
        self._start_at = self._restarts.next_at(self._clock.now())
        if self._start_at is None:
            self._give_up(reason)

    def _refuse_to_start(self, reason: PacelineError) -> None:
        if not self.ready.done():
            self._inbox.close()
            self.ready.set_exception(reason)

    def _flush(self) -> None:
        child = self._child
        if child is None:
            return
        child.link.flush()
        self._watching.refresh(child)

    def _dismiss(self) -> None:
        """Lets the worker go, in good order where it does not take too long."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.is_ready:
            child.send(messages.Leave())
        else:
            child.kill()
        child.bury(_STOP_PATIENCE_S)
        self.totals.died()
