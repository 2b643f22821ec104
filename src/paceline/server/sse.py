"""Server-sent events: chunks as a stream that always ends in order, with heartbeats while there is nothing to send.

After the 200 come events, at most one error event, then the event that marks the end. The chunks of a tick are written at once,
and nothing is read from the engine while the client does not read. On the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.chat import ChatChunk
from paceline.server.api_errors import (
    FAILED_FINISH_REASONS,
    OPENAI_FORM,
    ApiError,
    ErrorForm,
    api_error_of,
    api_error_of_finish,
)
from paceline.server.request_context import RequestContext, run_until_disconnect
from paceline.server.resumable_streams import NextBytes
from paceline.server.running_request import ChunkSource
from paceline.streaming import StreamChunk

_log = logging.getLogger("paceline.server")

_MANY_LOGPROBS = 2000  # take milliseconds to encode

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that buffer responses do not buffer this one
]


@dataclass(frozen=True, slots=True)
class Framing:
    """How events follow each other in a stream.

    Attributes:
        media_type: Of the response.
        frame: Returns the bytes to send of an event that the route has encoded.
        ping: Sent while there is nothing to send, unless the stream has its own heartbeat; empty: nothing is.
    """

    media_type: bytes
    frame: Callable[[bytes], bytes]
    ping: bytes


_EVENTS = b"text/event-stream; charset=utf-8"
SSE = Framing(_EVENTS, lambda event: b"data: %b\n\n" % event, b": ping\n\n")
"""Events without names: the route encodes their data."""
NAMED_SSE = Framing(_EVENTS, lambda event: event, b": ping\n\n")
"""Events with names: the route encodes them whole, by `named_event`."""
JSON_LINES = Framing(b"application/x-ndjson", lambda event: event + b"\n", b"")
"""One JSON object a line."""


def named_event(name: bytes, data: bytes) -> bytes:
    """Encode an event with a name. data: JSON without line breaks."""
    return b"event: %b\ndata: %b\n\n" % (name, data)


class EventWriter(ABC):
    """Encodes the events of one stream: called with each chunk of the source in order.

    Attributes:
        errors: The form of an error.
        framing: How events follow each other.
        done: The last event; empty: none.
        in_threads: Whether every chunk is encoded in a thread, not only chunks with many log-probabilities.
    """

    errors: ErrorForm = OPENAI_FORM
    framing: Framing = SSE
    done: bytes = b"[DONE]"
    in_threads: bool = False

    @abstractmethod
    def __call__(self, prompt: int, chunk: Any) -> Iterable[bytes]:
        """Return the events of a chunk, a `StreamChunk` or a `ChatChunk`, of a prompt."""

    def failure(self, api_error: ApiError) -> bytes:
        """Return the event that reports an error."""
        return msgspec.json.encode(self.errors.body(api_error))

    def opening(self) -> bytes:
        """Return the framed events before the first chunk."""
        return b""

    def heartbeat(self) -> bytes:
        """Return the framed event that is sent while there is nothing else to send, after all events before it."""
        return self.framing.ping


class EventStream(Response):
    """Writes a source's chunks as server-sent events, and cancels and closes the source at the end.

    A resumable request goes on when its client leaves: its events go to a `ResumableStream`, which the client reads.
    """

    media_type = "text/event-stream"

    def __init__(self, source: ChunkSource[Any], writer: EventWriter) -> None:
        super().__init__()
        self._source, self._writer = source, writer
        self._opening = writer.opening()
        self._api_error: ApiError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole response."""
        stream = RequestContext.of(scope).resumable_stream
        if stream is None:
            async with self._source:
                await send(_start(self._writer.framing.media_type, self._own_headers()))
                await self._write_to(send)
            return
        stream.media_type = self._writer.framing.media_type
        stream.lost_event = self._writer.framing.frame(self._writer.failure(LOST))
        client = LiveEvents(stream.reading(0), stream.media_type, headers=self._own_headers())
        reading = asyncio.create_task(client(scope, receive, send))
        try:
            async with self._source:
                await self._write_to(stream.receive)
            await reading  # until the client has read the rest
        finally:
            stream.finish()
            reading.cancel()

    async def _write_to(self, send: Send) -> None:
        wire = _Wire(send, self._source.heartbeat_s if self._writer.framing.ping else math.inf, self._writer.heartbeat)
        try:
            await self._write(wire)
        finally:
            wire.close()

    async def _write(self, wire: _Wire) -> None:
        source = self._source
        try:
            if self._opening:
                await wire.send(self._opening)
            async for batch in source.batches():
                if source.is_disconnected:
                    continue  # read to the end, which is near
                is_large = self._writer.in_threads or sum(map(_num_logprobs, batch)) > _MANY_LOGPROBS
                data = await wire.made_in_thread(self._framed, batch) if is_large else self._framed(batch)
                if data:
                    await wire.send(data)
        except Exception as error:  # noqa: BLE001 - every stream ends in order
            _log.exception("a stream could not be written; it ends with an error")
            self._api_error = self._api_error or api_error_of(error)
        source.cancel()
        if not source.is_disconnected:
            await wire.end(self._ending())

    def _framed(self, batch: Iterable[tuple[int, Any]]) -> bytes:
        """Return the bytes of the events of chunks. Any thread, one at a time."""
        frame = self._writer.framing.frame
        return b"".join([frame(event) for index, chunk in batch for event in self._events(index, chunk)])

    def _events(self, index: int, chunk: StreamChunk | ChatChunk) -> Iterable[bytes]:
        """Return the events of a chunk. A failure is reported at the end of the stream, the chunk's text at once."""
        if chunk.finish_reason not in FAILED_FINISH_REASONS:
            return self._writer(index, chunk)
        if self._api_error is None and chunk.finish_reason is not None:
            self._api_error = api_error_of_finish(chunk.finish_reason, chunk.error)
        if not chunk.has_output:
            return ()
        return self._writer(index, msgspec.structs.replace(chunk, finish_reason=None, usage=None, error=None))

    def _ending(self) -> bytes:
        last = [] if self._api_error is None else [self._writer.failure(self._api_error)]
        return b"".join(map(self._writer.framing.frame, [*last, *([self._writer.done] if self._writer.done else [])]))

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        return [pair for pair in self.raw_headers if pair[0] not in (b"content-type", b"content-length")]


