"""The middleware with any application: hosts, pages of other origins, counts and limits of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from paceline.server import exposition
from paceline.server.api_errors import OPENAI_FORM
from paceline.server.exposition import HttpMetrics
from paceline.server.in_flight import ByteBudget, InFlight
from paceline.server.middleware.access import AllowedHosts, Cors, may_be_forged
from paceline.server.middleware.request_limits import RequestLimit
from paceline.server.middleware.requests import HttpCounts, RequestIds
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteFacts, Routes

App = Callable[[Scope, Receive, Send], Awaitable[None]]

EXPOSED = (
    "x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)


def messages(app: App, method: str, /, **scope: Any) -> list[Message]:
    """Return the messages sent to a request without a body."""
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "method": method, "path": "/secret", "headers": [], **scope}, receive, send))
    return sent


# ---- hosts


def served(names: tuple[str, ...], *hosts: str) -> list[Message]:
    """Return the messages sent to a request with these Host headers; a plain 200 has no body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    routes = Routes(RouteFacts(errors=OPENAI_FORM))
    routes.add("POST", "/v1/models", lambda: None)
    headers = [(b"host", host.encode("latin-1")) for host in hosts]
    return messages(AllowedHosts(app, names), "POST", path="/v1/models", headers=headers, app=Starlette(routes=routes))


def status(names: tuple[str, ...], *hosts: str) -> Any:
    return served(names, *hosts)[0]["status"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "localhost.",
        "a.b.localhost:1",
        "127.0.0.1",
        "127.0.0.1:8080",
        "10.1.2.3:80",
        "[::1]",
        "[::1]:8080",
        "[fe80::1%eth0]:8080",
        "::1",
        "",
    ],
)
def test_addresses_and_localhost_are_served(host: str) -> None:
    """With a port and without; no name at all is fine too."""
    assert status((), host) == 200
    assert status(()) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "notlocalhost",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:80.evil.example",
        "127.0.0.1@evil.example",
        "[evil.example]",
        "[::1]evil.example",
        "[::1].evil.example:80",
        "evil.example[::1]",
        "localhost, evil.example",
        "localhost\0",
        "\xff",
        ".localhost.evil",
    ],
)
def test_other_names_are_refused_before_anything_is_read(host: str) -> None:
    """The message names the flag that allows them."""
    start, body = served((), host)
    assert start["status"] == 403
    error = json.loads(body["body"])["error"]
    assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
    assert "--allowed-hosts" in error["message"]


def test_names_that_were_given_are_served() -> None:
    """In any case of letters, with their port; and names below it only if they were listed."""
    names = ("LLM.example.org", "*.lan", "one.")
    for host in ("llm.example.org:80", "Llm.Example.Org.", "box.lan", "a.b.lan:1", "one", "localhost"):
        assert status(names, host) == 200
    for host in ("x.llm.example.org", "lan", "boxlan", "one.two", "example.org"):
        assert status(names, host) == 403


def test_any_name_is_served_where_that_is_wanted() -> None:
    """A star accepts every name."""
    assert status(("*",), "evil.example") == 200


def test_every_one_of_several_names_must_be_fine() -> None:
    """Whichever of them another program would read."""
    assert status((), "localhost", "evil.example") == 403


# ---- CORS


METHODS = ("GET", "POST", "DELETE", "OPTIONS")
PAGE = "https://page.example"


