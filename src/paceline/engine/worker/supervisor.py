"""The one thread of a front: it starts the worker, sends requests and calls, delivers reports, and recovers from deaths.

    commands of callers ──inbox──> [this thread] ──socket──> worker
    channels, futures  <─router─ [this thread] <─socket──  worker

Only this thread touches the open requests and the worker, so they need no locks. No thread waits for it, and it waits for no
other: bytes that the socket does not take are kept. Every accepted request ends here, even if workers die.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from paceline.clock import Clock
from paceline.engine.adapters import adapter_paths
from paceline.engine.core import Ask, Cancel, Command, Drain, EndSlow, SetInterval, SetPaused, Stop, Submit
from paceline.engine.engine_thread import EngineThread
from paceline.engine.inbox import FrontInbox
from paceline.engine.output_router import OutputRouter, PendingResults
from paceline.engine.questions import Call, Question, Reply, free_adapter, load_adapter, report
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import LONG_WORK, Beat
from paceline.engine.worker.open_requests import OpenRequests
from paceline.engine.worker.worker_process import Watching, WorkerProcess, model_files
from paceline.engine.worker.worker_telemetry import RequestsWatch, WorkerTotals
from paceline.errors import (
    EngineDied,
    EngineError,
    EngineStopped,
    ModelChanged,
    PacelineError,
    RpcServerUnavailable,
    WorkerUnresponsive,
)
from paceline.observability.heartbeat import (
    LONGEST_SILENCE_S,
    LONGEST_TICK_S,
    Heartbeat,
    Pulse,
    Sign,
    WorkerHistory,
    heartbeat_of,
    sleeping,
    starting,
)
from paceline.runtime.gguf_file import LoadedFiles
from paceline.scheduling.records import Delta
from paceline.streaming.chunk import FinishReason

LEAVE_S: Final = 10.0  # for a worker to leave by itself, before it is killed
_MAX_DOUBLINGS = 60  # far beyond any cap, and within the range of a float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    """Back-off and maximum number of restarts.

    Attributes:
        first_wait_s: Seconds before the first restart. Each further restart in a row waits twice as long.
        longest_wait_s: Longest wait.
        stable_s: A worker that was ready for this time ends the row.
        max_restarts: Restarts in a row; the next crash ends the engine. None: no limit.
    """

    first_wait_s: float = 0.1
    longest_wait_s: float = 10.0
    stable_s: float = 60.0
    max_restarts: int | None = None


class Restarts:
    """Counts the crashes of the workers of one engine. num_all: restarts since the beginning."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self.num_all = 0
        self._num_in_row = 0

    def crashed(self, now_s: float, ready_s: float | None) -> float | None:
        """Count a crash and return the time to start the next worker; None if max_restarts is exceeded.

        ready_s: when the dead worker became ready; None if it never was.
        """
        limits = self.limits
        self._num_in_row = self.num_in_row(now_s, ready_s) + 1
        if limits.max_restarts is not None and self._num_in_row > limits.max_restarts:
            return None
        self.num_all += 1
        doublings = min(self._num_in_row - 1, _MAX_DOUBLINGS)
        return now_s + min(limits.longest_wait_s, limits.first_wait_s * 2.0**doublings)

    def left(self, now_s: float, ready_s: float | None) -> None:
        """Note that an idle worker was stopped, which ends the row only if it was stable."""
        self._num_in_row = self.num_in_row(now_s, ready_s)

    def num_in_row(self, now_s: float, ready_s: float | None) -> int:
        """Return the number of crashes without a stable worker between them. ready_s: of the present worker, see `crashed`."""
        is_stable = ready_s is not None and now_s - ready_s >= self.limits.stable_s
        return 0 if is_stable else self._num_in_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How deaths, hangs and idle workers are treated; for hang_timeout_s and sleep_idle_s see `EngineConfig`.

    rpc_wait_s: seconds for which requests wait for a lost RPC server.
    """

    on_engine_death: Literal["replay", "fail"] = "replay"
    restarts: RestartLimits = field(default_factory=RestartLimits)
    hang_timeout_s: float = math.inf
    sleep_idle_s: float | None = None
    rpc_wait_s: float = math.inf


LOOK_S: Final = 1.0
"""Seconds between two looks at the heartbeats of a worker."""

_EXCUSED_FROM_S: Final = 2.5  # of silence; then an excuse is looked for
_MOST_PATIENCE: Final = 64  # times longer that ticks may take after crashes in a row


class _Silence:
    """The time for which a value has stayed the same, as its observer saw time pass."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._value: object = None

    def observe(self, value: object, passed_s: float) -> float:
        """Return the seconds for which the value is the same."""
        self.seconds = self.seconds + passed_s if value == self._value else 0.0
        self._value = value
        return self.seconds


