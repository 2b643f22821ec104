"""Prompts that cannot fit: refused by their bytes, in every API, before they are tokenised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tests.server.dialects import DIALECTS, STORY, Dialect
from tests.server.openai_world import OpenAIServer

pytestmark = pytest.mark.native

N_CTX = 1024
LONG = "fox " * 50_000
"""More bytes than all tokens of the context can have: the demo's longest token has 20."""
AT_LEAST = len(LONG) // 20


class Encoded:
    """The longest text that a server's tokenizer was given."""

    def __init__(self, server: OpenAIServer) -> None:
        self.longest = 0
        tokenizer: Any = server.engine.tokenizer
        for name in ("encode", "encode_prompt"):
            setattr(tokenizer, name, self._counted(getattr(tokenizer, name)))

    def _counted(self, encode: Any) -> Any:
        def call(text: str, *args: Any, **options: Any) -> Any:
            self.longest = max(self.longest, len(text))
            return encode(text, *args, **options)

        return call


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[OpenAIServer, Encoded]]:
    """Serve the demo model with a small context, and watch its tokenizer."""
    with OpenAIServer({"n_ctx": N_CTX, "num_slots": 1}) as server:
        yield server, Encoded(server)


@pytest.fixture
def world(running: tuple[OpenAIServer, Encoded]) -> OpenAIServer:
    """Return the server."""
    return running[0]


@pytest.fixture
def encoded(running: tuple[OpenAIServer, Encoded]) -> Encoded:
    """Return the texts that the server has tokenised in this test."""
    running[1].longest = 0
    return running[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_a_conversation_that_cannot_fit_is_not_tokenised(
    dialect: Dialect, stream: bool, world: OpenAIServer, encoded: Encoded
) -> None:
    """It is refused with a number of tokens that it has at least, and with the words that clients look for."""
    with world.client() as http:
        body = http.build_request("POST", dialect.path, json=dialect.body(8, stream=stream)).content
        response = http.post(dialect.path, content=body.replace(STORY.encode(), LONG.encode()))
    message = dialect.error_message(response.json())
    assert response.status_code == 400
    expected = r"\(at least (\d+) tokens\) exceeds the available context size \((\d+) tokens\)"
    if dialect.name == "anthropic":
        expected = r"^prompt is too long: (\d+) tokens > (\d+) maximum; the prompt has at least so many$"
    found = re.search(expected, message)
    assert found is not None, message
    assert int(found[1]) >= AT_LEAST
    assert int(found[2]) == N_CTX
    assert encoded.longest < 1000


PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": LONG}),
    "completions-second": ("/v1/completions", {"prompt": ["fox", LONG]}),
    "completions-object": ("/v1/completions", {"prompt": {"prompt_string": LONG}}),
    "completions-suffix": ("/v1/completions", {"prompt": "fox", "suffix": LONG}),
    "completion": ("/completion", {"prompt": LONG}),
    "completion-parts": ("/completion", {"prompt": [1, LONG[: len(LONG) // 2], 2, LONG[len(LONG) // 2 :]]}),
    "completion-second": ("/completion", {"prompt": ["fox", {"prompt_string": LONG}]}),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b", "prompt": LONG}),
    "embeddings": ("/v1/embeddings", {"input": ["fox", LONG]}),
    "embeddings-parts": ("/v1/embeddings", {"input": [{"content": [{"type": "text", "text": LONG}]}]}),
    "embedding": ("/embedding", {"content": LONG}),
    "embed": ("/api/embed", {"input": LONG, "truncate": False}),
    "score": ("/score", {"text_1": "fox", "text_2": [LONG]}),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_that_cannot_fit_is_not_tokenised(name: str, world: OpenAIServer, encoded: Encoded) -> None:
    """Whatever the API and the shape of the prompt; texts before it are not computed either."""
    path, body = PROMPTS[name]
    with world.client() as http:
        response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert re.search(r"at least \d{4,} tokens\b.* the available context size", response.text), response.text
    assert encoded.longest < 1000


CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": LONG, "truncate": "left", "max_tokens": 1}),
    "completion": ("/completion", {"prompt": LONG, "truncate": "right", "n_predict": 1}),
    "infill": ("/infill", {"input_prefix": LONG, "input_suffix": "b", "n_predict": 1}),
    "embeddings": ("/v1/embeddings", {"input": LONG, "truncate": "middle"}),
    "embed": ("/api/embed", {"input": LONG}),
}


@pytest.mark.parametrize("name", CUT)
def test_a_prompt_that_is_cut_is_not_refused(name: str, world: OpenAIServer, encoded: Encoded) -> None:
    """Its tokens have to be known for that."""
    path, body = CUT[name]
    with world.client() as http:
        response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert encoded.longest == len(LONG)


COUNTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tokenize": ("/tokenize", {"prompt": LONG}, "count"),
    "tokenize-chat": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "count"),
    "chat": ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": LONG}]}, "input_tokens"),
    "responses": ("/v1/responses/input_tokens", {"input": LONG}, "input_tokens"),
    "messages": (
        "/v1/messages/count_tokens",
        {"model": "tale", "messages": [{"role": "user", "content": LONG}]},
        "input_tokens",
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_tokens_of_a_prompt_that_cannot_fit_are_counted(name: str, world: OpenAIServer) -> None:
    """Routes that count tokens accept any text: programs decide by them how much to leave out."""
    path, body, member = COUNTED[name]
    with world.client() as http:
        response = http.post(path, json=body)
        exact = len(http.post("/tokenize", json={"content": LONG}).json()["tokens"])
    assert response.status_code == 200, response.text
    assert exact <= response.json()[member] < exact + 200