def ask(
    origin: str | None,
    *origins: str,
    method: str = "OPTIONS",
    headers: tuple[str, ...] = ("*",),
    credentials: bool = False,
) -> tuple[int, dict[str, str]]:
    """Status and headers of a response. The application responds 401 without headers; preflights do not reach it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] != "OPTIONS"
        await send({"type": "http.response.start", "status": 401, "headers": []})

    asked = [(b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization,x-a")]
    if origin is not None:
        asked.append((b"origin", origin.encode()))
    sent = messages(Cors(app, origins, METHODS, headers, credentials=credentials), method, headers=asked)
    return sent[0]["status"], {bytes(name).lower().decode(): value.decode() for name, value in sent[0]["headers"]}


LOCAL = ["http://localhost", "http://localhost:8080", "https://127.0.0.1", "http://127.0.0.1:3000", "http://[::1]:3000"]


@pytest.mark.parametrize("origin", LOCAL)
def test_localhost_is_every_port_of_this_machine(origin: str) -> None:
    """Its origin is echoed, in responses to preflights and to others."""
    assert ask(origin, "localhost")[1]["access-control-allow-origin"] == origin
    assert ask(origin, "localhost", method="GET")[1]["access-control-allow-origin"] == origin
    assert ask(origin, PAGE, "localhost")[1]["access-control-allow-origin"] == origin


FAR = [
    *("http://web.mydomain.fr", "http://notlocalhost", "http://localhost.evil.com", "null", "localhost", "http://[::1"),
    *("file://localhost", "http://localhost@evil.com", "http://evil.com/localhost", ""),
]


@pytest.mark.parametrize("origin", FAR)
def test_other_origins_are_not_localhost(origin: str) -> None:
    """Their preflight gets a response without the headers that allow them."""
    status, headers = ask(origin, "localhost")
    assert status == 200
    assert "access-control-allow-origin" not in headers
    assert headers["vary"].startswith("Origin")
    assert "access-control-allow-origin" not in ask(origin, "localhost", method="GET")[1]


def test_a_preflight_is_handled_before_keys_are_asked_for() -> None:
    """It has all headers that a browser needs."""
    status, headers = ask(PAGE, PAGE)
    assert status == 200
    assert headers == {
        "vary": "Origin, Access-Control-Request-Headers",
        "access-control-allow-origin": PAGE,
        "access-control-expose-headers": EXPOSED,
        "access-control-allow-credentials": "false",
        "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
        "access-control-allow-headers": "authorization,x-a",
        "access-control-max-age": "600",
        "content-length": "0",
    }
    assert ask(PAGE, PAGE, headers=("X-A", "X-B"))[1]["access-control-allow-headers"] == "X-A, X-B"


def test_of_several_origins_the_one_that_asks_is_named() -> None:
    """A header has one origin, as browsers take no list; the letters' case does not matter."""
    assert ask("https://b", "https://a", "https://b", method="POST")[1]["access-control-allow-origin"] == "https://b"
    assert ask("https://B", "https://b")[1]["access-control-allow-origin"] == "https://B"
    assert "access-control-allow-origin" not in ask("https://c", "https://a", "https://b")[1]


def test_errors_have_the_headers_too() -> None:
    """A page can read why it was refused."""
    status, headers = ask(PAGE, PAGE, method="POST")
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (401, PAGE, "Origin")


@pytest.mark.parametrize("method", ["OPTIONS", "GET"])
def test_any_origin_is_a_wildcard_without_credentials_and_echoed_with_them(method: str) -> None:
    """Browsers take no wildcard together with credentials."""
    assert ask(PAGE, "*", method=method)[1]["access-control-allow-origin"] == "*"
    headers: Any = ask(PAGE, "*", method=method, credentials=True)[1]
    assert (headers["access-control-allow-origin"], headers["access-control-allow-credentials"]) == (PAGE, "true")
    assert "access-control-allow-origin" not in ask(None, "*", method=method, credentials=True)[1]


def test_credentials_are_only_for_origins_that_are_allowed() -> None:
    """A response to another origin does not allow them."""
    assert "access-control-allow-credentials" not in ask("https://c", PAGE, method="GET", credentials=True)[1]
    assert ask(PAGE, PAGE, method="GET", credentials=True)[1]["access-control-allow-credentials"] == "true"


# ---- forged requests


