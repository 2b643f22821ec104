"""200 clients at once, who hang up as they like, and a worker that is killed again and again: every request ends.

PACELINE_SOAK_S: for how many seconds; by default short. PACELINE_SOAK_CLIENTS: how many clients.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.e2e.raw_client import Head, RawConnection
from tests.e2e.served import LONG_S, Served

SECONDS = float(os.environ.get("PACELINE_SOAK_S", "20"))
NUM_CLIENTS = int(os.environ.get("PACELINE_SOAK_CLIENTS", "200"))
KILL_S = 30.0 if SECONDS >= 120 else SECONDS / 5  # an engine that dies more than five times a minute is given up
WATCH_S = 0.5
MEGABYTE = 1 << 20
MOST_GROWTH = 4 * MEGABYTE
"""Of the server's memory within the second half, however long that is: the last threads, and what the C library keeps for
each. In ten minutes it is some 1.5 MB; 60 bytes that every request left behind would be more than this."""

pytestmark = [
    pytest.mark.native,
    pytest.mark.full,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]

FLAGS = ("-t", "1", "-np", "8", "--max-queue", "180", "--log-level", "error", "--heartbeat-s", "0.5")
WORDS = (
    "fox rabbit tree river stone night moon house little old green slow and then the a under with".split()  # noqa: SIM905
)


@dataclass
class Tally:
    """The outcomes of the requests. pings: seconds of an empty completion."""

    endings: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    kills: int = 0
    rss: list[int] = field(default_factory=list)
    pings: list[float] = field(default_factory=list)


class Client:
    """Sends requests in a row, and notes how each ended."""

    def __init__(self, port: int, tally: Tally, seed: int) -> None:
        self._port, self._tally, self._rng, self._seed = port, tally, random.Random(seed), seed
        self._connection: RawConnection | None = None
        self._num_asked = 0

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Until it is over; the last request has an ending, too."""
        acts = [self.stream, self.stream, self.whole, self.leave, self.leave_at_once, self.cancel, self.native]
        try:
            while not is_over():
                async with asyncio.timeout(LONG_S):
                    self._tally.endings[await self._rng.choice(acts)()] += 1
        finally:
            self._drop()

    # ---- what a client does; each returns how its request ended

    async def stream(self) -> str:
        """Read to the end."""
        connection, head = await self._ask(*self._openai(stream=True))
        if head.status != 200:
            return await self._refused(connection, head)
        return self._ending_of([event async for event in connection.events()])

    async def whole(self) -> str:
        """Without a stream."""
        connection, head = await self._ask(*self._openai(stream=False))
        if head.status != 200:
            return await self._refused(connection, head)
        completion = json.loads(await connection.whole(head))
        self._tally.num_tokens += completion["usage"]["completion_tokens"]
        reason: str = completion["choices"][0]["finish_reason"]
        return reason

    async def native(self) -> str:
        """llama-server's own stream, which has no mark at its end."""
        body = {"prompt": self._prompt(), "n_predict": self._rng.randrange(1, 60), "stream": True}
        connection, head = await self._ask("/completion", body)
        if head.status != 200:
            return await self._refused(connection, head)
        events = [json.loads(event) async for event in connection.events()]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        return "native " + str(events[-1]["stop_type"])

    async def leave(self) -> str:
        """Hangs up within the stream, or while it waits for its beginning."""
        connection, head = await self._ask(*self._openai(stream=True, max_tokens=400))
        if head.status != 200:
            return await self._refused(connection, head)
        wanted = self._rng.randrange(5)
        async for _ in connection.events():
            wanted -= 1
            if wanted <= 0:
                self._drop()
                return "left in the stream"
        return "ended before it left"

    async def leave_at_once(self) -> str:
        """Hangs up before there is a word, streaming or not."""
        path, body = self._openai(stream=self._rng.random() < 0.5, max_tokens=400)
        connection = await self._connected()
        connection.send(path, body)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rng.choice([0, 0.001, 0.01, 0.1])):
                await connection.head()
        self._drop()
        return "left at once"

    async def cancel(self) -> str:
        """Has its own stream cancelled, by its id, on another connection."""
        request_id = f"soak-{self._seed}-{self._num_asked}"
        connection, head = await self._ask(*self._openai(stream=True, max_tokens=400), request_id=request_id)
        if head.status != 200:
            return await self._refused(connection, head)
        assert head.headers["x-request-id"] == request_id
        other = await RawConnection.open(self._port)
        response = await other.post(f"/v1/requests/{request_id}/cancel", {})
        found = json.loads(await other.whole(response))["cancelled"]
        other.close()
        ending = self._ending_of([event async for event in connection.events()])
        assert found or ending != "cancelled"
        return ending

    # ---- how it does it

    def _openai(self, *, stream: bool, max_tokens: int = 60) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"max_tokens": self._rng.randrange(1, max_tokens), "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self._rng.random() < 0.5:
            return "/v1/completions", {**body, "prompt": self._prompt()}
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": self._prompt()}]}

    def _prompt(self) -> str:
        stem = " ".join(WORDS[: self._rng.randrange(len(WORDS))])
        return " ".join([stem, *self._rng.choices(WORDS, k=self._rng.randrange(1, 40))]).strip()

    async def _ask(self, path: str, body: dict[str, Any], request_id: str = "") -> tuple[RawConnection, Head]:
        connection = await self._connected()
        self._num_asked += 1
        return connection, await connection.post(path, body, request_id)

    async def _connected(self) -> RawConnection:
        """Return the last connection if it can be used again, or a new connection."""
        if self._connection is not None and (not self._connection.is_whole or self._rng.random() < 0.3):
            self._drop()
        if self._connection is None:
            self._connection = await RawConnection.open(self._port)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _refused(self, connection: RawConnection, head: Head) -> str:
        """Check the refusal's status; errors not about too many requests are failures of the test."""
        error = json.loads(await connection.whole(head))["error"]
        assert head.status == 429, (head.status, error)
        assert int(head.headers["retry-after"]) > 0
        await asyncio.sleep(self._rng.random() * 0.2)  # as a client that honours Retry-After, but sooner
        return "429"

    def _ending_of(self, events: list[str]) -> str:
        """How a stream ended: one terminal event, and then the mark."""
        assert events[-1] == "[DONE]"
        parsed = [json.loads(event) for event in events[:-1]]
        terminal = [
            event for event in parsed if "error" in event or any(choice["finish_reason"] for choice in event["choices"])
        ]
        assert len(terminal) == 1, terminal
        if "error" in terminal[0]:
            assert parsed[-1] is terminal[0]
            return str(terminal[0]["error"]["code"])
        self._tally.num_tokens += parsed[-1]["usage"]["completion_tokens"]
        return str(terminal[0]["choices"][0]["finish_reason"])


