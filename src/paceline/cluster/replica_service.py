"""A replica's side: requests of several fronts run in one engine, and each front gets the parts of its own.

A front is known by an id that it made up. It reads its parts from `events`, and renews its session every few seconds: one that
stays away for `LEASE_S` has died, and its requests are cancelled, so that their slots are free.

Methods run on an event loop, unless noted otherwise; parts come from the engine's supervising thread. What passes to other
machines is bytes: messages as between a front and its worker, with times as ages.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Protocol

import msgspec

from paceline.clock import Clock, MonotonicClock
from paceline.cluster.prefix_digest import BLOCK_TOKENS, DigestPublisher, DigestUpdate
from paceline.cluster.replica_calls import ReplicaEnded
from paceline.cluster.routing import LoadMeter, ReplicaLoad, ReplicaReport
from paceline.engine.backend import as_paceline_error
from paceline.engine.core import Cancel, RequestCommand
from paceline.engine.questions import Call, Reply, find_question
from paceline.engine.worker import messages
from paceline.engine.worker.open_requests import TakeEvent
from paceline.errors import EngineError, EngineStopped, WorkerUnresponsive
from paceline.observability import metric_table as table
from paceline.observability.heartbeat import Heartbeat
from paceline.observability.metrics_snapshot import Histogram, MetricsSnapshot
from paceline.scheduling.records import Delta, Embedded, Failed, Released, RequestEvent, SlotsSnapshot, event_elsewhere
from paceline.streaming.chunk import FinishReason

LEASE_S: Final = 10.0
"""A front that does not renew its session for so long has died."""

STREAM_FRAMES: Final = 20_000
"""After so many frames a front reads its events anew: what carries them may keep books of each."""

MAX_EARLY_CANCELS: Final = 4096
"""Cancelled requests that have not come, or have ended, which a session remembers."""

MAX_UPDATES: Final = 8
"""Digest updates that a report repeats, for routers that have missed some."""

SNAPSHOT_EVERY: Final = 16
"""Reports from one whole digest to the next, for routers that are new or have missed more."""


_SNAPSHOT_REPEATS = 2


class RelayEngine(Protocol):
    """What a replica needs of its engine: a `WorkerEngine`."""

    @property
    def limits(self) -> Any: ...  # noqa: D102
    def relay(self, message: messages.EngineRequest, take: TakeEvent) -> int: ...  # noqa: D102
    def command(self, command: RequestCommand) -> None: ...  # noqa: D102
    def describe(self) -> messages.Ready: ...  # noqa: D102
    def ask(self, question: Any, *args: Any) -> Future[Any]: ...  # noqa: D102
    def load_lora(self, name: str, path: str, *, in_place: bool = False) -> None: ...  # noqa: D102
    def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None: ...  # noqa: D102
    def stats(self) -> MetricsSnapshot: ...  # noqa: D102
    def slots(self) -> SlotsSnapshot: ...  # noqa: D102
    def prefix_digest(self, max_prefixes: int = 1024, *, block_tokens: int | None = None) -> Any: ...  # noqa: D102
    def heartbeat(self) -> Heartbeat: ...  # noqa: D102
    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None: ...  # noqa: D102


class _Session:
    """A front, as long as it renews. Parts of its requests wait here for it; any thread may put some."""

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self.number = number
        self.is_over = False
        self._loop = loop
        self._lock = threading.Lock()
        self._parts: list[RequestEvent] = []
        self._has_parts = asyncio.Event()
        self._reader = 0
        self.keys: dict[int, int] = {}  # of this front's requests: its key and ours
        self.cancelled: deque[int] = deque(maxlen=MAX_EARLY_CANCELS)  # keys of requests that are not here
        self.renewed_s = clock.now()

    def put(self, part: RequestEvent) -> None:
        """Add a part; wake the reader where it was the first. Never raises: it is called on the engine's thread."""
        with self._lock:
            self._parts.append(part)
            is_first = len(self._parts) == 1
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._has_parts.set)
            except RuntimeError:
                return  # the loop has ended, and with it this process

    def end(self) -> None:
        """End the reader, if there is one. On the loop."""
        self.is_over = True
        self._has_parts.set()

    def new_reader(self) -> int:
        """Return the number of a new reader; the one before gets nothing any more."""
        self._reader += 1
        self._has_parts.set()
        return self._reader

    async def take(self, reader: int) -> list[RequestEvent] | None:
        """Wait for parts, and return them; None where the session is over, or has another reader."""
        while True:
            await self._has_parts.wait()
            if self.is_over or reader != self._reader:
                return None
            with self._lock:
                parts, self._parts = self._parts, []
                self._has_parts.clear()
            if parts:
                return parts


