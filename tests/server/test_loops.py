"""Loops over HTTP: with --max-repetition a choice that repeats itself ends, with a reason in the words of each API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.conftest import DEMO_ENGINE
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings

pytestmark = pytest.mark.native

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server whose model draws one token for ever."""
    sampling = {"max_repetition": 8, "logit_bias": {400: 1000.0}, "temperature": 0.0}
    with RunningServer(ServerSettings(engine_options=DEMO_ENGINE, sampling=sampling)) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {"prompt": "hello"}, lambda reply: reply["choices"][0]["finish_reason"] == "repetition"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES},
            lambda reply: reply["choices"][0]["finish_reason"] == "repetition",
        ),
        ("/completion", {"prompt": "hello"}, lambda reply: reply["stop_type"] == "limit"),
        ("/api/generate", {"prompt": "hello", "stream": False}, lambda reply: reply["done_reason"] == "repetition"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100}, lambda reply: reply["stop_reason"] == "max_tokens"),
        (
            "/v1/responses",
            {"input": "hello"},
            lambda reply: (
                (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
            ),
        ),
    ],
)
def test_each_api_has_a_reason(server: RunningServer, path: str, body: dict[str, Any], reason: Any) -> None:
    """After sixteen tokens: eight of a repetition, looked for at every eighth token."""
    with server.client() as client:
        reply = client.post(
            path, json={"max_tokens": 100, "n_predict": 100, **body} if path != "/v1/responses" else body
        ).json()
    assert reason(reply), reply
    usage = reply.get("usage", {})
    counts = [usage.get(name) for name in ("completion_tokens", "output_tokens")] + [
        reply.get(name) for name in ("tokens_predicted", "eval_count")
    ]
    assert [count for count in counts if count is not None] == [16]


def test_a_request_may_switch_it_off(server: RunningServer) -> None:
    """With 0, whatever the server's default is."""
    with server.client() as client:
        reply = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 40, "max_repetition": 0}).json()
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 40)