class HangWatch:
    """Finds out from a worker's heartbeats whether the worker hangs. limit_s: `hang_timeout_s`.

    The listening thread and the engine's thread both give heartbeats. A stopped process gives none, nor does a thread that does
    not return from native code. Silence is counted look by look, and a look adds two seconds at most. If this process was
    suspended too, alone or with the machine, that time is not counted. Silence with an excuse is not counted either.

    Each crash in a row multiplies the time of a tick by four: perhaps the ticks were only slow.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._listening, self._beating, self._preparing = _Silence(), _Silence(), _Silence()
        self._patience = 1
        self._looked_s = self._next_s = math.inf

    def begin(self, now_s: float, num_crashes: int) -> None:
        """Watch a new worker. num_crashes: of the workers before it, in a row."""
        self._listening, self._beating, self._preparing = _Silence(), _Silence(), _Silence()
        self._patience = min(4**num_crashes, _MOST_PATIENCE)
        self._looked_s, self._next_s = now_s, now_s + LOOK_S

    def end(self) -> None:
        """Watch no worker."""
        self._next_s = math.inf

    def next_s(self) -> float:
        """Return the time of the next look; infinite without a worker."""
        return self._next_s

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat of the listening thread. Any thread."""
        return self._listening.seconds

    def allowed_s(self, beat: Beat) -> float:
        """Return the seconds for which the engine's thread may be silent after this heartbeat."""
        long_s = LONG_WORK * self._limit_s if beat.sign is None else self._limit_s
        return self._patience * max(long_s, beat.allowed_s)

    def look(
        self, now_s: float, beat: Beat | None, preparing: int | None, is_excused: Callable[[], bool], *, is_ready: bool
    ) -> str | None:
        """Return the reason why the worker counts as hung; None if it does not.

        Args:
            now_s: The time.
            beat: The worker's heartbeats; None before the first one.
            preparing: The request that the worker prepares.
            is_excused: Whether the silence has an excuse; called only if the worker is silent.
            is_ready: Whether the worker has loaded the model.
        """
        passed_s = min(now_s - self._looked_s, 2 * LOOK_S)
        self._looked_s, self._next_s = now_s, now_s + LOOK_S
        longest_s = max(self._listening.seconds, self._beating.seconds if is_ready else 0.0) + passed_s
        if longest_s > _EXCUSED_FROM_S and is_excused():
            passed_s = 0.0
        silent_s = self._listening.observe(None if beat is None else beat.listened_s, passed_s)
        tick_s = self._beating.observe(None if beat is None else beat.beaten_s, passed_s)
        prepared_s = self._preparing.observe(preparing, passed_s)
        limit_s = self._limit_s if is_ready else LONG_WORK * self._limit_s
        if silent_s >= limit_s:
            return f"it gave no heartbeat for {silent_s:.0f} s"
        if is_ready and beat is not None and tick_s >= (allowed_s := self.allowed_s(beat)):
            return f"its engine has been in one tick for {tick_s:.0f} s, and {allowed_s:.0f} s were allowed"
        if preparing is not None and prepared_s >= LONG_WORK * self._limit_s:
            return f"it has prepared one request for {prepared_s:.0f} s"
        return None


