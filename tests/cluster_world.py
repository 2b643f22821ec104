"""Replicas in memory for tests of an engine over them: engines on the fake backend, each with its thread, and no process.

The test decides when a replica dies, is drained, hangs or exists, and its passes wait for the test if it wants that.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import msgspec

from paceline.clock import MonotonicClock
from paceline.cluster import PromptBlocks
from paceline.cluster.cluster_engine import ClusterEngine
from paceline.cluster.replica_calls import ReplicaGone
from paceline.cluster.replica_service import ReplicaService
from paceline.engine import questions
from paceline.engine.backend import Executor
from paceline.engine.core import Engine, RequestCommand
from paceline.engine.engine_thread import Runner
from paceline.engine.inbox import Inbox
from paceline.engine.questions import Reply
from paceline.engine.worker import messages
from paceline.engine.worker.black_box import BlackBox
from paceline.engine.worker.open_requests import TakeEvent
from paceline.engine.worker.worker_requests import RequestPreparer, SocketSink
from paceline.observability.heartbeat import Heartbeat, Pulse
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Instruments, Metrics
from paceline.scheduling.records import RequestEvent, SlotsSnapshot
from paceline.scheduling.scheduler import Scheduler
from paceline.scheduling.strategies import resolve_strategy
from paceline.testing.fake_backend import FakeBackend, limits_of
from paceline.testing.fake_engine_client import FakeFrontModel

PATIENCE_S = 20.0  # for threads to get where they are going


class MemoryReplica:
    """The engine of a replica: a worker process's parts on a thread of this process. `passes`: replicas that may compute."""

    def __init__(self, **backend_options: Any) -> None:
        self._takers: dict[int, TakeEvent] = {}
        self._keys = itertools.count(1)
        self._gate = threading.Condition()
        self._allowed: float = float("inf")
        self.num_passes = 0
        self.pass_s = 0.0  # what a pass takes at least
        clock = MonotonicClock()
        backend: Any = FakeBackend(fail=self._pass, **{"eos_every": 10**9, **backend_options})
        self.limits = limits_of(backend, backend_options.get("num_seq_ids", 8))
        self._inbox = Inbox(2**62)
        self._metrics = Metrics(self.limits.num_slots)
        scheduler = Scheduler(self.limits, resolve_strategy("paced"), clock, Instruments(own=self._metrics))
        scheduler.reports_held_back = True
        self._sink = SocketSink(self, self._inbox, backend, lambda: None)  # type: ignore[arg-type]
        self._box = BlackBox.create()
        self._preparer = RequestPreparer(self._inbox, self._sink, backend, self._box)
        engine = Engine(self._inbox, scheduler, Executor(backend, clock))
        self._runner = Runner(engine, self._inbox, self._sink, Pulse(clock), backend.abort, (backend.close,))
        self.adapters: list[str] = []
        self._asked: dict[int, tuple[Any, Future[Any]]] = {}
        self.requests: list[messages.EngineRequest] = []
        self.events: list[RequestEvent] = []  # that were sent to the front

    # ---- passes

    def hold(self) -> None:
        """Compute no pass from now on."""
        with self._gate:
            self._allowed = self.num_passes

    def allow(self, num_passes: float = float("inf")) -> None:
        """Compute so many more passes."""
        with self._gate:
            self._allowed = self.num_passes + num_passes
            self._gate.notify_all()

    def _pass(self, _number: int, _rows: Any) -> None:
        with self._gate:
            self._gate.wait_for(lambda: self.num_passes < self._allowed)
            self.num_passes += 1
        time.sleep(self.pass_s)

    # ---- a link of the sink

    def send(self, *sent: bytes) -> None:
        for message in map(messages.decode_up, sent):
            if isinstance(message, Reply):
                question, found = self._asked.pop(message.number)
                found.set_result(question.result(message))
            for event in message.events if isinstance(message, messages.Happened) else ():
                self.events.append(event)
                self._takers[event.key](event)

    # ---- see `WorkerEngine`

    def relay(self, message: messages.EngineRequest, take: TakeEvent) -> int:
        key = next(self._keys)
        self.requests.append(message)
        self._takers[key] = take
        decoded = messages.decode_down(messages.encode(msgspec.structs.replace(message, key=key)))
        assert isinstance(decoded, messages.EngineRequest)
        self._preparer.expect(key)
        self._preparer.prepare(decoded)
        return key

    def command(self, command: RequestCommand) -> None:
        self._preparer.pass_on(command)

    def describe(self) -> messages.Ready:
        return messages.Ready(messages.PROTOCOL, asdict(self.limits), {}, self.adapters)

    def ask(self, question: Any, *args: Any) -> Future[Any]:
        found: Future[Any] = Future()
        call = question.call(next(self._keys), args)
        self._asked[call.number] = question, found
        self._sink.answer(call, 0.0)
        return found

    def load_lora(self, name: str, path: str, *, in_place: bool = False) -> None:
        self.adapters = [*self.adapters, name]

    def unload_lora(self, name: str, *, timeout_s: float | None = 30.0) -> None:
        self.adapters = [adapter for adapter in self.adapters if adapter != name]

    def stats(self) -> MetricsSnapshot:
        return self._metrics.snapshot()

    def slots(self) -> SlotsSnapshot:
        return self.ask(questions.slots).result(PATIENCE_S)  # type: ignore[no-any-return]

    def prefix_digest(self, max_prefixes: int = 1024, *, block_tokens: int | None = None) -> Any:
        return self.ask(questions.digest, max_prefixes, block_tokens)

    def heartbeat(self) -> Heartbeat:
        return self._runner.heartbeat()

    def end(self) -> None:
        """End the engine, with its requests; the replica still exists."""
        self.allow()
        self._runner.close(drain=False, timeout_s=None)

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        self.allow()
        self._runner.close(drain=drain, timeout_s=timeout_s)
        self._box.close()

    @property
    def num_open(self) -> int:
        return self._inbox.num_open


