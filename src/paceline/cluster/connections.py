"""The connections of a front with the replicas, and the commands on their way to them. On the dispatcher's event loop.

Each connection has a task that reads the replica's events and a task that renews the session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, Final

from paceline.cluster.replica_calls import ReplicaCalls, ReplicaGone
from paceline.cluster.replica_service import LEASE_S
from paceline.engine.worker import messages
from paceline.errors import EngineError
from paceline.scheduling.records import RequestEvent

_log = logging.getLogger("paceline.cluster")

RENEW_S: Final = LEASE_S / 5
SILENCE_S: Final = 2 * LEASE_S
"""A replica that does not renew a session for so long hangs, or cannot be reached."""

_AGAIN_S: Final = 0.5  # before a failed call is made again, while the replica is not known to be lost
_PAUSE_S: Final = 0.5  # before events are read again after a stream that ended at once


class Connections:
    """All connections of a front.

    Args:
        calls: Calls to the replicas.
        front: The front's id, which no other front has.
        on_joined: Called with a replica that takes requests, and its description. None of these functions may wait.
        on_left: Called with a replica that takes no more requests; it goes on with its requests for a while.
        on_lost: Called with a replica that is gone or has ended the requests of this front, and the reason.
        on_received: Called with a replica and events of its requests.
    """

    def __init__(
        self,
        calls: ReplicaCalls,
        front: str,
        on_joined: Callable[[str, messages.Ready], None],
        on_left: Callable[[str], None],
        on_lost: Callable[[str, str], None],
        on_received: Callable[[str, list[RequestEvent]], None],
    ) -> None:
        self._calls, self._front = calls, front
        self._on_joined, self._on_left, self._on_lost, self._on_received = on_joined, on_left, on_lost, on_received
        self._members: frozenset[str] = frozenset()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._joined: dict[str, tuple[int, messages.Ready]] = {}
        self._lost: set[str] = set()  # replicas that may still have a session, from which nothing is read
        self._closing: set[asyncio.Task[Any]] = set()
        self._has_members = asyncio.Event()

    def begin(self) -> None:
        """Begin to follow the replicas."""
        self._calls.watch(self._changed)

    @property
    def members(self) -> frozenset[str]:
        """The replicas that take requests."""
        return self._members

    @property
    def joined(self) -> frozenset[str]:
        """The replicas that take requests and are connected."""
        return self._members & self._joined.keys()

    @property
    def known(self) -> frozenset[str]:
        """All replicas that are connected or about to be, also if they are being drained."""
        return frozenset(self._tasks)

    async def wait_for_members(self) -> None:
        """Wait until there is a replica that takes requests."""
        await self._has_members.wait()

    def session(self, replica_id: str) -> int:
        """Return the number of this front's session with a replica; 0 if it is not connected."""
        return self._joined[replica_id][0] if replica_id in self._joined else 0

    def expect(self, replica_id: str) -> None:
        """Connect with a replica that got a request before it was reported."""
        if replica_id not in self._tasks:
            self._connect(replica_id)

    def leave(self, replica_id: str) -> None:
        """End the connection with a replica that takes no requests and has no request of this front."""
        task = self._tasks.pop(replica_id, None)
        self._joined.pop(replica_id, None)
        if task is not None:
            task.cancel()
            self._keep(self._end_session(replica_id))

    async def aclose(self) -> None:
        """End all connections."""
        tasks = list(self._tasks.values())
        for replica_id in list(self._tasks):
            self.leave(replica_id)
        if tasks:
            await asyncio.wait(tasks)
        if self._closing:
            await asyncio.wait(self._closing, timeout=RENEW_S)
        await self._calls.aclose()

    # ---- the tasks

    def _changed(self, members: frozenset[str]) -> None:
        new, gone, self._members = members - self._members, self._members - members, members
        if members:
            self._has_members.set()
        else:
            self._has_members.clear()
        for replica_id in sorted(members):
            if replica_id not in self._tasks:
                self._connect(replica_id)
            elif replica_id in new and replica_id in self._joined:  # it was being drained, and takes requests again
                self._on_joined(replica_id, self._joined[replica_id][1])
        for replica_id in sorted(gone):
            if replica_id in self._tasks:
                self._keep(self._part_with(replica_id))
            else:  # it was lost before
                self._forget_calls(replica_id)

    def _connect(self, replica_id: str) -> None:
        self._tasks[replica_id] = asyncio.create_task(self._follow(replica_id))

    async def _follow(self, replica_id: str) -> None:
        """Read a replica's events until it is gone."""
        why = "its events ended"
        try:
            if replica_id in self._lost:  # its old session's requests continue elsewhere
                self._lost.discard(replica_id)
                await self._calls.call(replica_id, "leave", self._front)
            number = await self._calls.call(replica_id, "renew", self._front)
            ready = _described(await self._calls.call(replica_id, "describe"))
            self._joined[replica_id] = number, ready
            self._on_joined(replica_id, ready)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(replica_id))
                group.create_task(self._renew(replica_id, number))
        except* ReplicaGone as gone:
            why = str(gone.exceptions[0])
        except* Exception as failures:  # noqa: BLE001 - the replica cannot be followed
            why = str(failures.exceptions[0])
            _log.exception("replica %s cannot be followed", replica_id)
        if self._tasks.get(replica_id) is asyncio.current_task():
            del self._tasks[replica_id]
            self._lose(replica_id, why)
            if replica_id in self._members:  # it may still be there
                self._keep(self._connect_again(replica_id))

    async def _part_with(self, replica_id: str) -> None:
        """Find out whether a replica that takes no more requests is being drained or has died."""
        why = None
        try:
            async with asyncio.timeout(RENEW_S):
                await self._calls.call(replica_id, "renew", self._front)
        except (ReplicaGone, TimeoutError) as gone:
            why = str(gone) or "it did not reply"
        if replica_id in self._members:
            return  # it takes requests again
        if why is None and replica_id in self._joined:
            self._on_left(replica_id)
        elif (task := self._tasks.pop(replica_id, None)) is not None:
            task.cancel()
            self._lose(replica_id, why or "it was stopped before it was connected")

    def _lose(self, replica_id: str, why: str) -> None:
        self._joined.pop(replica_id, None)
        self._lost.add(replica_id)
        self._on_lost(replica_id, why)
        self._forget_calls(replica_id)

    async def _connect_again(self, replica_id: str) -> None:
        await asyncio.sleep(RENEW_S / 2)
        if replica_id in self._members and replica_id not in self._tasks:
            self._connect(replica_id)

    async def _read(self, replica_id: str) -> None:
        while True:
            has_any = False
            async for frame in self._calls.stream(replica_id, "events", self._front):
                has_any = True
                message = messages.decode_up(frame)
                if isinstance(message, messages.Happened):
                    self._on_received(replica_id, message.events)
            if not has_any:  # the session or the connection has ended: renewing finds out
                await asyncio.sleep(_PAUSE_S)

    async def _renew(self, replica_id: str, number: int) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                async with asyncio.timeout(SILENCE_S):
                    now = await self._calls.call(replica_id, "renew", self._front)
            except TimeoutError:
                raise ReplicaGone(f"it did not reply for {SILENCE_S:.0f} s", replica_id) from None
            if now != number:
                raise ReplicaGone("it took this front for dead, and ended its requests", replica_id)

    async def _end_session(self, replica_id: str) -> None:
        try:
            async with asyncio.timeout(RENEW_S):
                await self._calls.call(replica_id, "leave", self._front)
        except (ReplicaGone, TimeoutError):
            pass  # if it is still there, it ends the session after the lease
        self._forget_calls(replica_id)

    def _forget_calls(self, replica_id: str) -> None:
        if replica_id not in self._members and replica_id not in self._tasks:
            self._lost.discard(replica_id)
            self._calls.forget(replica_id)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


