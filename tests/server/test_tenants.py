"""What tenants share of the cache over HTTP: nothing, by whatever route."""

from __future__ import annotations

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
