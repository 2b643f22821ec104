"""What the worker writes to stderr: the end of it is kept, for the error of its death."""

from __future__ import annotations

import os
import re

MAX_BYTES = 8192
_MAX_LINES = 20
# Of what faulthandler adds: where which thread was. What made it end stands before.
_NOISE = re.compile(r"(?m)^(Extension modules: .*|\n)")


class LastWords:
    """The read end of a pipe. Never waits."""

    def __init__(self, pipe: int) -> None:
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._data = b""

    def fileno(self) -> int:
        """Return the pipe's descriptor; -1 after the other side has closed it."""
        return self._pipe

    def read(self) -> bool:
        """Take what is there and return whether more may come."""
        while self._pipe >= 0:
            try:
                data = os.read(self._pipe, MAX_BYTES)
            except (BlockingIOError, InterruptedError):
                return True
            if not data:
                self.close()
            self._data = (self._data + data)[-MAX_BYTES:]
        return False

    @property
    def text(self) -> str:
        """The last lines."""
        lines = _NOISE.sub("", self._data.decode("utf-8", "replace")).strip().splitlines()
        return "\n".join(lines[-_MAX_LINES:])

    def close(self) -> None:
        """Close the pipe; idempotent."""
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
