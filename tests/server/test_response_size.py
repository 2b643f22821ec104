"""Log-probabilities and repeated prompts of one response: bounded in every API before a token is computed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.native

CHAT = {"messages": [{"role": "user", "content": "a"}]}
OLLAMA_300 = {"options": {"num_predict": 300}}
TOO_MANY: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": [5] * 300, "max_tokens": 1, "prompt_logprobs": 1000}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": [[5] * 150] * 2, "max_tokens": 1, "prompt_logprobs": 1000}, "prompt_logprobs"),
    (
        "/v1/completions",
        {"prompt": [5] * 300, "max_tokens": 1, "prompt_logprobs": 1000, "stream": True},
        "prompt_logprobs",
    ),
    ("/v1/completions", {"prompt": [5] * 300, "max_tokens": 1, "echo": True, "logprobs": 1000}, "prompt_logprobs"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3, "n": 100, "logprobs": 1000}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 300, "logprobs": 1000}, "logprobs"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 20, "n": 20, "logprobs": 1000, "stream": True}, "logprobs"),
    (
        "/v1/completions",
        {"prompt": "a", "max_tokens": 300, "logprobs": 1000, "stream": True, "max_buffered_tokens": 300},
        "logprobs",
    ),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 300, "logprobs": True, "top_logprobs": 1000}, "logprobs"),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1000, "min_tokens": 300}, "logprobs"),
    ("/completion", {"prompt": "a", "n_predict": 300, "n_probs": 1000}, "logprobs"),
    ("/completion", {"prompt": "a", "n_predict": 300, "n_probs": 1000, "n_indent": 1}, "logprobs"),
    (
        "/api/generate",
        {"prompt": "a", "raw": True, "logprobs": True, "top_logprobs": 1000, "stream": False, **OLLAMA_300},
        "logprobs",
    ),
    ("/api/chat", {**CHAT, "logprobs": True, "top_logprobs": 1000, "stream": False, **OLLAMA_300}, "logprobs"),
]


def num_computed(client: httpx.Client) -> str:
    """Return the line of the metrics that counts tokens of prompts."""
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return next(line for line in lines if line.startswith("llamacpp:prompt_tokens_total"))


@pytest.mark.parametrize(("path", "body", "field"), TOO_MANY)
def test_too_many_log_probabilities_are_refused_before_a_token_is_computed(
    client: httpx.Client, path: str, body: dict[str, Any], field: str
) -> None:
    """The error has the field, the numbers, and the way out."""
    before = num_computed(client)
    response = client.post(path, json=body)
    error = response.json()["error"]
    message: str = error if isinstance(error, str) else error["message"]
    assert (response.status_code, message.partition(" ")[0]) == (400, field), message
    assert "more than the 262144 of a response" in message
    assert "alternatives" in message
    assert num_computed(client) == before


@pytest.mark.parametrize(
    ("path", "body", "num_choices"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": -1, "logprobs": 1000}, 1),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": -1, "logprobs": 1000, "n": 2}, 4),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1000}, 1),
    ],
)
def test_a_request_without_max_tokens_ends_when_its_response_is_full_of_log_probabilities(
    client: httpx.Client, path: str, body: dict[str, Any], num_choices: int
) -> None:
    """A client that asks for a short reply with log-probabilities need not know how long the context is."""
    full = client.post(path, json={**body, "ignore_eos": True}).raise_for_status().json()
    assert [choice["finish_reason"] for choice in full["choices"]] == ["length"] * num_choices
    assert full["usage"]["completion_tokens"] == 2**18 // 1001 // num_choices * num_choices
    short = client.post(path, json={**body, "ignore_eos": True, "stop": ["e"]})
    assert short.raise_for_status().json()["choices"][0]["finish_reason"] == "stop"


def test_as_many_as_a_response_may_have_are_returned(client: httpx.Client) -> None:
    """With the values of a smaller request, whole and streamed, in parts or not."""
    body = {"prompt": [5, 6, 7] * 80, "max_tokens": 2, "temperature": 0, "logprobs": 1, "cache_prompt": False}
    few = client.post("/v1/completions", json={**body, "prompt_logprobs": 1}).raise_for_status().json()["choices"][0]
    many = (
        client.post("/v1/completions", json={**body, "prompt_logprobs": 1000}).raise_for_status().json()["choices"][0]
    )
    assert (many["text"], many["logprobs"]) == (few["text"], few["logprobs"])
    assert len(many["prompt_logprobs"]) == len(few["prompt_logprobs"]) == 240
    for wide, narrow in zip(many["prompt_logprobs"][1:], few["prompt_logprobs"][1:], strict=True):
        assert len(wide) >= 1000
        assert narrow.items() <= wide.items()
    streamed = client.post("/v1/completions", json={**body, "prompt_logprobs": 1000, "stream": True}).raise_for_status()
    events = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    assert events[0]["choices"][0]["prompt_logprobs"] == many["prompt_logprobs"]


def test_a_stream_may_have_more_in_all_than_wait_for_its_client(client: httpx.Client) -> None:
    """Sent parts are not kept: 300 tokens with 1,000 alternatives each arrive."""
    body = {"prompt": "a", "max_tokens": 300, "logprobs": 1000, "stream": True, "ignore_eos": True}
    num_tokens = 0
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event
                num_tokens += len(event["choices"][0]["logprobs"]["tokens"])
    assert num_tokens == 300


@pytest.mark.parametrize("field", ["content", "prompt", "messages"])
def test_a_text_of_too_many_tokens_has_no_list_of_them(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """A list of pieces takes 16 times the text, and much more memory."""
    text: Any = "0" * 1000
    body = {field: [{"role": "user", "content": text}] if field == "messages" else text, "with_pieces": True}
    assert client.post("/tokenize", json=body).status_code == 200
    monkeypatch.setattr("paceline.server.dialects.llama_server.llama_routes.MAX_TOKENS", 500)
    response = client.post("/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(f"{field}: 10")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"max_tokens": 1, "n": 250, "echo": True}), ("/completion", {"n_predict": 1, "n_cmpl": 250})],
)
def test_prompts_are_not_repeated_beyond_a_limit(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Each choice has the prompt's text in its result."""
    monkeypatch.setattr("paceline.server.running_request.MAX_REPEATED_CHARS", 100_000)
    response = client.post(path, json={"prompt": "word " * 100, **body})
    assert response.status_code == 400
    assert "once for each choice" in response.json()["error"]["message"]
