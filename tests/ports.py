"""Free ports for programs that take a number and not 0."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

_ABOVE, _BELOW = 10_000, 30_000  # systems assign higher ports to sockets that name none


def free_port() -> int:
    """Return a free port. No program that lets the system choose a port takes it in the meantime."""
    while True:
        port = _ABOVE + secrets.randbelow(_BELOW - _ABOVE)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