class ServersAway:
    """How long the RPC servers of an engine have been away. wait_s: seconds for which requests wait for them.

    Without its servers no worker becomes ready, so the time counts from the first worker that was refused or lost a server. It
    matters only while there is no worker: a worker that loads has its servers.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._since_s: float | None = None
        self._error: RpcServerUnavailable | None = None
        self.error: RpcServerUnavailable | None = None  # of every request, from the end of the wait until `back`

    def lost(self, now_s: float, error: RpcServerUnavailable) -> None:
        """Note that a worker has ended because a server is away."""
        self._error = error
        if self._since_s is None:
            self._since_s = now_s
        if self.error is not None:
            self.error = error

    def back(self) -> None:
        """Note that a worker is ready, or has ended for another reason, so that its servers count as present."""
        self._since_s = self._error = self.error = None

    def next_s(self) -> float:
        """Return the end of the wait; infinite if no server is away, and after the end."""
        return math.inf if self._since_s is None or self.error is not None else self._since_s + self._wait_s

    def give_up(self, now_s: float) -> RpcServerUnavailable | None:
        """Return the error of the requests that end now, once; None before the end of the wait."""
        if now_s < self.next_s():
            return None
        self.error = self._error
        return self.error


class Sleep:
    """Whether the worker is stopped because it was idle. idle_s: seconds until then; None: it is never stopped."""

    def __init__(self, idle_s: float | None) -> None:
        self._idle_s = math.inf if idle_s is None else idle_s
        self._used_s = math.inf  # a worker is not idle before its first use
        self._leave_by_s = math.inf
        self.is_asleep = False

    def used(self, now_s: float) -> None:
        """Note that the worker became ready or is needed."""
        self._used_s = now_s

    def is_due(self, now_s: float) -> bool:
        """Whether an idle worker is to be stopped."""
        return not self.is_asleep and now_s >= self._used_s + self._idle_s

    def is_late(self, now_s: float) -> bool:
        """Whether a worker that was told to leave takes too long."""
        return now_s >= self._leave_by_s

    def next_s(self) -> float:
        """Return the time at which `is_due` or `is_late` becomes true unless the worker is used before."""
        return self._leave_by_s if self.is_asleep else self._used_s + self._idle_s

    def begin(self, now_s: float) -> None:
        """Note that the worker was told to leave."""
        self.is_asleep, self._leave_by_s = True, now_s + LEAVE_S

    def left(self) -> None:
        """Note that the worker is gone or was killed."""
        self._leave_by_s = math.inf

    def end(self) -> None:
        """Note that another worker is started."""
        self.is_asleep, self._used_s, self._leave_by_s = False, math.inf, math.inf


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
        """Return the time at which the first question has waited for too long; infinite without questions."""
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
        """Resolve a question by the worker's reply. Raises `EngineError` for a result that cannot be read."""
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
        """Fail the questions that wait for a worker, since there may be no worker for long.

        An adapter that was to be freed is gone: no later worker loads it (`Supervisor.forget_adapter`).
        """
        self._end_idle()
        for number in self._results:
            call = self._open.get(number)
            is_done = call is not None and call.question.after_death == "ask until done"
            self._resolve(number, None, None if is_done else error)

    def end(self) -> None:
        """Resolve the open questions and every later question: there will be no worker any more. Any thread."""
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


_log = logging.getLogger("paceline.engine")

_STOP_PATIENCE_S = 10.0  # for a worker to end its requests, and then itself
_SILENT_PATIENCE_S = 1.0  # the same for one that has given no heartbeat for a while
_SILENT_S = 3.0
_KILL_S = 5.0  # from a kill until the end of the socket


