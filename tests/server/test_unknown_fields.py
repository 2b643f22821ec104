"""Unknown fields, and values as local clients send them, at every route with a body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.running import RunningServer

from paceline.server.settings import ServerSettings
from paceline.testing.models import KINDS, write_model

pytestmark = pytest.mark.native

RANKING: dict[str, Any] = {"isolation": "thread", "num_slots": 2, "n_threads": 1}
ENGINE: dict[str, Any] = {**RANKING, "n_ctx": 256}
TALK = [{"role": "user", "content": "Hello."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 1},
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 1},
    "/v1/chat/completions/input_tokens": {"messages": TALK},
    "/v1/responses": {"input": "Hello.", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "Hello."},
    "/v1/embeddings": {"input": "Once"},
    "/classify": {"input": "Once"},
    "/score": {"text_1": "Once", "text_2": "upon"},
    "/v1/messages": {"messages": TALK, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/api/chat": {"messages": TALK, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "Hello.", "stream": False, "options": {"num_predict": 1}},
    "/api/embed": {"input": "Once"},
    "/api/embeddings": {"prompt": "Once"},
    "/api/show": {"model": "paceline-demo"},
    "/completion": {"prompt": "Once", "n_predict": 1},
    "/tokenize": {"content": "Once"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": TALK},
    "/embedding": {"content": "Once"},
    "/rerank": {"query": "Once", "documents": ["upon"]},
}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK},
    "/v1/completions": {"prompt": "Once"},
    "/v1/responses": {"input": "Hello."},
    "/v1/messages": {"messages": TALK},
    "/completion": {"prompt": "Once"},
}


RANKED = ("/classify", "/score", "/rerank")
"""Routes that need another model."""


class Pair:
    """Two servers with the same settings: the demo model, and a tiny reranker for the routes that need one."""

    def __init__(self, demo: httpx.Client, reranker: httpx.Client) -> None:
        self.get, self._demo, self._reranker = demo.get, demo, reranker

    def post(self, path: str, body: Any) -> httpx.Response:
        return (self._reranker if path in RANKED else self._demo).post(path, json=body)


@contextmanager
def serving(folder: Path, *, strict_fields: bool) -> Iterator[Pair]:
    write_model(folder / "reranker.gguf", KINDS["reranker"])
    demo = ServerSettings(engine_options=ENGINE, embeddings=True, strict_fields=strict_fields)
    reranker = ServerSettings(model=folder / "reranker.gguf", engine_options=RANKING, strict_fields=strict_fields)
    with RunningServer(demo) as one, RunningServer(reranker) as two, one.client() as first, two.client() as second:
        yield Pair(first, second)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving(tmp_path_factory.mktemp("lenient"), strict_fields=False) as pair:
        yield pair


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with serving(tmp_path_factory.mktemp("strict"), strict_fields=True) as pair:
        yield pair


def warnings_of(body: Any) -> list[str]:
    found = body[0] if isinstance(body, list) else body
    return found.get("warnings", [])  # type: ignore[no-any-return]


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_has_a_warning(lenient: Pair, path: str) -> None:
    """With the nearest known name; one that is null has none."""
    body = BODIES[path]
    near = next(iter(body))
    response = lenient.post(path, body | {f"{near}q": 1, "client_notes": {"a": 1}, "nothing": None})
    assert response.status_code == 200, response.text
    warnings = warnings_of(response.json())
    assert f"{near}q is not a field of this endpoint and was ignored; did you mean {near}?" in warnings
    assert any(warning.startswith("client_notes is not a field") for warning in warnings)
    assert not any("nothing" in warning for warning in warnings)
    assert warnings_of(lenient.post(path, body).json()) == []


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_refused_by_a_strict_server(strict: Pair, path: str) -> None:
    """In the shape of the API, with the nearest known name; one that is null is absent."""
    body = BODIES[path]
    near = next(iter(body))
    response = strict.post(path, body | {f"{near}q": 1})
    assert response.status_code == 400
    assert f"{near}q is not a field of this endpoint; did you mean {near}?" in response.text
    if path.startswith("/v1/") and "messages" not in path:
        assert response.json()["error"]["code"] == "unknown_parameter"
    assert strict.post(path, body | {"nothing": None}).status_code == 200


def fields_of(client: Pair, path: str) -> dict[str, Any]:
    """Return the fields of a route's body and their schemas, as the OpenAPI document has them."""
    document = client.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    found = content["application/json"]["schema"]
    for choice in [found, *found.get("anyOf", ())]:
        if "$ref" in choice:
            return document["components"]["schemas"][choice["$ref"].rpartition("/")[2]]["properties"]  # type: ignore[no-any-return]
    raise AssertionError(f"{path} has no body in the OpenAPI document")


OLLAMA_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "stop", "repeat_penalty", "num_ctx", "mirostat", "num_keep")
VARYING = ("id", "id_slot", "created", "timings")


