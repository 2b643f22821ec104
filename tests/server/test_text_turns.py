"""Requests that wait for their turn to be tokenised: ended by their client, by their id, or by their time, and not tokenised."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.server.running import RunningServer
from tests.server.world import World

from paceline.server.in_flight import MAX_TEXT_BYTES, TurnQueue, while_wanted
from paceline.server.running_request import run_in_turn

LARGE = "x" * 100_000
CELLS = {"num_cells": 200_000}


class Tokenised:
    """How many texts an engine has tokenised."""

    def __init__(self, world: World) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        tokenizer: Any = world.engine.tokenizer
        encode = tokenizer.encode

        def counted(text: str, **options: Any) -> Any:
            self.sizes.append(len(text))
            self.begun.set()
            assert self.gate.wait(60)
            return encode(text, **options)

        tokenizer.encode = counted


def queue_of(world: World) -> TurnQueue:
    return world.server.service.body_budget.texts_queue(MAX_TEXT_BYTES)


@contextmanager
def occupied(world: World) -> Iterator[None]:
    """Within the block no request with a long text gets its turn."""
    queue = queue_of(world)
    world.server.call(lambda: queue.enter("another", MAX_TEXT_BYTES))
    try:
        yield
    finally:
        world.server.call(lambda: queue.leave("another", MAX_TEXT_BYTES))


def wait_for_waiting(world: World, number: int) -> None:
    world.server.until(lambda: queue_of(world).num_waiting == number)


def test_a_large_request_waits_for_its_turn_and_a_small_one_does_not(worlds: Any) -> None:
    """Its text is tokenised when the turn comes, and it is served then."""
    world = worlds(**CELLS)
    tokenised = Tokenised(world)
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(world.post(prompts=[LARGE]).status_code))
    with occupied(world):
        thread.start()
        wait_for_waiting(world, 1)
        assert world.post(prompts=["small"]).status_code == 200
        assert tokenised.sizes == [len("small")]
    thread.join(60)
    assert statuses == [200]
    assert tokenised.sizes.count(len(LARGE)) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_tokenised(worlds: Any, stream: bool) -> None:
    """It leaves the queue at once."""
    world = worlds(**CELLS)
    tokenised = Tokenised(world)
    with occupied(world):
        connection = world.raw(prompts=[LARGE], stream=stream)
        wait_for_waiting(world, 1)
        connection.close()
        wait_for_waiting(world, 0)
        world.server.do(world.server.service.in_flight.wait_idle())
    assert tokenised.sizes == []
    assert world.server.service.request_registry.count == 0
    assert world.post(prompts=[LARGE]).status_code == 200


def test_a_request_is_cancelled_by_its_id_before_its_turn(worlds: Any) -> None:
    """As it is later."""
    world = worlds(**CELLS)
    tokenised = Tokenised(world)
    with occupied(world), world.raw("mine", prompts=[LARGE]) as connection:
        wait_for_waiting(world, 1)
        assert world.client.post("/v1/requests/mine/cancel").json() == {"id": "mine", "cancelled": True}
        head, _, body = read_response(connection)
        assert b" 499 " in head
        assert json.loads(body)["error"]["code"] == "cancelled"
    assert tokenised.sizes == []


@pytest.mark.native
def test_a_resumable_completion_outlives_a_client_that_leaves_before_its_turn(
    server: RunningServer, client: httpx.Client
) -> None:
    """The stream is there for the client that comes back."""
    queue = server.service.body_budget.texts_queue(MAX_TEXT_BYTES)
    body = {"prompt": LARGE, "truncate": "left", "n_predict": 2, "stream": True, "ignore_eos": True}
    server.call(lambda: queue.enter("another", MAX_TEXT_BYTES))
    try:
        connection = HTTPConnection(client.base_url.host, client.base_url.port)
        headers = {"Content-Type": "application/json", "X-Conversation-Id": "left"}
        connection.request("POST", "/completion", json.dumps(body), headers)
        server.until(lambda: queue.num_waiting == 1)
        connection.close()
        for _ in range(5):  # which the server reads after the end of the connection
            client.get("/health").raise_for_status()
        assert server.call(lambda: queue.num_waiting) == 1
    finally:
        server.call(lambda: queue.leave("another", MAX_TEXT_BYTES))
    server.until(lambda: bool(server.service.resumable_streams.lookup(b"", ["left"])))
    assert b'"stop":true' in client.get("/v1/stream", params={"conv_id": "left"}).raise_for_status().content


@pytest.mark.parametrize("option", ["timeout_s", "queue_timeout_s", "ttft_timeout_s"])
def test_the_time_of_a_request_counts_before_its_turn(worlds: Any, option: str) -> None:
    """It ends as one that ran out of time in the engine's queue."""
    world = worlds(**CELLS)
    tokenised = Tokenised(world)
    with occupied(world):
        response = world.post(prompts=[LARGE], options={option: 0.05})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert tokenised.sizes == []
    assert queue_of(world).num_waiting == 0
    assert world.post(prompts=[LARGE]).status_code == 200


