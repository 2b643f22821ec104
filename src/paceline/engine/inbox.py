"""What other threads want of the engine: commands, taken in order by its thread; bounded where they are requests.

A request is refused here, at once, or it is accepted for good: closing and accepting exclude each other. Cancels and the
like are never refused, and take no lock: they may come out of a garbage collection in the middle of anything.
"""

from __future__ import annotations

import contextlib
import queue
import threading

from paceline.engine.commands import Command, Submit
from paceline.errors import EngineStopped, QueueFull
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request


class Inbox:
    """The way into the engine. max_requests: that have not ended, waiting or running; max_queue_tokens: of prompts that wait."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_queue_tokens = max_queue_tokens
        self._changed = threading.Condition()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._looked_at: list[Command] = []  # by `wait`, on the engine's thread
        self._waiting_tokens: dict[int, int] = {}
        self._open: set[int] = set()
        self._is_closed = False
        self._next_key = 0
        self.num_refused = 0

    def next_key(self) -> int:
        """Return a number that no other request of this engine has; they grow."""
        with self._changed:
            self._next_key += 1
            return self._next_key

    def submit(self, request: Request | EmbeddingRequest, num_tokens: int) -> None:
        """Accept a request, or raises `QueueFull` or `EngineStopped`."""
        with self._changed:
            self.check_open()
            self._check_room(num_tokens)
            self._open.add(request.key)
            self._waiting_tokens[request.key] = num_tokens
            self._commands.put(Submit(request))

    def put(self, command: Command) -> None:
        """Add a command that is no request; never refused."""
        self._commands.put(command)

    def take(self) -> list[Command]:
        """All commands since the last call, in order, but for requests that have ended already. Engine's thread."""
        commands, self._looked_at = self._looked_at, []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return [one for one in commands if not isinstance(one, Submit) or one.request.key in self._open]

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until there is a command, or so long; None: without a limit. Engine's thread."""
        with contextlib.suppress(queue.Empty):
            self._looked_at.append(self._commands.get(timeout=timeout_s))

    def started(self, key: int) -> None:
        """Note that a request waits no longer."""
        with self._changed:
            self._waiting_tokens.pop(key, None)

    def ended(self, key: int) -> None:
        """Note that a request has ended and makes room for another."""
        with self._changed:
            self._waiting_tokens.pop(key, None)
            self._open.discard(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no requests any more; commands still pass."""
        with self._changed:
            self._is_closed = True

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until every accepted request has ended, and return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether requests are refused for good."""
        return self._is_closed

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def check_open(self) -> None:
        """Raise `EngineStopped` where requests are refused for good."""
        if self._is_closed:
            raise EngineStopped("the engine was shut down and takes no requests; make a new one")

    def _check_room(self, num_tokens: int) -> None:
        if len(self._open) >= self._max_requests:
            self.num_refused += 1
            raise QueueFull(
                f"the engine holds {len(self._open)} requests, as many as num_slots + max_queue allow; try again later"
            )
        waiting = sum(self._waiting_tokens.values()) if self._max_queue_tokens is not None else 0
        if self._max_queue_tokens is not None and waiting and waiting + num_tokens > self._max_queue_tokens:
            self.num_refused += 1
            raise QueueFull(
                f"{waiting} prompt tokens wait, and with {num_tokens} more there would be over max_queue_tokens "
                f"({self._max_queue_tokens}); try again later"
            )