class ReplicaService:
    """The service. replica_id: what routers call it; max_digest_bytes: see `DigestPublisher`."""

    def __init__(
        self,
        engine: RelayEngine,
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
        self._has_ended = False  # the engine, so that what it has ended goes on elsewhere
        self._reports = _Reports(engine, max_digest_bytes)
        self._loop.call_later(LEASE_S / 2, self._look_at_sessions)

    def _look_at_sessions(self) -> None:
        """End the sessions of fronts that have died, also while no call comes."""
        self.end_old_sessions()
        self._loop.call_later(LEASE_S / 2, self._look_at_sessions)

    # ---- requests

    async def submit(self, front: str, request: bytes, adapters: dict[str, str]) -> tuple[str, int]:
        """Begin a request; what is wrong with it comes as its last part. Returns the ids of this replica and of the session.

        adapters: files of adapters that it uses, which are loaded where they are not there. Raises `ReplicaEnded`.
        """
        self._check_engine()
        message = messages.decode_down(request)
        if not isinstance(message, messages.EngineRequest):
            raise EngineError(f"a {type(message).__name__} is no request")
        session, key = self._session(front), message.key
        aged = message.moved_in_time(self._clock.now())
        try:
            await self._load_missing(adapters)
            # One that was cancelled, before it came or meanwhile, does not begin; nor one of a session that is over, which no
            # front reads: it sees by the number that the request has to be sent again.
            if not session.is_over and key not in session.cancelled:
                session.keys[key] = self._engine.relay(aged, lambda part: self._take(session, key, part))
        except EngineStopped as stopped:
            raise self._ended(str(stopped)) from None
        except Exception as error:  # noqa: BLE001 - the front is to know
            session.put(Failed(key, as_paceline_error(error)))
        return self._replica_id, session.number

    async def _load_missing(self, adapters: Mapping[str, str]) -> None:
        """Load the adapters that are not there, one request at a time. Raises as `load_lora`."""
        if adapters:  # to the end, also where this call is cancelled: the next one has to see what is loaded
            await asyncio.shield(self._loop.create_task(self._load_in_turn(adapters)))

    async def _load_in_turn(self, adapters: Mapping[str, str]) -> None:
        async with self._loading:
            known = set(self._engine.describe().adapters)
            for name in adapters.keys() - known:
                await asyncio.to_thread(self._engine.load_lora, name, adapters[name])

    def _take(self, session: _Session, key: int, part: RequestEvent) -> None:
        """Pass a part on, unless it is there because the engine ends: no request has to end for that. On the engine's thread."""
        if not self._has_ended and _is_for_shutdown(part):
            self._has_ended = True
            with suppress(RuntimeError):  # the loop has ended, and with it this process
                self._loop.call_soon_threadsafe(self._end_readers)
        if not self._has_ended:
            session.put(event_elsewhere(part, key, -self._clock.now()))

    def _end_readers(self) -> None:
        for session in self._sessions.values():
            session.end()

    async def command(self, front: str, commands: list[bytes]) -> None:
        """Pass on commands for requests of a front; those that have ended are not there any more."""
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
        """Yield the parts of a front's requests as they come, many at once, and end after `STREAM_FRAMES`.

        A front reads its events once at a time: a second call ends the first. Raises `ReplicaEnded`.
        """
        self._check_engine()
        session = self._session(front)
        reader = session.new_reader()
        for _ in range(STREAM_FRAMES):
            parts = await session.take(reader)
            if parts is None:
                self._check_engine()
                return
            for part in parts:
                if isinstance(part, (Released, Failed, Embedded)):
                    session.keys.pop(part.key, None)
            yield messages.encode(messages.Happened(parts))

    async def renew(self, front: str) -> int:
        """Keep a front's session, and end those of fronts that have died. Returns its number: another one for a new session.

        Raises `ReplicaEnded`.
        """
        self._check_engine()
        session = self._session(front)
        self.end_old_sessions()
        return session.number

    async def leave(self, front: str) -> None:
        """End a front's session, and cancel what it has left."""
        self._end_session(front)

    def end_old_sessions(self) -> None:
        """Cancel the requests of fronts that have died."""
        limit_s = self._clock.now() - LEASE_S
        for front in [name for name, one in self._sessions.items() if one.renewed_s < limit_s]:
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
        heartbeat = self._engine.heartbeat()
        if self._has_ended or heartbeat.state == "ended":
            raise self._ended(f"the engine of replica {self._replica_id} has ended")

    def _ended(self, why: str) -> ReplicaEnded:
        return ReplicaEnded(why, self._replica_id)

    @property
    def num_open(self) -> int:
        """Number of requests of all fronts."""
        return sum(len(one.keys) for one in self._sessions.values())

    # ---- state

    async def describe(self) -> bytes:
        """Return what a front has to know of the model and its limits."""
        return messages.encode(self._engine.describe())

    async def stats(self) -> bytes:
        """Return all metrics."""
        snapshot = await asyncio.to_thread(self._engine.stats)
        return messages.encode(messages.Stats(list(snapshot)))

    async def heartbeat(self) -> bytes:
        """Return the engine's heartbeat."""
        return msgspec.msgpack.encode(self._engine.heartbeat())

    async def ask(self, call: bytes) -> bytes:
        """Return the reply to a `Call`, in which an error is too. Raises `ReplicaEnded`."""
        self._check_engine()
        message = messages.decode_down(call)
        assert isinstance(message, Call)  # noqa: S101 - of the same version
        try:
            question = find_question(message)
            answer = await asyncio.wrap_future(self._engine.ask(question, *question.args(message)))
            reply = question.reply(message.number, answer)
        except EngineStopped as stopped:
            raise self._ended(str(stopped)) from None
        except Exception as error:  # noqa: BLE001 - the front is to know
            reply = Reply(message.number, None, as_paceline_error(error))
        return messages.encode(reply)

    async def load_lora(self, name: str, path: str, in_place: bool) -> bytes:
        """Load an adapter from a file of this machine; an error is in the reply."""
        return await self._change_adapters(lambda: self._engine.load_lora(name, path, in_place=in_place))

    async def unload_lora(self, name: str) -> bytes:
        """Unload an adapter, as soon as no open request uses it; an error is in the reply."""
        return await self._change_adapters(lambda: self._engine.unload_lora(name))

    async def _change_adapters(self, change: Callable[[], None]) -> bytes:
        failure = None
        try:
            await asyncio.to_thread(change)
        except Exception as error:  # noqa: BLE001 - the front is to know
            failure = as_paceline_error(error)
        return messages.encode(Reply(0, None, failure))

    # ---- health and routing

    async def check_health(self) -> None:
        """Raise `EngineStopped` where the engine has ended or hangs; a worker that is being started is fine."""
        self.end_old_sessions()
        heartbeat = self._engine.heartbeat()
        if not heartbeat.is_alive:
            raise EngineStopped(
                f"the engine of replica {self._replica_id} is {heartbeat.state} for {heartbeat.state_s:.0f} s"
            )

    async def routing_stats(self) -> ReplicaReport:
        """Return the next report for routers. Waits for the current tick, unless the engine ticks no more."""
        heartbeat = self._engine.heartbeat()
        is_ready = heartbeat.is_alive and heartbeat.state in ("idle", "ticking", "sleeping") and not self._has_ended
        if is_ready:
            with suppress(EngineStopped, WorkerUnresponsive):  # it ended just now, or hangs
                return await asyncio.to_thread(self._reports.make, self._wall_s())
        return self._reports.unhealthy(self._wall_s())

    async def scaling_stats(self) -> dict[str, float]:
        """Return what the number of replicas depends on, since the last call; see `LatencyPolicy`."""
        return await asyncio.to_thread(self._reports.pressure)

    async def aclose(self) -> None:
        """End the engine; what is still open ends with SHUTDOWN."""
        await asyncio.to_thread(self._engine.close)


class _Reports:
    """Makes the reports, one after the other: in a thread, as reading an engine waits for its tick."""

    def __init__(self, engine: RelayEngine, max_bytes: int) -> None:
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
        """Return a report that says so, with the load of the last one. Waits for nothing."""
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
        """Return mean waiting time, mean inter-token latency and the part of slots in use.

        While the worker does not respond, the last ones are returned.
        """
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
        expected_s = load.num_waiting * load.slot_s / load.num_slots  # of those that wait still
        busy = load.num_running / load.num_slots
        self._pressure = {"queue_s": max(queue_s, expected_s), "itl_s": itl_s, "busy": busy}
        return self._pressure

    def _begin_life(self, num_restarts: int) -> None:
        """Begin a digest anew where another worker has taken over: nothing is cached there."""
        if num_restarts != self._num_restarts:
            self._num_restarts = num_restarts
            self._epoch += 1
            self._publisher, self._updates = DigestPublisher(self._epoch, self._max_bytes), []

    def _add(self, update: DigestUpdate) -> None:
        """Keep an update for the next reports: within the bytes, behind a snapshot where one is due."""
        if not self._updates or self._updates[-1].version != update.version:
            self._updates.append(update)
        is_due = self._num_made % SNAPSHOT_EVERY == 0
        if is_due or update.is_snapshot or _num_bytes(self._updates) > self._max_bytes:
            self._updates = [self._publisher.snapshot()]
        elif len(self._updates) > (_SNAPSHOT_REPEATS if self._updates[0].is_snapshot else MAX_UPDATES):
            del self._updates[0]


def _is_for_shutdown(part: RequestEvent) -> bool:
    """Whether a part ends a request for no other reason than that its engine ends."""
    match part:
        case Delta(chunk=chunk) if chunk is not None:
            return chunk.finish_reason is FinishReason.SHUTDOWN or isinstance(chunk.error, EngineStopped)
        case Failed(error=error) | Embedded(error=error):
            return isinstance(error, EngineStopped)
    return False


def _mean_since(before: Histogram | None, now: Histogram) -> float:
    """Return the mean of the values that came after another reading; 0 where none came."""
    count = now.count - (0 if before is None else before.count)
    return max(0.0, now.sum - (0.0 if before is None else before.sum)) / count if count > 0 else 0.0


def _num_bytes(updates: list[DigestUpdate]) -> int:
    return sum(len(one.added) + len(one.removed) for one in updates)