def without_times(value: Any) -> Any:
    """Return a reply without its ids and times."""
    if isinstance(value, dict):
        is_time = {key: key in VARYING or key.endswith(("_at", "_duration")) for key in value}
        return {key: without_times(item) for key, item in value.items() if not is_time[key]}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_is_null_has_its_default(lenient: Pair, path: str) -> None:
    """All optional fields at once: the reply and the warnings equal those of a request without them."""
    fields = fields_of(lenient, path)
    body = BODIES[path] | ({"seed": 7} if "seed" in fields else {})
    if "options" in body:  # of Ollama
        body["options"] = body["options"] | {"seed": 7}
    nested = {key: dict.fromkeys(OLLAMA_OPTIONS) | body[key] for key in ("options",) if key in body}
    response = lenient.post(path, dict.fromkeys(fields) | body | nested)
    assert response.status_code == 200, response.text
    assert without_times(response.json()) == without_times(lenient.post(path, body).json())


def test_the_openapi_document_says_whether_other_fields_are_taken(lenient: Pair, strict: Pair) -> None:
    """`additionalProperties` of the bodies."""
    for client, expected in ((lenient, True), (strict, False)):
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        for name in (
            "OpenAIChatBody",
            "MessageBody",
            "OllamaChatBody",
            "CompletionBody",
            "StreamOptions",
            "ResponsesBody",
        ):
            assert schemas[name]["additionalProperties"] is expected


def test_many_unknown_fields_make_a_small_response(lenient: Pair) -> None:
    """And more fields than a body may have are still refused."""
    for path, body in BODIES.items():
        many = {f"{index}{'x' * 1000}": index for index in range(900)}
        response = lenient.post(path, body | many)
        assert response.status_code == 200, (path, response.text[:300])
        assert sum(map(len, warnings_of(response.json()))) < 10_000, path
        assert lenient.post(path, body | {str(index): index for index in range(1001)}).status_code == 400


def test_a_stream_has_the_warnings_at_its_end(lenient: Pair) -> None:
    """In its last event."""
    body = BODIES["/v1/chat/completions"] | {
        "temprature": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "x": 1},
    }
    lines = lenient.post("/v1/chat/completions", body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [warning.split()[0] for warning in events[-1]["warnings"]] == ["temprature", "stream_options.x"]


@pytest.mark.parametrize("path", CHATS)
def test_a_limit_of_minus_one_is_until_the_context_is_full(lenient: Pair, path: str) -> None:
    """The sequence has as many tokens as the context has positions."""
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    forever = {} if path == "/v1/messages" else {"ignore_eos": True}
    found = lenient.post(path, CHATS[path] | forever | {"temperature": 0, name: -1})
    assert found.status_code == 200, found.text
    body = found.json()
    if path == "/completion":
        assert (
            body["tokens_evaluated"] + body["tokens_predicted"] == ENGINE["n_ctx"] + 1
        )  # the last token needs no cell
    elif path == "/v1/messages":
        assert body["usage"]["output_tokens"] > 1
    else:
        assert body["usage"]["total_tokens"] == ENGINE["n_ctx"] + 1  # the last token needs no cell


def test_token_ids_may_be_whole_floats(lenient: Pair) -> None:
    """They are the same prompt; a fraction is refused with its place."""
    plain = [5, 6, 7]
    floats = [float(token) for token in plain]
    for path, name in (("/v1/completions", "prompt"), ("/completion", "prompt"), ("/detokenize", "tokens")):
        body = {**BODIES[path], "temperature": 0, "seed": 1}
        texts = [lenient.post(path, {**body, name: ids}) for ids in (plain, floats)]
        assert [response.status_code for response in texts] == [200, 200], texts[1].text
        first, second = (response.json() for response in texts)
        if path == "/v1/completions":
            assert first["choices"][0]["text"] == second["choices"][0]["text"]
            assert second["usage"]["prompt_tokens"] == len(plain)
        else:
            assert first["content"] == second["content"]
        refused = lenient.post(path, {**body, name: [5, 6.5]})
        assert refused.status_code == 400
        assert f"{name}[1]" in refused.text
    vectors = [lenient.post("/v1/embeddings", {"input": ids}).json()["data"] for ids in (plain, floats)]
    assert vectors[0] == vectors[1]


def test_a_banned_token_is_not_drawn(lenient: Pair) -> None:
    """By a list with its id and false, or with its text; in chats and completions."""
    greedy = {"prompt": "Once upon a", "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    first = lenient.post("/v1/completions", greedy).json()["choices"][0]
    for bias in (
        [[first["token_ids"][0], False]],
        [[float(first["token_ids"][0]), -1000]],
        {str(first["token_ids"][0]): False},
    ):
        other = lenient.post("/v1/completions", {**greedy, "logit_bias": bias}).json()["choices"][0]
        assert other["token_ids"] != first["token_ids"]
    for wrong in ([[first["token_ids"][0], "x"]], [[10**7, 1]], {"5": "x"}, [5]):
        refused = lenient.post("/v1/completions", {**greedy, "logit_bias": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logit_bias")
