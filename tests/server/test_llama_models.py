"""llama-server's endpoints over tiny random models: embedding, reranking, adapters, models that cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.running import RunningServer

from paceline import Model
from paceline.errors import Unsupported
from paceline.runtime import Embedder
from paceline.server.settings import ServerSettings
from paceline.testing.models import KINDS, write_lora, write_model

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"isolation": "thread", "num_slots": 2, "n_threads": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("bert", "reranker", "llama"):
        write_model(folder / f"{kind}.gguf", KINDS[kind])
    write_lora(folder / "style.gguf", KINDS["llama"])
    return folder


@pytest.fixture(scope="module")
def embedder(models: Path) -> Iterator[httpx.Client]:
    with (
        RunningServer(ServerSettings(model=models / "bert.gguf", engine_options=ENGINE)) as server,
        server.client() as client,
    ):
        yield client


@pytest.fixture(scope="module")
def reranker(models: Path) -> Iterator[httpx.Client]:
    settings = ServerSettings(model=models / "reranker.gguf", engine_options=ENGINE)
    with RunningServer(settings) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def styled(models: Path) -> Iterator[httpx.Client]:
    """A model with one adapter, which applies."""
    options = {**ENGINE, "lora": {"style": models / "style.gguf"}}
    settings = ServerSettings(model=models / "llama.gguf", engine_options=options, lora_scales={"style": 1.0})
    with RunningServer(settings) as server, server.client() as client:
        yield client


# ---- embedding


def embedded(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/embedding", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_becomes_a_list_of_one_vector_of_length_one(embedder: httpx.Client) -> None:
    """Both names of the field and of the route are accepted."""
    (one,) = embedded(embedder, content="the cat")
    (vector,) = one["embedding"]
    assert one["index"] == 0
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
    (same,) = embedder.post("/embeddings", json={"input": "the cat"}).json()
    assert same["embedding"][0] == pytest.approx(vector, abs=1e-5)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (["the cat", "a cat"], 2),
        ([12, 34, 56], 1),
        ([12, 34, "the", 56], 1),
        (["the", [12, 34]], 2),
        ([[12, 34], [12, "the", 34]], 2),
        ({"prompt_string": "the"}, 1),
        ({"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}, 1),
        (["a", {"prompt_string": "the"}, {"content": [{"type": "text", "text": "the"}]}], 3),
    ],
)
def test_inputs_to_embed_have_many_shapes(embedder: httpx.Client, given: Any, count: int) -> None:
    """Each gives its vectors in order."""
    assert [result["index"] for result in embedded(embedder, input=given)] == list(range(count))


def test_parts_of_a_content_are_one_text(embedder: httpx.Client) -> None:
    """The embedding is that of the joined text."""
    parts = {"content": [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]}
    first, second = embedded(embedder, input=["the cat", parts])
    assert first["embedding"][0] == pytest.approx(second["embedding"][0], abs=1e-5)


def test_vectors_are_normalised_as_asked(embedder: httpx.Client) -> None:
    """-1 not at all, 0 by the largest component, 1 by their sum."""
    plain = np.array(embedded(embedder, content="the cat", embd_normalize=-1)[0]["embedding"][0])
    assert np.linalg.norm(plain) != pytest.approx(1, abs=1e-3)
    largest = np.array(embedded(embedder, content="the cat", embd_normalize=0)[0]["embedding"][0])
    assert np.abs(largest).max() == pytest.approx(32760)
    taxicab = np.array(embedded(embedder, content="the cat", embd_normalize=1)[0]["embedding"][0])
    assert np.abs(taxicab).sum() == pytest.approx(1, abs=1e-4)
    assert taxicab == pytest.approx(plain / np.abs(plain).sum(), abs=1e-5)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"content": []},
        {"content": 5},
        {"input": {"content": "text"}},
        {"input": {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}},
        {"content": "a", "embd_normalize": -2},
        {"content": "a", "encoding_format": "hex"},
        {"content": [10**9, 1]},
        {"content": "the " * 5000},
    ],
)
def test_values_that_cannot_be_embedded_are_refused(embedder: httpx.Client, body: dict[str, Any]) -> None:
    """In llama-server's shape."""
    response = embedder.post("/embedding", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] in ("invalid_request_error", "exceed_context_size_error")


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_without_pooling_every_token_has_a_vector(models: Path, isolation: str) -> None:
    """As the model computes it, whatever normalisation is asked for; a request with too many of them is refused."""
    path, texts = models / "bert.gguf", ["the cat", "a"]
    settings = ServerSettings(model=path, engine_options={**ENGINE, "isolation": isolation}, pooling="none")
    with Model.load(path) as model, Embedder(model, pooling="none", n_threads=1) as embedder:
        expected = embedder.embed_tokens(texts)
    with RunningServer(settings) as server, server.client() as client:
        found = embedded(client, input=texts, embd_normalize=2)
        for vector, rows in zip(found, expected, strict=True):
            assert np.array(vector["embedding"]) == pytest.approx(rows, abs=1e-4)
        assert np.linalg.norm(expected[0], axis=1) != pytest.approx(1, abs=1e-3)
        response = client.post("/embedding", json={"input": [[5] * 100] * 8000})
        assert (response.status_code, "without pooling" in response.json()["error"]["message"]) == (400, True)
        assert embedded(client, input="the cat") == [found[0]]