def leave(world: Any, send: Callable[[], Any]) -> list[int]:
    """Leave while the first text of a request is tokenised, and return the sizes of the texts that were.

    The turn ends with the text that is being tokenised, and not before.
    """
    tokenised = Tokenised(world)
    tokenised.gate.clear()
    connection = send()
    assert tokenised.begun.wait(60)
    connection.close()
    world.server.until(lambda: is_disconnected(world))
    assert world.server.call(lambda: queue_of(world).enter("another", MAX_TEXT_BYTES).done()) is False
    tokenised.gate.set()
    world.server.do(world.server.service.in_flight.wait_idle())
    return tokenised.sizes


def test_a_client_that_leaves_ends_the_tokenising_of_its_prompts(worlds: Any) -> None:
    """Nothing waits then."""
    world = worlds(**CELLS)
    assert leave(world, lambda: world.raw(prompts=[LARGE] * 3)) == [len(LARGE)]
    wait_for_waiting(world, 0)


def test_a_client_that_leaves_ends_the_tokenising_of_its_choices(worlds: Any) -> None:
    """A prompt is long if it is long with all of its choices, each of which has it again."""
    world, prompt = worlds(**CELLS), "x" * 10_000
    body = {"prompt": prompt, "choices": ["a"] * 300}
    assert leave(world, lambda: world.server.raw("POST", "/v1/score_choices", body)) == [len(prompt)]


def test_a_cancelled_task_ends_the_tokenising_without_a_report() -> None:
    """As at the end of the server: after the text that is being tokenised."""
    begun, gate, done = threading.Event(), threading.Event(), list[int]()
    reports: list[Any] = []

    def tokenise() -> None:
        for number in while_wanted(range(3)):
            begun.set()
            assert gate.wait(60)
            done.append(number)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, report: reports.append(report))
        request: Any = SimpleNamespace(scope={}, receive=asyncio.Event().wait)
        task = asyncio.create_task(run_in_turn(cast(Any, None), request, tokenise, {}))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        del task
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert done == [0]
    assert reports == []


def test_a_request_whose_text_is_known_by_its_ids_needs_no_turn(worlds: Any) -> None:
    """There is nothing to tokenise, however long its body is."""
    world = worlds(**CELLS)
    with occupied(world):
        assert world.post(prompts=[[120] * 50_000]).status_code == 200


def is_disconnected(world: World) -> bool:
    """Return whether no connection of a client is open, except the caller's."""
    return not any(
        protocol.transport is not None and not protocol.transport.is_closing() and protocol.cycle is not None
        for protocol in world.server._server.server_state.connections
    )


def read_response(connection: Any) -> tuple[bytes, bytes, bytes]:
    received = b""
    while b"\r\n\r\n" not in received or not received.rstrip().endswith(b"}"):
        part = connection.recv(65536)
        if not part:
            break
        received += part
    return received.partition(b"\r\n\r\n")
