"""/classify and /score over tiny random models: a classifier, a reranker, an embedding model, and one that generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.server.running import RunningServer

from paceline import LLM
from paceline.errors import InvalidParams, Unsupported
from paceline.server.settings import ServerSettings
from paceline.testing.models import KINDS, BertSpec, write_model

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"isolation": "thread", "num_slots": 2, "n_threads": 1}
LABELS = ("calm", "angry", "glad")
TEXTS = ["the cat sat", "a dog ran", "the cat sat"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("bert", "reranker", "llama"):
        write_model(folder / f"{kind}.gguf", KINDS[kind])
    write_model(folder / "classifier.gguf", BertSpec(pooling="rank", class_labels=LABELS))
    return folder


def serving(path: Path) -> Iterator[httpx.Client]:
    with RunningServer(ServerSettings(model=path, engine_options=ENGINE)) as server, server.client() as client:
        yield client


@pytest.fixture(scope="module")
def classifier(models: Path) -> Iterator[httpx.Client]:
    yield from serving(models / "classifier.gguf")


@pytest.fixture(scope="module")
def reranker(models: Path) -> Iterator[httpx.Client]:
    yield from serving(models / "reranker.gguf")


@pytest.fixture(scope="module")
def embedder(models: Path) -> Iterator[httpx.Client]:
    yield from serving(models / "bert.gguf")


def ok(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def failed(client: httpx.Client, path: str, **body: Any) -> tuple[int, str | None]:
    response = client.post(path, json=body)
    assert response.status_code >= 400, response.text
    return response.status_code, response.json()["error"].get("param")


# ---- classify


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_text_gets_the_probabilities_of_all_classes(models: Path, isolation: str) -> None:
    """They add up to 1, the label is that of the greatest, and names come from the file, in front of a worker as well."""
    with LLM(models / "classifier.gguf", isolation=isolation, n_threads=1) as llm:
        found = llm.classify(TEXTS)
        assert llm.classify([]) == []
        (of_ids,) = llm.classify([llm.tokenizer.encode(TEXTS[0])])
    assert [item.labels for item in found] == [LABELS] * 3
    for item in found:
        assert sum(item.probs) == pytest.approx(1)
        assert item.probs[LABELS.index(item.label)] == max(item.probs)
    assert found[2].probs == pytest.approx(found[0].probs, abs=1e-4)
    assert of_ids.probs == pytest.approx(found[0].probs, abs=1e-4)
    assert found[1].probs != pytest.approx(found[0].probs, abs=1e-4)


def test_a_model_with_one_output_has_one_probability(models: Path) -> None:
    """The sigmoid of its score; its class has no name in the file."""
    with LLM(models / "reranker.gguf", n_threads=1) as llm:
        (found,) = llm.classify(["the cat"])
    assert (found.label, found.labels, len(found.probs)) == ("LABEL_0", ("LABEL_0",), 1)
    assert 0 < found.probs[0] < 1


def test_a_model_without_a_head_classifies_nothing(models: Path) -> None:
    """It is named, in the library and over HTTP."""
    with LLM(models / "bert.gguf", n_threads=1) as llm, pytest.raises(Unsupported, match="classification head"):
        llm.classify(["the cat"])
    for client in serving(models / "llama.gguf"):
        for path, body in (("/classify", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
            assert failed(client, path, **body)[0] in (400, 501)


def test_classify_has_vllms_shape(classifier: httpx.Client, models: Path) -> None:
    """With the numbers of the library."""
    response = ok(classifier, "/classify", input=TEXTS, model="classifier.gguf")
    with LLM(models / "classifier.gguf", n_threads=1) as llm:
        expected = llm.classify(TEXTS)
        num_tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert response["id"].startswith("classify-")
    assert (response["object"], response["model"]) == ("list", "classifier.gguf")
    assert response["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    for index, (entry, wanted) in enumerate(zip(response["data"], expected, strict=True)):
        assert (entry["index"], entry["label"], entry["num_classes"]) == (index, wanted.label, 3)
        assert entry["probs"] == pytest.approx(wanted.probs, abs=1e-3)


def test_numbers_of_the_head_are_returned_where_they_are_asked_for(classifier: httpx.Client) -> None:
    """Their softmax is returned otherwise."""
    (raw,) = ok(classifier, "/classify", input="the cat", use_activation=False)["data"]
    (found,) = ok(classifier, "/classify", input="the cat")["data"]
    powers = np.exp(np.array(raw["probs"]))
    assert (powers / powers.sum()).tolist() == pytest.approx(found["probs"], abs=1e-3)
    assert raw["label"] == found["label"]


def test_values_that_cannot_be_classified_are_refused(classifier: httpx.Client) -> None:
    """With the field at fault."""
    for value in ([], 3, None, [[]], [None]):
        assert failed(classifier, "/classify", input=value) == (400, "input")
    assert failed(classifier, "/classify")[0] == 400
    assert failed(classifier, "/classify", input="a", tenant="x") == (400, "tenant")
    assert failed(classifier, "/classify", input="the cat " * 400)[0] == 400
    assert ok(classifier, "/classify", input="the cat " * 400, truncate="right")["data"][0]["num_classes"] == 3


# ---- score


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_reranker_scores_pairs(reranker: httpx.Client, path: str) -> None:
    """The sigmoid of /rerank's scores, in the order of the texts."""
    documents = ["a dog", "the cat sat", "a bird"]
    response = ok(reranker, path, text_1="the cat", text_2=documents)
    ranked = {
        result["index"]: result["relevance_score"]
        for result in ok(reranker, "/rerank", query="the cat", documents=documents)["results"]
    }
    assert response["id"].startswith("score-")
    assert [(entry["index"], entry["object"]) for entry in response["data"]] == [
        (0, "score"),
        (1, "score"),
        (2, "score"),
    ]
    expected = [1 / (1 + np.exp(-ranked[index])) for index in range(3)]
    assert [entry["score"] for entry in response["data"]] == pytest.approx(expected, abs=1e-3)
    plain = ok(reranker, path, text_1="the cat", text_2=documents, use_activation=False)
    assert [entry["score"] for entry in plain["data"]] == pytest.approx([ranked[index] for index in range(3)], abs=1e-3)
    (single,) = ok(reranker, path, text_1="the cat", text_2=documents[1])["data"]
    assert single["score"] == pytest.approx(expected[1], abs=1e-3)


