"""What the supervising thread sleeps on: the inbox, and of a worker its socket and its last words. That thread only."""

from __future__ import annotations

import selectors
from types import TracebackType
from typing import Self

from paceline.engine.worker.front_inbox import FrontInbox
from paceline.engine.worker.worker_process import WorkerProcess

_READABLE, _WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Watching:
    """A selector, which is left with nothing open when the block is."""

    def __init__(self, inbox: FrontInbox) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, _READABLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()

    def wait(self, timeout_s: float | None) -> list[object]:
        """Return what is ready; nothing after so long. None: without a limit."""
        return [key.fileobj for key, _ in self._selector.select(timeout_s)]

    def add(self, worker: WorkerProcess) -> None:
        """Watch a worker that was started."""
        self._selector.register(worker.link, _READABLE)
        self._selector.register(worker.last_words, _READABLE)

    def remove(self, worker: WorkerProcess) -> None:
        """Stop watching a worker that is gone."""
        self._forget(worker.link)
        self._forget(worker.last_words)

    def refresh(self, worker: WorkerProcess) -> None:
        """Wait for room in the socket where something is kept for it; and no longer for words, when there will be none."""
        self._selector.modify(worker.link, _READABLE | (_WRITABLE if worker.link.is_backed_up else 0))
        if worker.last_words.fileno() < 0:
            self._forget(worker.last_words)

    def _forget(self, watched: object) -> None:
        """By what it is: its descriptor may be closed."""
        for key in tuple(self._selector.get_map().values()):
            if key.fileobj is watched:
                self._selector.unregister(key.fd)
