"""The bounded queue of commands from other threads to the engine's thread.

A request that finds no room is refused at once, or it waits in line and is accepted when earlier requests make room; closing
refuses the requests in the line. The engine's thread gets only accepted requests. If a cancel or a deadline ends the wait of a
request, the request is accepted out of turn, and the scheduler ends it. `QueueShares` keeps a part of the queue free for other
tenants, and the tenants in the line take turns.

Commands other than requests are never refused, and take no lock: a cancel may come from a finalizer, during a garbage
collection on any thread.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from paceline.engine.adapters import name_of
from paceline.engine.backend import Lora
from paceline.engine.core import Cancel, Command, Submit
from paceline.errors import EngineStopped, InvalidParams, QueueFull
from paceline.scheduling.records import EmbeddingRequest
from paceline.sequence import Request


@dataclass(frozen=True, slots=True)
class Wait:
    """Callbacks of a request that may wait in line.

    Attributes:
        on_accepted: Called, under the inbox's lock, when the engine gets the request.
        on_refused: Called if the inbox is closed before.
    """

    on_accepted: Callable[[], object]
    on_refused: Callable[[EngineStopped], object]


_SHARE: Final = 3
"""Places, and queued tokens, that a tenant may have for each free one."""

_RESERVED: Final = 4
"""The free places that are reserved for tenants without a request are at most the places divided by this number."""


class QueueShares:
    """The places and prompt tokens that each tenant has in the queue, and the limits of its share.

    A tenant may use the whole queue while it is alone: no other tenant is expected, and none has sent a request since the queue
    was last empty. Otherwise a tenant may have `_SHARE` times as many places as are free: three quarters of the queue for one
    tenant, and equal parts for several. It also leaves one place free for each expected tenant that has no request. Queued
    tokens are shared in the same way. So the first request of an expected tenant finds a place, and a tenant without a queued
    prompt may queue a prompt of any length. No accepted request is evicted: tenants below their shares get the places that
    become free. Requests without a tenant count as one tenant.

    Attributes:
        max_requests: Open requests, waiting or running.
        max_tokens: Prompt tokens that wait; None: no limit.
    """

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self._expected: frozenset[str] = frozenset()
        self._num_idle = 0  # expected tenants without an open request
        self._seen: set[str] = set()  # since the queue was last empty; two tenants are enough
        self._tenants: dict[int, str] = {}  # of the open requests
        self._waiting: dict[int, int] = {}  # prompt tokens of the open requests that wait
        self._num_open: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._num_tokens: Counter[str] = Counter()

    def expect(self, tenants: Iterable[str]) -> None:
        """Set the tenants that may send requests. A single tenant may use the whole queue."""
        self._expected = frozenset(tenants)
        self._num_idle = sum(not self._num_open[tenant] for tenant in self._expected)

    def note_tenant(self, tenant: str) -> None:
        """Record that a tenant sends requests, whether they are accepted or not."""
        if len(self._seen) < 2:
            self._seen.add(tenant)

    def add(self, key: int, tenant: str, num_tokens: int) -> None:
        """Count an accepted request, which waits."""
        self.note_tenant(tenant)
        if tenant in self._expected and not self._num_open[tenant]:
            self._num_idle -= 1
        self._tenants[key], self._waiting[key] = tenant, num_tokens
        self._num_open[tenant] += 1
        self._num_waiting[tenant] += 1
        self._num_tokens[tenant] += num_tokens

    def started(self, key: int) -> None:
        """Count a request as running; does nothing for a request that does not wait."""
        num_tokens = self._waiting.pop(key, None)
        if num_tokens is not None:
            tenant = self._tenants[key]
            self._num_tokens[tenant] -= num_tokens
            _decrement(self._num_waiting, tenant)

    def ended(self, key: int) -> None:
        """Release a request's place and tokens; does nothing for a request that is not open."""
        self.started(key)
        tenant = self._tenants.pop(key, None)
        if tenant is not None and not _decrement(self._num_open, tenant):
            del self._num_tokens[tenant]
            self._num_idle += tenant in self._expected
        if not self._tenants:
            self._seen.clear()

    def __contains__(self, key: object) -> bool:
        return key in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def is_full(self) -> bool:
        """Whether no tenant has room."""
        return len(self) >= self.max_requests

    def most_requests(self, tenant: str) -> int:
        """Return the most requests that a tenant may have open while the others have none."""
        if not self._is_shared(tenant):
            return self.max_requests
        num_others = len(self._expected) - (tenant in self._expected)
        most_beside_one = min(
            (_SHARE * self.max_requests - 1) // (_SHARE + 1), self.max_requests - self._num_reserved(num_others) - 1
        )
        return 1 + max(0, most_beside_one)

    def _num_reserved(self, num_idle: int) -> int:
        return min(num_idle, max(1, self.max_requests // _RESERVED))

    def why_refused(self, tenant: str, num_tokens: int) -> str | None:
        """Return why there is no room for a request with so many prompt tokens; None if there is room."""
        return self._why_no_place(tenant) or self._why_no_tokens(tenant, num_tokens)

    def _why_no_place(self, tenant: str) -> str | None:
        num_free, num_own = self.max_requests - len(self), self._num_open[tenant]
        if self.is_full:
            return f"the queue is full: the engine has {len(self)} requests (num_slots + max_queue)"
        if not num_own or not self._is_shared(tenant):
            return None
        if num_own < _SHARE * num_free and num_free > self._num_reserved(self._num_idle):
            return None
        return (
            f"the share of {_named(tenant)} in the queue is full: it has {num_own} of {self.max_requests} places (num_slots + "
            f"max_queue), and the {num_free} free places are kept for other tenants"
        )

    def _why_no_tokens(self, tenant: str, num_tokens: int) -> str | None:
        if self.max_tokens is None or not self._num_waiting[tenant]:
            return None
        num_queued, num_own = self._num_tokens.total(), self._num_tokens[tenant]
        num_free = self.max_tokens - num_queued
        if num_tokens > num_free:
            return (
                f"the queue is full: {num_queued} prompt tokens are queued, and {num_tokens} more would exceed max_queue_tokens "
                f"({self.max_tokens})"
            )
        if num_own + num_tokens <= _SHARE * num_free or not self._is_shared(tenant):
            return None
        return (
            f"the share of {_named(tenant)} in the queue is full: {num_own} of its prompt tokens are queued, and {num_tokens} "
            f"more would leave too few of max_queue_tokens ({self.max_tokens}) to other tenants"
        )

    def _is_shared(self, tenant: str) -> bool:
        return any(len(known) > (tenant in known) for known in (self._expected, self._seen))


def _decrement(counter: Counter[str], tenant: str) -> int:
    """Subtract 1 and return the rest; a tenant without a rest is removed."""
    counter[tenant] -= 1
    if not counter[tenant]:
        del counter[tenant]
        return 0
    return counter[tenant]


def _named(tenant: str) -> str:
    return f"tenant {tenant!r}" if tenant else "requests without a tenant"


class Inbox:
    """Bounds: max_requests open requests, waiting or running; max_queue_tokens tokens of waiting prompts, None: no bound."""

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        self._shares = QueueShares(max_requests, max_queue_tokens)
        self._changed = threading.Condition()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None only wakes the thread
        self._looked_at: list[Command | None] = []  # by `wait`, on the engine's thread
        self._line: dict[int, tuple[Request | EmbeddingRequest, int, Wait]] = {}  # in order of arrival
        self._line_turns: dict[str, dict[int, None]] = {}  # keys in the line by tenant; the first tenant is next
        self._is_line_held = False
        self._line_deadlines: list[tuple[float, int]] = []  # a heap; also of requests that have left the line
        self._adapters: dict[int, Lora] = {}  # of the open requests that have any
        self._retired: set[str] = set()  # keys of adapters that no new request may use
        self.has_adapter: Callable[[str], bool] = lambda _: True  # whether an adapter of this key is loaded
        self.on_cancel: Callable[[int], None] = lambda _: None  # called with the key of each cancelled request
        self._is_closed = False
        self._next_key = 0
        self.num_refused = 0
        self.on_left: Callable[[int], object] = lambda _: None
        """Called with a request that has left the queue: it runs, or has ended."""

    def set_bounds(self, max_requests: int, max_queue_tokens: int | None) -> None:
        """Set the bounds, once the number of slots is known."""
        with self._changed:
            self._shares.max_requests, self._shares.max_tokens = max_requests, max_queue_tokens
            self._accept_from_line()

    def expect_tenants(self, tenants: Iterable[str]) -> None:
        """Set the tenants that may send requests and have places kept free; see `QueueShares`."""
        with self._changed:
            self._shares.expect(tenants)
            self._accept_from_line()

    def most_requests(self, tenant: str) -> int:
        """Return the most requests that a tenant may have open while the others have none."""
        with self._changed:
            return self._shares.most_requests(tenant)

    def next_key(self) -> int:
        """Return a key for a new request of this engine. Keys grow."""
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

        is_accepted: whether another front has accepted the request within its own bounds, so that it always has room here.
        """
        with self._changed:
            self.check_open()
            self._shares.note_tenant(request.options.tenant)
            why_refused = None
            if not is_accepted and (in_line := self._line_turns.get(request.options.tenant)):
                why_refused = f"the queue is full: {len(in_line)} requests wait for room in it"
            elif not is_accepted:
                why_refused = self._shares.why_refused(request.options.tenant, num_tokens)
            has_room = why_refused is None
            if not has_room and wait is None:
                self.num_refused += 1
                raise QueueFull(f"{why_refused}; try again later")
            self._note_adapters(request)
            if has_room:
                self._accept(request, num_tokens)
            elif wait is not None:
                self._line[request.key] = (request, num_tokens, wait)
                self._line_turns.setdefault(request.options.tenant, {})[request.key] = None
                at_s = request.deadline_s()
                if not math.isinf(at_s):
                    heapq.heappush(self._line_deadlines, (at_s, request.key))
                    self._wake()
                if request.cancelled:
                    self.put(Cancel(request.key))  # the cancel may have been taken before the request was in line

    def _accept(self, request: Request | EmbeddingRequest, num_tokens: int) -> None:
        self._shares.add(request.key, request.options.tenant, num_tokens)
        self._begin(request)

    def _accept_from_line(self) -> None:
        """Accept requests from the line while there is room; the tenants take turns. The caller holds the lock."""
        if self._is_line_held or self._is_closed:
            return
        has_accepted = True
        while has_accepted:
            has_accepted = False
            for tenant in tuple(self._line_turns):
                if self._shares.is_full:
                    return
                key = next(iter(self._line_turns[tenant]))
                if self._shares.why_refused(tenant, self._line[key][1]) is None:
                    self._leave_line(key)
                    has_accepted = True

    def _leave_line(self, key: int) -> None:
        """Accept a request if it is in line, whatever its place. The caller holds the lock."""
        found = self._line.pop(key, None)
        if found is None:
            return
        request, num_tokens, wait = found
        tenant = request.options.tenant
        in_line = self._line_turns.pop(tenant)
        del in_line[key]
        if in_line:
            self._line_turns[tenant] = in_line  # after the other tenants
        self._accept(request, num_tokens)
        if request.cancelled:
            self.put(Cancel(key))  # the cancel may have been taken already
        wait.on_accepted()
        if not self._line:
            self._line_deadlines.clear()

    def _wake(self) -> None:
        """Wake the engine's thread, which may wait for an earlier deadline or none."""
        self._commands.put(None)

    def _begin(self, request: Request | EmbeddingRequest) -> None:
        """Hand an accepted request over."""
        self._commands.put(Submit(request))

    def put(self, command: Command) -> None:
        """Add a command other than a request; never refused."""
        self._commands.put(command)
        if isinstance(command, Cancel):
            self.on_cancel(command.key)

    def take(self) -> list[Command]:
        """Return the commands since the last call, in order, without requests that have ended. Engine's thread."""
        found, self._looked_at = self._looked_at, []
        while not self._commands.empty():
            found.append(self._commands.get())
        commands = [command for command in found if command is not None]
        if self._line:
            with self._changed:
                for command in commands:
                    if isinstance(command, Cancel):
                        self._leave_line(command.key)
        return [
            command for command in commands if not isinstance(command, Submit) or command.request.key in self._shares
        ]

    def end_overdue_waits(self, now_s: float) -> None:
        """Accept the requests in the line after their deadlines; the scheduler ends them. Engine's thread."""
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

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for a command, at most timeout_s; None: without a limit. Return whether there is one. Engine's thread."""
        with contextlib.suppress(queue.Empty):
            self._looked_at.append(self._commands.get(timeout=timeout_s))
            return True
        return False

    def started(self, key: int) -> None:
        """Note that a request has left the queue."""
        with self._changed:
            self._shares.started(key)
            self._accept_from_line()
        self.on_left(key)

    def ended(self, key: int) -> None:
        """Note that a request has ended and makes room for another."""
        with self._changed:
            self._shares.ended(key)
            self._adapters.pop(key, None)
            self._accept_from_line()
            self._changed.notify_all()
        self.on_left(key)

    def retire_adapter(self, adapter: str, timeout_s: float | None) -> bool:
        """Refuse new requests that use an adapter, and wait until no open request uses it; timeout_s None: no limit.

        Returns whether no request uses it; after a timeout new requests may use it again.
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
        """Accept no more requests, and refuse the requests in the line; commands still pass."""
        with self._changed:
            self._is_closed = True
            line, self._line = self._line, {}
            self._line_turns.clear()
            self._line_deadlines.clear()
            for key in line:
                self._adapters.pop(key, None)
            self._changed.notify_all()
        for _, _, wait in line.values():
            wait.on_refused(self._stopped_error())

    def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until every accepted request has ended, and return whether they have."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._shares, timeout_s)

    @property
    def is_closed(self) -> bool:
        """Whether requests are refused for good."""
        return self._is_closed

    def is_open(self, key: int) -> bool:
        """Whether a request has not ended."""
        return key in self._shares

    @property
    def num_open(self) -> int:
        """Number of requests that were accepted and have not ended."""
        return len(self._shares)

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


class FrontInbox(Inbox):
    """An inbox that wakes a thread which waits for file descriptors: the supervisor's thread.

    Only a finalizer closes the pipe: a cancel may come after everything else has ended.
    """

    def __init__(self, max_requests: int, max_queue_tokens: int | None = None) -> None:
        super().__init__(max_requests, max_queue_tokens)
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
            weakref.finalize(self, os.close, end).atexit = False
        self._stopped: EngineStopped | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable if a command has come since `calm`."""
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
        """Add a command other than a request, and wake the thread."""
        super().put(command)
        self.wake()

    def close_for(self, reason: EngineStopped) -> None:
        """Accept no more requests, and raise this error for new requests."""
        self._stopped = reason
        self.close()

    def _stopped_error(self) -> EngineStopped:
        return super()._stopped_error() if self._stopped is None else type(self._stopped)(str(self._stopped))
