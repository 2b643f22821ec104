"""Starts many servers fast: one process with everything imported, of which each server is a fork.

`python fork_server.py connect SOCKET ARGUMENT...` is the program behind LLAMA_SERVER_BIN_PATH: it has a server forked, passes
SIGTERM on, and ends as that ends. Its own imports are few, since it runs hundreds of times.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_POLL_S = 0.02
_MAX_BYTES = 1 << 20


def connect(path: str, arguments: Sequence[str]) -> int:
    """Have a server forked with this process's environment, folder and output; return its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        signal.signal(signal.SIGTERM, lambda *_: connection.send(b"stop"))
        start = {"arguments": list(arguments), "environment": dict(os.environ), "folder": str(Path.cwd())}
        socket.send_fds(connection, [json.dumps(start).encode()], [1, 2])
        return int(connection.recv(_MAX_BYTES) or b"1")


def serve(path: str, run: Callable[[list[str]], None]) -> None:
    """Fork a server for each connection, for ever. run: the server; called in the fork with its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the monitors
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _monitor(connection, run)
            connection.close()


def _monitor(connection: socket.socket, run: Callable[[list[str]], None]) -> None:
    """Start a server and see it to its end, or kill it when its client is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, files, _, _ = socket.recv_fds(connection, _MAX_BYTES, 2)
    server = os.fork()
    if server == 0:
        connection.close()
        _become(json.loads(data), files, run)
    for file in files:
        os.close(file)
    code = None
    while code is None:
        if select.select([connection], [], [], _POLL_S)[0]:
            os.kill(server, signal.SIGTERM if connection.recv(_MAX_BYTES) else signal.SIGKILL)
        ended, status = os.waitpid(server, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
    try:
        connection.send(str(code).encode())
    except OSError:  # the client is gone
        pass
    os._exit(0)


def _become(start: dict[str, object], files: Sequence[int], run: Callable[[list[str]], None]) -> None:
    code = 1
    try:
        for file, number in zip(files, (1, 2), strict=True):
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(start["environment"])  # type: ignore[call-overload]
        os.chdir(str(start["folder"]))
        run(list(start["arguments"]))  # type: ignore[call-overload]
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(connect(sys.argv[2], sys.argv[3:]))
