"""A replica: one engine that runs the requests of several fronts. Each front gets the events of its own requests.

A front makes up an id for itself. It reads its events from `events`, and renews its session every few seconds. If it does not
renew for `LEASE_S`, it has died: its requests are cancelled and their slots are free.

Methods run on an event loop unless stated otherwise; events come from the engine's thread. Other machines get bytes: the messages
between a front and its worker, with ages in place of times.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from typing import Final, TypeVar, TypeVarTuple

import msgspec

from paceline.clock import Clock, MonotonicClock
from paceline.cluster.prefix_digest import BLOCK_TOKENS, DigestPublisher, DigestUpdate
from paceline.cluster.replica_calls import ReplicaEnded
from paceline.cluster.routing import LoadMeter, ReplicaLoad, ReplicaReport
from paceline.engine.backend import as_paceline_error
from paceline.engine.core import Cancel, RequestCommand
from paceline.engine.questions import FILE_REPLY_S, Call, Question, Reply, find_question
from paceline.engine.worker import messages
from paceline.engine.worker.worker_engine import WorkerEngine
from paceline.errors import EngineError, EngineStopped, WorkerUnresponsive
from paceline.observability import metric_table as table
from paceline.observability.metric_table import Histogram, Sample
from paceline.observability.tracing import RequestSpan
from paceline.scheduling.records import Delta, Embedded, Failed, Released, RequestEvent, event_elsewhere
from paceline.streaming.chunk import FinishReason

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

LEASE_S: Final = 10.0
"""A front that does not renew its session for so long has died."""

STREAM_FRAMES: Final = 20_000
"""After so many frames a stream of events ends and the front reads anew: the carrier may keep a record of each frame."""

MAX_EARLY_CANCELS: Final = 4096
"""A session remembers so many cancelled requests that have not come, or have ended."""

MAX_UPDATES: Final = 8
"""A report repeats so many digest updates, for routers that missed reports."""

SNAPSHOT_EVERY: Final = 16
"""A report in so many has a whole digest, for routers that are new or missed more."""

_SNAPSHOT_REPEATS: Final = 2


def _of_replica(answer: Callable[[WorkerEngine, *Ts], R]) -> Question[R, *Ts]:
    return Question(answer, "replica", None, FILE_REPLY_S, "give up")


@_of_replica
def metrics(engine: WorkerEngine) -> list[Sample]:
    """Return all metrics."""
    return list(engine.stats())


@_of_replica
def change_adapter(engine: WorkerEngine, name: str, path: str | None) -> None:
    """Load an adapter from a file of this machine, or unload it if path is None."""
    if path is None:
        engine.unload_lora(name)
    else:
        engine.load_lora(name, path, in_place=True)


class _Session:
    """A front's session. The events of its requests wait here for it; any thread may put some."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.number = number
        self.is_over = False
        self._loop = loop
        self._lock = threading.Lock()
        self._events: list[RequestEvent] = []
        self._has_events = asyncio.Event()
        self._reader = 0
        self.keys: dict[int, int] = {}  # of its open requests: the front's key and the engine's
        self.cancelled: deque[int] = deque(maxlen=MAX_EARLY_CANCELS)  # keys of requests that are not here
        self.renewed_s = clock.now()

    def put(self, event: RequestEvent) -> None:
        """Add an event. Never raises: it is called on the engine's thread."""
        with self._lock:
            self._events.append(event)
            is_first = len(self._events) == 1
        if is_first:
            with suppress(RuntimeError):  # the loop has ended, and this process ends
                self._loop.call_soon_threadsafe(self._has_events.set)

    def end(self) -> None:
        """End the reader, if there is one. On the loop."""
        self.is_over = True
        self._has_events.set()

    def new_reader(self) -> int:
        """Return the number of a new reader; the reader before gets nothing any more."""
        self._reader += 1
        self._has_events.set()
        return self._reader

    async def take(self, reader: int) -> list[RequestEvent] | None:
        """Wait for events, and return them; None if the session is over or has another reader."""
        while True:
            await self._has_events.wait()
            if self.is_over or reader != self._reader:
                return None
            with self._lock:
                events, self._events = self._events, []
                self._has_events.clear()
            if events:
                return events