async def kill_now_and_then(served: Served, tally: Tally, is_over: asyncio.Event) -> None:
    """The worker, whatever it is at; then there is to be another one."""
    while not await happens_within(is_over, KILL_S):
        with served.worker() as worker:
            worker.signal(signal.SIGKILL)
            tally.kills += 1
            await asyncio.to_thread(worker.wait_gone)


async def watch(served: Served, tally: Tally, is_over: asyncio.Event) -> None:
    """Memory, and how long a request for next to nothing takes."""
    connection = await RawConnection.open(urlsplit(served.url).port or 0)
    while not await happens_within(is_over, WATCH_S):
        tally.rss.append(served.rss_bytes())
        began = time.perf_counter()
        await connection.whole(await connection.post("/tokenize", {"content": ""}))
        tally.pings.append(time.perf_counter() - began)
    connection.close()


async def happens_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


async def soak(served: Served, tally: Tally) -> None:
    """Run all of it for the given time."""
    is_over = asyncio.Event()
    port = urlsplit(served.url).port or 0
    async with asyncio.TaskGroup() as group:
        work: list[Coroutine[Any, Any, None]] = [
            Client(port, tally, seed).run(is_over.is_set) for seed in range(NUM_CLIENTS)
        ]
        for each in (kill_now_and_then(served, tally, is_over), watch(served, tally, is_over), *work):
            group.create_task(each)
        asyncio.get_running_loop().call_later(SECONDS, is_over.set)


def test_every_request_ends_and_nothing_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    """Slots, requests, files, processes and memory are as before, and the counts add up."""
    tally = Tally()
    with Served(*FLAGS) as served:
        asyncio.run(warm_up(served, tally))
        served.assert_idle()
        files, tally.endings = served.num_files(), Counter()
        asyncio.run(soak(served, tally))
        served.assert_idle()
        numbers = served.metrics()
        finished = {
            reason: int(numbers[f'paceline_requests_finished_total{{reason="{reason}"}}'])
            for reason in ("length", "stop", "cancelled", "error", "deadline", "shutdown", "slow_reader")
        }
        served.wait_until(lambda: served.num_files() <= files, "no descriptor is lost")
        with served.worker() as worker:
            assert served.children() == [worker.pid]
        middle, end = line(second_half(tally.rss))
        figures = (
            f"\n{SECONDS:g} s, {NUM_CLIENTS} clients: {tally.endings.total()} requests, {tally.num_tokens} tokens told, "
            f"{tally.kills} kills, {numbers['paceline_engine_restarts_total']:g} restarts"
            f"\n  as clients saw it: {dict(tally.endings.most_common())}"
            f"\n  as the engine counted: {finished}"
            f"\n  memory of the server: {middle / MEGABYTE:.1f} MB after a half, {end / MEGABYTE:.1f} MB at the end, "
            f"{(end - middle) / MEGABYTE * 120 / SECONDS:+.2f} MB a minute; "
            f"{files} descriptors before and {served.num_files()} after"
            f"\n  longest wait for an empty completion: {max(tally.pings):.3f} s\n"
        )
        with capsys.disabled():
            print(figures)  # noqa: T201 - what it is for
        assert finished["error"] == finished["shutdown"] == finished["deadline"] == finished["slow_reader"] == 0
        assert set(tally.endings) <= ENDINGS
        assert tally.kills > 0
        assert (
            0 < numbers["paceline_engine_restarts_total"] <= tally.kills
        )  # one that was loading is none that took over
        assert end - middle < MOST_GROWTH
        served.signal(signal.SIGTERM)
        assert served.code() == 0


ENDINGS = {
    "length", "stop", "native limit", "native eos", "native word", "cancelled", "429",
    "left in the stream", "left at once", "ended before it left",
}  # fmt: skip
"""How a request may end; errors are not among them, though its worker died."""


async def warm_up(served: Served, tally: Tally) -> None:
    """As many clients, once each: threads, pools and caches are there afterwards."""
    port = urlsplit(served.url).port or 0
    asked = 0

    def has_asked() -> bool:
        nonlocal asked
        asked += 1
        return asked > NUM_CLIENTS + NUM_CLIENTS

    async with asyncio.TaskGroup() as group:
        for seed in range(NUM_CLIENTS):
            group.create_task(Client(port, tally, -seed).run(has_asked))


def second_half(samples: list[int]) -> list[int]:
    """By then most threads have been made."""
    return samples[len(samples) // 2 :]


def line(samples: list[int]) -> tuple[float, float]:
    """Return both ends of the straight line nearest to the samples: momentary load matters little to it."""
    if len(samples) < 2:
        return samples[0], samples[0]
    slope, start = statistics.linear_regression(range(len(samples)), samples)
    return start, start + slope * (len(samples) - 1)