def test_a_list_names_what_was_ignored_in_its_first_member(embedder: httpx.Client) -> None:
    """There is no other place in it."""
    first, second = embedded(embedder, content=["a", "the"], foo=1)
    assert "foo" in first["warnings"][0]
    assert "warnings" not in second


def test_a_model_that_embeds_does_not_write(embedder: httpx.Client) -> None:
    """501, as unsupported."""
    response = embedder.post("/completion", json={"prompt": "the"})
    assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


def test_a_model_without_tokens_for_it_fills_no_gap(embedder: httpx.Client) -> None:
    """The error names the missing fields."""
    response = embedder.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 501
    assert "Infill is not supported by this model" in response.json()["error"]["message"]


def test_a_text_that_is_too_long_is_refused_or_cut(embedder: httpx.Client) -> None:
    """Beyond the trained length, and with truncate it is the vector of the rest."""
    words = "the cat sat " * 400
    refused = embedder.post("/embedding", json={"content": ["a", words]})
    assert refused.status_code == 400
    assert "too large" in refused.json()["error"]["message"]
    (cut,) = embedded(embedder, content=words, truncate="right")
    (other,) = embedded(embedder, content=words + "on the mat", truncate="right")
    assert cut["embedding"][0] == pytest.approx(other["embedding"][0], abs=1e-5)


# ---- reranking

DOCUMENTS = ["the cat was in the house", "a", "and the", "of it to"]


