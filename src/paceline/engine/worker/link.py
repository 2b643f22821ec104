"""One end of the socket between front and worker. Sending never waits: what the socket does not take is kept.

`send` may be called by any thread, in the middle of anything (a log record out of a finalizer); `receive` and `flush` belong to
the thread that watches the socket, which is woken by `on_backlog` when something is kept.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable

from paceline.engine.worker.frames import FrameReader, framed

_READ_BYTES = 2**18
_PARTS = 64  # frames that go out in one call


class Link:
    """Owns the socket. on_backlog: called where something is left to be sent; it must not wait."""

    def __init__(self, end: socket.socket, on_backlog: Callable[[], None] | None = None) -> None:
        end.setblocking(False)
        self._socket = end
        self._reader = FrameReader()
        # One for all reads: memory asked for in this size again and again leaves holes that nothing fits into any more.
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self._queue: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._rest = b""  # guarded by _sending: the part of a frame that the socket did not take
        self._is_over = False
        self._on_backlog = on_backlog

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message, in order. After the other side has gone it does nothing."""
        if self._is_over:
            return
        self._queue.put(framed(message))
        self.flush()
        if self.is_backed_up and self._on_backlog is not None:
            self._on_backlog()

    def flush(self) -> None:
        """Send what the socket takes now."""
        # A thread that finds the lock taken leaves: the holder looks at the queue once more after it has let go.
        while not self._is_over and self.is_backed_up and self._sending.acquire(blocking=False):
            try:
                if not self._send_some():
                    return
            except OSError:  # the other side is gone; its reader says so
                self._is_over = True
            finally:
                self._sending.release()

    @property
    def is_backed_up(self) -> bool:
        """Whether something is left to be sent."""
        return bool(self._rest) or not self._queue.empty()

    def receive(self) -> list[bytes] | None:
        """Return the messages that have come in whole; None where the other side is gone. Does not wait."""
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
