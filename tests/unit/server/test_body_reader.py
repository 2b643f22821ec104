"""Each body is read within its size, all of them within a budget that is released however a request ends."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Match, Route
from starlette.types import Message, Receive, Scope, Send

from paceline.server.in_flight import ByteBudget
from paceline.server.middleware.request_limits import BodyReader
from paceline.server.request_context import RequestContext
from paceline.server.routes import RouteTable

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class World:
    """Middleware with a budget of 100 bytes, 60 for one body; its application responds when `gate` is set."""

    def __init__(self, app: App | None = None, *, is_shared: bool = False) -> None:
        self.budget, self.gate, self.bodies = ByteBudget(100, is_shared=is_shared), asyncio.Event(), 0
        self.app = Starlette(routes=[Route("/x", lambda _: None, methods=["POST"])])
        self.received: list[tuple[bytes, dict[bytes, bytes]]] = []
        self._middleware = BodyReader(app or self._respond, 60, 60.0, self.budget, lambda: 7)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.received.append((body, dict(scope["headers"])))
        self.bodies += len(body)
        await self.gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(
        self,
        *parts: bytes,
        length: int | None = None,
        encoding: bytes = b"",
        hangs_up: bool = False,
        path: str = "/x",
        tenant: str = "",
    ) -> dict[str, Any]:
        """Return the start of the response; empty if there is none."""
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages.append({"type": "http.disconnect"} if hangs_up else {"type": "http.request", "body": b""})
        sent: list[Message] = []

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        headers += [(b"content-encoding", encoding)] if encoding else []
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "app": self.app}
        RequestContext.of(scope).tenant = tenant
        await self._middleware(scope, receive, send)
        return dict(sent[0]) if sent else {}

    async def begun(self, *parts: bytes, encoding: bytes = b"", tenant: str = "") -> asyncio.Task[dict[str, Any]]:
        """A request that is in flight."""
        before = self.bodies
        task = asyncio.create_task(self.ask(*parts, encoding=encoding, tenant=tenant))
        while self.bodies == before:
            await asyncio.sleep(0)
        return task


def test_the_body_of_a_request_without_a_route_is_not_read() -> None:
    """It counts against no limit, and the application responds at once."""
    statuses: list[int] = []

    async def respond(_scope: Scope, _receive: Receive, send: Send) -> None:
        statuses.append(404)
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def main() -> None:
        world = World(respond)
        assert (await world.ask(b"x" * 61, length=10**9, path="/y"))["status"] == 404
        assert statuses == [404]

    asyncio.run(main())


def test_a_tenant_leaves_room_for_the_bodies_of_others() -> None:
    """Its first body may be of any size; with more bodies it has as many bytes as stay free. A lone tenant has all of them."""

    async def main() -> None:
        world = World(is_shared=True)
        running = [await world.begun(b"x" * 40, tenant="a"), await world.begun(b"x" * 10, tenant="a")]
        for parts, length in (((b"x",), None), ((), 1)):
            refused = await world.ask(*parts, length=length, tenant="a")
            assert refused["status"] == 429
        running.append(await world.begun(b"x" * 50, tenant="b"))
        assert world.budget.free_bytes == 0
        world.gate.set()
        assert [(await request)["status"] for request in running] == [200] * 3
        assert world.budget.free_bytes == 100
        assert (await world.ask(b"x" * 60, tenant="a"))["status"] == 200

    asyncio.run(main())


def test_bodies_that_do_not_fit_together_are_refused_until_others_are_done() -> None:
    """With a 429 and the time to wait; smaller bodies still fit."""

    async def main() -> None:
        world = World()
        first, second = await world.begun(b"x" * 30, b"x" * 30), await world.begun(b"x" * 30)
        assert world.budget.free_bytes == 10
        for parts, length in (((b"x" * 11,), None), ((b"x" * 9, b"x" * 2), None), ((), 11)):
            start = await world.ask(*parts, length=length)
            assert start["status"] == 429
            assert (b"retry-after", b"7") in start["headers"]
            assert world.budget.free_bytes == 10
        third = await world.begun(b"x" * 10)
        world.gate.set()
        assert [(await item)["status"] for item in (first, second, third)] == [200] * 3
        assert world.budget.free_bytes == 100

    asyncio.run(main())


def test_the_budget_of_a_half_read_body_comes_back_after_a_disconnect() -> None:
    """The bytes of a body that was too large come back, too."""

    async def main() -> None:
        world = World()
        await world.ask(b"x" * 50, hangs_up=True)
        assert (await world.ask(b"x" * 50, b"x" * 11))["status"] == 413
        assert world.budget.free_bytes == 100

    asyncio.run(main())


def test_what_a_failing_or_cancelled_request_had_comes_back() -> None:
    """However its response ends."""

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("broken")

    async def main() -> None:
        with pytest.raises(RuntimeError):
            await (failing := World(fail)).ask(b"x" * 50)
        assert failing.budget.free_bytes == 100
        world = World()
        held = await world.begun(b"x" * 50)
        assert world.budget.free_bytes == 50
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        assert world.budget.free_bytes == 100

    asyncio.run(main())


def test_a_refusal_holds_nothing_while_it_is_sent() -> None:
    """A client that reads it slowly blocks no other request."""

    async def main() -> None:
        world = World()
        free: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * 50, "more_body": True}

        async def send(message: Message) -> None:
            free.append(world.budget.free_bytes)

        scope: Scope = {"type": "http", "method": "POST", "path": "/x", "headers": [], "app": world.app}
        await world._middleware(scope, receive, send)
        assert free == [100, 100]

    asyncio.run(main())


def test_the_body_is_released_before_the_response_is_complete() -> None:
    """Once it was handed over, it is the application's."""

    async def main() -> None:
        references: list[int] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            fresh, handed_over = {"body": bytes(49)}, await receive()
            references.append(sys.getrefcount(fresh.pop("body")))
            references.append(sys.getrefcount(handed_over.pop("body")))

        await World(app).ask(b"x" * 50)
        assert references[0] == references[1]

    asyncio.run(main())


