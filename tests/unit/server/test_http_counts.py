"""The counting middleware's view of a response, for any behaviour of the application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from paceline.server import exposition
from paceline.server.exposition import HttpMetrics
from paceline.server.middleware.requests import HttpCounts, RequestIds

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def start(kind: bytes, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def body(data: bytes, *, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def serve(app: App, metrics: HttpMetrics, method: str = "GET") -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    scope: Scope = {"type": "http", "method": method, "path": "/secret", "headers": []}
    asyncio.run(RequestIds(HttpCounts(app, metrics))(scope, receive, send))


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
