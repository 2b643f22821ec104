"""Settings that only flags set, seen from a client."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
from tests.server.openai_world import OpenAIServer

from paceline import LLM

pytestmark = pytest.mark.native

TEXT = "a little bear"


@pytest.fixture(params=["cls", "none"])
def server(request: pytest.FixtureRequest) -> Iterator[OpenAIServer]:
    with OpenAIServer(pooling=request.param) as world:
        yield world


def ask(server: OpenAIServer, **body: object) -> httpx.Response:
    with server.client() as http:
        return http.post("/v1/embeddings", json={"input": TEXT, "encoding_format": "float", **body})


@pytest.mark.parametrize("server", ["cls"], indirect=True)
def test_the_servers_pooling_holds_where_a_request_does_not_say(server: OpenAIServer) -> None:
    """A request's own pooling wins over the server's."""
    with LLM(n_threads=1, num_slots=1, n_ctx=1024) as llm:
        for body, pooling in (({}, "cls"), ({"pooling": "mean"}, "mean")):
            found = np.array(ask(server, **body).json()["data"][0]["embedding"])
            assert np.allclose(found, llm.embed(TEXT, pooling=pooling), atol=1e-2)


@pytest.mark.parametrize("server", ["none"], indirect=True)
def test_a_pooling_without_a_single_vector_is_refused(server: OpenAIServer) -> None:
    """With the way out, which works."""
    response = ask(server)
    assert response.status_code == 400
    assert "--pooling none" in response.json()["error"]["message"]
    assert ask(server, pooling="mean").status_code == 200
