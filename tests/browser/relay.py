"""A way to a server that can be cut: TCP connections are passed on, until a test breaks them."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit


class Relay:
    """Listens on a port of the loopback and passes bytes on to a server. url: what a page is opened by."""

    def __init__(self, server_url: str) -> None:
        self._target = _address(server_url)
        self._is_open = True
        self._pairs: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break every connection; new ones are passed on."""
        with self._lock:
            broken, self._pairs = self._pairs, []
        for one in broken:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

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
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()

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


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for one in (source, sink):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
