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
    """Its keys find its stored responses; others find none of them, also without a tenant, and cannot name it."""
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


def as_key(server: RunningServer, key: str, **headers: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {KEYS[key].secret}", **headers})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/lora-adapters", []),
        ("/props", {}),
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/nowhere.gguf"}),
        ("/v1/unload_lora_adapter", {"lora_name": "new"}),
    ],
)
def test_a_tenants_key_does_not_change_the_server_for_all(shared: RunningServer, path: str, body: Any) -> None:
    """Routes that act on all tenants refuse a tenant's key with 403, and take the key without a tenant."""
    with as_key(shared, "one") as tenant, as_key(shared, "none") as operator:
        refused = tenant.post(path, json=body)
        assert refused.status_code == 403
        assert "operator_key_required" in refused.text or "permission_error" in refused.text
        assert operator.post(path, json=body).status_code != 403


def test_the_keys_of_a_single_tenant_are_the_operators() -> None:
    """Without other tenants, and without keys, the routes work as before."""
    only = ApiKey(secret="first", tenant="one")
    for keys in ((only,), (ApiKey(secret="first"),), ()):
        settings = ServerSettings(engine_options=DEMO_ENGINE, api_keys=keys, props=True)
        with RunningServer(settings) as server, as_key(server, "one") as client:
            assert client.post("/props", json={}).json() == {"success": True}
            assert client.post("/lora-adapters", json=[]).json() == {"success": True}


def test_slots_show_a_tenant_its_own_requests(shared: RunningServer) -> None:
    """With equal request ids each tenant sees the settings of its own request, and of the other only that a slot is busy."""
    with (
        as_key(shared, "one", **{"x-request-id": "same"}) as one,
        as_key(shared, "two", **{"x-request-id": "same"}) as two,
        as_key(shared, "none") as operator,
    ):
        body = {"prompt": "hello", "n_predict": 3000, "ignore_eos": True, "stream": True}
        with (
            one.stream("POST", "/completion", json={**body, "seed": 11}) as first,
            two.stream("POST", "/completion", json={**body, "seed": 22}) as second,
        ):
            lines = [first.iter_lines(), second.iter_lines()]
            assert all(next(each).startswith("data:") for each in lines)
            for client, seeds in ((one, [11]), (two, [22]), (operator, [11, 22])):
                slots = [slot for slot in client.get("/slots").json() if slot["is_processing"]]
                assert len(slots) == 2
                shown = [slot for slot in slots if "params" in slot]
                assert sorted(slot["params"]["seed"] for slot in shown) == seeds
                hidden = [slot for slot in slots if "params" not in slot]
                assert all(slot.keys() == {"id", "n_ctx", "speculative", "is_processing"} for slot in hidden)


def test_metrics_have_no_text_of_a_tenant(shared: RunningServer) -> None:
    """Neither the names of tenants, nor paths, ids and prompts that they chose."""
    names = {"x-request-id": "chosen-id", "x-conversation-id": "chosen-talk", "user-agent": "chosen-agent"}
    with as_key(shared, "one", **names) as client:
        body = {"prompt": "chosen-prompt", "n_predict": 1, "user": "chosen-user", "cache_salt": "chosen-salt"}
        assert client.post("/completion?chosen=query", json=body).status_code == 200
        assert client.post("/v1/completions", json={**body, "model": "chosen-model"}).status_code == 200
        assert client.get("/chosen-path").status_code == 404
        text = client.get("/metrics").text
    assert "paceline_http_requests_total" in text
    assert "chosen" not in text
    assert "tenant" not in text


def test_a_request_with_more_prompts_than_a_tenants_share_is_refused_for_good(shared: RunningServer) -> None:
    """It is a 400 with the number, as another try would not help; 429 is for a share that is full now."""
    most = shared.engine.most_requests("one")
    with as_key(shared, "one") as client:
        for path in ("/v1/completions", "/completion"):
            refused = client.post(path, json={"prompt": ["hello"] * (most + 1), "max_tokens": 1, "n_predict": 1})
            assert refused.status_code == 400
            assert str(most) in refused.text
