"""Who is let in while others are being answered."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from paceline.server.middleware.admission import Admission
from paceline.server.traffic import Traffic


def test_one_more_than_may_be_answered_is_told_when_to_come_again() -> None:
    """As soon as one of the others is done, the next is let in."""
    service: Any = SimpleNamespace(is_draining=False, traffic=Traffic(), retry_after_s=lambda: 17)
    statuses: list[Any] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        if not scope["inner"]:
            statuses.append(await ask(inner=True))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    admission = Admission(answer, service, max_requests=1)

    async def ask(*, inner: bool) -> list[Message]:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        await admission({"type": "http", "method": "POST", "path": "/tokenize", "inner": inner}, receive, send)
        return sent

    for _ in range(2):
        assert asyncio.run(ask(inner=False))[0]["status"] == 200
    for start, body in statuses:
        assert start["status"] == 429
        assert (b"retry-after", b"17") in start["headers"]
        assert json.loads(body["body"])["error"]["type"] == "rate_limit_error"
    assert (len(statuses), service.traffic.count) == (2, 0)
