"""Streamed responses that outlive their connection: their last bytes are kept, to be read again from an offset.

A request with the header X-Conversation-Id opens one. Its own client is one reader of the kept bytes among others, so that a
slow or absent client delays nothing. On the event loop.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from starlette.requests import Request
from starlette.types import Message

from paceline.server.api_errors import invalid_request

HEADER: Final = "X-Conversation-Id"
MAX_ID_BYTES: Final = 1024
"""Most bytes of a conversation's id."""

_MAX_STREAM_BYTES = 4 << 20
_MAX_TOTAL_BYTES = 64 << 20
_MAX_STREAMS = 1024  # beyond, ended ones go early
_TTL_S = 300.0
_PART = 1 << 16  # bytes that are sent at once
_SEPARATOR = "::"  # between a conversation's id and a model's name, as llama-server's web page has it
_AFTER_SEPARATOR = ":;"  # sorts after all strings that begin with the separator

Key = tuple[bytes, str]
"""The owner (a digest of the API key; empty without keys) and the conversation's id."""


def conversation_id_of(request: Request) -> str | None:
    """Return the request's X-Conversation-Id; None if it is missing or empty. Raises if it is too long."""
    given = next((value for name, value in request.scope["headers"] if name == HEADER.lower().encode()), b"")
    if len(given) > MAX_ID_BYTES:
        raise invalid_request(f"{HEADER} has {len(given)} bytes, more than the limit of {MAX_ID_BYTES}", HEADER)
    return given.decode("utf-8", "replace") or None


NextBytes = Callable[[], Awaitable[tuple[bytes, bool]]]
"""Waits for the next bytes of a stream, and returns them and whether they are the last ones."""