def ranked(client: httpx.Client, path: str = "/rerank", **body: Any) -> Any:
    response = client.post(path, json={"query": "the cat", **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_document_that_is_too_long_is_refused_or_cut(reranker: httpx.Client) -> None:
    """The error has both lengths; with truncate it is ranked, and its tokens are counted as they were read."""
    long = "the cat sat " * 400
    refused = reranker.post("/rerank", json={"query": "a cat", "documents": ["a", long]})
    assert refused.status_code == 400
    assert "too large" in refused.json()["error"]["message"]
    response = ranked(reranker, documents=["a", long], truncate="right")
    assert sorted(result["index"] for result in response["results"]) == [0, 1]
    assert response["usage"]["prompt_tokens"] < 600
    wrong = reranker.post("/rerank", json={"query": "a", "documents": ["a"], "truncate": "up"})
    assert (wrong.status_code, "truncate" in wrong.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_documents_are_ranked_best_first(reranker: httpx.Client, path: str) -> None:
    """Every one, by its place in the list."""
    response = ranked(reranker, path, documents=DOCUMENTS)
    scores = [result["relevance_score"] for result in response["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 1
    assert sorted(result["index"] for result in response["results"]) == [0, 1, 2, 3]
    assert (response["object"], response["model"]) == ("list", "reranker.gguf")
    assert response["usage"]["prompt_tokens"] == response["usage"]["total_tokens"] > 4


def test_texts_are_ranked_in_teis_shape(reranker: httpx.Client) -> None:
    """A list, with the text on request."""
    plain = ranked(reranker, texts=DOCUMENTS)
    documents = ranked(reranker, documents=DOCUMENTS)["results"]
    assert [result["index"] for result in plain] == [document["index"] for document in documents]
    assert [item["score"] for item in plain] == pytest.approx(
        [document["relevance_score"] for document in documents], abs=1e-4
    )
    with_text = ranked(reranker, texts=DOCUMENTS, return_text=True)
    assert [choice["text"] for choice in with_text] == [DOCUMENTS[result["index"]] for result in plain]


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/v2/rerank"])
def test_documents_may_be_objects_and_are_returned_on_request(reranker: httpx.Client, path: str) -> None:
    """As clients of Jina and Cohere send them; scores equal those of the same texts, and an object comes back whole."""
    mixed: list[Any] = [{"text": DOCUMENTS[0], "title": "cat"}, DOCUMENTS[1], {"text": DOCUMENTS[2]}, DOCUMENTS[3]]
    plain = ranked(reranker, path, documents=DOCUMENTS)["results"]
    for body in ({"documents": mixed}, {"documents": mixed, "return_documents": False}):
        bare = ranked(reranker, path, **body)["results"]
        assert [set(result) for result in bare] == [{"index", "relevance_score"}] * 4
        assert [result["index"] for result in bare] == [result["index"] for result in plain]
        scores = [result["relevance_score"] for result in plain]
        assert [result["relevance_score"] for result in bare] == pytest.approx(scores, abs=1e-4)
    found = ranked(reranker, path, documents=mixed, return_documents=True, top_n=3)
    assert [result["index"] for result in found["results"]] == [result["index"] for result in plain[:3]]
    for result in found["results"]:
        given = mixed[result["index"]]
        assert result["document"] == (given if isinstance(given, dict) else {"text": given})
    assert found["id"].startswith("rerank-")
    assert "warnings" not in found


@pytest.mark.parametrize("document", [{}, {"title": "a"}, {"text": 5}, {"text": None}, {"image": "a"}])
def test_a_document_without_a_text_is_refused_by_its_place(reranker: httpx.Client, document: Any) -> None:
    """With an example of the right shape."""
    refused = reranker.post("/rerank", json={"query": "a", "documents": ["a", document]})
    assert refused.status_code == 400
    assert "documents[1] must be a text or an object with a text" in refused.json()["error"]["message"]


def test_truncate_may_be_a_bool_as_in_tei(reranker: httpx.Client) -> None:
    """True cuts at the right, false refuses."""
    long = "the cat sat " * 400
    cut = ranked(reranker, texts=["a", long], truncate=True)
    scores = [item["score"] for item in ranked(reranker, texts=["a", long], truncate="right")]
    assert [item["score"] for item in cut] == pytest.approx(scores, abs=1e-4)
    refused = reranker.post("/rerank", json={"query": "a cat", "texts": ["a", long], "truncate": False})
    assert "too large" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("top_n", "count"), [(None, 4), (2, 2), (4, 4), (99, 4), (0, 0)])
def test_the_best_are_returned(reranker: httpx.Client, top_n: int | None, count: int) -> None:
    """Both shapes return as many as were asked for."""
    assert len(ranked(reranker, documents=DOCUMENTS, top_n=top_n)["results"]) == count
    assert len(ranked(reranker, texts=DOCUMENTS, top_n=top_n)) == count


@pytest.mark.parametrize("documents", [[], None, 123, [1, 2, 3], "the"])
def test_documents_that_are_none_are_refused(reranker: httpx.Client, documents: Any) -> None:
    """A query that is none is refused as well."""
    assert reranker.post("/rerank", json={"query": "a", "documents": documents}).status_code == 400
    assert reranker.post("/rerank", json={"query": documents, "documents": ["a"]}).status_code in (200, 400)
    assert reranker.post("/rerank", json={"documents": ["a"]}).status_code == 400


# ---- adapters


def written(client: httpx.Client, **fields: Any) -> str:
    body = {"prompt": [5, 6, 7], "n_predict": 16, "temperature": 0, "cache_prompt": False, **fields}
    response = client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["content"])


def test_an_adapter_is_listed_by_its_file(styled: httpx.Client) -> None:
    """Its folder is not shown."""
    (one,) = styled.get("/lora-adapters").json()
    assert (one["id"], one["path"]) == (0, "style.gguf")


def test_a_requests_scales_win_over_the_servers(styled: httpx.Client) -> None:
    """An adapter that a request's list leaves out does not apply to it."""
    plain, full = written(styled, lora=[]), written(styled, lora=[{"id": 0, "scale": 1.0}])
    assert plain != full
    assert written(styled, lora=[{"id": 0, "scale": 0.0}]) == plain


def test_scales_can_be_set_for_all(styled: httpx.Client) -> None:
    """They are listed, and apply to requests that name none."""
    full = written(styled, lora=[{"id": 0, "scale": 1.0}])
    for scale in (0.0, 1.0):
        assert styled.post("/lora-adapters", json=[{"id": 0, "scale": scale}]).json() == {"success": True}
        assert styled.get("/lora-adapters").json()[0]["scale"] == scale
        assert (written(styled) == full) is (scale == 1.0)


def test_a_response_shows_the_scales_that_were_asked_for(styled: httpx.Client) -> None:
    """Unknown adapters are reported as ignored."""
    body = {"prompt": [5], "n_predict": 1, "lora": [{"id": 0, "scale": 0.5}, {"id": 3, "scale": 1}]}
    response = styled.post("/completion", json=body).json()
    assert response["generation_settings"]["lora"] == [{"id": 0, "scale": 0.5}, {"id": 3, "scale": 1.0}]
    assert "adapter 3" in response["warnings"][0]


# ---- chat templates

TOOLS_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def test_a_model_whose_one_template_is_that_for_tools_can_chat(tmp_path: Path) -> None:
    """There is no other way to talk to it."""
    extra = {"tokenizer.chat_template.tool_use": TOOLS_TEMPLATE}
    path = write_model(tmp_path / "tools.gguf", KINDS["llama"], metadata=extra)
    with RunningServer(ServerSettings(model=path, engine_options=ENGINE)) as server, server.client() as client:
        response = client.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert response.json() == {"prompt": "user: Hi\n"}


def test_a_template_that_cannot_be_read_is_an_error_of_chat_requests(tmp_path: Path) -> None:
    """Every time, in an error of its own; requests without a chat template are served."""
    path = write_model(tmp_path / "m.gguf", KINDS["llama"], metadata={"tokenizer.chat_template": "{% if %}"})
    with RunningServer(ServerSettings(model=path, engine_options=ENGINE)) as server, server.client() as client:
        for _ in range(2):
            response = client.post("/apply-template", json={"messages": [{"role": "user", "content": "Hi"}]})
            assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")
            assert "the model's chat template cannot be used" in response.json()["error"]["message"]
        assert client.post("/completion", json={"prompt": [1, 2], "n_predict": 1}).status_code == 200
        errors = []
        for _ in range(2):
            with pytest.raises(Unsupported) as caught:
                server.call(server.service.chat_format)
            errors.append(caught.value)
        assert errors[0] is not errors[1]
