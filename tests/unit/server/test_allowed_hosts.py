"""Which Host headers are allowed, whatever the application behind the middleware does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from paceline.server.api_errors import OPENAI_FORM
from paceline.server.middleware.access import AllowedHosts
from paceline.server.routes import RouteFacts, Routes


def ask(names: tuple[str, ...], *hosts: str) -> list[Message]:
    """Return the bytes sent to a request with these Host headers; a plain 200 has no body."""
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", host.encode("latin-1")) for host in hosts]
    routes = Routes(RouteFacts(errors=OPENAI_FORM))
    routes.add("POST", "/v1/models", lambda: None)
    with_routes = Starlette(routes=routes)
    scope: Scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": headers, "app": with_routes}
    asyncio.run(AllowedHosts(app, names)(scope, receive, send))
    return sent


def status(names: tuple[str, ...], *hosts: str) -> Any:
    return ask(names, *hosts)[0]["status"]


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
    start, body = ask((), host)
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
