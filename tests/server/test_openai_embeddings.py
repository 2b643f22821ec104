"""/v1/embeddings and /v1/models over the demo model, with the `openai` package."""

from __future__ import annotations

import asyncio
import base64
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.exact import EXACT
from tests.server.openai_world import NAMES, OpenAIServer
from tests.server.running import LONG_S, RunningServer

from paceline import LLM

pytestmark = pytest.mark.native

TEXTS = ["a little bear", "the old mill by the river"]


@pytest.fixture(scope="module")
def world() -> Iterator[OpenAIServer]:
    with OpenAIServer(tags=("small", "demo", "small")) as world:
        yield world


@pytest.fixture
def client(world: OpenAIServer) -> Iterator[openai.OpenAI]:
    with world.openai() as client:
        yield client


def embed(client: openai.OpenAI, given: Any = TEXTS, **options: Any) -> np.ndarray[Any, Any]:
    response = client.embeddings.create(model="tale", input=given, encoding_format="float", **options)
    return np.array([entry.embedding for entry in response.data])


def test_embeddings_match_the_library(client: openai.OpenAI) -> None:
    """Of length 1, in the order of the texts, with their tokens counted."""
    response = client.embeddings.create(model="tale", input=TEXTS)
    with LLM(**EXACT, num_slots=1, n_ctx=1024) as llm:
        expected = llm.embed(TEXTS)
        num_tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    found = np.array([entry.embedding for entry in response.data])
    assert np.allclose(found, expected, atol=1e-2)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert [(entry.index, entry.object) for entry in response.data] == [(0, "embedding"), (1, "embedding")]
    assert (response.object, response.model, response.model_extra) == ("list", "tale", {})
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_has_the_very_same_numbers_as_floats(world: OpenAIServer, client: openai.OpenAI) -> None:
    """Decoded as little-endian float32, both are equal."""
    with world.client() as http:
        response = http.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    packed = base64.b64decode(response["data"][0]["embedding"])
    numbers = struct.unpack(f"<{len(packed) // 4}f", packed)
    assert np.array_equal(np.float32(numbers), np.float32(embed(client, TEXTS[0])[0]))


def test_an_input_may_be_text_ids_or_a_list_of_these(world: OpenAIServer, client: openai.OpenAI) -> None:
    """The same text has the same vector."""
    ids = world.engine.tokenizer.encode(TEXTS[0])
    alone = embed(client, TEXTS[0])
    for given in (ids, [ids], [TEXTS[0]]):
        assert np.allclose(embed(client, given), alone, atol=1e-5)


def parts(*texts: str) -> dict[str, Any]:
    """The object of content parts that llama-server takes for a text."""
    return {"content": [{"type": "text", "text": text} for text in texts]}


def test_an_input_may_mix_texts_ids_and_objects(world: OpenAIServer) -> None:
    """As llama-server has them: a list with an id in it is one text, and an object of text parts is the text they spell."""
    tokenizer = world.engine.tokenizer
    tail = tokenizer.encode("little bear", add_special=False)
    mixed = [*tokenizer.encode("a "), "little", tail[-1]]
    given: list[Any] = [mixed, [mixed, "a little bear"], parts("a little ", "bear"), {"prompt_string": "a little bear"}]
    given += [["a little bear", parts("a little ", "bear"), tail, {"prompt_string": "a little bear"}]]
    counts = []
    with world.client() as http:
        for item in given:
            response = http.post("/v1/embeddings", json={"input": item})
            assert response.status_code == 200, response.text
            counts.append([entry["index"] for entry in response.json()["data"]])
        whole = [entry["embedding"] for entry in response.json()["data"]]
    assert counts == [[0], [0, 1], [0], [0], [0, 1, 2, 3]]
    assert np.allclose(whole[0], whole[1], atol=1e-5)
    assert np.allclose(whole[0], whole[3], atol=1e-5)
    assert not np.allclose(whole[0], whole[2], atol=1e-2)


def test_fewer_dimensions_are_the_first_ones_at_length_one(client: openai.OpenAI) -> None:
    """They are truncated and normalised, as Matryoshka models need it."""
    whole, short = embed(client), embed(client, dimensions=8)
    assert short.shape == (2, 8)
    assert np.allclose(short, whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True), atol=1e-5)