BROWSER = {"host": "127.0.0.1:8080", "user-agent": "Mozilla/5.0 (X11; Linux x86_64) Gecko/20100101 Firefox/140.0"}
FOREIGN = {"sec-fetch-site": "cross-site"}


def forged(headers: dict[str, str]) -> bool:
    return may_be_forged([(name.encode(), value.encode()) for name, value in headers.items()])


@pytest.mark.parametrize(
    "headers",
    [
        {**BROWSER, "sec-fetch-site": "cross-site"},
        {**BROWSER, "sec-fetch-site": "same-site"},  # of another port of this machine
        {**BROWSER, "sec-fetch-site": "none"},  # from the address bar
        {**BROWSER, "sec-fetch-site": "cross-site", "referer": "http://127.0.0.1:8080/"},
        {"host": "127.0.0.1:8080", "sec-fetch-site": "cross-site"},
        {**BROWSER, "host": "192.168.1.5:8080"},  # over plain HTTP browsers leave Sec-Fetch-Site out
        {**BROWSER, "referer": "http://page.example/?http://127.0.0.1:8080"},
        {**BROWSER, "origin": "null"},
        {**BROWSER, "origin": "http://127.0.0.1:3000"},
        {"host": "127.0.0.1:8080", "origin": "http://page.example"},
        {"host": "127.0.0.1:8080", "referer": "http://page.example/"},
        {**BROWSER, "origin": "http://127.0.0.1:8080", "referer": "http://page.example/"},
        {**BROWSER, **FOREIGN, "authorization": "Basic dTpw"},  # browsers add these by themselves
        {**BROWSER, **FOREIGN, "accept": "application/json", "content-type": "text/plain"},
    ],
)
def test_a_request_of_a_browser_may_be_forged(headers: dict[str, str]) -> None:
    """It is, unless it proves to come from the server's own page."""
    assert forged(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "127.0.0.1:8080", "user-agent": "curl/8.14.1"},
        {"host": "127.0.0.1:8080", "user-agent": "node", "sec-fetch-mode": "cors"},
        {"host": "127.0.0.1:8080"},
        {},
    ],
)
def test_programs_forge_nothing(headers: dict[str, str]) -> None:
    """They act for their own users."""
    assert not forged(headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "same-origin"},
        {"referer": "http://127.0.0.1:8080/chat?x=http://page.example"},
        {"origin": "http://127.0.0.1:8080", "referer": "http://127.0.0.1:8080/"},
    ],
)
def test_a_page_of_the_server_itself_forges_nothing(headers: dict[str, str]) -> None:
    """Browsers set these headers, and no script can."""
    assert not forged({**BROWSER, **headers})


@pytest.mark.parametrize(
    "headers", [{"x-requested-with": "paceline"}, {"x-api-key": "k"}, {"authorization": "Bearer k"}]
)
def test_a_header_that_needs_a_preflight_proves_consent(headers: dict[str, str]) -> None:
    """A page of another origin may send it only after the server has allowed its origin."""
    assert not forged({**BROWSER, **FOREIGN, **headers})


# ---- counts


def start(kind: bytes, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def serve(app: App, metrics: HttpMetrics, method: str = "GET") -> None:
    messages(RequestIds(HttpCounts(app, metrics)), method)


def numbers(metrics: HttpMetrics) -> dict[Any, Any]:
    return {(sample.name, *[value for _, value in sample.labels]): sample.value for sample in metrics.samples()}


@pytest.mark.parametrize("kind", [b"text/event-stream; charset=utf-8", b"application/x-ndjson"])
def test_a_stream_is_open_until_its_response_is_over(kind: bytes) -> None:
    """Of events or of lines; its bytes count as they go."""
    metrics = HttpMetrics()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = SimpleNamespace(path="/v1/things/{id}")
        await send(start(kind))
        await send(body(b"data: 1", more=True))
        assert numbers(metrics)[exposition.STREAMS,] == 1
        assert numbers(metrics)[exposition.BYTES,] == 7
        await send(body(b"data: 22"))

    serve(app, metrics, "POST")
    found = numbers(metrics)
    assert (found[exposition.STREAMS,], found[exposition.BYTES,]) == (0, 15)
    assert found[exposition.REQUESTS, "/v1/things/{id}", "POST", "200"] == 1


def test_a_response_that_is_no_stream_has_no_bytes_here() -> None:
    """A request that matched no route counts as other, like an unknown method."""
    metrics = HttpMetrics()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(b"application/json", 404))
        await send(body(b"{}"))

    serve(app, metrics, "BREW")
    found = numbers(metrics)
    assert (found[exposition.STREAMS,], found[exposition.BYTES,]) == (0, 0)
    assert found[exposition.REQUESTS, "other", "other", "404"] == 1