class MemoryCalls:
    """`ReplicaCalls` to replicas of this process; of the preferred replicas, the least busy gets the next request."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._changed: Callable[[frozenset[str]], None] = lambda _: None
        self._services: dict[str, ReplicaService] = {}
        self._gone: dict[str, asyncio.Event] = {}
        self._broken: dict[str, asyncio.Event] = {}
        self._members_changed = asyncio.Event()
        self.loop = asyncio.get_running_loop()

    def watch(self, changed: Callable[[frozenset[str]], None]) -> None:
        self._changed = changed
        self.update()

    def update(self) -> None:
        """Report the replicas of the moment. On the loop."""
        self._members_changed.set()
        self._members_changed = asyncio.Event()
        self._changed(frozenset(self._world.members))

    async def route(self, prompt: PromptBlocks, avoid: frozenset[str], method: Any, *args: Any) -> Any:
        while not self._world.members:
            await self._members_changed.wait()
        self._world.routed.append(prompt)
        names = [member for member in self._world.members if member not in avoid] or list(self._world.members)
        chosen = min(names, key=lambda name: (name not in self._world.preferred, self._service(name).num_open))
        return await self.call(chosen, method, *args)

    async def call(self, replica_id: str, method: Any, *args: Any) -> Any:
        self._check(replica_id)
        if (replica_id, method) in self._world.hangs_in:
            await asyncio.sleep(3600)
        if (failure := self._world.fails_in.get((replica_id, method))) is not None:
            raise failure
        if (gate := self._world.held_in.get((replica_id, method))) is not None:
            return await asyncio.shield(asyncio.ensure_future(self._held(gate, replica_id, method, *args)))
        result = await getattr(self._service(replica_id), method)(*args)
        if (replica_id, method) in self._world.dies_of:
            self._world.dies_of.remove((replica_id, method))
            self.die(replica_id)
        if (gate := self._world.late_in.get((replica_id, method))) is not None:
            while not gate.is_set():
                await asyncio.sleep(0.001)
        self._check(replica_id)
        if (replied := self._world.replied_in.get((replica_id, method))) is not None:
            replied.set()
        return result

    async def _held(self, gate: threading.Event, replica_id: str, method: Any, *args: Any) -> Any:
        """Call a method once the gate is open, whatever has become of the caller."""
        while not gate.is_set():
            await asyncio.sleep(0.001)
        return await getattr(self._service(replica_id), method)(*args)

    async def stream(self, replica_id: str, method: Any, *args: Any) -> AsyncIterator[bytes]:
        gone = self._gone.setdefault(replica_id, asyncio.Event())
        broken = self._broken[replica_id] = asyncio.Event()
        frames = getattr(self._service(replica_id), method)(*args)
        while True:
            waits = [asyncio.ensure_future(item) for item in (anext(frames, None), gone.wait(), broken.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    if not wait.done():
                        wait.cancel()
            self._check(replica_id)
            if broken.is_set():
                raise ReplicaGone("its events broke", replica_id)
            frame = waits[0].result()
            if frame is None:
                return
            yield frame

    def forget(self, replica_id: str) -> None:
        self._world.forgotten.append(replica_id)

    async def aclose(self) -> None:
        """Do nothing: the world ends the replicas."""

    def break_events(self, replica_id: str) -> None:
        """End the stream of a replica's events with an error. On the loop."""
        self._broken[replica_id].set()

    def die(self, replica_id: str) -> None:
        """Have every call to a replica fail from now on. On the loop."""
        self._world.members.pop(replica_id, None)
        self._world.dead.add(replica_id)
        self._gone.setdefault(replica_id, asyncio.Event()).set()
        self.update()

    def _check(self, replica_id: str) -> None:
        if replica_id in self._world.dead:
            raise ReplicaGone("it died", replica_id)

    def _service(self, replica_id: str) -> ReplicaService:
        self._check(replica_id)
        if replica_id not in self._services:
            self._services[replica_id] = ReplicaService(self._world.replicas[replica_id], replica_id)
        return self._services[replica_id]


