"""The queue of commands from other threads to the engine's; the number of requests in it is bounded.

A request for which there is no room is refused here, at once, or it waits in line and is accepted when requests before it make
room; closing refuses the requests in the line. The engine's thread gets only accepted requests. If a cancel or a deadline ends
the wait of a request, the request is accepted out of turn, and the scheduler ends it.

Cancels and the like are never refused, and take no lock: they may come from a finalizer, during a garbage collection on any
thread.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.engine.adapters import name_of
from paceline.engine.backend import Lora
from paceline.engine.commands import Cancel, Command, Submit
from paceline.errors import EngineStopped, InvalidParams, QueueFull
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.sequence import Request


@dataclass(frozen=True, slots=True)
class Wait:
    """Callbacks of a request that may wait in line.

    on_accepted: called, under the inbox's lock, when the engine gets it. on_refused: called if the inbox is closed before.
    """

    on_accepted: Callable[[], object]
    on_refused: Callable[[EngineStopped], object]


class Inbox:
    """Bounds: max_requests that have not ended, waiting or running; max_queue_tokens of prompts that wait; None: no bound."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        self._max_requests = max_requests
        self._max_queue_tokens = max_queue_tokens
        self._changed = threading.Condition()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None only wakes the thread
        self._looked_at: list[Command | None] = []  # by `wait`, on the engine's thread
        self._line: dict[int, tuple[Request | EmbeddingRequest, int, Wait]] = {}  # in order of arrival
        self._is_line_held = False
        self._line_deadlines: list[tuple[float, int]] = []  # a heap; also of requests that have left the line
        self._waiting_tokens: dict[int, int] = {}
        self._open: set[int] = set()
        self._adapters: dict[int, Lora] = {}  # of the open requests that have any
        self._retired: set[str] = set()  # keys of adapters that no new request may use
        self.has_adapter: Callable[[str], bool] = lambda _: True  # whether an adapter of this key is loaded
        self._is_closed = False
        self._next_key = 0
        self.num_refused = 0
        self.on_left: Callable[[int], object] = lambda _: None
        """Called with a request that has left the queue: it runs, or has ended."""

    def set_bounds(self, max_requests: int, max_queue_tokens: int | None) -> None:
        """Set the bounds, once the number of slots is known."""
        with self._changed:
            self._max_requests, self._max_queue_tokens = max_requests, max_queue_tokens
            self._accept_from_line()

    def next_key(self) -> int:
        """Return a number that no other request of this engine has; they grow."""
        with self._changed:
            self._next_key += 1
            return self._next_key

    def submit(
        self,
        request: Request | EmbeddingRequest,
        num_tokens: int,
        *,
        wait: Wait | None = None,
        is_accepted: bool = False,
    ) -> None:
        """Accept a request, or keep it in line if there is no room and `wait` is given. Raises `QueueFull` or `EngineStopped`.

        is_accepted: another front has accepted it, within bounds of its own, and there is room for it in any case.
        """
        with self._changed:
            self.check_open()
            has_room = is_accepted or (not self._line and self._has_room(num_tokens))
            if not has_room and wait is None:
                self.num_refused += 1
                raise self._queue_full(num_tokens)
            self._note_adapters(request)
            if has_room:
                self._accept(request, num_tokens)
            elif wait is not None:
                self._line[request.key] = (request, num_tokens, wait)
                self._note_deadline(request)
                if request.cancelled:
                    self.put(Cancel(request.key))  # the first one may have been taken before the request was in line

    def _accept(self, request: Request | EmbeddingRequest, num_tokens: int) -> None:
        self._open.add(request.key)
        self._waiting_tokens[request.key] = num_tokens
        self._begin(request)

    def _accept_from_line(self) -> None:
        """Accept the requests at the head of the line for which there is room. The caller holds the lock."""
        while self._line and not self._is_line_held:
            key, (_, num_tokens, _) = next(iter(self._line.items()))
            if not self._has_room(num_tokens):
                return
            self._leave_line(key)

    def _leave_line(self, key: int) -> None:
        """Accept a request if it is in line, whatever its place. The caller holds the lock."""
        found = self._line.pop(key, None)
        if found is None:
            return
        request, num_tokens, wait = found
        self._accept(request, num_tokens)
        if request.cancelled:
            self.put(Cancel(key))  # the first one may have been taken already
        wait.on_accepted()
        if not self._line:
            self._line_deadlines.clear()

    def _note_deadline(self, request: Request | EmbeddingRequest) -> None:
        at_s = request.deadline_s()
        if not math.isinf(at_s):
            heapq.heappush(self._line_deadlines, (at_s, request.key))
            self._wake()

    def _wake(self) -> None:
        """Wake the engine's thread, which may wait for an earlier deadline or none."""
        self._commands.put(None)

    def _begin(self, request: Request | EmbeddingRequest) -> None:
        """Hand over a request that was accepted."""
        self._commands.put(Submit(request))

    def put(self, command: Command) -> None:
        """Add a command that is no request; never refused."""
        self._commands.put(command)

    def take(self) -> list[Command]:
        """Return the commands since the last call, in order, without requests that have ended already. Engine's thread."""
        found, self._looked_at = self._looked_at, []
        while not self._commands.empty():
            found.append(self._commands.get())
        commands = [command for command in found if command is not None]
        if self._line:
            with self._changed:
                for command in commands:
                    if isinstance(command, Cancel):
                        self._leave_line(command.key)
        return [one for one in commands if not isinstance(one, Submit) or one.request.key in self._open]

    def end_overdue_waits(self, now_s: float) -> None:
        """Accept the requests in the line whose deadline has passed; the scheduler ends them. Engine's thread."""
        if not self._line_deadlines:
            return
        with self._changed:
            while self._line_deadlines and self._line_deadlines[0][0] <= now_s:
                self._leave_line(heapq.heappop(self._line_deadlines)[1])

    def next_deadline_s(self) -> float:
        """Return when the next deadline of a request in the line passes; infinite without one."""
        with self._changed:
            while self._line_deadlines and self._line_deadlines[0][1] not in self._line:
                heapq.heappop(self._line_deadlines)
            return self._line_deadlines[0][0] if self._line_deadlines else math.inf

    def wait(self, timeout_s: float | None) -> None:
        """Wait for a command, at most timeout_s; None: without a limit. Engine's thread."""
        with contextlib.suppress(queue.Empty):
            self._looked_at.append(self._commands.get(timeout=timeout_s))

    def started(self, key: int) -> None:
        """Note that a request has left the queue."""
        with self._changed:
            self._waiting_tokens.pop(key, None)
            self._accept_from_line()
        self.on_left(key)

    def ended(self, key: int) -> None:
        """Note that a request has ended and makes room for another."""
        with self._changed:
            self._waiting_tokens.pop(key, None)
            self._open.discard(key)
            self._adapters.pop(key, None)
            self._accept_from_line()
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

    def forget_adapter(self, adapter: str) -> None:
        """Forget a retired adapter, which `has_adapter` does not know any more."""
        with self._changed:
            self._retired.discard(adapter)

    def num_using(self, adapter: str) -> int:
        """Return the number of open requests that use an adapter."""
        return sum(any(key == adapter for key, _ in lora) for lora in tuple(self._adapters.values()))

    def close(self) -> None:
        """Accept no requests any more, and refuse the requests in the line; commands still pass."""
        with self._changed:
            self._is_closed = True
            line, self._line = self._line, {}
            self._line_deadlines.clear()
            for key in line:
                self._adapters.pop(key, None)
            self._changed.notify_all()
        for _, _, wait in line.values():
            wait.on_refused(self._stopped_error())

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
        """Number of requests that were accepted and have not ended."""
        return len(self._open)

    @contextlib.contextmanager
    def holding_line(self) -> Iterator[None]:
        """Accept no request from the line while the block ends all requests that were accepted. Engine's thread."""
        self._is_line_held = True
        try:
            yield
        finally:
            with self._changed:
                self._is_line_held = False
                self._accept_from_line()

    def is_in_line(self, key: int) -> bool:
        """Whether a request waits in line."""
        return key in self._line

    def check_open(self) -> None:
        """Raise `EngineStopped` if requests are refused for good."""
        if self._is_closed:
            raise self._stopped_error()

    def _stopped_error(self) -> EngineStopped:
        return EngineStopped("the engine was shut down and takes no requests; make a new one")

    def _note_adapters(self, request: Request | EmbeddingRequest) -> None:
        if not isinstance(request, Request) or not request.lora:
            return
        for key, _ in request.lora:
            if key in self._retired or not self.has_adapter(key):
                raise InvalidParams(f"lora: the adapter {name_of(key)!r} is being unloaded, or was unloaded just now")
        self._adapters[request.key] = request.lora

    def _has_room(self, num_tokens: int) -> bool:
        if self._is_closed or len(self._open) >= self._max_requests:
            return False
        if self._max_queue_tokens is None:
            return True
        waiting = sum(self._waiting_tokens.values())
        return not waiting or waiting + num_tokens <= self._max_queue_tokens

    def _queue_full(self, num_tokens: int) -> QueueFull:
        if self._line:
            return QueueFull(f"the queue is full: {len(self._line)} requests wait for room in it; try again later")
        if len(self._open) >= self._max_requests:
            return QueueFull(
                f"the queue is full: the engine has {len(self._open)} requests (num_slots + max_queue); try again later"
            )
        return QueueFull(
            f"the queue is full: {sum(self._waiting_tokens.values())} prompt tokens are queued, and {num_tokens} more would "
            f"exceed max_queue_tokens ({self._max_queue_tokens}); try again later"
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

    def _begin(self, request: Request | EmbeddingRequest) -> None:
        super()._begin(request)
        self.wake()

    def _wake(self) -> None:
        self.wake()

    def put(self, command: Command) -> None:
        """As `Inbox.put`."""
        super().put(command)
        self.wake()

    def close_for(self, reason: EngineStopped) -> None:
        """Accept no requests any more, and raise this for new ones."""
        self._stopped = reason
        self.close()

    def _stopped_error(self) -> EngineStopped:
        return super()._stopped_error() if self._stopped is None else EngineStopped(str(self._stopped))
