"""The queue of commands from other threads to the engine's; the number of requests in it is bounded.

A request is refused here, at once, or it is accepted for good: closing and accepting exclude each other. Cancels and the
like are never refused, and take no lock: they may come from a finalizer, during a garbage collection on any thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable

from paceline.engine.adapters import name_of
from paceline.engine.backend import Lora
from paceline.engine.commands import Command, Submit
from paceline.errors import EngineStopped, InvalidParams, QueueFull
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request


class Inbox:
    """Bounds: max_requests that have not ended, waiting or running; max_queue_tokens of prompts that wait; None: no bound."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_queue_tokens = max_queue_tokens
        self._changed = threading.Condition()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._looked_at: list[Command] = []  # by `wait`, on the engine's thread
        self._waiting_tokens: dict[int, int] = {}
        self._open: set[int] = set()
        self._adapters: dict[int, Lora] = {}  # of the open requests that have any
        self._retired: set[str] = set()  # keys of adapters that no new request may use
        self._is_closed = False
        self._next_key = 0
        self.num_refused = 0
        self.on_left: Callable[[int], object] = lambda _: None
        """Called with a request that has left the queue: it runs, or has ended."""

    def set_bounds(self, max_requests: int, max_queue_tokens: int | None) -> None:
        """Set the bounds, once the number of slots is known."""
        with self._changed:
            self._max_requests, self._max_queue_tokens = max_requests, max_queue_tokens

    def next_key(self) -> int:
        """Return a number that no other request of this engine has; they grow."""
        with self._changed:
            self._next_key += 1
            return self._next_key

    def submit(self, request: Request | EmbeddingRequest, num_tokens: int, *, is_accepted: bool = False) -> None:
        """Accept a request. Raises `QueueFull` or `EngineStopped`.

        is_accepted: another front has accepted it, within bounds of its own, and there is room for it in any case.
        """
        with self._changed:
            self.check_open()
            if not is_accepted:
                self._check_room(num_tokens)
            self._note_adapters(request)
            self._open.add(request.key)
            self._waiting_tokens[request.key] = num_tokens
            self._begin(request)

    def _begin(self, request: Request | EmbeddingRequest) -> None:
        """Hand over a request that was accepted."""
        self._commands.put(Submit(request))

    def put(self, command: Command) -> None:
        """Add a command that is no request; never refused."""
        self._commands.put(command)

    def take(self) -> list[Command]:
        """Return the commands since the last call, in order, without requests that have ended already. Engine's thread."""
        commands, self._looked_at = self._looked_at, []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return [one for one in commands if not isinstance(one, Submit) or one.request.key in self._open]

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a command, at most timeout_s; None: without a limit. Engine's thread."""
        with contextlib.suppress(queue.Empty):
            self._looked_at.append(self._commands.get(timeout=timeout_s))

    def started(self, key: int) -> None:
        """Note that a request has left the queue."""
        with self._changed:
            self._waiting_tokens.pop(key, None)
        self.on_left(key)

    def ended(self, key: int) -> None:
        """Note that a request has ended and makes room for another."""
        with self._changed:
            self._waiting_tokens.pop(key, None)
            self._open.discard(key)
            self._adapters.pop(key, None)
            self._changed.notify_all()
        self.on_left(key)

    def retire_adapter(self, adapter: str, timeout_s: float | None) -> bool:
        """Refuse new requests that use an adapter, and wait until no open one does; None: without a limit.

        Returns whether that is so; if not in time, requests may use it again.
        """
        with self._changed:
            was_retired = adapter in self._retired
            self._retired.add(adapter)
            is_unused = False
            try:
                is_unused = self._changed.wait_for(lambda: self.num_using(adapter) == 0, timeout_s)
            finally:
                if is_unused:
                    self._retired.add(adapter)  # another thread's wait may have ended without success meanwhile
                elif not was_retired:
                    self._retired.discard(adapter)
            return is_unused

    def num_using(self, adapter: str) -> int:
        """Return the number of open requests that use an adapter."""
        return sum(any(key == adapter for key, _ in lora) for lora in tuple(self._adapters.values()))

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

    def is_open(self, key: int) -> bool:
        """Whether a request has not ended."""
        return key in self._open

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    def check_open(self) -> None:
        """Raise `EngineStopped` if requests are refused for good."""
        if self._is_closed:
            raise EngineStopped("the engine was shut down and takes no requests; make a new one")

    def _note_adapters(self, request: Request | EmbeddingRequest) -> None:
        if not isinstance(request, Request) or not request.lora:
            return
        for key, _ in request.lora:
            if key in self._retired:
                raise InvalidParams(f"lora: the adapter {name_of(key)!r} is being unloaded, or was unloaded just now")
        self._adapters[request.key] = request.lora

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


class FrontInbox(Inbox):
    """An inbox that wakes a thread which waits for file descriptors, the supervisor's.

    The pipe is closed by a finalizer alone: a cancel may come after everything else has ended.
    """

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        super().__init__(max_requests, max_queue_tokens)
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end).atexit = False
        self._stopped: EngineStopped | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable if something has come in since `calm`."""
        return self._read_end

    def calm(self) -> None:
        """Clear the wake-up, before the commands are taken."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._read_end, 4096)) == 4096:
                pass

    def wake(self) -> None:
        """Wake the thread; takes no lock and never waits."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_end, b"\0")

    def submit(self, request: Request | EmbeddingRequest, num_tokens: int, *, is_accepted: bool = False) -> None:
        """As `Inbox.submit`."""
        super().submit(request, num_tokens, is_accepted=is_accepted)
        self.wake()

    def put(self, command: Command) -> None:
        """As `Inbox.put`."""
        super().put(command)
        self.wake()

    def close_for(self, reason: EngineStopped) -> None:
        """Accept no requests any more, and raise this for new ones."""
        self._stopped = reason
        self.close()

    def check_open(self) -> None:
        """Raise `EngineStopped`, with the reason of `close_for`, if requests are refused for good."""
        if self._stopped is not None:
            raise EngineStopped(str(self._stopped))
        super().check_open()
