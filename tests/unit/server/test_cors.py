"""CORS headers and preflights for pages of other origins, whatever the application behind the middleware does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from paceline.server.middleware.access import Cors

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
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] != "OPTIONS"
        await send({"type": "http.response.start", "status": 401, "headers": []})

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    asked = [(b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"authorization,x-a")]
    if origin is not None:
        asked.append((b"origin", origin.encode()))
    scope: Scope = {"type": "http", "method": method, "path": "/completions", "headers": asked}
    asyncio.run(Cors(app, origins, METHODS, headers, credentials=credentials)(scope, receive, send))
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
        "access-control-expose-headers": "x-request-id, retry-after",
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