def test_a_classifier_of_several_classes_scores_no_pairs(classifier: httpx.Client, models: Path) -> None:
    """None of its outputs is a score; the error names the classes and the alternative, over HTTP and in the library."""
    for path, body in (
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "use_activation": False}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        response = classifier.post(path, json=body)
        assert response.status_code == 400, path
        assert "3 classes ('calm', 'angry', 'glad')" in response.json()["error"]["message"]
        assert "/classify" in response.json()["error"]["message"]
    for isolation in ("thread", "process"):
        with LLM(models / "classifier.gguf", isolation=isolation, n_threads=1) as llm:
            with pytest.raises(Unsupported, match="3 classes"):
                llm.rerank("a", ["b"])
            assert llm.classify(["a"])


def test_a_reranker_that_says_yes_or_no_scores_by_its_yes(tmp_path: Path) -> None:
    """Like Qwen3's rerankers, which have two outputs."""
    path = write_model(tmp_path / "yes.gguf", BertSpec(pooling="rank", class_labels=("yes", "no")))
    for client in serving(path):
        (found,) = ok(client, "/score", text_1="the cat", text_2="a dog", use_activation=False)["data"]
        (ranked,) = ok(client, "/rerank", query="the cat", documents=["a dog"])["results"]
        assert found["score"] == pytest.approx(ranked["relevance_score"], abs=1e-3)


def test_lists_of_the_same_length_go_pair_by_pair(reranker: httpx.Client) -> None:
    """Each text with the text at the same place."""
    response = ok(reranker, "/score", text_1=["the cat", "a dog"], text_2=["a bird", "the cat"])
    alone = [
        ok(reranker, "/score", text_1=first, text_2=second)["data"][0]["score"]
        for first, second in (("the cat", "a bird"), ("a dog", "the cat"))
    ]
    assert [entry["score"] for entry in response["data"]] == pytest.approx(alone, abs=1e-3)


def test_an_embedding_model_scores_by_the_cosine(embedder: httpx.Client) -> None:
    """Equal texts have 1."""
    response = ok(embedder, "/score", text_1="the cat sat", text_2=TEXTS)
    vectors = [entry["embedding"] for entry in ok(embedder, "/v1/embeddings", input=TEXTS)["data"]]
    expected = [float(np.dot(vectors[0], vector)) for vector in vectors]
    assert [entry["score"] for entry in response["data"]] == pytest.approx(expected, abs=1e-3)
    assert response["data"][0]["score"] == pytest.approx(1, abs=1e-4)


def test_pairs_that_do_not_fit_are_refused(reranker: httpx.Client) -> None:
    """With the field at fault."""
    for first, second, param in (
        (["a", "b"], ["c", "d", "e"], "text_1"),
        (["a", "b"], "c", "text_1"),
        ([], ["a"], "text_1"),
        ("a", [], "text_2"),
        ("a", [3], "text_2"),
        ({"content": []}, "a", "text_1"),
        ("a", ["b"] * 8193, "text_2"),
    ):
        assert failed(reranker, "/score", text_1=first, text_2=second) == (400, param)
    assert failed(reranker, "/score", text_1="a")[0] == 400
    assert failed(reranker, "/score", text_1="the cat " * 400, text_2="a")[0] == 400
    assert failed(reranker, "/score", text_1="a", text_2="b", tenant="x") == (400, "tenant")


# ---- dimensions and prompts of embeddings


def test_vectors_are_cut_and_normalized_after_that(models: Path) -> None:
    """As OpenAI's route does; more than there are is refused before anything is computed."""
    with LLM(models / "bert.gguf", n_threads=1) as llm:
        n_embd = llm.model.n_embd_out
        whole, cut = llm.embed(TEXTS), llm.embed(TEXTS, dimensions=8)
        assert cut.shape == (3, 8)
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        assert np.allclose(cut, expected, atol=1e-4)
        raw = llm.embed(TEXTS[0], dimensions=8, normalize=False)
        assert np.allclose(raw, llm.embed(TEXTS[0], normalize=False)[:8], atol=1e-4)
        assert llm.embed(TEXTS, dimensions=n_embd).shape == (3, n_embd)
        assert llm.embed([], dimensions=8).shape == (0, 8)
        for dimensions in (0, n_embd + 1, True, 2.0, "8"):
            with pytest.raises(InvalidParams, match="dimensions"):
                llm.embed(TEXTS, dimensions=dimensions)  # type: ignore[arg-type]


def test_the_name_of_a_prompt_is_refused_with_the_way_out(models: Path, embedder: httpx.Client) -> None:
    """GGUF files carry no prefixes."""
    with LLM(models / "bert.gguf", n_threads=1) as llm, pytest.raises(Unsupported, match="prompt_name.*in front"):
        llm.embed(TEXTS, prompt_name="query")
    response = embedder.post("/v1/embeddings", json={"input": "a", "prompt_name": "query"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_name")
