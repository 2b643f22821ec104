"""How many requests are in flight at once."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from paceline.server.in_flight import InFlight
from paceline.server.middleware.request_limits import RequestLimit
from paceline.server.request_context import RequestContext


def test_a_request_beyond_the_limit_gets_429_and_retry_after() -> None:
    """As soon as another one has ended, the next request passes."""
    service: Any = SimpleNamespace(is_draining=False, in_flight=InFlight(), retry_after_s=lambda: 17)
    statuses: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        if not scope["inner"]:
            statuses.append(await ask(inner=True))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    limit = RequestLimit(app, service, max_requests=1)

    async def ask(*, inner: bool) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await limit({"type": "http", "method": "POST", "path": "/tokenize", "inner": inner}, receive, send)
        return sent

    for _ in range(2):
        assert asyncio.run(ask(inner=False))[0]["status"] == 200
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
        service: Any = SimpleNamespace(is_draining=False, in_flight=InFlight(), retry_after_s=lambda: 17)
        limit, statuses = RequestLimit(app, service, max_requests=8, is_shared=is_shared), list[int]()

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