def test_a_stream_that_breaks_off_is_closed_and_counted() -> None:
    """Whatever ends it."""
    metrics = HttpMetrics()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(b"text/event-stream"))
        raise OSError("the client is gone")

    with pytest.raises(OSError, match="gone"):
        serve(app, metrics)
    found = numbers(metrics)
    assert found[exposition.STREAMS,] == 0
    assert found[exposition.REQUESTS, "other", "GET", "200"] == 1


def test_a_client_that_left_before_its_response_is_counted_apart() -> None:
    """Nothing was sent: 499."""
    metrics = HttpMetrics()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        return

    serve(app, metrics)
    assert numbers(metrics)[exposition.REQUESTS, "other", "GET", "499"] == 1


def test_what_is_no_request_passes_uncounted() -> None:
    """The lifespan."""
    metrics = HttpMetrics()
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    asyncio.run(HttpCounts(app, metrics)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
    assert numbers(metrics) == {(exposition.STREAMS,): 0, (exposition.BYTES,): 0}


# ---- requests in flight


def test_a_request_beyond_the_limit_gets_429_and_retry_after() -> None:
    """As soon as another one has ended, the next request passes."""
    service: Any = SimpleNamespace(
        is_draining=False, in_flight=InFlight(), retry_after_s=lambda: 17, body_budget=ByteBudget(1)
    )
    statuses: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        if not scope["inner"]:
            statuses.append(await limited(inner=True))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    limit = RequestLimit(app, service, max_requests=1)

    async def limited(*, inner: bool) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await limit({"type": "http", "method": "POST", "path": "/tokenize", "inner": inner}, receive, send)
        return sent

    for _ in range(2):
        assert asyncio.run(limited(inner=False))[0]["status"] == 200
    for start, body in statuses:
        assert start["status"] == 429
        assert (b"retry-after", b"17") in start["headers"]
        assert json.loads(body["body"])["error"]["type"] == "rate_limit_error"
    assert (len(statuses), service.in_flight.count) == (2, 0)


def test_a_tenant_leaves_room_in_flight_to_the_others() -> None:
    """Of eight places one tenant alone has six; another still finds one, and without tenants all eight are one's own."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await asyncio.Event().wait()

    async def statuses_of(tenants: str, *, is_shared: bool) -> list[int]:
        budget = ByteBudget(1, is_shared=is_shared)
        service: Any = SimpleNamespace(
            is_draining=False, in_flight=InFlight(), retry_after_s=lambda: 17, body_budget=budget
        )
        limit, statuses = RequestLimit(app, service, max_requests=8), list[int]()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        tasks = []
        for tenant in tenants:
            scope: Scope = {"type": "http", "method": "POST", "path": "/tokenize"}
            RequestContext.of(scope).tenant = tenant
            tasks.append(asyncio.create_task(limit(scope, receive, send)))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert service.in_flight.count == service.in_flight.count_of("a") == 0
        return statuses

    assert asyncio.run(statuses_of("aaaaaaab", is_shared=True)) == [200] * 6 + [429, 200]
    assert asyncio.run(statuses_of("aaaaaaaab", is_shared=False)) == [200] * 8 + [429]
