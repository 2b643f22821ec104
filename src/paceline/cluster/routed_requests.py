"""The open requests of an engine over replicas: sent, continued on another replica, ended. On the dispatcher's event loop."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from paceline.clock import Clock
from paceline.cluster import PromptBlocks, hash_prompt
from paceline.cluster.connections import CommandSender, Connections
from paceline.cluster.replica_calls import ReplicaCalls, ReplicaEnded, ReplicaGone
from paceline.cluster.replica_service import MAX_EARLY_CANCELS
from paceline.engine.adapters import name_of
from paceline.engine.backend import as_paceline_error
from paceline.engine.core import Cancel, EndSlow, RequestCommand, SetInterval, SetPaused
from paceline.engine.output_router import OutputRouter
from paceline.engine.worker import messages
from paceline.engine.worker.open_requests import PROBATION_TICKS
from paceline.engine.worker.replay_log import FrontRequests
from paceline.engine.worker.worker_telemetry import RequestsWatch
from paceline.errors import EngineDied, EngineError
from paceline.scheduling.records import Delta, EmbeddingRequest, RequestEvent, Started, due_reason, event_elsewhere
from paceline.sequence import Request
from paceline.streaming.chunk import FinishReason

_log = logging.getLogger("paceline.cluster")

GRACE_S: Final = 2.0
"""Time for a replica to end a request that was cancelled or is past its deadline, before it is ended here."""

_BACK_OFF_S: Final = 0.05  # before a request that no replica took is sent again; doubled each time
_MAX_BACK_OFF_S: Final = 2.0
_MAX_TRIES: Final = 64  # in about two minutes

MAX_DEATHS: Final = 3
"""A request ends after so many replicas in a row died with it. It was alone on the last of them."""


class RoutedRequests(FrontRequests):
    """The state of each request, the replica that has it, and the suspects after deaths of replicas."""

    def __init__(  # noqa: PLR0913 - of a front, and of its connections
        self,
        calls: ReplicaCalls,
        connections: Connections,
        front: str,
        router: OutputRouter,
        clock: Clock,
        watch: RequestsWatch,
        *,
        adapter_paths: Callable[[], Mapping[str, str]],
    ) -> None:
        super().__init__(router, clock, watch)
        self._adapter_paths = adapter_paths
        self._calls, self._connections, self._front = calls, connections, front
        self._placements, self._suspects = Placements(), Suspects()
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._commands = CommandSender(calls, front, lambda replica_id: replica_id in connections.known)
        # Numbers of requests that may still come to some replica, and are not to run there.
        self._given_up: deque[int] = deque(maxlen=MAX_EARLY_CANCELS)
        self._leaving: set[str] = set()  # replicas that go on with their requests, since there is no other replica
        self._num_slots: dict[str, int] = {}
        self._waits_for_readers = True

    # ---- callers

    def add(self, request: Request | EmbeddingRequest) -> None:
        """Add a new request, and send it to a replica."""
        self._replay_log.add(request)
        self._watch.queued(request)
        self._set_timer(request.key)
        self._send(request.key)

    def command(self, command: RequestCommand) -> None:
        """Do a caller's command."""
        request = self._replay_log.find(command.key)
        if request is None:
            return
        match command:
            case Cancel(key):
                request.cancelled = True
                self._end_or_tell(key, command)
            case EndSlow(key):
                if isinstance(request, Request):
                    request.is_slow = True
                    self._end_or_tell(key, command)
            case SetPaused(key, is_paused):
                self._set_paused(key, is_paused=is_paused)
            case SetInterval(key, interval):
                if isinstance(request, Request):
                    request.set_interval(interval)
                    if request.params.prompt_logprobs is None:  # as in `OpenRequests`
                        self._tell(key, command)

    def drain(self) -> None:
        """Stop waiting for slow readers."""
        self._waits_for_readers = False
        for key in self._replay_log:
            self._set_paused(key, is_paused=False)

    def close(self) -> None:
        """End all tasks and timers, after the requests have ended."""
        for task in self._sending.values():
            task.cancel()
        self._commands.close()
        for timer in self._timers.values():
            timer.cancel()

    def _set_paused(self, key: int, *, is_paused: bool) -> None:
        request, is_paused = self._replay_log.find(key), is_paused and self._waits_for_readers
        if not isinstance(request, Request) or request.is_paused == is_paused:
            return
        request.is_paused = is_paused
        self._watch.paused(key, is_paused)
        self._tell(key, SetPaused(key, is_paused))
        if is_paused:
            self._suspects.forget(key)
            self._send_next()

    def _end_or_tell(self, key: int, command: RequestCommand) -> None:
        """Have the replica end a request, and end it here after `GRACE_S`, or at once if it is on no replica."""
        if self._placements.is_placed(key):
            self._tell(key, command)
            asyncio.get_running_loop().call_later(GRACE_S, self._end_due, key)
        else:
            self._end_due(key)

    # ---- to replicas

    def _send(self, key: int) -> None:
        """Send a request to the best replica, unless it has to wait for its turn as a suspect."""
        if self._suspects.may_go(key):
            task = self._sending[key] = asyncio.get_running_loop().create_task(self._route(key))
            task.add_done_callback(lambda done: self._sent(key, done))

    def _sent(self, key: int, task: asyncio.Task[None]) -> None:
        if self._sending.get(key) is task:
            del self._sending[key]
        if not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("a request could not be sent to a replica", exc_info=failure)
            self.end(key, FinishReason.ERROR, as_paceline_error(failure))

    async def _route(self, key: int) -> None:
        """Send a request until a replica takes it. Raises `EngineError` after `_MAX_TRIES`."""
        failed: frozenset[str] = frozenset()
        num_tries = 0
        while (request := self._replay_log.find(key)) is not None:
            await self._connections.wait_for_members()  # before the request's age is computed
            placement = self._placements.begin(key)
            avoid = failed | self._leaving | (self._connections.members - self._connections.joined)
            try:
                frame, adapters = messages.encode(self._message(key, placement.number)), self._adapters_of(request)
                blocks = self._blocks(request)
                replica_id, session = await self._calls.route(blocks, avoid, "submit", self._front, frame, adapters)
            except ReplicaGone as gone:
                self._give_up(placement)  # the replica may have it all the same
                self._placements.end(key)
                if gone.replica_id is not None:
                    failed |= {gone.replica_id}
                    # Did it die while it took the request in?
                    if not isinstance(gone, ReplicaEnded) and self._accuse([key], str(gone)):
                        return
                    if not self._suspects.may_go(key):
                        return
                num_tries += 1
                if num_tries == _MAX_TRIES:
                    raise EngineError(
                        f"no replica took this request in {num_tries} tries, so try again later; the last one: {gone}"
                    ) from gone
                await asyncio.sleep(min(_BACK_OFF_S * 2**num_tries, _MAX_BACK_OFF_S))
                continue
            self._arrived(placement, replica_id, session)
            return

    def _arrived(self, placement: ReplicaPlacement, replica_id: str, session: int) -> None:
        """Record the request's replica, and deliver the events that came before the replica was known."""
        key = placement.key
        if self._placements.numbered(placement.number) is None:  # it ended, or was moved, meanwhile
            self._commands.add(replica_id, messages.encode(Cancel(placement.number)))
            self.flush()
            return
        if session < self._connections.session(replica_id):  # that session has ended, and the request with it
            self._place_again(placement)
            return
        placement.replica_id, placement.session = replica_id, session
        self._connections.expect(replica_id)
        early, placement.early = placement.early, []
        request = self._replay_log.find(key)
        if isinstance(request, Request):
            self._tell_changes(request)
        if request is not None and request.cancelled:
            self._end_or_tell(key, Cancel(key))
        self.received(replica_id, [event for sender, event in early if sender == replica_id])
        self.flush()

    def _tell_changes(self, request: Request) -> None:
        """Send a replica the changes of a request since it was sent there."""
        key = request.key
        if request.params.prompt_logprobs is None:
            self._tell(key, SetInterval(key, request.options.interval))
        if request.is_paused:
            self._tell(key, SetPaused(key, True))
            self._suspects.forget(key)

    def _message(self, key: int, number: int) -> messages.EngineRequest:
        """Return the request for a replica: with its number there as key, ages in place of times, and adapters by name."""
        message = self._replay_log.message(key).moved_in_time(-self._clock.now())
        options = dict(message.options)
        if options.get("lora"):
            options["lora"] = {name_of(adapter): scale for adapter, scale in dict(options["lora"]).items()}
        return msgspec.structs.replace(message, key=number, options=options)

    def _adapters_of(self, request: Request | EmbeddingRequest) -> dict[str, str]:
        """Return the files of a request's adapters by name, for a replica that started after they were loaded."""
        names = {name_of(key) for key, _ in request.options.lora}
        return {name: path for name, path in self._adapter_paths().items() if name in names and path} if names else {}

    def _blocks(self, request: Request | EmbeddingRequest) -> PromptBlocks:
        """Return the blocks of a request's prompt and generated tokens, all of which a replica computes."""
        if isinstance(request, EmbeddingRequest):
            return PromptBlocks(max(1, request.num_tokens))
        ids = [*request.prompt, *self._replay_log.generated(request.key)]
        return PromptBlocks(len(ids)) if request.media else hash_prompt(ids, request.options)

    def _tell(self, key: int, command: RequestCommand) -> None:
        """Pass a command to the replica of a request. A request on its way gets its changes when it arrives."""
        placement = self._placements.find(key)
        if placement is not None and placement.replica_id is not None:
            renumbered = msgspec.structs.replace(command, key=placement.number)
            self._commands.add(placement.replica_id, messages.encode(renumbered))

    def flush(self) -> None:
        """Send the commands that were passed on."""
        self._commands.flush()

    # ---- of replicas

    def received(self, replica_id: str, events: list[RequestEvent]) -> None:
        """Record and deliver the events of a replica, except events of earlier placements."""
        for event in events:
            placement = self._placements.numbered(event.key)
            if placement is None:
                continue
            if placement.replica_id is None:
                placement.early.append((replica_id, event))
            elif placement.replica_id == replica_id:
                if isinstance(event, (Started, Delta)) and event.progress is not None:
                    placement.has_begun = True
                self.take(event_elsewhere(event, placement.key, self._clock.now()))

    def joined(self, replica_id: str, num_slots: int) -> None:
        """Move queued requests from draining replicas to this or another replica, and requests of an earlier session here."""
        self._num_slots[replica_id] = num_slots
        for number in self._given_up:
            self._commands.add(replica_id, messages.encode(Cancel(number)))
        session = self._connections.session(replica_id)
        for placement in self._placements.on(replica_id):
            if placement.session < session:
                self._place_again(placement)
        self._leaving.discard(replica_id)
        for other in tuple(self._leaving):
            self._move_all(other)

    def left(self, replica_id: str) -> None:
        """Move a replica's requests if there is another replica; otherwise it goes on with them."""
        self._leaving.add(replica_id)
        if self._connections.joined:
            self._move_all(replica_id)
        else:
            self._leave_if_done(replica_id)

    def lost(self, replica_id: str, why: str) -> None:
        """Continue the requests of a replica that is gone, and end the request that replicas die of, if one is found."""
        self._leaving.discard(replica_id)
        self._commands.forget(replica_id)
        here, num_slots = self._placements.on(replica_id), self._num_slots.pop(replica_id, 0)
        self._accuse(_may_have_run(here, num_slots), why)
        for placement in here:
            self._place_again(placement)

    def _move_all(self, replica_id: str) -> None:
        for placement in self._placements.on(replica_id):
            self._tell(placement.key, Cancel(placement.key))
            self._place_again(placement)
        self.flush()
        self._leave_if_done(replica_id)

    def _place_again(self, placement: ReplicaPlacement) -> None:
        """Send a request to another replica, or end it if it is due or only its release was missing."""
        key = placement.key
        request = self._replay_log.find(key)
        self._placements.end(key)
        if request is None:
            return
        reason = due_reason(request, self._clock.now())
        if reason is not None or (isinstance(request, Request) and request.num_open == 0):
            self.end(key, reason or FinishReason.ERROR)
        else:
            self._send(key)

    def _leave_if_done(self, replica_id: str) -> None:
        if replica_id in self._leaving and not self._placements.on(replica_id):
            self._leaving.discard(replica_id)
            self._commands.forget(replica_id)
            self._connections.leave(replica_id)

    def _accuse(self, keys: list[int], why: str) -> bool:
        """Suspect requests after the death of their replica. Ends the request at fault, and returns whether there is one."""
        guilty = self._suspects.died(keys)
        if guilty is not None:
            self._placements.end(guilty)
            text = (
                f"{MAX_DEATHS} replicas died one after the other while they had this request, the last time as the only "
                f"suspect; the last one: {why}"
            )
            self.end(guilty, FinishReason.ERROR, EngineDied(text, None, ""))
        return guilty is not None

    # ---- ends

    def _set_timer(self, key: int) -> None:
        request = self._replay_log.find(key)
        at_s = math.inf if request is None else request.deadline_s()
        if math.isinf(at_s):
            return
        wait_s = max(0.0, at_s - self._clock.now()) + self._grace_s(key)
        self._timers[key] = asyncio.get_running_loop().call_later(wait_s, self._reach_deadline, key)

    def _grace_s(self, key: int) -> float:
        return GRACE_S if self._placements.is_placed(key) else 0.0

    def _reach_deadline(self, key: int) -> None:
        """End a request after its deadline and the replica's time to end it."""
        self._timers.pop(key, None)
        request = self._replay_log.find(key)
        if request is None:
            return
        if self._clock.now() - request.deadline_s() >= self._grace_s(key):
            self._end_due(key)
        else:
            self._set_timer(key)

    def _end_due(self, key: int) -> None:
        """End a request here if it was cancelled or is past its deadline."""
        request = self._replay_log.find(key)
        reason = None if request is None else due_reason(request, self._clock.now())
        if reason is not None:
            self._tell(key, Cancel(key))
            self.flush()
            self.end(key, reason)

    def _noted(self, event: RequestEvent) -> None:
        if isinstance(event, Delta) and event.drawn:
            self._suspects.brought(event.key)
            self._send_next()

    def _forget(self, key: int) -> None:
        placement = self._placements.end(key)
        self._suspects.forget(key)
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        task = self._sending.pop(key, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            self._give_up(placement)
        if placement is not None and placement.replica_id is not None:
            self._leave_if_done(placement.replica_id)
        self._send_next()

    def _give_up(self, placement: ReplicaPlacement | None) -> None:
        """Cancel a request that is on its way, on all replicas: any of them may get it."""
        if placement is not None and placement.replica_id is None:
            self._given_up.append(placement.number)
            for replica_id in self._connections.known:
                self._commands.add(replica_id, messages.encode(Cancel(placement.number)))

    def _send_next(self) -> None:
        """Send the next suspect that waits for its turn."""
        key = self._suspects.next()
        if key is not None:
            self._send(key)


@dataclass(slots=True)
class ReplicaPlacement:
    """A request on its way to a replica, or on it.

    Each time that a request is sent it gets a new number, the key that it has on the replica. A replica may report a number
    that is over until it gets the cancel; such a report belongs to no request.

    Attributes:
        key: The request's key here.
        number: Its key on the replica.
        replica_id: The replica that has it; None while it is on its way.
        session: The number of this front's session on the replica.
        has_begun: Whether it has left the replica's queue.
        early: Events that came before the replica was known, with their replicas.
    """

    key: int
    number: int
    replica_id: str | None = None
    session: int = 0
    has_begun: bool = False
    early: list[tuple[str, RequestEvent]] = field(default_factory=list)


class Placements:
    """The open placements, by number and by request. Pure."""

    def __init__(self) -> None:
        self._next = 0
        self._by_number: dict[int, ReplicaPlacement] = {}
        self._by_key: dict[int, ReplicaPlacement] = {}

    def begin(self, key: int) -> ReplicaPlacement:
        """Return a new placement of a request, and end the placement before it."""
        self.end(key)
        self._next += 1
        placement = ReplicaPlacement(key, self._next)
        self._by_number[placement.number] = self._by_key[key] = placement
        return placement

    def find(self, key: int) -> ReplicaPlacement | None:
        """Return the placement of a request; None if it is neither on a replica nor on its way to a replica."""
        return self._by_key.get(key)

    def is_placed(self, key: int) -> bool:
        """Return whether a replica has a request."""
        placement = self._by_key.get(key)
        return placement is not None and placement.replica_id is not None

    def numbered(self, number: int) -> ReplicaPlacement | None:
        """Return the placement with a number; None if it is over."""
        return self._by_number.get(number)

    def end(self, key: int) -> ReplicaPlacement | None:
        """Forget the placement of a request, and return it."""
        placement = self._by_key.pop(key, None)
        if placement is not None:
            del self._by_number[placement.number]
        return placement

    def on(self, replica_id: str) -> list[ReplicaPlacement]:
        """Return the placements on a replica, the earliest first."""
        return [placement for placement in self._by_number.values() if placement.replica_id == replica_id]


class Suspects:
    """Finds the request that replicas die of: a request that was on several dead replicas in a row is tried alone.

        routed ──died──> suspected ──died again, without tokens in between──> alone ──died once more──> at fault
          ^                  │                                                  │
          └──── tokens in `PROBATION_TICKS` bursts on the next replica ─────────┘

    A replica dies for many reasons that have nothing to do with its requests, so the first time all of them go on elsewhere at
    once. A request that has brought tokens from its present replica is past the place at which the replica before died. Pure;
    requests are named by key, and unknown requests are not suspected.
    """

    def __init__(self) -> None:
        self._num_deaths: dict[int, int] = {}
        self._num_good: dict[int, int] = {}
        self._alone: int | None = None
        self._waiting: deque[int] = deque()

    def may_go(self, key: int) -> bool:
        """Return whether a request may be sent to a replica now; if not, `next` returns it later."""
        if self._num_deaths.get(key, 0) < MAX_DEATHS - 1 or self._alone == key:
            return True
        if self._alone is None:
            self._alone = key
            return True
        if key not in self._waiting:
            self._waiting.append(key)
        return False

    def brought(self, key: int) -> None:
        """Note that a request has brought tokens."""
        if key in self._num_deaths:
            self._num_good[key] = self._num_good.get(key, 0) + 1
            if self._num_good[key] >= PROBATION_TICKS:
                self.forget(key)

    def died(self, keys: Iterable[int]) -> int | None:
        """Suspect the requests that a dead replica had begun. Returns the request at fault, or None."""
        guilty = None
        for key in keys:
            self._num_good.pop(key, None)
            self._num_deaths[key] = self._num_deaths.get(key, 0) + 1
            if self._alone == key and self._num_deaths[key] >= MAX_DEATHS:
                guilty = key
        return guilty

    def forget(self, key: int) -> None:
        """Stop suspecting a request: it brought tokens, waits for its reader, or has ended."""
        self._num_deaths.pop(key, None)
        self._num_good.pop(key, None)
        if self._alone == key:
            self._alone = None
        if key in self._waiting:
            self._waiting.remove(key)

    def next(self) -> int | None:
        """Return a waiting request that may be sent to a replica now, or None."""
        return self._waiting.popleft() if self._alone is None and self._waiting else None


def _may_have_run(placements: list[ReplicaPlacement], num_slots: int) -> list[int]:
    """Return the requests that may have been in a dead replica's last pass: the begun ones, and the next in its queue.

    A replica reports that a request has begun after its first pass.
    """
    begun = [placement.key for placement in placements if placement.has_begun]
    waiting = [placement.key for placement in placements if not placement.has_begun]
    return begun + waiting[: max(1, num_slots - len(begun))]