def test_a_text_that_is_too_long_is_cut_with_truncate(world: OpenAIServer) -> None:
    """To the longest text that can be embedded, and the usage counts its tokens."""
    longest = world.engine.limits.max_embedding_tokens
    with world.client() as client:
        body = {"input": ["a " * (longest + 500), "b"], "truncate": "left"}
        response = client.post("/v1/embeddings", json=body)
        alone = client.post("/v1/embeddings", json={"input": "b"}).json()
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == longest + alone["usage"]["prompt_tokens"]


def test_truncate_may_be_a_bool_or_a_word_of_nvidias_api(world: OpenAIServer) -> None:
    """END and true cut at the right, START cuts at the left, NONE and false refuse a long text as without them."""
    longest = world.engine.limits.max_embedding_tokens
    text = " ".join(str(number) for number in range(longest))
    with world.client() as client:

        def embedded(**fields: Any) -> Any:
            response = client.post("/v1/embeddings", json={"input": text, **fields})
            return response.status_code if response.status_code != 200 else response.json()["data"][0]["embedding"]

        right, left = embedded(truncate="right"), embedded(truncate="left")
        assert not np.allclose(right, left, atol=1e-3)
        for value, expected in (("END", right), (True, right), ("START", left)):
            assert np.allclose(embedded(truncate=value), expected, atol=1e-4), value
        assert [embedded(truncate=value) for value in ("NONE", False, None)] == [400, 400, 400]


def test_an_input_may_be_an_object_with_a_text(world: OpenAIServer) -> None:
    """As clients of Jina's API send it; the vector is that of the text alone."""
    with world.client() as client:
        mixed = client.post("/v1/embeddings", json={"input": [{"text": "a fox"}, "a duck"]}).json()
        plain = client.post("/v1/embeddings", json={"input": ["a fox", "a duck"]}).json()
    for found, expected in zip(mixed["data"], plain["data"], strict=True):
        assert np.allclose(found["embedding"], expected["embedding"], atol=1e-4)
    assert mixed["usage"] == plain["usage"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": []}, "input", "invalid_params"),
        ({"input": ""}, "input", "invalid_params"),
        ({"input": 5}, "input", "invalid_type"),
        ({"input": ["a"] * 8193}, "input", "invalid_params"),
        ({"input": ["a", None]}, "input", "invalid_type"),
        ({"input": [[]]}, "input", "invalid_params"),
        ({"input": [99999]}, "input", "invalid_params"),
        ({"input": {"content": "a"}}, "input", "invalid_type"),
        ({"input": {"content": ["a"]}}, "input", "invalid_type"),
        ({"input": {"content": [{"type": "text", "text": 1}]}}, "input", "invalid_type"),
        ({"input": {"content": [{"type": "image_url", "image_url": {}}]}}, "input.content", "unsupported"),
        ({"input": {"content": [{"type": "video"}]}}, "input", "invalid_params"),
        ({"input": {"prompt_string": "a", "multimodal_data": ["AAAA"]}}, "input.multimodal_data", "unsupported"),
        ({"input": {"text": 5}}, "input", "invalid_type"),
        ({"input": "a", "truncate": "END "}, "truncate", "invalid_params"),
        ({}, "input", "invalid_params"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "invalid_params"),
        ({"input": "a", "dimensions": 100_000}, "dimensions", "invalid_params"),
        ({"input": "a", "dimensions": 0}, "dimensions", "invalid_params"),
        ({"input": "a", "pooling": "none"}, "pooling", "invalid_params"),
        ({"input": "a", "timeout_s": -1}, "timeout_s", "invalid_params"),
        ({"input": "a", "truncate": "up"}, "truncate", "invalid_params"),
        ({"input": "a " * 3000}, None, "context_length_exceeded"),
    ],
)
def test_a_refusal_names_the_field(world: OpenAIServer, body: dict[str, Any], param: str | None, code: str) -> None:
    """In OpenAI's shape."""
    with world.client() as client:
        response = client.post("/v1/embeddings", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code)


def test_a_model_made_to_generate_embeds_only_with_the_flag(server: RunningServer) -> None:
    """The error names the flag."""
    with server.client() as client:
        response = client.post("/v1/embeddings", json={"input": "a"})
    assert response.status_code == 400
    assert "--embeddings" in response.json()["error"]["message"]


