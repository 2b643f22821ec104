"""Heartbeats of a stream keep their place among the events: events are sent in the order of encoding, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests import virtual_time
from tests.polling import async_wait_until

from paceline.server.sse import NAMED_SSE, EventStream, EventWriter
from paceline.streaming import StreamChunk


class Source:
    """Yields batches of one chunk when the test lets it."""

    prompts = ((1,),)
    is_disconnected = False

    def __init__(self, heartbeat_s: float, num_batches: int) -> None:
        self.heartbeat_s = heartbeat_s
        self.ready = [asyncio.Event() for _ in range(num_batches)]

    async def batches(self) -> AsyncIterator[list[tuple[int, StreamChunk]]]:
        for event in self.ready:
            await event.wait()
            yield [(0, StreamChunk(index=0))]

    def cancel(self) -> None:
        pass

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *error: object) -> None:
        pass


class Client:
    """Receives the sent bytes. gate: cleared while it does not read."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_waiting = 0

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            return
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1
        if message["body"]:
            self.sent.append(message["body"])


class Numbers(EventWriter):
    """Encodes events and heartbeats with one row of numbers."""

    framing, done = NAMED_SSE, b""

    def __init__(self) -> None:
        self.num = 0

    def encode(self, kind: bytes) -> bytes:
        self.num += 1
        return b"%b%d " % (kind, self.num - 1)

    def opening(self) -> bytes:
        return self.encode(b"opening")

    def __call__(self, prompt: int, chunk: Any) -> list[bytes]:
        return [self.encode(b"event")]

    def heartbeat(self) -> bytes:
        return self.encode(b"beat")

    def failure(self, api_error: Any) -> bytes:
        return b""


def kinds_in_order(client: Client) -> list[bytes]:
    """Return the sent parts, each with the number of its place."""
    parts = b"".join(client.sent).split()
    assert [int(part.strip(b"abcdefghijklmnopqrstuvwxyz")) for part in parts] == list(range(len(parts)))
    return [part.rstrip(b"0123456789") for part in parts]


@pytest.mark.parametrize("num_batches", [0, 2])
def test_a_heartbeat_that_waits_for_the_client_is_sent_before_what_comes_after_it(num_batches: int) -> None:
    """Also if the stream ends meanwhile."""

    async def run() -> list[bytes]:
        numbers, client = Numbers(), Client()
        source = Source(0.01, num_batches + 1)
        running = asyncio.create_task(EventStream(source, numbers)({"type": "http"}, asyncio.Queue().get, client.send))
        await async_wait_until(lambda: len(client.sent) == 1)
        client.gate.clear()
        await async_wait_until(lambda: client.num_waiting == 1)  # the heartbeat
        for event in source.ready:
            event.set()
        await asyncio.sleep(0.05)
        assert client.num_waiting == 1
        client.gate.set()
        await running
        return kinds_in_order(client)

    kinds = virtual_time.run(run())
    assert kinds[:3] == [b"opening", b"beat", b"event"]
    assert kinds.count(b"event") == num_batches + 1


def test_there_is_no_heartbeat_while_events_wait_for_the_client() -> None:
    """They are enough for it to count."""

    async def run() -> list[bytes]:
        numbers, client = Numbers(), Client()
        source = Source(0.01, 1)
        client.gate.clear()
        running = asyncio.create_task(EventStream(source, numbers)({"type": "http"}, asyncio.Queue().get, client.send))
        await async_wait_until(lambda: client.num_waiting == 1)
        await asyncio.sleep(0.1)
        source.ready[0].set()
        client.gate.set()
        await running
        return kinds_in_order(client)

    assert virtual_time.run(run()) == [b"opening", b"event"]


def test_a_heartbeat_comes_one_interval_after_the_last_event() -> None:
    """Not up to two of them, which clients with a limit would not wait for."""

    async def run() -> list[bytes]:
        numbers, client = Numbers(), Client()
        source = Source(0.2, 2)
        running = asyncio.create_task(EventStream(source, numbers)({"type": "http"}, asyncio.Queue().get, client.send))
        await async_wait_until(lambda: len(client.sent) == 1)
        await asyncio.sleep(0.1)
        source.ready[0].set()
        await asyncio.sleep(0.25)
        source.ready[1].set()
        await running
        return kinds_in_order(client)

    assert virtual_time.run(run())[:3] == [b"opening", b"event", b"beat"]
