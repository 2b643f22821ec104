"""The inbox of a front: as `Inbox`, and whatever comes in wakes a thread that watches file descriptors."""

from __future__ import annotations

import contextlib
import os
import weakref

from paceline.engine.commands import Command
from paceline.engine.inbox import Inbox
from paceline.errors import EngineStopped
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request


class FrontInbox(Inbox):
    """Its pipe lives as long as it does: a cancel may come after everything else has ended."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        super().__init__(max_requests, max_queue_tokens)
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end).atexit = False
        self._stopped: EngineStopped | None = None

    def fileno(self) -> int:
        """Readable where something has come in since `calm`."""
        return self._read_end

    def calm(self) -> None:
        """Clear the wake-up, before the thread looks at the commands."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read_end, 4096)) == 4096:
                pass

    def wake(self) -> None:
        """Wakes the thread; takes no lock and never waits."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def submit(self, request: Request | EmbeddingRequest, num_tokens: int) -> None:
        """As `Inbox.submit`."""
        super().submit(request, num_tokens)
        self.wake()

    def put(self, command: Command) -> None:
        """As `Inbox.put`."""
        super().put(command)
        self.wake()

    def close_for(self, reason: EngineStopped) -> None:
        """Accept no requests any more, and say why."""
        self._stopped = reason
        self.close()

    def check_open(self) -> None:
        """Raise `EngineStopped` where requests are refused for good."""
        if self._stopped is not None:
            raise EngineStopped(str(self._stopped))
        super().check_open()