class ResumableStream:
    """The bytes of one response: all are counted, the last ones kept. started_at, completed_at: Unix seconds, 0: not yet."""

    def __init__(self, conversation_id: str, max_bytes: int, cancel: Callable[[], None]) -> None:
        """cancel: ends the request; the stream still gets its last events."""
        self.conversation_id, self.cancel = conversation_id, cancel
        self.started_at, self.completed_at = int(time.time()), 0
        self.media_type = b"text/event-stream; charset=utf-8"
        self.lost_event = b""
        """The last event of a reader that has fallen behind by more bytes than are kept."""
        self.dropped_bytes = self.num_readers = 0
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._changed = asyncio.Event()
        self.on_change: Callable[[int], None] = lambda _: None
        """Called with the growth of the number of kept bytes."""
        self.on_finish: Callable[[], None] = lambda: None

    @property
    def is_done(self) -> bool:
        """Whether the response is complete."""
        return bool(self.completed_at)

    @property
    def kept_bytes(self) -> int:
        """Number of bytes that can be read."""
        return len(self._kept)

    @property
    def total_bytes(self) -> int:
        """Number of bytes of the whole stream."""
        return self.dropped_bytes + len(self._kept)

    async def receive(self, message: Message) -> None:
        """Add a part of a response's body, in the place of a client. Never waits."""
        data = message.get("body", b"")
        if self.is_done or not data:
            return
        before = len(self._kept)
        self._kept += data
        self.drop(len(self._kept) - self._max_bytes)
        self._wake()
        self.on_change(len(self._kept) - before)

    def drop(self, num_bytes: int) -> int:
        """Drop the oldest `num_bytes`, or all bytes; return their number."""
        num_dropped = min(max(0, num_bytes), len(self._kept))
        del self._kept[:num_dropped]
        self.dropped_bytes += num_dropped
        return num_dropped

    def finish(self) -> None:
        """Mark the response as complete. Idempotent."""
        if not self.is_done:
            self.completed_at = int(time.time())
            self._wake()
            self.on_finish()

    @contextmanager
    def reading(self, offset: int) -> Iterator[NextBytes]:
        """Count a reader, which gets the bytes from an offset on. `lost_event` ends it if they are no longer kept."""

        async def next_bytes() -> tuple[bytes, bool]:
            nonlocal offset
            while offset >= self.dropped_bytes:
                start = offset - self.dropped_bytes
                data = bytes(self._kept[start : start + _PART])
                offset += len(data)
                if data or self.is_done:
                    return data, not data
                await self._changed.wait()
            return self.lost_event, True

        self.num_readers += 1
        try:
            yield next_bytes
        finally:
            self.num_readers -= 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ResumableStreams:
    """All resumable streams, by owner and conversation: at most one each. Limits: bytes of one, of all, their number, time."""

    def __init__(
        self,
        *,
        max_stream_bytes: int = _MAX_STREAM_BYTES,
        max_total_bytes: int = _MAX_TOTAL_BYTES,
        max_streams: int = _MAX_STREAMS,
        ttl_s: float = _TTL_S,
    ) -> None:
        """ttl_s: how long an ended stream is kept."""
        self._max_stream_bytes, self._max_total_bytes = max_stream_bytes, max_total_bytes
        self._max_streams, self._ttl_s = max_streams, ttl_s
        self._by_owner: dict[bytes, dict[str, ResumableStream]] = {}
        self._waiting: dict[Key, list[Callable[[], object]]] = {}  # requests whose stream is still to be opened
        self._expiry: dict[Key, asyncio.TimerHandle] = {}  # of ended streams, in the order of their ends
        self._growing: set[ResumableStream] = set()  # streams that have not ended, also replaced ones
        self.total_bytes = 0
        """Number of bytes that are kept."""

    def __len__(self) -> int:
        return sum(map(len, self._by_owner.values()))

    def open(
        self, owner: bytes, conversation_id: str, cancel: Callable[[], None], waited: Callable[[], object] | None = None
    ) -> ResumableStream:
        """Return a new stream, which replaces a stream of the same conversation and cancels it.

        waited: the `cancel` that the request passed to `waiting`. Earlier requests are cancelled too; a later request goes on,
        and replaces this stream.
        """
        self._discard_open(owner, conversation_id)
        key = (owner, conversation_id)
        waiting = self._waiting.get(key, [])
        earlier = waiting[: waiting.index(waited)] if waited in waiting else []
        for discard in earlier:
            waiting.remove(discard)
            discard()
        stream = ResumableStream(conversation_id, self._max_stream_bytes, cancel)
        stream.on_change = self._grow
        stream.on_finish = lambda: self._finish(key, stream)
        self._by_owner.setdefault(owner, {})[conversation_id] = stream
        self._growing.add(stream)
        while len(self) > self._max_streams and self._expiry:
            self._evict(next(iter(self._expiry)))
        return stream

    @contextmanager
    def waiting(self, owner: bytes, conversation_id: str, cancel: Callable[[], object]) -> Iterator[None]:
        """Register a request until it opens its stream. cancel: called if it is discarded meanwhile."""
        key = (owner, conversation_id)
        self._waiting.setdefault(key, []).append(cancel)
        try:
            yield
        finally:
            same = self._waiting.get(key, [])
            if cancel in same:
                same.remove(cancel)
            if not same:
                self._waiting.pop(key, None)

    def is_awaited(self, owner: bytes, conversation_id: str) -> bool:
        """Return whether a request will open the stream of a conversation."""
        return (owner, conversation_id) in self._waiting

    def find(self, owner: bytes, conversation_id: str) -> ResumableStream | None:
        """Return the stream of a conversation; None if the owner has none."""
        return self._by_owner.get(owner, {}).get(conversation_id)

    def lookup(self, owner: bytes, ids: Sequence[str]) -> list[ResumableStream]:
        """Return the streams of conversations and of their variants (`id::model`), in the order of the ids.

        Each stream comes once, so that nested ids make neither long work nor a long list.
        """
        owned = self._by_owner.get(owner, {})
        names = sorted(owned)  # not found yet
        order = {name: index for index, name in enumerate(owned)}
        found: list[str] = []
        for conversation_id in dict.fromkeys(ids):
            start = bisect_left(names, conversation_id + _SEPARATOR)
            end = bisect_left(names, conversation_id + _AFTER_SEPARATOR, start)
            taken = names[start:end]
            del names[start:end]
            exact = bisect_left(names, conversation_id)
            if names[exact : exact + 1] == [conversation_id]:
                taken.append(names.pop(exact))
            found += sorted(taken, key=order.__getitem__)
        return [owned[name] for name in found]

    def discard(self, owner: bytes, conversation_id: str) -> None:
        """Forget the stream of a conversation and cancel its request, if there is one."""
        for cancel in self._waiting.pop((owner, conversation_id), ()):
            cancel()
        self._discard_open(owner, conversation_id)

    def _discard_open(self, owner: bytes, conversation_id: str) -> None:
        stream = self.find(owner, conversation_id)
        if stream is not None:
            self._evict((owner, conversation_id))
            if not stream.is_done:
                stream.cancel()

    def cancel_unread(self) -> None:
        """Cancel the requests of streams without a reader."""
        for stream in tuple(self._growing):
            if not stream.num_readers:
                stream.cancel()

    def _grow(self, num_bytes: int) -> None:
        """Count bytes. Beyond the limit ended streams are evicted, the oldest first; else the largest one loses bytes."""
        self.total_bytes += num_bytes
        while self.total_bytes > self._max_total_bytes and self._expiry:
            self._evict(next(iter(self._expiry)))
        while (excess := self.total_bytes - self._max_total_bytes) > 0:
            self.total_bytes -= max(self._growing, key=lambda stream: stream.kept_bytes).drop(excess)

    def _finish(self, key: Key, stream: ResumableStream) -> None:
        self._growing.discard(stream)
        if self.find(*key) is stream:
            self._expiry[key] = asyncio.get_running_loop().call_later(self._ttl_s, self._evict, key)
        else:
            self.total_bytes -= stream.kept_bytes  # it was replaced or discarded before

    def _evict(self, key: Key) -> None:
        """Forget a stream; its bytes count until it has ended."""
        owner, conversation_id = key
        stream = self._by_owner[owner].pop(conversation_id)
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        if (expiry := self._expiry.pop(key, None)) is not None:
            expiry.cancel()
            self.total_bytes -= stream.kept_bytes