def test_a_decoded_body_holds_its_decoded_bytes_of_the_budget() -> None:
    """The compressed bytes are released, and headers describe the decoded body."""

    async def main() -> None:
        world, content = World(), b"x" * 55
        compressed = zlib.compress(content)
        held = await world.begun(compressed[:5], compressed[5:], encoding=b"deflate")
        assert world.budget.free_bytes == 45
        assert world.received == [(content, {b"content-type": b"application/json", b"content-length": b"55"})]
        world.gate.set()
        assert (await held)["status"] == 200
        assert world.budget.free_bytes == 100

    asyncio.run(main())


def test_a_bomb_is_refused_when_its_decoded_bytes_pass_a_limit() -> None:
    """The limit of one body is a 413, the limit of all bodies together a 429; both release the reserved bytes."""

    async def main() -> None:
        world = World()
        assert (await world.ask(zlib.compress(bytes(61)), encoding=b"deflate"))["status"] == 413
        held = await world.begun(b"x" * 50)
        assert (await world.ask(zlib.compress(bytes(45)), encoding=b"deflate"))["status"] == 429
        assert world.budget.free_bytes == 50
        world.gate.set()
        await held

    asyncio.run(main())


def test_an_encoding_that_is_not_known_is_refused_before_the_body_is_read() -> None:
    """The response names the encodings that are."""

    async def main() -> None:
        world = World()
        start = await world.ask(b"x", encoding=b"br", hangs_up=True)
        assert start["status"] == 415
        assert (b"accept-encoding", b"gzip, deflate, zstd") in start["headers"]
        assert (await world.ask(b"x", encoding=b"gzip"))["status"] == 400
        world.gate.set()
        assert (await world.ask(encoding=b"gzip"))["status"] == 200  # there is no body to decode

    asyncio.run(main())


def test_routes_of_short_paths_are_remembered_and_long_paths_take_no_memory() -> None:
    """A path has up to 64 KiB, and a client may send any number of paths."""
    asked: list[str] = []

    class Counted(Route):
        def matches(self, scope: Scope) -> tuple[Match, Scope]:
            asked.append(scope["path"])
            return super().matches(scope)

    table = RouteTable([Counted("/{name:path}", lambda _: None, methods=["GET"])])
    long = "/" + "x" * 1000
    for path in ("/short", "/short", long, long):
        assert table.facts("GET", path) is not None
        assert table.facts("POST", path) is None
    assert asked == ["/short"] * 2 + [long] * 4
    for number in range(2000):
        table.facts("GET", f"/{number}")
    table.facts("GET", "/late")
    asked.clear()
    assert table.facts("GET", "/late") is not None
    assert asked == []  # paths that clients made up do not keep others from being remembered
