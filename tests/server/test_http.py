"""Rules of HTTP on every route: HEAD as GET without a body, HTTP/1.0 without chunks, paths with a slash at their end."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.router_world import described
from tests.server.running import RunningServer
from tests.server.stand_in import prompts
from tests.server.world import World

from paceline.server.settings import ACCESS_LOGGER, ApiKey

KEYS = {"api_keys": (ApiKey(secret="k"),)}
CHANGING = ("date", "x-request-id", "transfer-encoding")  # HTTP lets HEAD leave transfer-encoding out


def paths_of_get(app: Any) -> Iterator[str]:
    for path, methods in app.openapi()["paths"].items():
        if "get" in methods:
            yield re.sub(r"\{[^}]*\}", "small", path)
    yield from ("/", "/docs", "/openapi.json")


def lasting(headers: httpx.Headers) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in CHANGING}


@pytest.fixture
def made(worlds: Any) -> Callable[..., World]:
    """Make worlds with facts of a model."""

    def make(settings: dict[str, Any] | None = None) -> World:
        world: World = worlds(settings)
        described(world.engine, "small")
        return world

    return make


def raw(world: World, request: str, body: bytes = b"") -> tuple[str, dict[str, str], bytes]:
    """Send a request and read to the end of the connection: status line, headers, body."""
    with world.socket() as connection:
        connection.sendall(request.replace("\n", "\r\n").encode() + body)
        received = b""
        while part := connection.recv(65536):
            received += part
    head, _, rest = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return first, {name: value for name, _, value in pairs}, rest


def check_head_of_all(client: httpx.Client, app: Any, queries: tuple[str, ...]) -> int:
    """Compare HEAD and GET of every route; return how many were streams."""
    num_streams = 0
    for path in dict.fromkeys(paths_of_get(app)):
        for query in queries:
            with client.stream("GET", path + query) as got:
                if got.headers["content-type"].startswith("text/event-stream"):
                    num_streams += 1
                else:
                    got.read()
            head = client.head(path + query)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            expected, found = lasting(got.headers), lasting(head.headers)
            if path in ("/metrics", "/v1/engine/model", "/v1/engine/page"):  # they have clocks and counters
                expected.pop("content-length"), found.pop("content-length")
            assert found == expected, path
    return num_streams


@pytest.mark.native
def test_head_is_answered_as_get_on_every_route_of_one_model(server: RunningServer, client: httpx.Client) -> None:
    """With the same status and headers, and for a stream of events with the headers alone."""
    assert check_head_of_all(client, server.app, ("",)) == 1


def test_head_needs_the_key_that_get_needs(made: Any) -> None:
    """And none if GET needs none."""
    client = made(KEYS).client
    assert [client.head(path).status_code for path in ("/v1/models", "/slots", "/health", "/")] == [401, 401, 200, 200]


def test_head_is_answered_as_get_on_every_route_of_several_models(routers: Any) -> None:
    """The routes of a model too, by its name in the query."""
    world = routers()
    world.client.post("/models/load", json={"model": "small"})
    world.until("small", "loaded")
    assert check_head_of_all(world.client, world.server.app, ("", "?model=small")) >= 2


def test_head_where_there_is_no_get_is_refused_with_the_methods_that_there_are(made: Any) -> None:
    """As GET is."""
    head = made().client.head("/v1/chat/completions")
    assert (head.status_code, head.headers["allow"], head.content) == (405, "POST", b"")


def test_head_is_logged_and_counted_as_head(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Under the pattern of its route."""
    world = made()
    with caplog.at_level(logging.INFO, ACCESS_LOGGER):
        assert world.client.head("/v1/models/none").status_code == 404
        world.server.until(lambda: bool(caplog.messages))  # the line follows the response
    line = json.loads(caplog.messages[-1])
    assert (line["method"], line["route"], line["status"]) == ("HEAD", "/v1/models/{model_id:path}", 404)
    assert 'method="HEAD"' in world.client.get("/metrics").text


