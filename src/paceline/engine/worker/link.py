"""One end of the socket between front and worker: messages in frames, sent without ever waiting.

A frame is four bytes of length, big-endian, then the message. `send` may be called by any thread at any time (a log record
from a finalizer); `receive` and `flush` belong to the thread that watches the socket, which `on_backlog` wakes.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from paceline.errors import EngineError

_READ_BYTES = 2**18
_PARTS = 64  # calls of `send` whose messages go out in one write
MAX_BYTES = 2**30
_HEADER = 4


class Link:
    """Owns the socket, and keeps what it does not take yet. on_backlog: called if something is kept; it must not wait."""

    def __init__(self, end: socket.socket, on_backlog: Callable[[], None] | None = None) -> None:
        end.setblocking(False)
        self._socket = end
        self._reader = FrameReader()
        # One buffer for all reads: allocating this size again and again fragments the heap.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._rest = b""  # guarded by _sending: the part of a frame that the socket did not take
        self._is_over = False
        self._on_backlog = on_backlog

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(self, *messages: bytes) -> None:
        """Send messages, in order and in one write if the socket takes them; do nothing if the other side is gone."""
        if self._is_over:
            return
        self._queue.put(b"".join(map(framed, messages)))
        self.flush()
        if self.is_backed_up and self._on_backlog is not None:
            self._on_backlog()

    def flush(self) -> None:
        """Send what the socket takes now."""
        # A thread that finds the lock taken returns: the holder checks the queue again after its release.
        while not self._is_over and self.is_backed_up and self._sending.acquire(blocking=False):
            try:
                if not self._send_some():
                    return
            except OSError:  # the other side is gone; `receive` reports it
                self._is_over = True
            finally:
                self._sending.release()

    @property
    def is_backed_up(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._rest) or not self._queue.empty()

    def receive(self) -> list[bytes] | None:
        """Return the messages that are whole; None if the other side is gone. Does not wait."""
        try:
            size = self._socket.recv_into(self._buffer)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError:
            return None
        return self._reader.feed(self._buffer[:size]) if size else None

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._is_over = True
        self._socket.close()

    def _send_some(self) -> bool:
        """Return whether the socket takes more."""
        parts = [self._rest]
        with contextlib.suppress(queue.Empty):
            while len(parts) < _PARTS:
                parts.append(self._queue.get_nowait())
        data = b"".join(parts)
        self._rest = data
        with contextlib.suppress(BlockingIOError, InterruptedError):
            self._rest = data[self._socket.send(data) :]
        return not self._rest


def framed(message: bytes) -> bytes:
    """Return the message with its length in front. Raises `EngineError` for one that no reader would take."""
    _check_size(len(message))
    return len(message).to_bytes(_HEADER, "big") + message


class FrameReader:
    """Joins bytes, split anywhere, to whole messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Return the messages that are whole now. Raises `EngineError` for a length above the maximum."""
        self._data += data
        messages, begin = [], 0
        while (end := self._end(begin)) is not None:
            messages.append(bytes(self._data[begin + _HEADER : end]))
            begin = end
        del self._data[:begin]
        return messages

    def _end(self, begin: int) -> int | None:
        if len(self._data) - begin < _HEADER:
            return None
        size = int.from_bytes(self._data[begin : begin + _HEADER], "big")
        _check_size(size)
        end = begin + _HEADER + size
        return end if end <= len(self._data) else None


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise EngineError(f"a message of {size} bytes, and {MAX_BYTES} is the most that goes between processes")
