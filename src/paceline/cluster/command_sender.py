"""Commands of a front on their way to the replicas: each replica gets its own in order, until it has taken them or is lost.

On the dispatcher's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from paceline.cluster.replica_calls import ReplicaCalls, ReplicaGone

_log = logging.getLogger("paceline.cluster")

_AGAIN_S: Final = 0.5  # until a call is made again that failed, while the replica is not known to be lost


class CommandSender:
    """The commands, by replica. One call is made at a time to each, so that none overtakes another.

    A call that fails is made again: commands may come twice, which changes nothing, but a request that was to go on must not
    stay paused. is_known: whether there is a connection with a replica, or will be.
    """

    def __init__(self, calls: ReplicaCalls, front: str, is_known: Callable[[str], bool]) -> None:
        self._calls, self._front, self._is_known = calls, front, is_known
        self._waiting: defaultdict[str, list[bytes]] = defaultdict(list)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, replica_id: str, command: bytes) -> None:
        """Add a command, which `flush` sends."""
        self._waiting[replica_id].append(command)

    def flush(self) -> None:
        """Send what was added, all for a replica at once."""
        for replica_id in self._waiting.keys() - self._tasks.keys():
            self._tasks[replica_id] = asyncio.get_running_loop().create_task(self._send_all(replica_id))

    def forget(self, replica_id: str) -> None:
        """Send a replica nothing more: it is lost, or has been left, and what the commands were for is over there."""
        self._waiting.pop(replica_id, None)
        task = self._tasks.pop(replica_id, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Send nothing more."""
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
                await asyncio.sleep(_AGAIN_S)  # `forget` ends this, where it is lost
            except Exception:  # noqa: BLE001 - they are wanted by callers, who get their end in any case
                _log.exception("replica %s did not take commands", replica_id)
                return
            else:
                return
