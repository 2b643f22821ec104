"""A way to a server that can be cut: TCP connections are passed on, until a test breaks them."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Relay:
    """Listens on a port of the loopback and passes bytes on to a server.

    Args:
        server_url: Address of the server.
        stream_bytes: Number of bytes of an event stream after which the relay holds it back until connections are broken, so
            that no server is too fast for a test which breaks them; None: no limit. Without effect after `unblock`.

    Attributes:
        url: Address for a page.
    """

    def __init__(self, server_url: str, *, stream_bytes: int | None = None) -> None:
        self._target = _address(server_url)
        self._stream_bytes = stream_bytes
        self._broken = threading.Event()
        self._is_open = True
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection; new connections are passed on."""
        with self._lock:
            broken, self._pairs = self._pairs, []
        self._broken.set()
        for connection in broken:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def block(self) -> None:
        """Break every connection, and each new one."""
        self._is_open = False
        self.cut()

    def unblock(self, server_url: str | None = None) -> None:
        """Pass new connections on again. server_url: of another server, from now on."""
        if server_url is not None:
            self._target = _address(server_url)
        self._is_open = True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # the relay is closed
                return
            if not self._is_open:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs += [client, server]
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        num_bytes: int | None = None  # of an event stream
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 12):
                if b"content-type: text/event-stream" in data.lower():
                    num_bytes = 0
                if num_bytes is not None and self._stream_bytes is not None:
                    num_bytes += len(data)
                    if num_bytes > self._stream_bytes:
                        self._broken.wait()
                sink.sendall(data)
        for connection in (source, sink):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port