def _num_logprobs(item: tuple[int, Any]) -> int:
    _, chunk = item
    return sum(1 + len(logprobs.token_ids) for logprobs in (*chunk.logprobs, *chunk.prompt_logprobs))


LOST = ApiError(400, "invalid_request_error", "offset_lost", "Stream offset lost, please restart")


class LiveEvents(Response):
    """Events until the client disconnects or there are no more; pings while there are none.

    Args:
        source: Returns, while it is entered, a function that waits for the next bytes, and whether they are the last ones.
        media_type: Of the response.
        opening: Sent at once.
        ping: Sent while there is nothing to send; empty: nothing is.
        heartbeat_s: Seconds until a ping.
        headers: Further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        source: AbstractContextManager[NextBytes],
        media_type: bytes = _EVENTS,
        *,
        opening: bytes = b"",
        ping: bytes = b"",
        heartbeat_s: float = math.inf,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__()
        self._source, self._opening, self._ping = source, opening, ping
        self._start = _start(media_type, headers)
        self._heartbeat_s = heartbeat_s if ping and math.isfinite(heartbeat_s) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        del scope
        with self._source as next_bytes:  # entered first: a client that sees the response begin misses no event
            await run_until_disconnect(receive, self._copy(next_bytes, send))

    async def _copy(self, next_bytes: NextBytes, send: Send) -> None:
        await send(self._start)
        data, is_last = self._opening, False
        while True:
            if data or is_last:
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_last:
                return
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    data, is_last = await next_bytes()
            except TimeoutError:
                data = self._ping


def stream_start(framing: Framing) -> Message:
    """Return the message that begins a response with events before its request runs."""
    return _start(framing.media_type, ())


def _start(media_type: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Message:
    kind = (b"content-type", media_type)
    return {"type": "http.response.start", "status": 200, "headers": [kind, *_HEADERS, *headers]}


class _Wire:
    """The connection to the client; sends a heartbeat from time to time while no event is sent."""

    def __init__(self, send: Send, heartbeat_s: float, heartbeat: Callable[[], bytes]) -> None:
        """heartbeat: encodes a heartbeat, which is sent before all events that are encoded later; empty: nothing is."""
        self._send, self._heartbeat_s, self._heartbeat = send, heartbeat_s, heartbeat
        self._is_sending = False
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._loop.time()  # the end of the last event
        self._timer: asyncio.TimerHandle | None = None
        self._wait(heartbeat_s)
        self._beating: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> None:
        """Send events. Waits while the client does not read."""
        self._is_sending = True
        await self._heartbeat_sent()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_sending, self._sent_s = False, self._loop.time()

    async def made_in_thread(self, make: Callable[[Any], bytes], batch: Any) -> bytes:
        """Call a function with chunks in a thread, and return its result. No heartbeat is encoded meanwhile."""
        self._is_sending = True
        try:
            return await asyncio.to_thread(make, batch)
        finally:
            self._is_sending = False

    async def end(self, data: bytes) -> None:
        self._stop()
        await self._heartbeat_sent()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def close(self) -> None:
        self._stop()
        if self._beating is not None:
            self._beating.cancel()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def _heartbeat_sent(self) -> None:
        """Wait until a heartbeat is sent: its sequence number may precede the number of the next event."""
        if self._beating is not None and not self._beating.done():
            await asyncio.wait((self._beating,))

    def _beat(self) -> None:
        rest_s = self._sent_s + self._heartbeat_s - self._loop.time()
        if rest_s > 0:
            self._wait(rest_s)
            return
        is_beating = self._beating is not None and not self._beating.done()
        if not self._is_sending and not is_beating and (data := self._heartbeat()):
            message = {"type": "http.response.body", "body": data, "more_body": True}
            self._beating = self._loop.create_task(self._send_heartbeat(message))
        self._wait(self._heartbeat_s)

    def _wait(self, seconds: float) -> None:
        if math.isfinite(seconds):
            self._timer = self._loop.call_later(seconds, self._beat)

    async def _send_heartbeat(self, message: Message) -> None:
        await self._send(message)
