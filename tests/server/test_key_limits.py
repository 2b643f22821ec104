"""Limits of API keys over HTTP: 429 with its headers, and the usage of each key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.engine.scoring import ScoringCall
from paceline.errors import QueueFull
from paceline.server import service
from paceline.server.key_accounts import KeyAccounts
from paceline.server.settings import ApiKey, ServerSettings

pytestmark = pytest.mark.native

KEYS = (
    ApiKey(secret="free", tenant="a", name="free"),
    ApiKey(secret="slow", tenant="a", name="slow", tokens_per_minute=30),
    ApiKey(secret="day", tenant="b", weight=3, tokens_per_day=20),
    ApiKey(secret="none", tenant="b", weight=3, name="none", max_requests=1),
    ApiKey(secret="vectors", tenant="a", name="vectors", tokens_per_minute=100, tokens_per_day=150),
    ApiKey(secret="op"),
)
PROMPT = [1] * 20
COUNTED = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Clock:
    """Both clocks of the accounts."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    settings = ServerSettings(engine_options=DEMO_ENGINE, api_keys=KEYS, metrics_per_key=True, embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "KeyAccounts", lambda settings: KeyAccounts(settings, CLOCK, CLOCK))
        with RunningServer(settings) as running:
            yield running


def complete(server: RunningServer, key: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    asked = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "cache_salt": key, **body}
    return httpx.post(server.url + path, json=asked, headers={"authorization": f"Bearer {key}"}, timeout=60)


def usage(server: RunningServer, key: str) -> dict[str, dict[str, Any]]:
    response = httpx.get(f"{server.url}/v1/usage", headers={"authorization": f"Bearer {key}"}, timeout=60)
    return {entry["key"]: entry for entry in response.json()["data"]}


def test_tokens_per_minute_end_in_429_with_the_headers_of_openai(server: RunningServer) -> None:
    """A refused request is in no count, and other keys go on."""
    first = complete(server, "slow")
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "30"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 6
    refused = complete(server, "slow")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "28"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "6"
    assert refused.headers["x-ratelimit-reset-tokens"] == "48s"
    assert complete(server, "slow", max_tokens=-5).status_code == 400
    entry = usage(server, "slow")["slow"]
    assert (entry["requests"], entry["prompt_tokens"], entry["completion_tokens"], entry["tokens_today"]) == (
        1,
        20,
        4,
        24,
    )
    assert "x-ratelimit-limit-tokens" not in complete(server, "free").headers
    CLOCK.now_s += 28
    assert complete(server, "slow").status_code == 200


def post(server: RunningServer, key: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)


def test_embeddings_and_scores_have_the_limits_of_generations(server: RunningServer) -> None:
    """Their tokens are reserved. Cached tokens of scores cost nothing."""
    embedded = post(server, "vectors", "/v1/embeddings", {"input": [[1] * 30] * 2})
    assert (embedded.status_code, embedded.headers["x-ratelimit-remaining-tokens"]) == (200, "40")
    refused = post(server, "vectors", "/v1/embeddings", {"input": [[1] * 30] * 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    scored = {"prompt": [2] * 30, "choices": [[3, 4], [5, 6]]}
    assert post(server, "vectors", "/v1/score_choices", scored).status_code == 200
    assert usage(server, "vectors")["vectors"]["tokens_today"] == 60 + 34
    assert post(server, "vectors", "/v1/score_choices", scored).status_code == 429
    CLOCK.now_s += 60
    assert post(server, "vectors", "/v1/score_choices", scored).status_code == 200
    entry = usage(server, "vectors")["vectors"]
    assert (entry["requests"], entry["cached_tokens"]) == (3, 28)
    assert entry["tokens_today"] == 60 + 34 + 6  # the last prompt token is computed for each choice
    refused = post(server, "vectors", "/v1/embeddings", {"input": [[1] * 30] * 2})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


def test_cached_tokens_cost_nothing_and_are_counted(server: RunningServer) -> None:
    """A second equal prompt is charged for the tokens that were computed."""
    before = usage(server, "free")["free"]
    for _ in range(2):
        assert complete(server, "free", cache_salt="twice").status_code == 200
    after = usage(server, "free")["free"]
    assert after["cached_tokens"] - before["cached_tokens"] == 19
    assert after["prompt_tokens"] - before["prompt_tokens"] == 40
    assert after["tokens_today"] - before["tokens_today"] == 20 + 4 + 1 + 4
    assert after["requests"] - before["requests"] == 2


def test_scores_that_find_no_room_cost_nothing(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue was full when they were submitted."""
    before = usage(server, "free")["free"]

    async def refused(*_: object) -> None:
        raise QueueFull("full")

    monkeypatch.setattr(ScoringCall, "result_of_all", refused)
    assert post(server, "free", "/v1/score_choices", {"prompt": [2] * 30, "choices": [[3, 4]]}).status_code == 429
    assert usage(server, "free")["free"] == before


def test_the_budget_of_a_day(server: RunningServer) -> None:
    """Streamed tokens count. Routes that compute nothing stay open."""
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream": True, "cache_salt": "day"},
        headers={"authorization": "Bearer day"},
        timeout=60,
    ) as response:
        assert response.status_code == 200
        assert "x-ratelimit-limit-tokens" not in response.headers
        response.read()
    refused = complete(server, "day")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert int(refused.headers["retry-after"]) == 86_400 - CLOCK.now_s
    (entry,) = usage(server, "day").values()
    assert entry["tokens_today"] == 23
    assert (entry["tenant"], entry["limits"]["weight"]) == ("b", 3)
    assert post(server, "day", "/tokenize", {"content": "hello"}).status_code == 200
    assert post(server, "day", "/v1/messages/count_tokens", COUNTED).status_code == 200
    models = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer day"}, timeout=60)
    assert models.status_code == 200


def test_requests_at_once(server: RunningServer) -> None:
    """While one of them is read a further one is refused; the place is free when the response has ended."""
    asked = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer none"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, headers=headers, timeout=60) as response:
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        refused = complete(server, "none")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_requests")
        response.read()
    assert usage(server, "none")["none"]["requests_in_flight"] == 0
    assert complete(server, "none").status_code == 200


def test_an_operator_sees_all_keys_and_a_tenants_key_itself(server: RunningServer) -> None:
    """The metrics have the names as a label with --metrics-per-key, or the number of a key without a name."""
    assert len(usage(server, "op")) == len(KEYS)
    assert list(usage(server, "slow")) == ["slow"]
    text = httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer op"}, timeout=60).text
    assert 'paceline_key_tokens_total{key="free",kind="prompt"}' in text
    assert 'paceline_key_tokens_total{key="key-3",kind="prompt"}' in text


def test_without_keys_there_is_no_usage(world: Any) -> None:
    """Nor headers, nor metrics of keys."""
    with world.client() as client:
        assert client.get("/v1/usage").json() == {"object": "list", "data": []}
        response = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
        assert not [name for name in response.headers if name.startswith("x-ratelimit")]
        assert "paceline_key_" not in client.get("/metrics").text
