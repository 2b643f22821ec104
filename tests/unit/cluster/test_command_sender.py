"""Commands for replicas come in order, and are not lost while a replica is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.cluster.connections import CommandSender
from paceline.cluster.replica_calls import ReplicaGone


class SlowCalls:
    """Calls that take until `go` is set; the first `num_failing` of them fail then."""

    def __init__(self, num_failing: int = 0) -> None:
        self.made: list[tuple[str, list[bytes]]] = []
        self.go = asyncio.Event()
        self._num_failing = num_failing

    async def call(self, replica_id: str, method: str, front: str, commands: list[bytes]) -> None:
        assert (method, front) == ("command", "me")
        self.made.append((replica_id, commands))
        await self.go.wait()
        if len(self.made) <= self._num_failing:
            raise ReplicaGone("the network is down", replica_id)


def sender(calls: Any, *, is_known: bool = True) -> CommandSender:
    return CommandSender(calls, "me", lambda _: is_known)


def test_no_command_overtakes_another() -> None:
    """Commands during a call wait for its end; other replicas do not."""

    async def run() -> None:
        calls = SlowCalls()
        commands = sender(calls)
        for replica_id, command in (("a", b"1"), ("a", b"2"), ("b", b"3"), ("a", b"4")):
            commands.add(replica_id, command)
            commands.flush()
            await asyncio.sleep(0)
        assert calls.made == [("a", [b"1"]), ("b", [b"3"])]
        calls.go.set()
        await asyncio.sleep(0.01)
        assert calls.made[2:] == [("a", [b"2", b"4"])]

    asyncio.run(run())


def test_a_command_that_did_not_come_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that could not be reached, and is known still, gets its commands, in order."""
    monkeypatch.setattr("paceline.cluster.connections._AGAIN_S", 0.001)

    async def run() -> None:
        calls = SlowCalls(num_failing=2)
        commands = sender(calls)
        calls.go.set()
        commands.add("a", b"resume")
        commands.flush()
        await asyncio.sleep(0)
        commands.add("a", b"next")
        commands.flush()
        await asyncio.sleep(0.05)
        assert calls.made == [("a", [b"resume"])] * 3 + [("a", [b"next"])]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["is not known", "is forgotten"])
def test_a_replica_that_is_gone_gets_nothing_more(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent again to a missing replica; a replica that comes back under its name gets new commands."""
    monkeypatch.setattr("paceline.cluster.connections._AGAIN_S", 0.001)

    async def run() -> None:
        calls = SlowCalls(num_failing=1)
        commands = sender(calls, is_known=how == "is forgotten")
        commands.add("a", b"old")
        commands.flush()
        await asyncio.sleep(0)
        if how == "is forgotten":
            commands.forget("a")
        calls.go.set()
        await asyncio.sleep(0.02)
        assert calls.made == [("a", [b"old"])]
        commands.add("a", b"new")
        commands.flush()
        await asyncio.sleep(0)
        assert calls.made[1:] == [("a", [b"new"])]
        commands.close()

    asyncio.run(run())
