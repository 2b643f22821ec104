"""Limits for untrusted clients: keys, sizes, times, numbers, and the contents of an internal error."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import sys
import zlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from tests.server.stand_in import prompts

from paceline.server.settings import ApiKey

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSORS: dict[str, Any] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}
KEYS = (ApiKey(secret="first secret", tenant="a"), ApiKey(secret="second", tenant="b"))


def read_to_end(connection: Any) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):  # a server that closes does not read what was sent after its limit
        while part := connection.recv(65536):
            received += part
    return received


def test_without_a_key_only_public_routes_are_served(worlds: Any) -> None:
    """The errors of the others say how to send one."""
    client = worlds({"api_keys": KEYS}).client
    assert [client.get(path).status_code for path in ("/", "/health", "/v1/health", "/health/ready")] == [200] * 4
    for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}, {"authorization": "Bearer"}):
        response = client.post("/v1/probe", json={"prompts": prompts(1)}, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    error = client.post("/completion", json={}).json()["error"]
    assert (error["code"], error["type"]) == (401, "authentication_error")


REFUSED_UNREAD = (
    b"POST /health",
    b"PUT /docs",
    b"DELETE /v1/health",
    b"POST /",
    b"OPTIONS /health",
    b"POST /completion",
    b"POST /v1/messages",
    b"POST /api/chat",
    b"POST /nothing",
)


def test_no_body_is_read_before_its_request_is_authorised(worlds: Any) -> None:
    """Also on public paths, of which only GET and HEAD need no key: the response comes at once, and the connection closes."""
    world = worlds({"api_keys": KEYS, "keep_alive_s": 1000.0})
    budget = world.server.service.body_budget
    for begin in REFUSED_UNREAD:
        with world.socket() as connection:
            connection.sendall(begin + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n" + b"x" * 500)
            assert read_to_end(connection).startswith(b"HTTP/1.1 401 "), begin
            assert budget.free_bytes == budget.max_bytes
    assert world.client.head("/health").status_code == 200


@pytest.mark.parametrize("begin", [b"GET /health", b"HEAD /health", b"POST /nothing", b"PUT /health"])
def test_a_body_that_no_route_reads_is_not_waited_for(worlds: Any, begin: bytes) -> None:
    """The response says that the connection closes, and it does; the budget of bodies is whole."""
    world = worlds({"keep_alive_s": 1000.0})
    budget = world.server.service.body_budget
    with world.socket() as connection:
        connection.sendall(begin + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n" + b"x" * 500)
        received = read_to_end(connection)
        assert b"\r\nconnection: close\r\n" in received.lower()
        assert budget.free_bytes == budget.max_bytes


def test_a_client_that_sends_its_whole_body_first_reads_the_refusal(worlds: Any) -> None:
    """Bytes after the response are discarded: a connection that was reset would lose the response."""
    world = worlds({"api_keys": KEYS})
    with world.socket() as connection:
        connection.sendall(b"POST /completion HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n")
        for _ in range(80):
            connection.sendall(b"x" * 100_000)
        assert read_to_end(connection).startswith(b"HTTP/1.1 401 ")


def test_a_connection_goes_on_after_a_body_that_arrived(worlds: Any) -> None:
    """Two requests on it, each with a body."""
    world = worlds()
    body = json.dumps({"prompts": prompts(1)}).encode()
    head = b"POST /v1/probe HTTP/1.1\r\nhost: localhost\r\n%scontent-length: %d\r\n\r\n"
    with world.socket() as connection:
        connection.sendall(head % (b"", len(body)))
        connection.sendall(body + head % (b"connection: close\r\n", len(body)) + body)
        received = read_to_end(connection)
    assert received.count(b"HTTP/1.1 200 OK") == 2
    assert received.lower().count(b"connection: close") == 1


AUTHORIZED = b"authorization: Bearer second\r\n"
CHUNKED = b"POST /v1/probe HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_authorized", [False, True])
def test_trailers_are_no_headers(worlds: Any, *, is_split: bool, is_authorized: bool) -> None:
    """Whether they come with the head in one packet or later: a key in a trailer opens nothing, and a request is served."""
    world = worlds({"api_keys": KEYS})
    body = json.dumps({"prompts": prompts(1)}).encode()
    head = CHUNKED + (AUTHORIZED if is_authorized else b"connection: close\r\n") + b"\r\n"
    rest = b"%x\r\n%b\r\n0\r\n" % (len(body), body) + b"authorization: Bearer x\r\n" * is_authorized
    rest += AUTHORIZED * (not is_authorized) + b"\r\n"
    after = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" if is_authorized else b""
    with world.socket() as connection:
        if is_split:
            connection.sendall(head)
            if is_authorized:
                world.server.until(lambda: world.server.service.in_flight.count == 1)
            connection.sendall(rest + after)
        else:
            connection.sendall(head + rest + after)
        received = read_to_end(connection)
    assert received.startswith(b"HTTP/1.1 200 " if is_authorized else b"HTTP/1.1 401 ")
    assert received.count(b"HTTP/1.1 200") == 2 * is_authorized


@pytest.mark.parametrize("endless", [b"5;a=", b"0\r\nx: "])
def test_what_surrounds_a_chunked_body_is_bounded(worlds: Any, endless: bytes) -> None:
    """Extensions of chunks and trailers have the limit of headers."""
    world = worlds({"max_header_bytes": 2000})
    with world.socket() as connection:
        connection.sendall(CHUNKED + b"\r\n" + endless)
        for _ in range(3):
            connection.sendall(b"y" * 1000)
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_request_for_another_protocol_is_served_with_its_body(
    worlds: Any, *, is_split: bool, is_chunked: bool
) -> None:
    """As HTTP/1.1, and its body is never taken for another request."""
    world = worlds({"api_keys": KEYS})
    body = json.dumps({"prompts": prompts(1)}).encode() + b"\r\nGET /v1/models HTTP/1.1\r\n" + AUTHORIZED + b"\r\n"
    body = body.ljust(5000)
    framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % len(body)
    head = b"POST /v1/probe HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + AUTHORIZED
    sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    after = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with world.socket() as connection:
        connection.sendall(head + framing + b"\r\n\r\n" + sent[: 0 if is_split else 1000])
        if is_split:
            world.server.until(lambda: world.server.service.in_flight.count == 1)
        connection.sendall(sent[0 if is_split else 1000 :] + after)
        received = read_to_end(connection)
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == [b"400", b"200"]


def test_each_key_opens_in_any_of_the_usual_ways(worlds: Any) -> None:
    """A key is accepted as a bearer token, bare, or in X-Api-Key."""
    client = worlds({"api_keys": KEYS}).client
    for headers in (
        {"authorization": "Bearer first secret"},
        {"authorization": "bearer second"},
        {"authorization": "second"},
        {"x-api-key": "first secret"},
    ):
        assert client.post("/v1/probe", json={"prompts": prompts(1)}, headers=headers).status_code == 200


def test_a_request_is_cancelled_by_its_own_tenant_only(worlds: Any) -> None:
    """For others it is not there."""
    world = worlds({"api_keys": KEYS})
    world.engine.backend.hold()
    first, second = ({"authorization": f"Bearer {key.secret}"} for key in KEYS)
    body = {"prompts": prompts(1), "stream": True}
    with world.client.stream("POST", "/v1/probe", json=body, headers={**first, "x-request-id": "r"}):
        for headers, expected in ((second, False), (first, True)):
            response = world.client.post("/v1/requests/r/cancel", headers=headers)
            assert response.json() == {"id": "r", "cancelled": expected}
    world.engine.backend.gate.set()


def test_a_body_that_is_too_long_is_refused(worlds: Any) -> None:
    """Whether it declares its length or comes in chunks."""
    client = worlds({"max_body_bytes": 1000}).client
    for content in (b"x" * 1001, iter([b"x" * 600] * 3)):
        response = client.post("/completion", content=content)
        assert response.status_code == 413
        assert "limit is 1000" in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", COMPRESSORS)
def test_a_compressed_body_is_served_as_its_content(worlds: Any, encoding: str) -> None:
    """The limit on bodies holds for the decoded bytes, and a damaged body is the client's fault."""
    client, compress = worlds({"max_body_bytes": 10_000}).client, COMPRESSORS[encoding]
    plain = client.post("/v1/probe", json={"prompts": prompts(1)})

    def post(content: bytes) -> Any:
        return client.post("/v1/probe", content=compress(content), headers={"content-encoding": encoding})

    served = post(json.dumps({"prompts": prompts(1)}).encode())
    assert (served.status_code, served.json()) == (200, plain.json())
    refused = post(b" " * 50_000_000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    damaged = client.post("/v1/probe", content=b"{}", headers={"content-encoding": encoding})
    assert (damaged.status_code, damaged.json()["error"]["code"]) == (400, "invalid_content_encoding")


def test_a_body_in_an_encoding_that_is_not_known_is_refused(worlds: Any) -> None:
    """With the encodings that are; a body that is compressed twice is refused, too."""
    client = worlds().client
    for encoding in ("br", "gzip, gzip"):
        refused = client.post("/v1/probe", content=b"{}", headers={"content-encoding": encoding})
        assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_content_encoding")
        assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"
    plain = client.post("/v1/probe", json={"prompts": prompts(1)}, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_bodies_that_are_too_long_together_are_refused(worlds: Any) -> None:
    """Until a request has its response, or its client disconnects; requests without a body are served meanwhile."""
    world = worlds({"max_body_bytes": 600, "max_total_body_bytes": 1000})
    world.engine.backend.hold()
    body = {"prompts": ["x" * 550], "stream": True}
    with world.raw(**body):
        world.engine.backend.wait_for_pass()
        refused = world.post(**body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_bytes")
        assert int(refused.headers["retry-after"]) >= 1
        assert world.client.post("/v1/requests/none/cancel").status_code == 200
    world.engine.backend.gate.set()
    budget = world.server.service.body_budget
    world.server.until(lambda: budget.free_bytes == 1000)
    assert world.post(**body).status_code == 200
    world.server.until(lambda: budget.free_bytes == 1000)


def test_headers_that_are_too_long_are_refused(worlds: Any) -> None:
    """Before and after they are whole."""
    world = worlds({"max_header_bytes": 2000})
    assert world.client.get("/health", headers={"x": "y" * 2000}).status_code == 431
    with world.socket() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 5000)
        assert read_to_end(connection).startswith(b"HTTP/1.1 431 ")


def test_a_slow_sender_gets_408_and_is_disconnected(worlds: Any) -> None:
    """With half a head, and with half a body."""
    world = worlds({"body_timeout_s": 0.05})
    whole = b"POST /completion HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"
    for begun in (b"POST /comple", whole):
        with world.socket() as connection:
            connection.sendall(begun)
            assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_never_asks_is_closed(worlds: Any) -> None:
    """It is closed without a response."""
    with worlds({"keep_alive_s": 0.05}).socket() as connection:
        assert read_to_end(connection) == b""


def test_too_many_connections_are_refused(worlds: Any) -> None:
    """Once all have a request in progress: with a 503 for the next one, as soon as it is there."""
    world = worlds({"max_connections": 3})
    world.engine.backend.hold()
    held = [world.raw(prompts=prompts(1)) for _ in range(3)]
    world.server.until(lambda: world.server.service.in_flight.count == 3)
    with world.socket() as another:
        received = read_to_end(another)
    assert received.startswith(b"HTTP/1.1 503 ")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "unavailable_error"
    assert b"\r\nretry-after: 1\r\n" in received.lower()
    for each in held:
        each.close()
    world.server.until(lambda: not world.server.connections)
    assert world.client.get("/health").status_code == 200


def test_the_connection_that_has_waited_longest_is_closed_for_a_new_one(worlds: Any) -> None:
    """After no bytes, a part of a request or whole requests; never a connection with a request in progress."""
    world = worlds({"max_connections": 6})
    world.engine.backend.hold()
    connections, in_flight = world.server.connections, world.server.service.in_flight
    with ExitStack() as closing:
        running = closing.enter_context(world.raw(prompts=prompts(1)))
        world.server.until(lambda: in_flight.count == 1)
        waiting = []
        body = b"POST /v1/probe HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"
        health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        for sent in (b"", b"GET /hea", body, health + body, health):
            waiting.append(closing.enter_context(world.socket()))
            waiting[-1].sendall(sent)
            world.server.until(lambda: len(connections) == 1 + len(waiting))
            if sent.startswith(health):
                assert waiting[-1].recv(65536).startswith(b"HTTP/1.1 200 ")
        for first in waiting:
            client = closing.enter_context(world.server.client())
            assert client.get("/health").status_code == 200
            assert read_to_end(first) == b""
        world.engine.backend.gate.set()
        assert running.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_connections_that_cannot_be_refused_yet_wait(worlds: Any) -> None:
    """They are accepted when others are closed."""
    world = worlds({"max_connections": 2})
    world.engine.backend.hold()
    with ExitStack() as closing:
        held = [closing.enter_context(world.raw(prompts=prompts(1))) for _ in range(2)]
        world.server.until(lambda: world.server.service.in_flight.count == 2)
        refused = [closing.enter_context(world.socket()) for _ in range(20)]
        assert all(read_to_end(each).startswith(b"HTTP/1.1 503 ") for each in refused)
        held.pop().close()
        world.server.until(lambda: len(world.server.connections) == 1)
        assert world.client.get("/health").status_code == 200


def test_bytes_that_begin_no_request_do_not_keep_a_connection(worlds: Any) -> None:
    """Blank lines between requests are allowed, and prolong nothing."""
    world = worlds({"keep_alive_s": 0.3})
    with world.socket() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_beyond_the_limit_get_retry_after(worlds: Any, monkeypatch: Any) -> None:
    """It is estimated from the queue and the rate at which requests end."""
    world = worlds(num_slots=1, max_queue=3)
    asked: list[int] = []
    monkeypatch.setattr(
        world.server.service._completion_rate, "estimate_wait_s", lambda number: asked.append(number) or 17
    )
    world.engine.backend.hold()
    with world.raw(prompts=prompts(4)):
        world.server.until(lambda: world.engine.num_open == 4)
        response = world.post(prompts=prompts(1))
        assert (response.status_code, response.headers["retry-after"]) == (429, "17")
        assert asked == [3]
        world.engine.backend.gate.set()


def test_invalid_http_is_refused(worlds: Any) -> None:
    """In the shape of other errors."""
    with worlds().socket() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_get_responses_in_order(worlds: Any) -> None:
    """In sequence on one connection."""
    with worlds().socket() as connection:
        ask = "GET {} HTTP/1.1\r\nhost: localhost\r\n{}\r\n"
        connection.sendall((ask.format("/health", "") * 20 + ask.format("/nothing", "connection: close\r\n")).encode())
        received = read_to_end(connection)
    assert received.count(b"200 OK") == 20
    assert received.index(b"404 Not Found") > received.rindex(b"200 OK")


def test_a_disconnect_is_noticed_behind_pipelined_requests(worlds: Any) -> None:
    """Later bytes on the connection are no reason to go on."""
    world = worlds()
    world.engine.backend.hold()
    with world.raw(prompts=prompts(1)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        world.engine.backend.wait_for_pass()
    world.server.until(lambda: world.server.service.request_registry.count == 0)
    world.engine.backend.gate.set()


def test_an_internal_error_reveals_no_details(worlds: Any, caplog: Any) -> None:
    """The response has an id, the log has the rest."""
    world = worlds()
    with caplog.at_level(logging.ERROR, "paceline.server"):
        response = world.client.post("/v1/broken", json={})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"] in caplog.text
    assert "/home/user/secret is broken" in caplog.text


def test_bodies_need_not_say_that_they_are_json_but_from_a_web_page(worlds: Any) -> None:
    """Browsers send these requests to any server without a preflight: with a form's type, or with no type."""
    client = worlds().client
    body = json.dumps({"prompts": prompts(1)}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert client.post("/v1/probe", content=body).status_code == 200
    assert client.post("/v1/probe", content=body, headers=form).status_code == 200
    for origin in ("https://elsewhere.example", "null", f"http://elsewhere.example/{client.base_url.host}"):
        page = {"origin": origin}
        for headers in (form, {}, {"content-type": ""}, {"content-type": "text/plain; x=/json"}):
            response = client.post("/v1/probe", content=body, headers={**headers, **page})
            assert response.status_code == 415
        assert client.post("/v1/requests/x/cancel", headers=page).status_code == 415
        assert client.post("/v1/probe", content=body, headers={"content-type": "application/json", **page}).is_success
    for site, status in (("cross-site", 415), ("same-site", 415), ("same-origin", 200)):
        headers = {**form, "sec-fetch-site": site}
        assert client.post("/v1/probe", content=body, headers=headers).status_code == status


def test_pages_of_the_server_itself_may_leave_the_type_out(worlds: Any) -> None:
    """The API's pages send requests without a body and a type."""
    world = worlds()
    page = {"origin": world.server.url}
    assert world.client.post("/v1/requests/x/cancel", headers=page).json() == {"id": "x", "cancelled": False}


def test_cors_is_off_unless_asked_for(worlds: Any) -> None:
    """With it, the named origins may read responses and errors, and send preflights."""
    page = {"origin": "https://page.example"}
    call = {**page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    closed = worlds().client
    assert "access-control-allow-origin" not in closed.get("/health", headers=page).headers
    assert closed.options("/v1/probe", headers=call).status_code == 405
    client = worlds({"cors_origins": ("https://page.example",), "api_keys": KEYS}).client
    assert client.options("/v1/probe", headers=call).status_code == 200
    response = client.post("/v1/probe", json={}, headers=page)
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    other = client.get("/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    spelled = {name for name, _ in client.options("/v1/probe", headers=call).headers.raw if b"Access-Control" in name}
    assert {b"Access-Control-Allow-Origin", b"Access-Control-Allow-Methods"} < spelled


def test_ids_of_requests_come_back_and_bad_ids_are_replaced(worlds: Any) -> None:
    """Also with errors; an id that does not fit a log is replaced."""
    client = worlds().client
    assert client.get("/nothing", headers={"x-request-id": "a-1.b:2"}).headers["x-request-id"] == "a-1.b:2"
    for bad in ("", "x" * 129, "two words", "é"):
        made = client.get("/health", headers={"x-request-id": bad.encode()}).headers["x-request-id"]
        assert len(made) == 24
    ids = {client.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5


def test_a_line_in_the_access_log_has_what_a_request_took_and_no_contents(worlds: Any, caplog: Any) -> None:
    """Ids, tokens, times, the end; neither keys nor prompts."""
    world = worlds({"api_keys": KEYS})
    with caplog.at_level(logging.INFO, "paceline.server.access"):
        world.client.post(
            "/v1/probe?q=private",
            json={"prompts": ["very private"], "stream": True},
            headers={"authorization": "Bearer first secret", "x-request-id": "r1"},
        )
        world.server.do(world.server.service.in_flight.wait_idle())
    (line,) = [json.loads(record.getMessage()) for record in caplog.records if record.name == "paceline.server.access"]
    assert (line["request_id"], line["route"], line["status"], line["tenant"]) == ("r1", "/v1/probe", 200, "a")
    assert (line["prompt_tokens"], line["completion_tokens"], line["finish_reason"]) == (12, 8, "length")
    assert {"cached_tokens", "queue_s", "prefill_s", "decode_s", "duration_s"} <= line.keys()
    assert "private" not in caplog.text
    assert "secret" not in caplog.text


def test_a_prefix_goes_before_every_route(worlds: Any) -> None:
    """Keys and shapes of errors follow the rest of the path."""
    client = worlds({"root_path": "/llm", "api_keys": KEYS}).client
    assert client.get("/llm/health").status_code == 200
    assert client.post("/llm/v1/probe", json={}).status_code == 401
    response = client.get("/llm/v1/nothing", headers={"x-api-key": "second"})
    assert response.json()["error"]["code"] == "not_found"
    assert 'href="/llm/openapi.json"' in client.get("/llm/docs").text


def test_the_start_page_loads_nothing_from_elsewhere(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the web page was not built it names the model and points to the routes."""
    monkeypatch.setattr("paceline.server.web_page.built_files", dict)
    response = worlds().client.get("/")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "paceline-demo" in response.text
    assert "//" not in response.text
    assert worlds({"start_page": False}).client.get("/").status_code == 404


def test_the_pages_follow_a_reload(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their links and features are those of the settings at the time of a request."""
    monkeypatch.setattr("paceline.server.web_page.built_files", dict)
    world = worlds({"metrics": True, "slots": True})
    assert 'href="/metrics"' in world.client.get("/").text
    service = world.server.service
    world.server.call(lambda: service.apply(replace(service.settings, metrics=False, slots=False)))
    assert 'href="/metrics"' not in world.client.get("/").text
    page = world.client.get("/v1/engine/page").json()
    assert (page["features"]["metrics"], page["features"]["slots"], "metrics" in page["links"]) == (False, False, False)


def test_without_a_key_only_the_servers_own_names_are_served(worlds: Any) -> None:
    """On every route, whatever it is for, and before a body is read; a page that had its name lead here learns nothing."""
    world = worlds({"max_body_bytes": 10})
    elsewhere = {"host": "page.example:8080", "origin": "http://page.example:8080"}
    for path in ("/", "/health", "/docs", "/openapi.json", "/metrics", "/v1/models", "/slots", "/nothing"):
        response = world.client.get(path, headers=elsewhere)
        assert (response.status_code, "--allowed-hosts" in response.text) == (403, True), path
    assert world.client.post("/v1/probe", content=b"x" * 20, headers=elsewhere).status_code == 403
    assert world.client.options("/v1/probe", headers=elsewhere).status_code == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:8080", "llm.localhost"):
        assert world.client.get("/health", headers={"host": host}).status_code == 200


def test_other_names_are_served_where_they_were_given_or_a_key_is_required(worlds: Any) -> None:
    """No web page knows a key; allowed names count with keys as well."""
    named = {"host": "llm.example.org"}
    for settings, expected in (
        ({"allowed_hosts": ("llm.example.org",)}, 200),
        ({"allowed_hosts": ("*",)}, 200),
        ({"hosts": ("llm.example.org",)}, 200),
        ({"api_keys": KEYS}, 200),
        ({"api_keys": KEYS, "allowed_hosts": ("other.example.org",)}, 403),
    ):
        assert worlds(settings).client.get("/health", headers=named).status_code == expected, settings


def test_the_page_of_the_api_has_every_route_and_field_and_loads_nothing(worlds: Any) -> None:
    """So it is there without a network; behind a prefix its links are too."""
    client = worlds({"root_path": "/llm"}).client
    document = client.get("/llm/openapi.json").json()
    response = client.get("/llm/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == "default-src 'none'; style-src 'unsafe-inline'"
    for part in ("//", "<script", "<link", "src=", "url(", "@import"):
        assert part not in response.text
    for path in document["paths"]:
        assert f"<code>{path}</code>" in response.text
    for schema in document["components"]["schemas"].values():
        for field in schema["properties"]:
            assert f"<code>{field}</code>" in response.text
    anchors = {part.partition('"')[0] for part in response.text.split('href="#')[1:]}
    assert anchors <= {part.partition('"')[0] for part in response.text.split('id="')[1:]}
    assert 'href="/llm/openapi.json"' in response.text


def test_the_pages_of_the_api_can_be_switched_off(worlds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of them; the start page does not lead to them then."""
    monkeypatch.setattr("paceline.server.web_page.built_files", dict)  # the page of links
    client = worlds({"docs": False}).client
    assert [client.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404] * 3
    assert "/docs" not in client.get("/").text
