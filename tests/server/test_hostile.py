"""Input that means harm, or does it without meaning to: every answer is a clear refusal or an answer, and the server goes on."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from tests.server.running import RunningServer

pytestmark = pytest.mark.native

PLAIN: dict[str, Any] = {"max_tokens": 1, "n_predict": 1}


def body(text: str) -> bytes:
    """A body with this text wherever a route looks for one."""
    fields = ("prompt", "content", "input", "query", "input_prefix", "input_suffix")
    return json.dumps(PLAIN | dict.fromkeys(fields, text) | {"messages": [{"role": "user", "content": text}]}).encode()


BODIES = {
    "nested lists": b"[" * 200_000,
    "nested objects": b'{"prompt":' * 100_000,
    "nested and whole": b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}",
    "a lone surrogate": body("\ud800"),
    "a surrogate as a name": b'{"\\ud800":1,' + body("a")[1:],
    "a NUL": body("a\0b"),
    "a raw NUL": b'{"prompt":"a\0b"}',
    "no UTF-8": b'{"prompt":"\xff\xfe"}',
    "one letter": body("a" * 100_000),
    "ten megabytes": body("word " * 2_000_000),
    "NaN": b'{"temperature":NaN,' + body("a")[1:],
    "infinity": b'{"temperature":1e999,' + body("a")[1:],
    "a huge number": b'{"seed":' + b"9" * 5000 + b"," + body("a")[1:],
    "nothing": b"",
    "words": b"hello",
    "a list": b"[1,2]",
    "null": b"null",
}
ROUTES = (
    "/v1/completions",
    "/completion",
    "/tokenize",
    "/v1/embeddings",
    "/infill",
    "/v1/rerank",
    "/slots/0?action=save",
)


@pytest.mark.parametrize("kind", BODIES)
def test_no_body_breaks_a_route(client: httpx.Client, kind: str) -> None:
    """It is answered or refused in JSON, and the next one is answered."""
    for route in ROUTES:
        answer = client.post(route, content=BODIES[kind])
        assert answer.status_code < 500 or answer.status_code == 501, (route, answer.text)
        assert isinstance(answer.json(), (dict, list))
        assert "Traceback" not in answer.text
    assert client.get("/health").status_code == 200
    assert client.post("/completion", json={"prompt": "A", "n_predict": 1}).status_code == 200


def test_paths_lead_nowhere_but_to_routes(client: httpx.Client) -> None:
    """No file is found by climbing, encoding or naming it."""
    for path in (
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/docs/../../x",
        "/v1/models/..%2f..%2fx",
        "/%00",
    ):
        assert client.get(path).status_code in (400, 404)


def test_many_idle_connections_keep_nobody_out(server: RunningServer, client: httpx.Client) -> None:
    """They cost a socket each and nothing else."""
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        server.until(lambda: len(server.connections) >= 200)
        assert client.post("/completion", json={"prompt": "A", "n_predict": 1}).status_code == 200
    finally:
        for one in idle:
            one.close()