def test_a_text_that_does_not_fit_is_called_too_large(world: OpenAIServer) -> None:
    """In the words that clients of llama-server look for, with both numbers; the server goes on."""
    with world.client() as http:
        error = http.post("/v1/embeddings", json={"input": ["b", "a " * 3000]}).json()["error"]
        assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    assert "text 1 is too large" in error["message"]
    assert "exceeds the available context size" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert error["n_prompt_tokens"] > error["n_ctx"]


def test_a_client_that_disconnects_cancels_its_embedding(world: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that the engine has not begun is cancelled as well."""
    accepted, cancelled = threading.Event(), threading.Event()

    def never(*_: Any) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        future.add_done_callback(lambda done: done.cancelled() and cancelled.set())
        accepted.set()
        return future

    monkeypatch.setattr(world.engine, "embed", never)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=world.url, timeout=LONG_S) as client:
            call = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}))
            await asyncio.to_thread(accepted.wait, LONG_S)
            call.cancel()
            await asyncio.wait([call])

    asyncio.run(leave())
    assert cancelled.wait(LONG_S)


def test_an_embedding_can_be_cancelled_by_its_id(world: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client gets the error."""
    accepted = threading.Event()

    def never(*_: Any) -> Future[list[Any]]:
        accepted.set()
        return Future()

    monkeypatch.setattr(world.engine, "embed", never)

    async def cancel() -> httpx.Response:
        async with httpx.AsyncClient(base_url=world.url, timeout=LONG_S) as client:
            headers = {"x-request-id": "vector-1"}
            call = asyncio.create_task(client.post("/v1/embeddings", json={"input": "a"}, headers=headers))
            await asyncio.to_thread(accepted.wait, LONG_S)
            cancelled = await client.post("/v1/requests/vector-1/cancel")
            assert cancelled.json()["cancelled"] is True
            return await call

    response = asyncio.run(cancel())
    assert response.json()["error"]["code"] == "cancelled"


def test_the_model_is_listed_once_with_all_of_its_names(world: OpenAIServer, client: openai.OpenAI) -> None:
    """Its id is the first name; aliases, tags and facts of its file are at llama-server's places, in /models too."""
    (listed,) = client.models.list().data
    assert (listed.id, listed.object) == (NAMES[0], "model")
    assert listed.model_extra is not None
    assert (listed.model_extra["aliases"], listed.model_extra["tags"]) == ([*NAMES], ["small", "demo"])
    meta, model = listed.model_extra["meta"], world.engine.model
    assert (meta["n_vocab"], meta["n_ctx_train"], meta["n_embd"]) == (model.n_vocab, model.n_ctx_train, model.n_embd)
    assert (meta["n_params"], meta["size"]) == (model.n_params, model.size_bytes)
    with world.client() as http:
        body = http.get("/v1/models").json()
        assert http.get("/models").json() == body
    (second,) = body["models"]
    assert (second["name"], second["model"], second["capabilities"]) == (NAMES[0], NAMES[0], ["completion"])


def test_a_model_without_aliases_is_listed_without(server: RunningServer) -> None:
    """Its id is the name of the demo model, or of its file."""
    with server.client() as http:
        (listed,) = http.get("/v1/models").json()["data"]
    assert (listed["id"], listed["aliases"], listed["tags"]) == ("paceline-demo", [], [])


def test_a_model_is_found_by_an_alias_with_a_slash(client: openai.OpenAI) -> None:
    """As many models have; the id is the name that was asked for."""
    assert client.models.retrieve(NAMES[1]).id == NAMES[1]


def test_a_model_that_there_is_none_of_is_not_found(client: openai.OpenAI) -> None:
    """With OpenAI's code."""
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("gpt-4")
    assert raised.value.code == "model_not_found"


def test_the_api_pages_show_every_field(world: OpenAIServer) -> None:
    """OpenAI's and ours."""
    with world.client() as client:
        document = client.get("/openapi.json").json()
    assert {"/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"} <= set(document["paths"])
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
        assert set(document["paths"][path]["post"]["responses"]) == {"200", "default"}
    schemas = document["components"]["schemas"]
    assert {"prompt", "suffix", "echo", "top_k", "priority", "lora"} <= set(
        schemas["OpenAICompletionBody"]["properties"]
    )
    assert {"messages", "top_logprobs", "grammar", "ttft_timeout_s"} <= set(schemas["OpenAIChatBody"]["properties"])
