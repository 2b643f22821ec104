"""The thread of an engine over replicas: it sends requests to replicas, delivers their events, and moves requests.

    commands of callers ──inbox──> [this thread] ──calls──> replicas
    channels, futures  <─router─ [this thread] <─events──  replicas

It runs an event loop, and no thread waits for it. Every accepted request ends here, whatever happens to replicas.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, Final, TypeVar

from paceline.clock import Clock
from paceline.cluster.connections import Connections
from paceline.cluster.replica_calls import Method, ReplicaCalls, ReplicaGone
from paceline.cluster.routed_requests import RoutedRequests
from paceline.engine.core import Cancel, Command, Drain, EndSlow, SetInterval, SetPaused, Stop, Submit
from paceline.engine.engine_thread import EngineThread
from paceline.engine.inbox import FrontInbox
from paceline.engine.output_router import OutputRouter
from paceline.engine.worker import messages
from paceline.engine.worker.worker_telemetry import RequestsWatch
from paceline.errors import EngineError, EngineStopped
from paceline.observability.heartbeat import Heartbeat, Pulse, Sign, WorkerHistory, heartbeat_of, starting
from paceline.scheduling.records import RequestEvent
from paceline.streaming.chunk import FinishReason

_log = logging.getLogger("paceline.cluster")
T = TypeVar("T")

_SHUT_DOWN = "the engine over replicas was shut down; make a new one"

_END_S: Final = 5.0  # for connections to end
_TURN_S: Final = 10.0  # for a replica to reply before another replica is asked
_STATE_S: Final = 2.0  # for replicas to report their state


class Dispatcher(EngineThread):
    """Owns the thread and its event loop. It is the `ConnectionObserver` of its connections.

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

    def ask_all(self, method: Method, *args: Any) -> Future[dict[str, Any]]:
        """Return a future of the results of a method of each connected replica; replicas that are gone are left out."""
        return self._run_on_loop(lambda: self._ask_all(lambda name: self._reply(name, method, *args)))

    def ask_state(self, method: Method, *args: Any) -> Future[dict[str, Any]]:
        """As `ask_all`, within `_STATE_S`: replicas that hang or fail are left out, too."""
        return self._run_on_loop(lambda: self._ask_all(lambda name: self._state(name, method, *args)))

    def ask_one(self, method: Method, *args: Any) -> Future[Any]:
        """Return a future of the result of a method of any replica. It fails with `EngineError` if there is none.

        If a replica is gone or does not reply within `_TURN_S`, the next replica is asked.
        """
        return self._run_on_loop(lambda: self._ask_one(method, *args))

    def _run_on_loop(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Return a future of the result of a coroutine on the loop. It fails with `EngineStopped` if the loop ends first."""
        loop = self._loop
        with self._asked_lock:
            if loop is None or self._is_over_for_questions:
                raise EngineStopped(_SHUT_DOWN)
            reply: Future[T] = Future()
            try:
                loop.call_soon_threadsafe(self._begin_reply, make, reply)
            except RuntimeError:  # the loop is closed
                raise EngineStopped(_SHUT_DOWN) from None
            self._asked.add(reply)
        reply.add_done_callback(self._asked.discard)
        return reply

    def _begin_reply(self, make: Callable[[], Coroutine[Any, Any, T]], reply: Future[T]) -> None:
        task = asyncio.get_running_loop().create_task(make())
        self._replying.add(task)
        task.add_done_callback(lambda done: self._end_reply(done, reply))

    def _end_reply(self, task: asyncio.Task[T], reply: Future[T]) -> None:
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
        self._connections = Connections(calls, front, self)
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

    async def _ask_all(self, ask: Callable[[str], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
        names = list(self._described)
        replies = await asyncio.gather(*map(ask, names))
        return {name: reply for name, reply in zip(names, replies, strict=True) if reply is not None}

    async def _ask_one(self, method: Method, *args: Any) -> Any:
        names = list(self._described)
        for replica_id in names:
            is_last = replica_id == names[-1]
            try:
                async with asyncio.timeout(None if is_last else _TURN_S):
                    reply = await self._reply(replica_id, method, *args)
            except TimeoutError:
                continue
            if reply is not None:
                return reply
        raise EngineError("no replica is there to reply; try again")

    async def _reply(self, replica_id: str, method: Method, *args: Any) -> Any:
        assert self._calls is not None  # noqa: S101 - made before the loop is known
        try:
            return await self._calls.call(replica_id, method, *args)
        except ReplicaGone:
            return None

    async def _state(self, replica_id: str, method: Method, *args: Any) -> Any:
        try:
            async with asyncio.timeout(_STATE_S):
                return await self._reply(replica_id, method, *args)
        except TimeoutError:
            _log.warning("replica %s did not report its %s within %.0f s", replica_id, method, _STATE_S)
        except Exception:  # noqa: BLE001 - the others are shown
            _log.exception("replica %s could not report its %s", replica_id, method)
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

    # ---- see `ConnectionObserver`

    def joined(self, replica_id: str, ready: messages.Ready) -> None:
        """Add a replica."""
        self._described = {**self._described, replica_id: ready}
        self.on_joined(self._described)
        if not self.ready.done():
            self.ready.set_result(ready)
        self._requests.joined(replica_id, int(ready.limits["num_slots"]))
        self._rest()

    def left(self, replica_id: str) -> None:
        """Move the requests of a replica that is being drained."""
        self._forget(replica_id)
        self._requests.left(replica_id)
        self._rest()

    def lost(self, replica_id: str, why: str) -> None:
        """Continue the requests of a dead replica elsewhere."""
        if replica_id in self._described:  # else it was lost before and could not be connected again
            self._num_lost += 1
            self._watch.restarted()
            _log.warning("replica %s is lost: %s", replica_id, why)
        self._forget(replica_id)
        self._requests.lost(replica_id, why)
        self._rest()

    def received(self, replica_id: str, events: list[RequestEvent]) -> None:
        """Deliver the events of a replica."""
        self._pulse.tick()
        self._requests.received(replica_id, events)
        self._rest()

    def _forget(self, replica_id: str) -> None:
        if replica_id in self._described:
            self._described = {name: ready for name, ready in self._described.items() if name != replica_id}
            self._since_s = self._clock.now()
            self.on_gone(replica_id)
            self.on_joined(self._described)