class _Trace:
    """The span of a request on a replica, a child of its front's. Events may come on the engine's thread."""

    def __init__(self, traceparent: str | None, replica_id: str) -> None:
        headers = {} if traceparent is None else {"traceparent": traceparent}
        self._span, self._replica_id = RequestSpan("replica", headers, is_on=traceparent is not None), replica_id

    def noted(self, event: RequestEvent) -> RequestEvent:
        """Return an event; the last one ends the span."""
        name, attributes = f"replica {self._replica_id}", {"paceline.replica.id": self._replica_id}
        if isinstance(event, Delta) and event.is_last and event.chunk is not None:
            reasons = (str(event.chunk.finish_reason),)
            self._span.end(name, {**attributes, "gen_ai.response.finish_reasons": reasons})
        elif isinstance(event, Failed):
            self._span.end(name, attributes, error=event.error.code)
        return event


class ReplicaService:
    """The methods of a replica that fronts call.

    Args:
        engine: The engine.
        replica_id: Its name.
        max_digest_bytes: The most bytes of a digest update.
        clock: For tests.
        wall_s: For tests: returns Unix seconds.
    """

    def __init__(
        self,
        engine: WorkerEngine,
        replica_id: str,
        *,
        max_digest_bytes: int = 16 * 1024,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._engine, self._replica_id = engine, replica_id
        self._clock = MonotonicClock() if clock is None else clock
        self._wall_s = wall_s
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[str, _Session] = {}
        self._num_sessions = 0
        self._loading = asyncio.Lock()
        self._has_ended = False  # the engine: its requests continue on other replicas
        self._reports = _Reports(engine, max_digest_bytes)
        self._loop.call_later(LEASE_S / 2, self._look_at_sessions)

    def _look_at_sessions(self) -> None:
        """End the sessions of dead fronts, also while no call comes."""
        self.end_old_sessions()
        self._loop.call_later(LEASE_S / 2, self._look_at_sessions)

    # ---- requests

    async def submit(self, front: str, request: bytes, adapters: dict[str, str]) -> tuple[str, int]:
        """Begin a request. An error of the request comes as its last event.

        Args:
            front: The front's id.
            request: An `EngineRequest`.
            adapters: The files of its adapters by name, which are loaded if they are missing.

        Returns:
            The ids of this replica and of the session.

        Raises:
            ReplicaEnded: The engine has ended.
        """
        self._check_engine()
        message = messages.decode_down(request)
        if not isinstance(message, messages.EngineRequest):
            raise EngineError(f"a {type(message).__name__} is no request")
        session, key = self._session(front), message.key
        aged = message.moved_in_time(self._clock.now())
        try:
            if adapters:  # loaded to the end, also if this call is cancelled: the next call has to see the loaded ones
                await asyncio.shield(self._loop.create_task(self._load_missing(adapters)))
            # A request that was cancelled by now does not begin, nor a request of a session that is over and has no reader: its
            # front sees by the session's number that it has to send the request again.
            if not session.is_over and key not in session.cancelled:
                trace = _Trace(message.options.get("traceparent"), self._replica_id)
                session.keys[key] = self._engine.relay(aged, lambda event: self._take(session, key, trace.noted(event)))
        except EngineStopped as stopped:
            raise ReplicaEnded(str(stopped), self._replica_id) from None
        except Exception as error:  # noqa: BLE001 - the front gets it
            session.put(Failed(key, as_paceline_error(error)))
        return self._replica_id, session.number

    async def _load_missing(self, adapters: Mapping[str, str]) -> None:
        async with self._loading:
            known = set(self._engine.describe().adapters)
            for name in adapters.keys() - known:
                await asyncio.to_thread(self._engine.load_lora, name, adapters[name])

    def _take(self, session: _Session, key: int, event: RequestEvent) -> None:
        """Pass an event on, unless it ends a request because the engine ends. On the engine's thread."""
        if not self._has_ended and _is_for_shutdown(event):
            self._has_ended = True
            with suppress(RuntimeError):  # the loop has ended, and this process ends
                self._loop.call_soon_threadsafe(self._end_readers)
        if not self._has_ended:
            session.put(event_elsewhere(event, key, -self._clock.now()))

    def _end_readers(self) -> None:
        for session in self._sessions.values():
            session.end()

    async def command(self, front: str, commands: list[bytes]) -> None:
        """Do commands for requests of a front; commands for requests that have ended do nothing."""
        session = self._session(front)
        for data in commands:
            command = messages.decode_down(data)
            if not isinstance(command, RequestCommand):
                raise EngineError(f"a {type(command).__name__} is no command for a request")
            ours = session.keys.get(command.key)
            if ours is not None:
                self._engine.command(msgspec.structs.replace(command, key=ours))
            elif isinstance(command, Cancel):
                session.cancelled.append(command.key)

    async def events(self, front: str) -> AsyncIterator[bytes]:
        """Yield the events of a front's requests as they come, several in a frame; end after `STREAM_FRAMES`.

        A front has one reader: a second call ends the first. Raises `ReplicaEnded`.
        """
        self._check_engine()
        session = self._session(front)
        reader = session.new_reader()
        for _ in range(STREAM_FRAMES):
            events = await session.take(reader)
            if events is None:
                self._check_engine()
                return
            for event in events:
                if isinstance(event, (Released, Failed, Embedded)):
                    session.keys.pop(event.key, None)
            yield messages.encode(messages.Happened(events))

    async def renew(self, front: str) -> int:
        """Keep a front's session alive. Returns the session's number, which is new after the old session ended.

        Raises `ReplicaEnded`.
        """
        self._check_engine()
        session = self._session(front)
        self.end_old_sessions()
        return session.number

    async def leave(self, front: str) -> None:
        """End a front's session, and cancel its open requests."""
        self._end_session(front)

    def end_old_sessions(self) -> None:
        """Cancel the requests of fronts that have died."""
        limit_s = self._clock.now() - LEASE_S
        for front in [name for name, session in self._sessions.items() if session.renewed_s < limit_s]:
            self._end_session(front)

    def _session(self, front: str) -> _Session:
        session = self._sessions.get(front)
        if session is None:
            self._num_sessions += 1
            session = self._sessions[front] = _Session(self._num_sessions, self._loop, self._clock)
        session.renewed_s = self._clock.now()
        return session

    def _end_session(self, front: str) -> None:
        session = self._sessions.pop(front, None)
        if session is not None:
            session.end()
            for key in session.keys.values():
                self._engine.command(Cancel(key))

    def _check_engine(self) -> None:
        if self._has_ended or self._engine.heartbeat().state == "ended":
            raise ReplicaEnded(f"the engine of replica {self._replica_id} has ended", self._replica_id)

    @property
    def num_open(self) -> int:
        """Number of open requests of all fronts."""
        return sum(len(session.keys) for session in self._sessions.values())

    # ---- state

    async def describe(self) -> bytes:
        """Return the description of the model and its limits, as a worker sends it to its front."""
        return messages.encode(self._engine.describe())

    async def ask(self, call: bytes) -> bytes:
        """Return the `Reply` to a `Call`, also if that is an error. Raises `ReplicaEnded`."""
        self._check_engine()
        message = messages.decode_down(call)
        assert isinstance(message, Call)  # noqa: S101 - of the same version
        try:
            question = find_question(message)
            args = question.args(message)
            if question.place == "replica":
                answer = await asyncio.to_thread(question.answer, self._engine, *args)
            else:
                answer = await asyncio.wrap_future(self._engine.ask(question, *args))
            reply = question.reply(message.number, answer)
        except EngineStopped as stopped:
            raise ReplicaEnded(str(stopped), self._replica_id) from None
        except Exception as error:  # noqa: BLE001 - the front gets it
            reply = Reply(message.number, None, as_paceline_error(error))
        return messages.encode(reply)

    # ---- health and routing

    async def check_health(self) -> None:
        """Raise `EngineStopped` if the engine has ended or hangs; a worker that is being started is fine."""
        self.end_old_sessions()
        heartbeat = self._engine.heartbeat()
        if not heartbeat.is_alive:
            raise EngineStopped(
                f"the engine of replica {self._replica_id} is {heartbeat.state} for {heartbeat.state_s:.0f} s"
            )

    async def routing_stats(self) -> ReplicaReport:
        """Return the next report for routers. Waits for the current tick if the engine runs."""
        heartbeat = self._engine.heartbeat()
        is_ready = heartbeat.is_alive and heartbeat.state in ("idle", "ticking", "sleeping") and not self._has_ended
        if is_ready:
            with suppress(EngineStopped, WorkerUnresponsive):  # it ended just now, or hangs
                return await asyncio.to_thread(self._reports.make, self._wall_s())
        return self._reports.unhealthy(self._wall_s())

    async def scaling_stats(self) -> dict[str, float]:
        """Return the numbers for `LatencyPolicy`, since the last call."""
        return await asyncio.to_thread(self._reports.pressure)

    async def aclose(self) -> None:
        """End the engine; open requests end with SHUTDOWN."""
        await asyncio.to_thread(self._engine.close)


class _Reports:
    """Makes the reports, one at a time, on threads: reading an engine waits for its tick."""

    def __init__(self, engine: WorkerEngine, max_bytes: int) -> None:
        self._engine, self._max_bytes = engine, max_bytes
        self._meter = LoadMeter(engine.limits.num_cells)
        self._meter_of_pressure = LoadMeter(engine.limits.num_cells)
        self._seen_queue: Histogram | None = None
        self._seen_itl: Histogram | None = None
        self._epoch = secrets.randbits(48)
        self._publisher = DigestPublisher(self._epoch, max_bytes)
        self._pressure = {"queue_s": 0.0, "itl_s": 0.0, "busy": 0.0}
        self._num_restarts = 0
        self._updates: list[DigestUpdate] = []
        self._num_made = 0
        self._load = ReplicaLoad(num_slots=max(1, engine.limits.num_slots), free_cells=engine.limits.num_cells)
        self._lock = threading.Lock()

    def unhealthy(self, now: float) -> ReplicaReport:
        """Return a report of an unhealthy replica, with the last load. Waits for nothing."""
        return ReplicaReport(state="unhealthy", load=self._load, made_at=now)

    def make(self, now: float) -> ReplicaReport:
        """Return the next report. Raises `EngineStopped`."""
        with self._lock:
            self._begin_life(self._engine.heartbeat().num_restarts)
            digest = self._engine.prefix_digest(self._publisher.max_prefixes, block_tokens=BLOCK_TOKENS).result()
            self._load = self._meter.read(self._engine.stats(), self._engine.slots())
            self._add(self._publisher.publish(digest))
            self._num_made += 1
            return ReplicaReport(state="ready", load=self._load, updates=tuple(self._updates), made_at=now)

    def pressure(self) -> dict[str, float]:
        """Return mean waiting time, mean inter-token latency and the share of slots in use; the last ones if the worker hangs."""
        try:
            stats, slots = self._engine.stats(), self._engine.slots()
        except WorkerUnresponsive:
            return self._pressure
        with self._lock:
            queue, itl = stats.histogram(table.QUEUE_S.name), stats.histogram(table.ITL_S.name)
            queue_s = _mean_since(self._seen_queue, queue)
            itl_s = _mean_since(self._seen_itl, itl)
            self._seen_queue, self._seen_itl = queue, itl
        load = self._meter_of_pressure.read(stats, slots)
        expected_s = load.num_waiting * load.slot_s / load.num_slots  # of requests that still wait
        busy = load.num_running / load.num_slots
        self._pressure = {"queue_s": max(queue_s, expected_s), "itl_s": itl_s, "busy": busy}
        return self._pressure

    def _begin_life(self, num_restarts: int) -> None:
        """Begin a new digest if there is another worker: nothing is cached there."""
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._epoch += 1
            self._publisher, self._updates = DigestPublisher(self._epoch, self._max_bytes), []

    def _add(self, update: DigestUpdate) -> None:
        """Add an update to the next reports, or put a snapshot in place of all updates."""
        if not self._updates or self._updates[-1].version != update.version:
            self._updates.append(update)
        is_due = self._num_made % SNAPSHOT_EVERY == 0
        num_bytes = sum(len(update.added) + len(update.removed) for update in self._updates)
        if is_due or update.is_snapshot or num_bytes > self._max_bytes:
            self._updates = [self._publisher.snapshot()]
        elif len(self._updates) > (_SNAPSHOT_REPEATS if self._updates[0].is_snapshot else MAX_UPDATES):
            del self._updates[0]


def _is_for_shutdown(event: RequestEvent) -> bool:
    """Return whether an event ends a request only because its engine ends."""
    match event:
        case Delta(chunk=chunk) if chunk is not None:
            return chunk.finish_reason is FinishReason.SHUTDOWN or isinstance(chunk.error, EngineStopped)
        case Failed(error=error) | Embedded(error=error):
            return isinstance(error, EngineStopped)
    return False


def _mean_since(before: Histogram | None, now: Histogram) -> float:
    """Return the mean of the values since an earlier reading; 0 if there are none."""
    count = now.count - (0 if before is None else before.count)
    return max(0.0, now.sum - (0.0 if before is None else before.sum)) / count if count > 0 else 0.0
