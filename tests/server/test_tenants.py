"""Tenants over HTTP: they share no cached prefixes by any route, and take turns in the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ApiKey, ServerSettings

pytestmark = pytest.mark.native

KEYS = {
    "one": ApiKey(secret="first", tenant="one"),
    "also one": ApiKey(secret="second", tenant="one"),
    "two": ApiKey(secret="third", tenant="two"),
    "none": ApiKey(secret="fourth"),
}
TEXT = "There was a fox who had a house at the end of a long road, and in it lived nobody but she. "


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with RunningServer(ServerSettings(engine_options=DEMO_ENGINE, api_keys=tuple(KEYS.values()))) as running:
        yield running


def num_cached(server: RunningServer, key: str, path: str, **body: Any) -> int:
    """Tokens of the prompt that were there already."""
    headers = {"authorization": f"Bearer {KEYS[key].secret}"}
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    result = response.json()
    cached: int = (
        result["timings"]["cache_n"]
        if "timings" in result
        else result["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    return cached


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "By completions. " + TEXT, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "In a chat. " + TEXT}], "max_tokens": 1}),
        ("/v1/responses", {"input": "By responses. " + TEXT, "max_output_tokens": 1}),
        ("/completion", {"prompt": "By llama-server's. " + TEXT, "n_predict": 1}),
        ("/infill", {"input_prefix": "In a gap. " + TEXT, "input_suffix": TEXT, "n_predict": 1}),
    ],
)
def test_prefixes_are_shared_within_a_tenant_and_not_beyond(shared: RunningServer, path: str, body: Any) -> None:
    """Its keys find what it left; others find nothing of it, also with no tenant at all, and cannot name it."""
    assert num_cached(shared, "one", path, **body) < 20  # what a template has in front of every message
    assert num_cached(shared, "also one", path, **body) >= 20
    for other in ("two", "none"):
        assert num_cached(shared, other, path, **body) < 20
        assert num_cached(shared, other, path, **body) >= 20
    named = httpx.post(
        shared.url + path,
        json={**body, "tenant": "one", "cache_salt": "x"},
        headers={"authorization": "Bearer third"},
        timeout=60,
    )
    result = named.json()
    assert named.status_code == 400 or (result["timings"]["cache_n"] == 0 and "tenant" in result["warnings"][0])


def test_a_tenant_that_fills_the_queue_leaves_room_and_a_fair_turn_to_another() -> None:
    """Of eighty requests 48 fill the tenant's share of 64 places; a request of another tenant waits for about one turn."""
    engine = {**DEMO_ENGINE, "num_slots": 2, "max_queue": 62}
    body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
    done: list[str] = []
    num_before: list[int] = []
    refused: list[httpx.Response] = []

    async def attack(server: RunningServer) -> httpx.Response:
        async with server.async_client(limits=httpx.Limits(max_connections=100)) as client:

            async def send(key: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {KEYS[key].secret}"}
                response = await client.post("/v1/completions", json=body, headers=headers)
                if response.status_code == 200:
                    done.append(key)
                else:
                    refused.append(response)
                return response

            async with asyncio.TaskGroup() as tasks:
                many = [tasks.create_task(send("one")) for _ in range(80)]
                while len(refused) < 32:
                    await asyncio.sleep(0.01)
                num_before.append(len(done))
                other = await send("two")
            assert all(task.done() for task in many)
            return other

    with RunningServer(ServerSettings(engine_options=engine, api_keys=tuple(KEYS.values()))) as server:
        other = asyncio.run(attack(server))
    assert other.status_code == 200, other.text
    assert (done.count("one"), len(refused)) == (48, 32)
    assert done.index("two") - num_before[0] <= 5  # two have slots, one may have its turn, two may have arrived late
    for response in refused:
        assert response.status_code == 429
        assert "the share of tenant 'one' in the queue is full: it has 48 of 64 places" in response.text
        assert int(response.headers["retry-after"]) >= 1