def test_a_connection_goes_on_after_head(made: Any) -> None:
    """Also after the head of a stream that would never end: no byte of a body is left on it."""
    requests = "".join(f"HEAD {path} HTTP/1.1\nhost: localhost\n\n" for path in ("/v1/engine/events", "/v1/models"))
    first, _, rest = raw(made(), requests + "GET /health HTTP/1.1\nhost: localhost\nconnection: close\n\n")
    assert first == "HTTP/1.1 200 OK"
    models, _, rest = rest.partition(b"\r\n\r\n")
    assert models.startswith(b"HTTP/1.1 200 OK")
    assert rest.endswith(b'\r\n\r\n{"status":"ok"}')
    assert rest.startswith(b"HTTP/1.1 200 OK")


def test_http_1_0_gets_a_stream_without_chunks(made: Any) -> None:
    """The end of the connection ends it; the events equal HTTP/1.1's."""
    world = made()
    body = json.dumps({"prompts": prompts(1), "stream": True}).encode()
    head = f"POST /v1/probe HTTP/1.0\ncontent-type: application/json\ncontent-length: {len(body)}\n\n"
    status, headers, received = raw(world, head, body)
    assert status == "HTTP/1.1 200 OK"
    assert "transfer-encoding" not in headers
    assert "content-length" not in headers
    assert headers["connection"] == "close"
    expected = world.client.post("/v1/probe", json={"prompts": prompts(1), "stream": True})
    assert expected.headers["transfer-encoding"] == "chunked"
    assert received == expected.content
    assert received.endswith(b"data: [DONE]\n\n")


def test_http_1_0_gets_a_whole_response_with_its_length(made: Any) -> None:
    """Whether it asks to keep the connection or not: it is closed."""
    for more in ("", "connection: keep-alive\n"):
        status, headers, received = raw(made(), f"GET /health HTTP/1.0\n{more}\n")
        assert (status, received) == ("HTTP/1.1 200 OK", b'{"status":"ok"}')
        assert headers["content-length"] == "15"
        assert headers["connection"] == "close"
    status, headers, received = raw(made(), "HEAD /health HTTP/1.0\n\n")
    assert (status, headers["content-length"], received) == ("HTTP/1.1 200 OK", "15", b"")


def test_a_path_with_a_slash_at_its_end_is_the_route_without_it(made: Any) -> None:
    """Without a redirect, so that a POST keeps its body and a proxy's scheme and host do not matter."""
    world = made(KEYS)
    with world.server.client(headers={"x-api-key": "k", "host": "localhost"}) as client:
        posted = client.post("/v1/probe/", json={"prompts": prompts(1)})
        assert (posted.status_code, posted.json()) == (
            200,
            client.post("/v1/probe", json={"prompts": prompts(1)}).json(),
        )
        assert client.get("/v1/models//").json()["object"] == "list"
        assert client.head("/v1/models/").status_code == 200
        assert client.get("/nothing/").status_code == 404
        assert client.get("/v1/chat/completions/").status_code == 405
    assert world.client.get("/health/").status_code == 200  # it needs no key, as /health
    assert world.client.get("/v1/models/").status_code == 401


def test_a_slash_that_is_part_of_a_name_stays(made: Any) -> None:
    """An encoded slash is no slash of the path."""
    for path in ("/v1/models/some%2F", "/v1/models/some%2F/"):
        assert "'some/'" in made().client.get(path).json()["error"]["message"]


def test_a_slash_at_the_end_is_taken_behind_a_prefix_and_by_a_router(made: Any, routers: Any) -> None:
    """The prefix itself keeps its slash."""
    client = made({"root_path": "/llm"}).client
    assert client.get("/llm/v1/models/").status_code == 200
    assert client.get("/llm/").status_code == 200
    router = routers().client
    assert router.get("/v1/models/").json()["object"] == "list"
    assert router.post("/completion/", json={"prompt": "once", "n_predict": 3, "model": "small"}).status_code == 200


def test_a_folder_of_the_page_is_served_with_its_slash(made: Any, tmp_path: Path) -> None:
    """Without it a redirect adds it, which names neither scheme nor host."""
    (tmp_path / "index.html").write_text("mine")
    (tmp_path / "help").mkdir()
    (tmp_path / "help" / "index.html").write_text("help")
    client = made({"page_folder": tmp_path}).client
    assert client.get("/help/").text == "help"
    for path in ("/help", "//help"):
        moved = client.get(f"http://{client.base_url.host}:{client.base_url.port}{path}?x=1")
        assert (moved.status_code, moved.headers["location"]) == (307, "/help/?x=1")
    assert client.get("/health/").json() == {"status": "ok"}