class CommandSender:
    """Sends a front's commands to the replicas, in order: one call at a time to each replica.

    A call that fails is made again until the replica is lost. A command that comes twice changes nothing; a lost command could
    leave a request paused.

    Args:
        calls: Calls to the replicas.
        front: This front's id.
        is_known: Returns whether a replica is connected or about to be.
    """

    def __init__(self, calls: ReplicaCalls, front: str, is_known: Callable[[str], bool]) -> None:
        self._calls, self._front, self._is_known = calls, front, is_known
        self._waiting: defaultdict[str, list[bytes]] = defaultdict(list)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, replica_id: str, command: bytes) -> None:
        """Add a command, which `flush` sends."""
        self._waiting[replica_id].append(command)

    def flush(self) -> None:
        """Send the added commands, all of a replica in one call."""
        for replica_id in self._waiting.keys() - self._tasks.keys():
            self._tasks[replica_id] = asyncio.get_running_loop().create_task(self._send_all(replica_id))

    def forget(self, replica_id: str) -> None:
        """Drop the commands for a replica that is lost or was left."""
        self._waiting.pop(replica_id, None)
        task = self._tasks.pop(replica_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Drop all commands."""
        for replica_id in self._waiting.keys() | self._tasks.keys():
            self.forget(replica_id)

    async def _send_all(self, replica_id: str) -> None:
        while commands := self._waiting.pop(replica_id, None):
            await self._send(replica_id, commands)
        if self._tasks.get(replica_id) is asyncio.current_task():
            del self._tasks[replica_id]

    async def _send(self, replica_id: str, commands: list[bytes]) -> None:
        while True:
            try:
                await self._calls.call(replica_id, "command", self._front, commands)
            except ReplicaGone:
                if not self._is_known(replica_id):
                    return
                await asyncio.sleep(_AGAIN_S)  # `forget` ends this if the replica is lost
            except Exception:  # noqa: BLE001 - callers get the end of their requests in any case
                _log.exception("replica %s did not take commands", replica_id)
                return
            else:
                return


def _described(data: bytes) -> messages.Ready:
    """Return the description of a replica. Raises `EngineError` for a replica of another version."""
    ready = messages.decode_up(data)
    if not isinstance(ready, messages.Ready):
        raise EngineError(f"a replica described itself by a {type(ready).__name__}")
    messages.check_protocol(ready.protocol)
    return ready
