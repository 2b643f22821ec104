"""Events about models for the readers of GET /models/sse, in llama-server's form. On the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.model_manager import ModelStatus
from paceline.server.request_context import DisconnectWatcher
from paceline.server.sse import SSE, stream_start

_MAX_BEHIND: Final = 1024  # events; a reader that is further behind loses its oldest

VALUES: Final[Mapping[str, str]] = {
    "preparing": "loading",
    "queued": "loading",
    "loading": "loading",
    "loaded": "loaded",
    "unloading": "loaded",
    "sleeping": "sleeping",
    "unloaded": "unloaded",
    "failed": "unloaded",
}
"""llama-server's word for each state."""


class EventFeed:
    """Passes events on to all readers."""

    def __init__(self) -> None:
        self._queues: list[asyncio.Queue[bytes | None]] = []
        self._last: dict[str, dict[str, Any]] = {}
        self._is_closed = False

    def publish(self, event: str, model: str, data: Mapping[str, Any] | None = None) -> None:
        """Send an event to every reader."""
        members = {"model": model, "event": event, **({} if data is None else {"data": data})}
        for queue in self._queues:
            _put(queue, SSE.frame(msgspec.json.encode(members)))

    def report(self, status: ModelStatus) -> None:
        """Send the status of a model if that has changed for llama-server's clients."""
        if status.state == "removed":
            self._last.pop(status.name, None)
            self.publish("model_remove", status.name)
            return
        data = status_data(status)
        if data != self._last.get(status.name, {"status": "unloaded", "exit_code": 0}):
            self._last[status.name] = data
            self.publish("model_status", status.name, data)

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        for queue in self._queues:
            _put(queue, None)

    def stream(self, heartbeat_s: float) -> Response:
        """Return a response with the events from now on."""
        return _FeedStream(self._queues, heartbeat_s, is_closed=self._is_closed)


def status_data(status: ModelStatus) -> dict[str, Any]:
    """Return a status as events have it."""
    data: dict[str, Any] = {"status": VALUES[status.state]}
    if data["status"] == "unloaded":
        data["exit_code"] = int(status.state == "failed")
    elif status.state == "loading":
        data["progress"] = {"stages": ["text_model"], "current": "text_model", "value": round(status.progress, 4)}
    return data


def _put(queue: asyncio.Queue[bytes | None], event: bytes | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)


class _FeedStream(Response):
    """The events of a feed, until the client disconnects or the feed is closed."""

    media_type = "text/event-stream"

    def __init__(self, queues: list[asyncio.Queue[bytes | None]], heartbeat_s: float, *, is_closed: bool) -> None:
        super().__init__()
        self._queues, self._heartbeat_s, self._is_closed = queues, heartbeat_s, is_closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        del scope
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_BEHIND)
        if self._is_closed:
            queue.put_nowait(None)
        self._queues.append(queue)  # before the response begins: a client that sees that misses nothing
        watcher = DisconnectWatcher(receive)
        sending = asyncio.create_task(self._send(queue, send))
        watcher.on_disconnect(sending.cancel)
        try:
            await asyncio.wait((sending,))
        finally:
            self._queues.remove(queue)
            watcher.close()
            sending.cancel()
        if not sending.cancelled():
            sending.result()

    async def _send(self, queue: asyncio.Queue[bytes | None], send: Send) -> None:
        await send(stream_start(SSE))
        await send({"type": "http.response.body", "body": SSE.ping, "more_body": True})
        while True:
            data = await self._next(queue)
            await send({"type": "http.response.body", "body": data or b"", "more_body": data is not None})
            if data is None:
                return

    async def _next(self, queue: asyncio.Queue[bytes | None]) -> bytes | None:
        try:
            async with asyncio.timeout(self._heartbeat_s if math.isfinite(self._heartbeat_s) else None):
                return await queue.get()
        except TimeoutError:
            return SSE.ping
