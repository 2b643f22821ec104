"""`ClusterEngine`: an `EngineClient` over several replicas of one model, and the thread that sends requests to them.

    commands of callers ──inbox──> Dispatcher ──calls──> replicas
    channels, futures  <─router─   Dispatcher <─events── replicas

Prompts are tokenised and requests are checked on the caller's thread, with the vocabulary alone; the replicas have the weights.
The bounds of the queue are those of all replicas together.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar, TypeVarTuple

from paceline.clock import Clock, MonotonicClock
from paceline.cluster.connections import Connections
from paceline.cluster.replica_calls import ReplicaCalls, ReplicaGone
from paceline.cluster.replica_service import change_adapter, metrics
from paceline.cluster.routed_requests import RoutedRequests
from paceline.config import EngineConfig
from paceline.engine.adapters import AdapterRegistry, name_of
from paceline.engine.arguments import engine_arguments
from paceline.engine.client import fitted_config
from paceline.engine.core import Cancel, Command, Drain, EndSlow, SetInterval, SetPaused, Stop, Submit
from paceline.engine.engine_thread import EngineThread
from paceline.engine.inbox import FrontInbox
from paceline.engine.output_router import OutputRouter, map_future
from paceline.engine.questions import (
    MEASURE_REPLY_S,
    Call,
    MediaSizes,
    Question,
    Reply,
    activity,
    digest,
    measure_media,
    measuring,
    slots,
)
from paceline.engine.worker import messages
from paceline.engine.worker.worker_engine import FrontEngine, FrontModel, no_samplers
from paceline.engine.worker.worker_telemetry import RequestsWatch, WorkerTotals
from paceline.errors import Aborted, AdapterError, EngineError, EngineStopped, Unsupported
from paceline.media import MediaExtent
from paceline.observability.heartbeat import Heartbeat, Pulse, Sign, WorkerHistory, heartbeat_of, starting
from paceline.observability.metric_table import MetricsSnapshot
from paceline.observability.metrics import Instruments, Metrics
from paceline.scheduling.records import EngineActivity, RequestEvent, SlotsSnapshot
from paceline.sequence import Limits
from paceline.streaming.chunk import FinishReason

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
_log = logging.getLogger("paceline.cluster")
_POLL_S: Final = 0.1  # between two checks whether the wait for a replica is cancelled
_FILES = (
    "saved prefixes are files of one machine, and the replicas of a cluster have none in common; requests find cached prefixes "
    "on the replica that has them by themselves"
)
_FILE_QUESTIONS = ("save_prefix", "load_prefix", "erase_prefix")
_DIGESTS = "a cluster has a prefix digest for each of its replicas, which routers get from them"
_SHUT_DOWN = "the engine over replicas was shut down; make a new one"

_END_S: Final = 5.0  # for connections to end
_TURN_S: Final = 10.0  # for a replica to reply before another replica is asked
_STATE_S: Final = 2.0  # for replicas to report their state


class Dispatcher(EngineThread):
    """Owns the thread and its event loop. No thread waits for it; every accepted request ends here, whatever happens to replicas.

    Args:
        make_calls: Makes the calls to replicas; called on the loop.
        inbox: Commands come from it.
        router: Events go to it.
        clock: The clock.
        watch: Gets telemetry of the requests.

    Attributes:
        ready: Done when the first replica has described itself.
        on_joined: Called with the descriptions of all replicas at each change.
        on_gone: Called with the id of a replica that is gone.
        adapter_paths: Returns the files of the adapters by name, which replicas may have to load.
    """

    _inbox: FrontInbox

    def __init__(
        self,
        make_calls: Callable[[], ReplicaCalls],
        inbox: FrontInbox,
        router: OutputRouter,
        clock: Clock,
        watch: RequestsWatch,
    ) -> None:
        super().__init__("paceline-dispatcher", inbox)
        self._make_calls, self._router, self._clock, self._watch = make_calls, router, clock, watch
        self._pulse = Pulse(clock)
        self._since_s = clock.now()
        self.ready: Future[messages.Ready] = Future()
        self.on_joined: Callable[[dict[str, messages.Ready]], object] = lambda _: None
        self.on_gone: Callable[[str], object] = lambda _: None
        self.adapter_paths: Callable[[], Mapping[str, str]] = dict
        self._described: dict[str, messages.Ready] = {}
        self._num_lost = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line_timer: asyncio.TimerHandle | None = None  # for the first deadline in the inbox's line
        self._calls: ReplicaCalls | None = None
        self._asked_lock = threading.Lock()
        self._asked: set[Future[Any]] = set()
        self._replying: set[asyncio.Task[Any]] = set()
        self._is_over_for_questions = False
        self._start_thread()

    # ---- any thread

    @property
    def replicas(self) -> dict[str, messages.Ready]:
        """The descriptions of the replicas that are connected; to be read only."""
        return self._described

    def heartbeat(self) -> Heartbeat:
        """Return whether there are replicas. Waits for nothing."""
        now, own = self._clock.now(), self._pulse.sign
        past = WorkerHistory(num_restarts=self._num_lost)
        if not self._thread.is_alive():
            return heartbeat_of(Sign("ended", own.since_s), now, past)
        if not self._described:
            return starting(now - self._since_s, past)
        return heartbeat_of(own, now, past)

    def announce(self) -> None:
        """Call `on_joined` now, on the thread: it was set after the first replica came."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(lambda: self.on_joined(self._described))

    def ask_all(self, call: Call, within_s: float | None = None) -> Future[dict[str, Reply]]:
        """Return a future of the replies of the connected replicas; replicas that are gone are left out.

        within_s: replicas that fail, or do not reply within so many seconds, are left out as well.
        """
        return self._run_on_loop(lambda: self._ask_all(call, within_s))

    def ask_one(self, call: Call) -> Future[Reply]:
        """Return a future of the reply of any replica. It fails with `EngineError` if there is none.

        If a replica is gone or does not reply within `_TURN_S`, the next replica is asked.
        """
        return self._run_on_loop(lambda: self._ask_one(call))

    def _run_on_loop(self, make: Callable[[], Coroutine[Any, Any, R]]) -> Future[R]:
        """Return a future of the result of a coroutine on the loop. It fails with `EngineStopped` if the loop ends first."""
        loop = self._loop
        with self._asked_lock:
            if loop is None or self._is_over_for_questions:
                raise EngineStopped(_SHUT_DOWN)
            reply: Future[R] = Future()
            try:
                loop.call_soon_threadsafe(self._begin_reply, make, reply)
            except RuntimeError:  # the loop is closed
                raise EngineStopped(_SHUT_DOWN) from None
            self._asked.add(reply)
        reply.add_done_callback(self._asked.discard)
        return reply

    def _begin_reply(self, make: Callable[[], Coroutine[Any, Any, R]], reply: Future[R]) -> None:
        task = asyncio.get_running_loop().create_task(make())
        self._replying.add(task)
        task.add_done_callback(lambda done: self._end_reply(done, reply))

    def _end_reply(self, task: asyncio.Task[R], reply: Future[R]) -> None:
        self._replying.discard(task)
        if reply.done() or not reply.set_running_or_notify_cancel():
            return
        if task.cancelled():
            reply.set_exception(EngineStopped(_SHUT_DOWN))
        elif (failure := task.exception()) is not None:
            reply.set_exception(failure)
        else:
            reply.set_result(task.result())

    def _refuse_questions(self) -> None:
        """Fail the questions without a reply: the loop is closed."""
        with self._asked_lock:
            self._is_over_for_questions = True
        for reply in tuple(self._asked):
            if not reply.done() and reply.set_running_or_notify_cancel():
                reply.set_exception(EngineStopped(_SHUT_DOWN))

    def _interrupt(self) -> None:
        """Do nothing: this thread takes commands at once."""

    # ---- the thread

    def _run(self) -> None:
        with ExitStack() as ends:  # all of them are called, in reverse order, even if another raises
            ends.callback(lambda: self.ended.set_result(self._gave_up))
            ends.callback(self._refuse_to_start)
            ends.callback(self._refuse_questions)
            ends.callback(self._watch.close)
            ends.callback(self._router.close)
            ends.callback(self._inbox.close)
            ends.callback(self._pulse.end)
            try:
                asyncio.run(self._serve())
            except Exception as error:  # noqa: BLE001 - no other thread ends the open requests
                _log.exception("the dispatcher of an engine over replicas failed; its requests end with an error")
                self._gave_up = EngineStopped(f"the dispatcher failed: {error!r}")
                self._inbox.close_for(self._gave_up)

    def _refuse_to_start(self) -> None:
        if not self.ready.done():
            self.ready.set_exception(EngineStopped("the engine was shut down before there was a replica"))

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._calls = calls = self._make_calls()
        front = secrets.token_hex(8)
        self._connections = Connections(calls, front, self._joined, self._left, self._lost, self._received)
        self._requests = RoutedRequests(
            calls,
            self._connections,
            front,
            self._router,
            self._clock,
            self._watch,
            adapter_paths=lambda: self.adapter_paths(),  # noqa: PLW0108 - it is set later
        )
        self._over = asyncio.Event()
        self._loop = loop
        loop.add_reader(self._inbox.fileno(), self._take_commands)
        try:
            self._connections.begin()
            self._take_commands()
            await self._over.wait()
        finally:
            loop.remove_reader(self._inbox.fileno())
            self._requests.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await self._connections.aclose()

    async def _ask_all(self, call: Call, within_s: float | None) -> dict[str, Reply]:
        ask = self._ask if within_s is None else partial(self._ask_in_time, within_s)
        names = list(self._described)
        replies = await asyncio.gather(*[ask(name, call) for name in names])
        return {name: reply for name, reply in zip(names, replies, strict=True) if reply is not None}

    async def _ask_one(self, call: Call) -> Reply:
        names = list(self._described)
        for replica_id in names:
            is_last = replica_id == names[-1]
            try:
                async with asyncio.timeout(None if is_last else _TURN_S):
                    reply = await self._ask(replica_id, call)
            except TimeoutError:
                continue
            if reply is not None:
                return reply
        raise EngineError("no replica is there to reply; try again")

    async def _ask(self, replica_id: str, call: Call) -> Reply | None:
        """Return the reply of a replica; None if it is gone. Raises `EngineError` for a reply of another version."""
        assert self._calls is not None  # noqa: S101 - made before the loop is known
        try:
            reply = messages.decode_up(await self._calls.call(replica_id, "ask", messages.encode(call)))
        except ReplicaGone:
            return None
        if not isinstance(reply, Reply):
            raise EngineError(f"a replica replied by a {type(reply).__name__}")
        return reply

    async def _ask_in_time(self, seconds: float, replica_id: str, call: Call) -> Reply | None:
        try:
            async with asyncio.timeout(seconds):
                return await self._ask(replica_id, call)
        except TimeoutError:
            _log.warning("replica %s did not report its %s within %.0f s", replica_id, call.name, seconds)
        except Exception:  # noqa: BLE001 - the others are shown
            _log.exception("replica %s could not report its %s", replica_id, call.name)
        return None

    # ---- commands

    def _take_commands(self) -> None:
        self._pulse.tick()
        self._inbox.calm()
        self._inbox.end_overdue_waits(self._clock.now())
        for command in self._inbox.take():
            self._do(command)
        self._rest()
        if self._line_timer is not None:
            self._line_timer.cancel()
        wait_s = self._inbox.next_deadline_s() - self._clock.now()
        loop = asyncio.get_running_loop()
        self._line_timer = None if math.isinf(wait_s) else loop.call_later(max(0.0, wait_s), self._take_commands)

    def _do(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._requests.add(request)
            case Cancel() | SetPaused() | SetInterval() | EndSlow():
                self._requests.command(command)
            case Drain():
                self._requests.drain()
            case Stop():
                self._inbox.close()
                self._requests.end_all(FinishReason.SHUTDOWN)
            case _:
                raise AssertionError("replicas are asked by calls")

    def _rest(self) -> None:
        self._requests.flush()
        self._pulse.rest()
        if self._inbox.is_closed and self._inbox.num_open == 0:
            self._over.set()

    # ---- reports on replicas

    def _joined(self, replica_id: str, ready: messages.Ready) -> None:
        self._described = {**self._described, replica_id: ready}
        self.on_joined(self._described)
        if not self.ready.done():
            self.ready.set_result(ready)
        self._requests.joined(replica_id, int(ready.limits["num_slots"]))
        self._rest()

    def _left(self, replica_id: str) -> None:
        self._forget(replica_id)
        self._requests.left(replica_id)
        self._rest()

    def _lost(self, replica_id: str, why: str) -> None:
        if replica_id in self._described:  # else it was lost before and could not be connected again
            self._num_lost += 1
            self._watch.restarted()
            _log.warning("replica %s is lost: %s", replica_id, why)
        self._forget(replica_id)
        self._requests.lost(replica_id, why)
        self._rest()

    def _received(self, replica_id: str, events: list[RequestEvent]) -> None:
        self._pulse.tick()
        self._requests.received(replica_id, events)
        self._rest()

    def _forget(self, replica_id: str) -> None:
        if replica_id in self._described:
            self._described = {name: ready for name, ready in self._described.items() if name != replica_id}
            self._since_s = self._clock.now()
            self.on_gone(replica_id)
            self.on_joined(self._described)


class ClusterEngine(FrontEngine):
    """An engine over replicas.

    Args:
        paths: The files of the model; the vocabulary is loaded from them.
        options: The options of the replicas' engines, as `LLM` takes them.
        make_calls: Makes the calls to the replicas; called on the dispatcher's event loop.
        share: The share of all requests of the replicas that this front may have.
        cancel: Ends the wait for the first replica when it is set.
        front_model: In place of `paths`, for tests.

    Raises:
        ModelLoadError: The vocabulary cannot be loaded.
        Aborted: cancel was set before there was a replica.
    """

    def __init__(
        self,
        paths: Sequence[str],
        options: Mapping[str, Any],
        make_calls: Callable[[], ReplicaCalls],
        *,
        share: float = 1.0,
        cancel: threading.Event | None = None,
        front_model: FrontModel | None = None,
    ) -> None:
        self.config: EngineConfig = engine_arguments(options).config
        self._per_replica = self.config
        self._share = share
        self._clock = MonotonicClock()
        self.metrics = Metrics(self.config.num_slots, has_ticks=False)  # the replicas count ticks
        self._inbox = FrontInbox(1, self.config.max_queue_tokens)
        self._router = OutputRouter(self._inbox)
        self._totals = WorkerTotals()
        watch = RequestsWatch(Instruments((), own=self.metrics), self._clock)
        self._dispatcher = Dispatcher(make_calls, self._inbox, self._router, self._clock, watch)
        self._thread = self._dispatcher
        self._dispatcher.end_when_lost(self)
        load = partial(FrontModel, list(paths), options.get("kv_overrides"))
        ready = self._load_front(
            load if front_model is None else lambda: front_model, partial(self._first_replica, cancel)
        )
        self._take_limits(self._dispatcher.replicas or {"": ready})
        self._take_requests(
            AdapterRegistry(ready.adapters),
            self._front.vocabulary,
            partial(no_samplers, self._front),
            measuring(partial(_measure, self._dispatcher)),
        )
        adapters, this = (
            self._adapters,
            weakref.ref(self),
        )  # losing the engine ends the dispatcher, so it keeps no reference

        def on_joined(replicas: Mapping[str, messages.Ready]) -> None:
            if (engine := this()) is not None:
                engine.take_replicas(replicas)

        self._dispatcher.adapter_paths = lambda: {adapter.name: adapter.path for adapter in adapters.all()}
        self._dispatcher.on_joined = on_joined
        self._dispatcher.announce()
        self._dispatcher.on_gone = self._totals.died

    def _first_replica(self, cancel: threading.Event | None) -> messages.Ready:
        while cancel is None or not cancel.is_set():
            with suppress(TimeoutError):
                return self._dispatcher.ready.result(_POLL_S)
        raise Aborted("waiting for the first replica was cancelled")

    @property
    def replicas(self) -> tuple[str, ...]:
        """The ids of the replicas that are connected."""
        return tuple(self._dispatcher.replicas)

    def replica_places(self) -> dict[str, tuple[str, int]]:
        """Return host and process of each replica that reports them."""
        facts = {name: ready.facts for name, ready in self._dispatcher.replicas.items()}
        return {name: (known["host"], known["pid"]) for name, known in facts.items() if "pid" in known}

    def _take_limits(self, replicas: Mapping[str, messages.Ready]) -> None:
        """Take the slots of all replicas together, and the lowest of their other limits."""
        if not replicas:
            return  # as many requests as before may wait for the next replica
        all_limits = [
            Limits(**{**ready.limits, "boundary_ids": frozenset(ready.limits.get("boundary_ids", ()))})
            for ready in replicas.values()
        ]
        num_slots = sum(limits.num_slots for limits in all_limits)
        cells = [limits.num_cells for limits in all_limits if limits.num_cells is not None]
        self.limits = replace(
            min(all_limits, key=lambda limits: limits.max_positions),
            num_slots=num_slots,
            num_cells=sum(cells) if len(cells) == len(all_limits) else None,
            max_embedding_tokens=min(limits.max_embedding_tokens for limits in all_limits),
        )
        max_queue = self._per_replica.max_queue * len(all_limits)
        most_tokens = self._per_replica.max_queue_tokens
        queue_tokens = None if most_tokens is None else most_tokens * len(all_limits)
        self.config = fitted_config(
            replace(self._per_replica, max_queue=max_queue, max_queue_tokens=queue_tokens), self.limits
        )
        self._inbox.set_bounds(
            self._share_of(num_slots + max_queue), None if queue_tokens is None else self._share_of(queue_tokens)
        )
        self.metrics.set_num_slots(num_slots)

    def _share_of(self, count: int) -> int:
        return max(1, math.ceil(count * self._share))

    def take_replicas(self, replicas: Mapping[str, messages.Ready]) -> None:
        """Take the limits of the present replicas. On the dispatcher's thread."""
        self._take_limits(replicas)
        self._text_requests = replace(self._text_requests, limits=self.limits)

    # ---- adapters and files

    def _load_adapter(self, key: str, path: str) -> None:
        self._set_adapter(name_of(key), path)

    def _free_adapter(self, key: str) -> None:
        name = name_of(key)
        if all(adapter.name != name for adapter in self.loras()):  # else another file has replaced it in the replicas
            self._set_adapter(name, None)

    def _set_adapter(self, name: str, path: str | None) -> None:
        """Change an adapter of all replicas. Raises the first error; then replicas may differ until it is tried again."""
        replies = self._dispatcher.ask_all(change_adapter.call(0, (name, path))).result()
        if not replies:
            raise EngineError(f"no replica was there to change the adapter {name!r}; try again")
        for replica_id, reply in replies.items():
            if reply.error is not None:
                raise AdapterError(f"replica {replica_id}: {reply.error}") from reply.error

    # ---- state

    def stats(self) -> MetricsSnapshot:
        """Return the metrics of all replicas together. A replica that is gone counts with its last report."""
        with suppress(EngineStopped):
            for name, snapshot in self.replica_stats().items():
                if name in self._dispatcher.replicas:  # a replica that went after its reply is counted already
                    self._totals.report(snapshot, name=name)
        return self._totals.together(self.metrics.snapshot())

    def reported_stats(self, max_age_s: float) -> None:
        """Return None: replicas report only when they are asked."""

    def replica_stats(self) -> dict[str, MetricsSnapshot]:
        """Return the metrics of each replica."""
        samples = self._ask_replicas(metrics).result()
        return {name: MetricsSnapshot(tuple(of_replica)) for name, of_replica in samples.items()}

    def replica_slots(self) -> dict[str, SlotsSnapshot]:
        """Return the slots of each replica."""
        return self._ask_replicas(slots).result()

    def _ask_replicas(self, question: Question[R]) -> Future[dict[str, R]]:
        """Return a future of the answers of the replicas that reply within `_STATE_S`, by their ids."""

        def answers(replies: dict[str, Reply]) -> dict[str, R]:
            return {name: question.result(reply) for name, reply in replies.items() if reply.result is not None}

        return map_future(self._dispatcher.ask_all(question.call(0, ()), _STATE_S), answers)

    def _ask(self, question: Question[R, *Ts], args: tuple[*Ts], delay_s: float = 0.0) -> Future[R]:
        """Ask all replicas for their slots, for the questions on slots and activity. Raises `Unsupported` for other questions.

        The slots come in the order of the replicas' ids. An activity has slots only, without delay: ticks and trees are
        the replicas' own.
        """
        del args, delay_s
        self._dispatcher.check_process()
        joined: Any
        if question.name == slots.name:
            joined = self._joined_slots
        elif question.name == activity.name:
            joined = self._joined_activity
        else:
            other = f"a cluster does not reply to {question.name}; ask the engines of its replicas"
            raise Unsupported(
                {digest.name: _DIGESTS, **dict.fromkeys(_FILE_QUESTIONS, _FILES)}.get(question.name, other)
            )
        return map_future(self._ask_replicas(slots), joined)

    def _joined_activity(self, replies: dict[str, SlotsSnapshot]) -> EngineActivity:
        found, now_s = self._joined_slots(replies), self._clock.now()
        return EngineActivity(started_s=0.0, now_s=now_s, last_number=0, slots=found, num_waiting=found.num_waiting)

    def _joined_slots(self, found: dict[str, SlotsSnapshot]) -> SlotsSnapshot:
        """Return the slots of all replicas with new ids and keys, since each replica numbers its own."""
        views = [
            replace(view, key=None if view.key is None else view.key * len(found) + index)
            for index, name in enumerate(sorted(found))
            for view in found[name]
        ]
        num_on_replicas = len({view.key for view in views if view.key is not None})
        num_waiting = max(
            0, self._inbox.num_open - num_on_replicas, sum(snapshot.num_waiting for snapshot in found.values())
        )
        return SlotsSnapshot(tuple(replace(view, id=index) for index, view in enumerate(views)), num_waiting)


def _measure(dispatcher: Dispatcher, args: tuple[MediaExtent]) -> Future[tuple[MediaSizes, ...]]:
    """Ask a replica for the sizes of an image or audio, and wait for the reply."""
    measured: Future[tuple[MediaSizes, ...]] = Future()
    try:
        reply = dispatcher.ask_one(measure_media.call(0, args)).result(MEASURE_REPLY_S)
    except TimeoutError:
        text = f"no replica measured an image or audio within {MEASURE_REPLY_S:.0f} s; try again"
        raise EngineError(text) from None
    if reply.error is not None:
        raise reply.error
    measured.set_result(measure_media.result(reply))
    return measured
