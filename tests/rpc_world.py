"""RPC servers for tests: `paceline rpc-serve` in a process of its own, and scripted stand-ins."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from tests.ports import free_port

from paceline.errors import RpcServerUnavailable
from paceline.runtime.rpc import greet

_START_S = 60.0


class LendingServer:
    """A `paceline rpc-serve` on a port that stays the same over restarts."""

    def __init__(self, *flags: str) -> None:
        self.port, self._flags = free_port(), flags
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it greets."""
        command = [sys.executable, "-m", "paceline", "rpc-serve", "--port", str(self.port), "-t", "1", *self._flags]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        end_s = time.monotonic() + _START_S
        while not self._greets():
            assert self._process.poll() is None and time.monotonic() < end_s, "the server did not start"
            time.sleep(0.05)

    def _greets(self) -> bool:
        try:
            greet(self.address, 2)
        except RpcServerUnavailable:
            return False
        return True

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it without a goodbye; the kernel closes its connections."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@contextmanager
def stopped(server: LendingServer) -> Iterator[None]:
    """Have a server hang while the block runs: the kernel accepts bytes, and no reply comes."""
    server.send(signal.SIGSTOP)
    try:
        yield
    finally:
        server.send(signal.SIGCONT)


@contextmanager
def stand_in(behave: Callable[[socket.socket], object]) -> Iterator[str]:
    """Accept connections, and handle each with the given function; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the test is over
                    return
                kept.append(connection)
                with contextlib.suppress(OSError, struct.error):  # the other side has closed
                    behave(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in kept:
                connection.close()


def replying(*replies: bytes) -> Callable[[socket.socket], object]:
    """Return a handler that answers commands in order with these payloads, and then closes."""

    def behave(connection: socket.socket) -> None:
        for payload in replies:
            head = connection.recv(9, socket.MSG_WAITALL)
            connection.recv(struct.unpack("<Q", head[1:])[0], socket.MSG_WAITALL)
            connection.sendall(struct.pack("<Q", len(payload)) + payload)
        connection.close()

    return behave


def hello(major: int, minor: int = 0, patch: int = 0) -> bytes:
    return bytes([major, minor, patch, 0]) + bytes(24)