class Supervisor(EngineThread):
    """Owns the thread and the worker.

    Attributes:
        ready: Done when the first worker runs; fails with the reason if it cannot run.
        on_replaced: Called on this thread with the description of each later worker.
        loading: The progress of loading; None at its end.
        relays: Receivers of the events of relayed requests; see `OpenRequests`.
        totals: The metrics of all workers.
        calls: The open questions.
    """

    _inbox: FrontInbox

    def __init__(
        self,
        setup: messages.Setup,
        policy: Policy,
        inbox: FrontInbox,
        router: OutputRouter,
        clock: Clock,
        watch: RequestsWatch,
    ) -> None:
        super().__init__("paceline-supervisor", inbox)
        self._setup, self._policy = setup, policy
        self._adapters = {
            name: str(path.absolute()) for name, path in adapter_paths(setup.options.get("lora", ())).items()
        }
        self._router, self._clock, self._watch = router, clock, watch
        self._files = LoadedFiles()
        self._requests, self._restarts = OpenRequests(router, clock, watch), Restarts(policy.restarts)
        self.relays = self._requests.relays
        self.totals, self.calls = WorkerTotals(), Calls(inbox.wake, clock)
        self.ready: Future[messages.Ready] = Future()
        self.on_replaced: Callable[[messages.Ready], object] = lambda _: None
        self.loading: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self.ready.add_done_callback(lambda _: self.loading.put(None))
        self._worker: WorkerProcess | None = None
        self._sleep, self._away = Sleep(policy.sleep_idle_s), ServersAway(policy.rpc_wait_s)
        self._is_waking = self._is_wake_asked = False
        self._due_s: float | None = None  # when a turn has more to do than to take tokens; None: not known
        self._hang_watch = HangWatch(policy.hang_timeout_s)
        self._is_hung, self._num_hangs = False, 0  # whether the last worker hung; number of hangs
        self._reap_at: float | None = None  # of a worker that was killed and does not end
        self._pulse = Pulse(clock)
        self._since_s = clock.now()  # the last worker was started, or died
        self._start_at: float | None = clock.now()
        self._stop_by: float | None = None
        self._refusal: PacelineError | None = None
        self._start_thread()

    # ---- any thread

    @property
    def worker_pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        worker = self._worker
        return None if worker is None else worker.pid

    def forget_adapter(self, adapter: str) -> None:
        """Have later workers load an adapter no more."""
        self._adapters.pop(adapter, None)

    def wake(self) -> None:
        """Start a worker if the last one was stopped as idle, and count as use of it; waits for nothing."""
        self._is_wake_asked = True
        self._inbox.wake()

    def heartbeat(self) -> Heartbeat:
        """Return the state of this thread and of the worker's engine, or of the start of a worker. Waits for nothing."""
        own, worker, now = self._pulse.sign, self._worker, self._clock.now()
        past = WorkerHistory(
            worker_pid=None if worker is None else worker.pid,
            num_restarts=self._restarts.num_all,
            num_crashes=self._restarts.num_in_row(now, None if worker is None else worker.ready_s),
            num_hangs=self._num_hangs,
        )
        if not self._thread.is_alive():
            return heartbeat_of(Sign("ended", own.since_s), now, past)
        beat = None if worker is None or not worker.is_ready else worker.beat()
        if self._sleep.is_asleep and not self._is_wake_asked:
            return sleeping(now - self._since_s, past)
        is_hung = self._is_hung
        if is_hung or beat is None or beat.sign is None:
            start_at = self._start_at
            restart_in_s = None if start_at is None else max(0.0, start_at - now)
            return starting(now - self._since_s, past, restart_in_s, is_hung=is_hung)
        own_s = now - own.since_s if own.state == "ticking" else 0.0
        limit_s = self._policy.hang_timeout_s
        return heartbeat_of(
            beat.sign,
            now,
            past,
            silent_s=max(0.0, own_s, self._hang_watch.silent_s),
            longest_tick_s=max(LONGEST_TICK_S, self._hang_watch.allowed_s(beat) if math.isfinite(limit_s) else 0.0),
            longest_silence_s=max(LONGEST_SILENCE_S, limit_s if math.isfinite(limit_s) else 0.0),
        )

    def _interrupt(self) -> None:
        """Do nothing: this thread runs no pass, and takes commands at once."""

    # ---- the thread

    def _run(self) -> None:
        with ExitStack() as ends:  # all of them are called, the last one first, whatever others raise
            ends.callback(lambda: self.ended.set_result(self._gave_up))
            ends.callback(self._refuse_to_start, EngineStopped("the engine was shut down while it was starting"))
            ends.callback(self.calls.end)
            ends.callback(self._watch.close)
            ends.callback(self._router.close)
            ends.callback(self._dismiss)
            ends.callback(self._inbox.close)
            try:
                with Watching(self._inbox) as self._watching:
                    while not (self._inbox.is_closed and self._inbox.num_open == 0):
                        self._turn()
            except Exception as error:  # noqa: BLE001 - no other thread ends what is open
                _log.exception("the supervisor of an engine failed; its requests end with an error")
                self._gave_up = EngineStopped(f"the engine's supervisor failed: {error!r}")
                self._inbox.close_for(self._gave_up)

    def _turn(self) -> None:
        self._pulse.rest()
        if self._due_s is None:
            self._due_s = self._next_due_s()
        wait_s = self._due_s - self._clock.now()
        ready = self._watching.wait(None if wait_s == math.inf else max(0.0, wait_s))
        self._pulse.tick()
        worker = self._worker
        has_only_messages = worker is not None and ready == [worker.link] and not worker.link.is_backed_up
        if worker is not None and has_only_messages and self._clock.now() < self._due_s:
            # The usual turn while streams run. On a CPU its time is the passes', so it does no more than it must.
            if not self._receive(worker):
                self._due_s = -math.inf
            return
        self._turn_whole(ready)
        self._due_s = None

    def _turn_whole(self, ready: list[object]) -> None:
        """Do all that may be due."""
        self._note_use()
        if self._inbox in ready:
            self._inbox.calm()
        self._inbox.end_overdue_waits(self._clock.now())
        for command in self._inbox.take():
            self._do(command)
        worker = self._worker
        ticking_since_s = None if worker is None else self._ticking_since_s(worker)  # before its reports are taken
        if worker is not None and worker.last_words in ready:
            worker.last_words.read()
        if worker is not None and worker.link in ready:
            self._receive(worker)
        self._run_timers()
        self._requests.end_overdue(ticking_since_s)
        awake = None if self._sleep.is_asleep else self._worker
        if awake is not None and awake.is_ready and self._stop_by is None:
            self._requests.hand_over(awake)
        self.calls.pass_on(awake)
        if self._worker is not None:
            self._worker.link.flush()
            self._watching.refresh(self._worker)

    def _next_due_s(self) -> float:
        """Return the next deadline; infinite without a deadline."""
        times = [time for time in (self._start_at, self._stop_by, self._reap_at) if time is not None]
        times += [self._hang_watch.next_s(), self.calls.next_due_s()]
        if self._worker is None:  # else it may be loading, with its servers
            times.append(self._away.next_s())
        return min([*times, self._requests.next_deadline_s(), self._inbox.next_deadline_s(), self._sleep.next_s()])

    def _do(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._requests.add(request)
                if self._away.error is not None:
                    self._requests.end(request.key, FinishReason.ERROR, self._away.error)
            case Cancel():
                self._requests.cancel(self._worker, command)
            case SetPaused(key, is_paused):
                self._requests.set_paused(self._worker, key, is_paused=is_paused)
            case SetInterval(key, interval):
                self._requests.set_interval(self._worker, key, interval)
            case EndSlow(key):
                self._requests.end_slow(self._worker, key)
            case Drain():
                self._requests.drain(self._worker)
            case Stop():
                self._stop()
            case Ask():
                raise AssertionError("a worker is asked by calls")

    def _stop(self) -> None:
        self._inbox.close()
        if self._stop_by is not None:
            return
        self._stop_by = self._clock.now() + self._patience_s()
        self._start_at = None
        if self._worker is not None and self._worker.is_ready:
            self._worker.send(Stop())
        elif self._worker is not None:
            self._worker.kill()  # it is loading, and nothing ends that sooner

    def _patience_s(self) -> float:
        """Return the seconds that a worker has to end."""
        return _SILENT_PATIENCE_S if self._hang_watch.silent_s >= _SILENT_S else _STOP_PATIENCE_S

    # ---- messages of the worker

    def _receive(self, worker: WorkerProcess) -> bool:
        """Process the messages of a worker; return whether they only brought tokens of requests that go on."""
        has_only_tokens = True
        try:
            received = worker.link.receive()
            for data in received or ():
                if worker.makes_sense:  # else earlier messages are missing
                    message = messages.decode_up(data)
                    if isinstance(message, messages.Happened):
                        for event in message.events:
                            self._requests.take(event)
                            has_only_tokens = has_only_tokens and isinstance(event, Delta) and not event.is_last
                    else:
                        has_only_tokens = False
                        self._handle(worker, message)
        except EngineError as error:  # it is replaced, like one that has crashed
            worker.makes_sense = False
            self._refusal = error
            worker.kill()
            return False
        if received is None:
            self._reap(worker)
        return has_only_tokens and received is not None

    def _handle(self, worker: WorkerProcess, message: messages.Up) -> None:
        match message:
            case messages.Ready():
                self._become_ready(worker, message)
            case messages.Refused(_, error):
                self._refusal = error
                worker.kill()
            case messages.Stats(samples):
                self.totals.report(samples, self._clock.now())
            case Reply(error=error):
                call = self.calls.find(message)
                if error is None and call is not None and call.question is load_adapter:
                    self._note_adapter(message.number, call)
                self.calls.take(message)
            case messages.Logged(logger, level, text):
                logging.getLogger(logger).log(level, "%s", text)
            case messages.Loading(fraction):
                if not self.ready.done():  # the progress of later workers is read by no caller
                    self.loading.put(fraction)
            case messages.Traced(lines):
                self._watch.traced(lines)

    def _note_adapter(self, number: int, call: OpenCall) -> None:
        """Note an adapter that was loaded, before the caller knows, so that no later worker lacks it."""
        key, path = call.args
        if self.calls.is_open(number):
            self._adapters[key] = path
            self._files.add(Path(path), self._file_paths())
        else:  # its caller has given up
            self.calls.ask(free_adapter, (key,))

    def _become_ready(self, worker: WorkerProcess, message: messages.Ready) -> None:
        messages.check_protocol(message.protocol)
        if (changed := self._changed_model()) is not None:
            self._refuse_changed(worker, changed)
            return
        worker.ready_s = self._clock.now()
        self._is_hung = False
        self._away.back()
        self._sleep.used(worker.ready_s)
        if self.ready.done():
            self.on_replaced(message)
        if self._is_waking:
            self._is_waking = False
            _log.info("the engine's process runs again")
        elif self.ready.done():
            self._watch.restarted()
            _log.warning("a new process has taken the engine over")
        else:
            self.ready.set_result(message)

    # ---- death

    def _reap(self, worker: WorkerProcess) -> None:
        self._watching.remove(worker)
        self._worker = self._reap_at = None
        self._hang_watch.end()
        if not self._sleep.is_asleep:
            self._since_s = self._clock.now()
        death = worker.reap()
        self.totals.died()
        self.calls.died(EngineDied(str(death), death.signal, death.last_words))
        if self._sleep.is_asleep:
            self._sleep.left()
            return
        self._sleep.end()
        reason = self._refusal or death.lost_server or EngineDied(str(death), death.signal, death.last_words)
        self._refusal = None  # of this worker alone
        if isinstance(reason, RpcServerUnavailable):
            self._away.lost(self._clock.now(), reason)
        else:
            self._away.back()
        if self._policy.on_engine_death == "fail" and self._stop_by is None:
            self._requests.die_with(death)
        else:
            self._requests.survive(death)
        if self._stop_by is None:
            self._start_later(reason, worker.ready_s)

    def _give_up(self, stopped: EngineStopped) -> None:
        """End the engine and all its requests. stopped: the reason."""
        _log.error("%s", stopped)
        self._gave_up = stopped
        self._inbox.close_for(stopped)
        for command in self._inbox.take():
            self._do(command)
        self._requests.end_all(FinishReason.ERROR, stopped)

    # ---- hangs

    def _ticking_since_s(self, worker: WorkerProcess) -> float | None:
        """Return the beginning of the worker's present tick; None between ticks or without heartbeats."""
        beat = worker.beat() if worker.is_ready and self._hang_watch.silent_s < _SILENT_S else None
        is_ticking = beat is not None and beat.sign is not None and beat.sign.state == "ticking"
        return beat.sign.since_s if beat is not None and beat.sign is not None and is_ticking else None

    def _look_for_hang(self, worker: WorkerProcess, now_s: float) -> None:
        """Kill a worker without heartbeats. Its end is noticed like the end of any worker."""
        if self._reap_at is not None:
            if now_s >= self._reap_at:
                self._reap(worker)
            return
        if now_s < self._hang_watch.next_s():
            return
        preparing = worker.box.read_preparing()
        reason = self._hang_watch.look(now_s, worker.beat(), preparing, worker.is_excused, is_ready=worker.is_ready)
        if reason is None or self._stop_by is not None or self._sleep.is_asleep:
            return
        _log.error("the engine's process %d hangs: %s; it is killed", worker.pid, reason)
        self._is_hung = True
        self._num_hangs += 1
        self._since_s, self._reap_at = now_s, now_s + _KILL_S
        self._hang_watch.end()
        worker.kill_hung(reason, is_silent=self._hang_watch.silent_s >= self._policy.hang_timeout_s)

    # ---- sleep

    def _note_use(self) -> bool:
        """Return whether a worker is needed, which counts as use of it."""
        is_wanted = self._is_wake_asked or self._inbox.num_open > 0 or self.calls.need_worker
        if is_wanted and not self._sleep.is_asleep:
            self._is_wake_asked = False
            if self._worker is not None and self._worker.is_ready:
                self._sleep.used(self._clock.now())
        return is_wanted

    def _check_idle(self, now_s: float) -> None:
        """Stop an idle worker, and start one when it is needed again."""
        worker, is_wanted = self._worker, self._note_use()
        if self._sleep.is_asleep:
            if worker is not None and self._sleep.is_late(now_s):
                self._sleep.left()
                worker.kill()
            elif worker is None and is_wanted:
                self._is_waking, self._start_at = True, now_s
        elif worker is not None and worker.is_ready and not is_wanted and self._sleep.is_due(now_s):
            _log.info("no request has come for a while; the engine's process is let go until the next one")
            self._sleep.begin(now_s)
            self._restarts.left(now_s, worker.ready_s)
            self._since_s = now_s
            worker.send(report.call(0, ()))  # with the metrics since its last report
            worker.send(messages.Leave())

    # ---- timers

    def _run_timers(self) -> None:
        now = self._clock.now()
        if self._stop_by is None:
            self._check_idle(now)
        if self._start_at is not None and now >= self._start_at:
            self._start()
        if self._stop_by is not None:
            self._check_stop(now)
        self._requests.end_due()
        if self._worker is not None:
            self._look_for_hang(self._worker, now)
        if self._worker is None:
            self._refuse_without_servers(now)
        self.calls.end_overdue()

    def _refuse_without_servers(self, now_s: float) -> None:
        """End requests and questions after RPC servers have been away for too long."""
        error = self._away.give_up(now_s)
        if error is not None:
            self._requests.end_all(FinishReason.ERROR, error)
        if self._away.error is not None:
            self.calls.refuse(self._away.error)

    def _check_stop(self, now_s: float) -> None:
        """End the requests that no worker has, and kill a worker that takes too long."""
        if self._worker is None:
            self._requests.end_all(FinishReason.SHUTDOWN)
            return
        self._requests.end_held(FinishReason.SHUTDOWN)
        if now_s >= (self._stop_by or 0):
            self._stop_by = math.inf
            self._worker.kill()

    def _start(self) -> None:
        self._start_at, self._since_s = None, self._clock.now()
        is_first = not self.ready.done()
        if is_first:
            self._files.record(self._file_paths())
        elif (changed := self._changed_model()) is not None:
            self._give_up(changed)
            return
        self._sleep.end()
        try:
            worker = WorkerProcess(self._next_setup())
        except OSError as error:  # no more processes or descriptors
            self._start_later(EngineError(f"no process could be started: {error}"), None)
            return
        self._worker = worker
        self._watching.add(worker)
        self._hang_watch.begin(self._clock.now(), self._restarts.num_in_row(self._clock.now(), None))
        if is_first:
            self._files.read_contents()  # while the worker loads

    def _file_paths(self) -> list[Path]:
        """Return the files that the next worker would load."""
        return [*model_files(self._setup), *map(Path, tuple(self._adapters.values()))]

    def _changed_model(self) -> ModelChanged | None:
        """Return the error of a model with a file that was replaced since the first worker loaded it."""
        replaced = self._files.replaced(self._file_paths())
        if not replaced:
            return None
        names = " and ".join(map(str, replaced))
        return ModelChanged(f"{names} was replaced since the model was loaded; load the model again")

    def _refuse_changed(self, worker: WorkerProcess, changed: ModelChanged) -> None:
        """End a worker that may have loaded another model than the front has."""
        if self.ready.done():
            self._give_up(changed)
        else:
            self._refusal = changed
            worker.kill()

    def _next_setup(self) -> messages.Setup:
        if not self.ready.done():
            return self._setup
        num_restarts, options = 0 if self._is_waking else self._restarts.num_all, self._setup.options
        return msgspec.structs.replace(
            self._setup,
            options={name: value for name, value in options.items() if name != "lora"},
            num_restarts=num_restarts,
            reports_progress=self._setup.reports_progress and not num_restarts,
            adapters=dict(self._adapters),
        )

    def _start_later(self, reason: PacelineError, ready_s: float | None) -> None:
        """Back off after a crash, or end the engine. ready_s: when the crashed worker became ready; None if it never was."""
        self._is_waking = False
        if not self.ready.done():
            self._refuse_to_start(reason)
            return
        now = self._clock.now()
        self._start_at = self._restarts.crashed(now, ready_s)
        if self._start_at is None:
            self._give_up(
                EngineStopped(
                    f"the engine's process crashed once more after max_restarts={self._policy.restarts.max_restarts} "
                    "restarts in a row, and is not started again; make a new engine, or allow more; the last crash: "
                    f"{reason}"
                )
            )
            return
        num_crashes = self._restarts.num_in_row(now, None)
        _log.error("%s; crash %d in a row, restart in %.1f s", reason, num_crashes, self._start_at - now)

    def _refuse_to_start(self, reason: PacelineError) -> None:
        if not self.ready.done():
            self._inbox.close()
            self.ready.set_exception(reason)

    def _dismiss(self) -> None:
        """Stop the worker, in good order unless it takes too long."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.is_ready:
            worker.send(messages.Leave())
        else:
            worker.kill()
        worker.reap(self._patience_s())
        self.totals.died()
