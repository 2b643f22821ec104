"""Embeddings of images over HTTP: in llama-server's shape and in parts, as the library computes them; refused by the part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.exact import EXACT
from tests.media_requests import DATA, FILE, image_part, text_part
from tests.server.openai_world import OpenAIServer

from paceline import LLM, Image
from paceline.testing.models import Qwen2VlSpec, Qwen25VisionSpec, write_model

pytestmark = pytest.mark.native

ENGINE: dict[str, Any] = {"n_ctx": 2048, "num_slots": 4, **EXACT}
MARKER = "<__media__>"
INPUT: dict[str, Any] = {"prompt_string": f"a{MARKER}b", "multimodal_data": [DATA]}
CLOSE = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_model(folder / "mmproj-seeing.gguf", Qwen25VisionSpec())
    return write_model(folder / "seeing.gguf", Qwen2VlSpec(pooling="last"))


@pytest.fixture(scope="module")
def world(model: Path) -> Iterator[OpenAIServer]:
    with OpenAIServer(ENGINE, model=model, media_marker=MARKER, max_images=3) as world:
        yield world


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """The vectors of the prompt with the picture, and of a text."""
    with LLM(model, **ENGINE) as llm:
        return llm.embed([["a", Image(FILE), "b"], "text"], parse_special=True)


def posted(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def vectors_of(client: httpx.Client, value: Any, **body: Any) -> Any:
    found = posted(client, "/v1/embeddings", input=value, **body)
    return np.array([entry["embedding"] for entry in found["data"]])


def test_openais_endpoint_takes_both_shapes(world: OpenAIServer, expected: Any) -> None:
    """Alone, and with texts in a list; the cells of the picture count as tokens."""
    parts = {"content": [text_part("a"), image_part(), text_part("b")]}
    with world.client() as client:
        for item in (INPUT, parts):
            assert np.allclose(vectors_of(client, item), expected[:1], atol=CLOSE)
            assert np.allclose(vectors_of(client, ["text", item, "text"]), expected[[1, 0, 1]], atol=CLOSE)
        assert len(vectors_of(client, [["te", "xt"], INPUT, [1, "a"], {"content": [text_part("a")]}])) == 4
        assert len(vectors_of(client, [1, "a", 2])) == 1
        found = posted(client, "/v1/embeddings", input=["a", INPUT])
        assert found["usage"]["prompt_tokens"] > 10
        assert np.allclose(vectors_of(client, INPUT, pooling="last", encoding_format="float"), expected[:1], atol=CLOSE)
        assert vectors_of(client, {"prompt_string": "text", "multimodal_data": []}).shape == expected[1:].shape


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_llama_servers_endpoint_takes_its_shape(world: OpenAIServer, expected: Any, path: str) -> None:
    """As content and as input."""
    with world.client() as client:
        for field in ("content", "input"):
            found = posted(client, path, **{field: [INPUT, "text"]})
            assert [result["index"] for result in found] == [0, 1]
            assert np.allclose([vector["embedding"][0] for vector in found], expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({**INPUT, "prompt_string": "a"}, "input has 1 multimodal_data, and 0 markers"),
        (["a", {**INPUT, "prompt_string": MARKER * 2}], "input[1] has 1 multimodal_data, and 2 markers"),
        ({**INPUT, "multimodal_data": DATA}, "input.multimodal_data must be a list"),
        (["a", {**INPUT, "multimodal_data": ["aGk="]}], "input[1].multimodal_data[0]: an image must be"),
        ({"content": [image_part("data:image/png;base64,aGk="), text_part("b")]}, "input.content[0].image_url"),
        ({"content": [image_part(), {"type": "video"}]}, "input.content[1].type must be text"),
        ({**INPUT, "multimodal_data": [DATA[:400]]}, "input.multimodal_data[0]"),
        ([INPUT] * 4, "input[3].multimodal_data[0]"),
    ],
)
def test_a_refusal_names_the_part(world: OpenAIServer, expected: Any, value: Any, words: str) -> None:
    """With both endpoints, and the server goes on."""
    with world.client() as client:
        for path in ("/v1/embeddings", "/embeddings"):
            error = posted(client, path, 400, input=value)["error"]
            assert error["message"].startswith(words)
        assert np.allclose(vectors_of(client, INPUT), expected[:1], atol=CLOSE)


def test_other_poolings_and_models_without_a_projector_refuse(world: OpenAIServer, model: Path) -> None:
    """With advice on the change."""
    with world.client() as client:
        error = posted(client, "/v1/embeddings", 400, input=INPUT, pooling="mean")["error"]
        assert 'pooling "last"' in error["message"]
        assert posted(client, "/v1/embeddings", 400, input=INPUT, truncate="left")["error"]["message"].startswith(
            "truncate"
        )
        assert posted(client, "/classify", 400, input=INPUT)["error"]
    with OpenAIServer({**ENGINE, "mmproj": False}, model=model, media_marker=MARKER) as blind, blind.client() as client:
        for path in ("/v1/embeddings", "/embeddings"):
            error = posted(client, path, 400, input=INPUT)["error"]
            assert error["message"].startswith("input.multimodal_data[0]: this model takes no images")
            assert posted(client, path, input="text")