class ClusterWorld:
    """Replicas by id, and an engine over them.

    members: replicas that take requests; preferred: replicas that get them, if any; dies_of: replica and method at the end of
    which the replica dies; hangs_in: methods that do not return; fails_in: exceptions of methods; late_in: methods that
    return, when they are done, once an event is set; replied_in: events that are set when a method returns; held_in: methods
    that are called once an event is set, also for a caller that has given up.
    """

    def __init__(self, *names: str, **backend_options: Any) -> None:
        self._options = backend_options
        self.replicas: dict[str, MemoryReplica] = {}
        self.members: dict[str, None] = {}
        self.dead: set[str] = set()
        self.preferred: tuple[str, ...] = ()
        self.dies_of: list[tuple[str, str]] = []
        self.hangs_in: set[tuple[str, str]] = set()
        self.fails_in: dict[tuple[str, str], Exception] = {}
        self.late_in: dict[tuple[str, str], threading.Event] = {}
        self.replied_in: dict[tuple[str, str], threading.Event] = {}
        self.held_in: dict[tuple[str, str], threading.Event] = {}
        self.routed: list[PromptBlocks] = []
        self.forgotten: list[str] = []
        self._calls: MemoryCalls | None = None
        for name in names:
            self._make(name)

    def _make(self, name: str) -> None:
        self.replicas[name] = MemoryReplica(**self._options)
        self.members[name] = None

    def engine(self, **options: Any) -> ClusterEngine:
        """Return an engine over them."""
        return ClusterEngine([], options, self._make_calls, front_model=FakeFrontModel())

    def _make_calls(self) -> MemoryCalls:
        self._calls = MemoryCalls(self)
        return self._calls

    def add(self, name: str) -> None:
        """Start another replica."""
        self._make(name)
        self._on_loop(self._known.update)

    def drain(self, name: str) -> None:
        """Have a replica take no more requests; it goes on with its open requests."""
        self.members.pop(name)
        self._on_loop(self._known.update)

    def take_back(self, name: str) -> None:
        """Have a replica that was to be drained take requests again."""
        self.members[name] = None
        self._on_loop(self._known.update)

    def break_events(self, name: str) -> None:
        """Have the events of a replica break off; it goes on with its open requests."""
        self._on_loop(lambda: self._known.break_events(name))

    def kill(self, name: str) -> None:
        """Have a replica die."""
        self._on_loop(lambda: self._known.die(name))

    @property
    def _known(self) -> MemoryCalls:
        assert self._calls is not None
        return self._calls

    def _on_loop(self, do: Callable[[], None]) -> None:
        async def run() -> None:
            do()

        asyncio.run_coroutine_threadsafe(run(), self._known.loop).result(PATIENCE_S)

    def close(self) -> None:
        for replica in self.replicas.values():
            replica.close()
