"""Work in progress: HTTP requests, bytes of their bodies and texts, running requests by id, and the rate of completion.

On the event loop.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeVar


class InFlight:
    """Counter of HTTP requests in progress, of all tenants and of each."""

    def __init__(self) -> None:
        self.count = 0
        self._of_tenants: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no HTTP request is in progress."""
        await self._idle.wait()

    def count_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests in progress."""
        return self._of_tenants[tenant]

    @contextmanager
    def counting(self, tenant: str) -> Iterator[None]:
        """Count a request while the block runs."""
        self.count += 1
        self._of_tenants[tenant] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            self._of_tenants[tenant] -= 1
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]
            if not self.count:
                self._idle.set()


class RegisteredRequest(Protocol):
    """A request that can be found by its id and cancelled. num_parts: the number of its engine requests."""

    request_id: str
    tenant: str
    num_parts: int

    def cancel(self) -> None:
        """Cancel it; its stream ends with a terminal event."""


@dataclass(slots=True, eq=False)
class PendingCall:
    """A `RegisteredRequest` that waits for a future."""

    request_id: str
    tenant: str
    future: asyncio.Future[Any]
    is_cancelled: bool = False
    num_parts: int = 1

    def cancel(self) -> None:
        """Cancel the future."""
        self.is_cancelled = True
        self.future.cancel()


class RequestRegistry:
    """Accepted requests whose response is not complete, by id. Ids are the clients' and need not be unique."""

    def __init__(self, completion_rate: CompletionRate) -> None:
        self._by_id: dict[str, list[RegisteredRequest]] = {}
        self._completion_rate = completion_rate

    @property
    def count(self) -> int:
        """Number of requests."""
        return sum(map(len, self._by_id.values()))

    def add(self, request: RegisteredRequest) -> None:
        """Register a request and count its parts as started."""
        self._by_id.setdefault(request.request_id, []).append(request)
        self._completion_rate.start(request.num_parts)

    def remove(self, request: RegisteredRequest) -> None:
        """Unregister a request and count its parts as finished; a second call does nothing."""
        same = self._by_id.get(request.request_id, [])
        if request in same:
            same.remove(request)
            self._completion_rate.finish(request.num_parts)
        if not same:
            self._by_id.pop(request.request_id, None)

    def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        """Cancel all requests with this id, of one tenant if given; return whether there was any."""
        requests = [
            request for request in self._by_id.get(request_id, ()) if tenant is None or request.tenant == tenant
        ]
        for request in requests:
            request.cancel()
        return bool(requests)

    def cancel_all(self) -> None:
        """Cancel every request."""
        for request_id in tuple(self._by_id):
            self.cancel(request_id)


MIN_RETRY_S, MAX_RETRY_S = 1, 60
"""Bounds of Retry-After in seconds; some clients give up beyond."""

_WINDOW_S = 60.0
_MAX_FINISHES = 1024  # that are remembered


class CompletionRate:
    """Rate at which requests finish, over the last minute and no further back than the last idle moment."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_open = 0
        self._busy_since = 0.0
        self._ends: deque[float] = deque(maxlen=_MAX_FINISHES)

    def start(self, number: int) -> None:
        """Count `number` requests as started."""
        if not self._num_open:
            self._busy_since = self._clock()
            self._ends.clear()
        self._num_open += number

    def finish(self, number: int) -> None:
        """Count `number` requests as finished, for whatever reason."""
        self._num_open -= number
        self._ends.extend([self._clock()] * min(number, _MAX_FINISHES))

    def estimate_wait_s(self, number: int) -> int:
        """Return how long until `number` more requests finish, in whole seconds from 1 to 60.

        If none has finished yet, that is the time since the first one started.
        """
        now = self._clock()
        if not self._num_open:
            return MIN_RETRY_S
        since = max(self._busy_since, now - _WINDOW_S)
        if len(self._ends) == _MAX_FINISHES:
            since = max(since, self._ends[0])
        num_ended = sum(end > since for end in self._ends)
        return _whole_seconds((now - since) * (number / num_ended if num_ended else 1))


def estimate_remaining_s(share: float, elapsed_s: float) -> int:
    """Return the remaining time of work if a share of it (0 to 1) took `elapsed_s`, in whole seconds from 1 to 60."""
    return _whole_seconds(elapsed_s * (1 - share) / share if share > 0 else elapsed_s)


def _whole_seconds(seconds: float) -> int:
    return math.ceil(min(max(seconds, MIN_RETRY_S), MAX_RETRY_S))


class ByteBudget:
    """The bytes that the bodies of all requests may have together, with the images that are fetched for them.

    Attributes:
        max_bytes: The bytes of all requests together.
        free_bytes: The bytes that no request has.
        is_shared: Whether one tenant leaves room for others. The only body of a tenant may take all free bytes; several bodies of
            a tenant may take as many bytes together as stay free.
        small_texts: The texts of small requests that are rendered and tokenised at once.
        large_texts: The same of large requests.
    """

    def __init__(self, max_bytes: int, *, is_shared: bool = False) -> None:
        self.max_bytes = self.free_bytes = max_bytes
        self.is_shared = is_shared
        self.small_texts, self.large_texts = TurnQueue(MAX_SMALL_TEXTS_BYTES), TurnQueue(MAX_TEXT_BYTES)
        self._num_bytes: Counter[str] = Counter()

    def reserve(self, tenant: str = "") -> ByteReservation:
        """Return a reservation of no bytes yet."""
        return ByteReservation(self, tenant)

    def texts_queue(self, num_bytes: int) -> TurnQueue:
        """Return the queue in which a request waits until its texts, of so many bytes, are tokenised."""
        return self.small_texts if num_bytes <= SMALL_TEXT_BYTES else self.large_texts

    def has_room(self, tenant: str, num_bytes: int, num_own: int) -> bool:
        """Return whether a tenant may take `num_bytes` more for a body that has `num_own`."""
        of_tenant, free = self._num_bytes[tenant], self.free_bytes - num_bytes
        has_share = not self.is_shared or of_tenant == num_own or of_tenant + num_bytes <= free
        return free >= 0 and has_share

    def take(self, tenant: str, num_bytes: int) -> None:
        """Count bytes as a tenant's; a negative number gives them back."""
        self.free_bytes -= num_bytes
        self._num_bytes[tenant] += num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]


