"""Server-sent events: a generation's chunks as a stream that always ends in order, and says that it lives while it waits.

After the 200 there come events, at most one of them a failure, then the one that marks the end. On the event loop; what a
tick brought to a stream is written at once, and nothing is read from the engine while the client does not read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.server.generating import Readable
from paceline.server.problems import FAILED_ENDINGS, Problem, problem_of, problem_of_ending
from paceline.streaming import StreamChunk

_log = logging.getLogger("paceline.server")

Render = Callable[[int, StreamChunk], Iterable[bytes]]
"""The JSON of the events that tell a chunk of a prompt; without line breaks."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that gather answers leave this one alone
]
_PING = b": ping\n\n"


def event_stream(
    generation: Readable,
    render: Render,
    *,
    failure: Callable[[Problem], bytes],
    done: bytes = b"[DONE]",
) -> Response:
    """The answer to a request that streams; it owns the generation from now on.

    failure: the JSON of the event that tells a problem. done: the data of the last event; empty: none.
    """
    return EventStream(generation, render, failure, done)


class EventStream(Response):
    """Writes what a generation brings. Its client's hanging up ends the generation, and leaving it in any way does."""

    media_type = "text/event-stream"

    def __init__(self, generation: Readable, render: Render, failure: Callable[[Problem], bytes], done: bytes) -> None:
        super().__init__()
        self._generation, self._render, self._failure, self._done = generation, render, failure, done
        self._problem: Problem | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the shape of ASGI
        """Sends the whole answer."""
        async with self._generation:
            await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *self._own_headers()]})
            wire = _Wire(send, self._generation.heartbeat_s)
            try:
                await self._write(wire)
            finally:
                wire.close()

    async def _write(self, wire: _Wire) -> None:
        generation = self._generation
        try:
            async for batch in generation.batches():
                if generation.is_abandoned:
                    continue  # to its end, which is near
                data = [b"data: %b\n\n" % event for index, chunk in batch for event in self._events(index, chunk)]
                if data:
                    await wire.send(b"".join(data))
        except Exception as error:  # noqa: BLE001 - every stream ends in order
            _log.exception("a stream could not be written; it ends with an error")
            self._problem = self._problem or problem_of(error)
        generation.cancel()
        if not generation.is_abandoned:
            await wire.end(self._ending())

    def _events(self, index: int, chunk: StreamChunk) -> Iterable[bytes]:
        """What a chunk becomes; a failed ending is told at the end, its text at once."""
        if chunk.finish_reason not in FAILED_ENDINGS:
            return self._render(index, chunk)
        if self._problem is None and chunk.finish_reason is not None:
            self._problem = problem_of_ending(chunk.finish_reason, chunk.error)
        if not (chunk.text or chunk.token_ids):
            return ()
        return self._render(index, msgspec.structs.replace(chunk, finish_reason=None, usage=None, error=None))

    def _ending(self) -> bytes:
        last = [] if self._problem is None else [self._failure(self._problem)]
        return b"".join(b"data: %b\n\n" % event for event in [*last, *([self._done] if self._done else [])])

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """What a route has added."""
        return [pair for pair in self.raw_headers if pair[0] not in (b"content-type", b"content-length")]


class _Wire:
    """The way to the client; tells it from time to time that the stream lives while nothing else comes."""

    def __init__(self, send: Send, heartbeat_s: float) -> None:
        self._send, self._heartbeat_s = send, heartbeat_s
        self._is_quiet, self._is_sending = True, False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._wait()
        self._ping: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> None:
        """Waits while the client does not read."""
        self._is_quiet, self._is_sending = False, True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending = False

    async def end(self, data: bytes) -> None:
        """The last of it."""
        self.close()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        """Beats no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _beat(self) -> None:
        if self._is_quiet and not self._is_sending and (self._ping is None or self._ping.done()):
            self._ping = self._loop.create_task(self._send_ping())
        self._is_quiet = True
        self._wait()

    def _wait(self) -> None:
        if math.isfinite(self._heartbeat_s):
            self._timer = self._loop.call_later(self._heartbeat_s, self._beat)

    async def _send_ping(self) -> None:
        await self._send({"type": "http.response.body", "body": _PING, "more_body": True})