class ByteReservation:
    """One request's bytes of a budget; a context manager, which releases them."""

    current: Final[ContextVar[ByteReservation | None]] = ContextVar("byte_reservation", default=None)
    """Of the request that is being served, for data that are read besides its body."""

    def __init__(self, budget: ByteBudget, tenant: str) -> None:
        self.budget, self.num_bytes = budget, 0
        self._tenant = tenant

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more can be reserved now."""
        return self.budget.has_room(self._tenant, num_bytes, self.num_bytes)

    def grow(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` more; return False, and reserve none, if fewer are free."""
        if not self.has_room(num_bytes):
            return False
        self.budget.take(self._tenant, num_bytes)
        self.num_bytes += num_bytes
        return True

    def release(self) -> None:
        """Release all bytes. Idempotent."""
        self.budget.take(self._tenant, -self.num_bytes)
        self.num_bytes = 0

    def __enter__(self) -> Self:
        self._token = self.current.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.current.reset(self._token)
        self.release()


SMALL_TEXT_BYTES: Final = 64 << 10
"""A request with at most this many bytes does not wait until larger requests are tokenised."""

MAX_TEXT_BYTES: Final = 2 << 20
"""Bytes of larger requests that are tokenised at once. Tokenising takes up to 144 bytes of memory for each of them."""

MAX_SMALL_TEXTS_BYTES: Final = 1 << 20
"""The same of small requests."""


class TurnQueue:
    """Requests that share a number of bytes, or of slots; a request waits until there is room for it.

    Tenants take turns, and the requests of one tenant are served in order. A tenant with several requests under way has at most
    half of the bytes, or `max_of_tenant`. A request with more bytes than there are counts as all of them.
    """

    def __init__(self, max_bytes: int, max_of_tenant: int | None = None) -> None:
        self._max_bytes = self._free_bytes = max_bytes
        self._max_of_tenant = max_bytes // 2 if max_of_tenant is None else max_of_tenant
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}  # tenants in the order of their turns

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait."""
        return sum(not turn.done() for queue in self._waiting.values() for _, turn in queue)

    def enter(self, tenant: str, num_bytes: int) -> asyncio.Future[None]:
        """Return a future that is done when it is the request's turn; cancelling it before leaves the queue.

        Call `leave` after a turn.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn.add_done_callback(lambda done: self._admit() if done.cancelled() else None)
        self._waiting.setdefault(tenant, deque()).append((min(num_bytes, self._max_bytes), turn))
        self._admit()
        return turn

    def leave(self, tenant: str, num_bytes: int) -> None:
        """End the turn of a request that had entered with the same arguments."""
        self._count(tenant, -min(num_bytes, self._max_bytes))
        self._admit()

    def _admit(self) -> None:
        while self._begin_turn():
            pass

    def _begin_turn(self) -> bool:
        """Begin the next turn if there is room. No request overtakes a request that waits for free bytes alone."""
        for tenant, queue in tuple(self._waiting.items()):
            while queue and queue[0][1].done():
                queue.popleft()
            if not queue:
                del self._waiting[tenant]
                continue
            num_bytes, turn = queue[0]
            running = self._running[tenant]
            if running and running + num_bytes > self._max_of_tenant:
                continue
            if num_bytes > self._free_bytes:
                return False
            queue.popleft()
            del self._waiting[tenant]
            if queue:
                self._waiting[tenant] = queue
            self._count(tenant, num_bytes)
            turn.set_result(None)
            return True
        return False

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._free_bytes -= num_bytes
        self._running[tenant] += num_bytes
        if not self._running[tenant]:
            del self._running[tenant]


CHECK_WANTED: Final[ContextVar[Callable[[], None]]] = ContextVar("check_wanted", default=lambda: None)
"""Raises `ClientDisconnected`, in threads that prepare a request, when its client has disconnected."""

T = TypeVar("T")


def while_wanted(parts: Iterable[T]) -> Iterator[T]:
    """Yield the parts of a request as long as its client is connected. Raises as `CHECK_WANTED`."""
    check = CHECK_WANTED.get()
    for part in parts:
        check()
        yield part
