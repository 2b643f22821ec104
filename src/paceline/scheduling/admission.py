"""Which sequences run: the queue, the slots, admission, preemption, and the end of requests.

A request ends once, on every path, with everything that was held back: the reason is latched, held-back text is flushed, the last
chunk goes out, then slot and cells are released.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec

from paceline.errors import PacelineError
from paceline.kv_cache import KVCache, NotAdmitted, PrefixMatch
from paceline.scheduling.fair_shares import FairShares
from paceline.scheduling.records import Delta, Event, Released, Started, due_reason
from paceline.scheduling.telemetry import Telemetry
from paceline.sequence import Request, Sequence
from paceline.streaming.chunk import FinishReason


class WaitingQueue:
    """The waiting sequences: first come first served within a priority; waiting makes up for priority, so none starves.

    Tenants share the slots: the next sequence belongs to the tenant with the lowest turn (`FairShares.turn`), and tenants with
    equal ones alternate. Priority and arrival order the sequences of one tenant.

    sequences: of all tenants by priority and arrival; read-only.
    """

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self._of_tenants: dict[str, list[Sequence]] = {}  # the tenant whose last turn is longest ago comes first

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self.sequences))

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in its turn; a preempted sequence comes before all that arrived later."""
        for sequences in (self.sequences, self._of_tenants.setdefault(_tenant(sequence), [])):
            insort(sequences, sequence, key=lambda waiting: waiting.turn_key)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence, if it waits."""
        own = self._of_tenants.get(_tenant(sequence), [])
        if sequence in own:
            own.remove(sequence)
            self.sequences.remove(sequence)
            if not own:
                del self._of_tenants[_tenant(sequence)]

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that gets a slot; the other tenants are next."""
        self.discard(sequence)
        own = self._of_tenants.pop(_tenant(sequence), None)
        if own is not None:
            self._of_tenants[_tenant(sequence)] = own

    @property
    def tenants(self) -> set[str]:
        """The tenants with waiting sequences that are not paused."""
        waiting = self._of_tenants.items()
        return {tenant for tenant, own in waiting if not all(sequence.request.is_paused for sequence in own)}

    def in_turn(self, turn_of: Callable[[str], float]) -> Iterator[Sequence]:
        """Yield the waiting sequences in the order in which they get slots.

        turn_of: returns the turn of a tenant (`Slots.turn_of`); the order follows it and `take` between two steps.
        """
        if len(self._of_tenants) <= 1:
            yield from tuple(self.sequences)
            return
        waiting = {tenant: deque(sequences) for tenant, sequences in self._of_tenants.items()}
        while waiting:
            tenants = [tenant for tenant in self._of_tenants if tenant in waiting]
            tenant = min(tenants, key=turn_of)
            yield waiting[tenant].popleft()
            if not waiting[tenant]:
                del waiting[tenant]


class Slots:
    """Slots 0 to num - 1; the lowest free slot is taken first.

    Attributes:
        running: Sequences with a slot, in order of admission.
        num_running: Their number by tenant.
    """

    def __init__(self, num: int, shares: FairShares) -> None:
        self._num, self._shares = num, shares
        self._free = list(range(num))
        self.running: list[Sequence] = []
        self.num_running: Counter[str] = Counter()

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def turn_of(self, tenant: str) -> float:
        """Return the turn of a tenant for the next slot; the lowest is first."""
        return self._shares.turn(tenant, self.num_running[tenant])

    def allocate(self, sequence: Sequence, tick: int) -> int:
        """Give a sequence a slot and return the slot."""
        slot = sequence.slot = heapq.heappop(self._free)
        sequence.last_tick = tick
        self.running.append(sequence)
        self.num_running[_tenant(sequence)] += 1
        return slot

    def release(self, sequence: Sequence) -> int:
        """Take the slot of a sequence back and return the slot."""
        slot = sequence.slot
        assert slot is not None  # noqa: S101 - it runs
        self.running.remove(sequence)
        self.num_running[_tenant(sequence)] -= 1
        if not self.num_running[_tenant(sequence)]:
            del self.num_running[_tenant(sequence)]
        heapq.heappush(self._free, slot)
        sequence.slot = None
        return slot

    def next_victim(self) -> Sequence:
        """Return the running sequence to preempt first.

        A paused sequence comes first, then a sequence of a tenant with several, of the tenant with most by weight, of the tenant
        with the youngest. Of one tenant the least important and youngest sequence is preempted.
        """
        shares, by_order = self._shares, sorted(self.running, key=lambda sequence: sequence.order)
        youngest = {_tenant(sequence): sequence.order for sequence in by_order}

        def key(running: Sequence) -> tuple[object, ...]:
            tenant = _tenant(running)
            num = self.num_running[tenant]
            of_tenant = (num > 1, shares.weighted(tenant, num), shares.time(tenant), youngest[tenant])
            return (running.request.is_paused, *of_tenant, -running.priority, running.order)

        return max(self.running, key=key)

    def is_owed_to(self, sequence: Sequence) -> bool:
        """Return whether the next victim gives its slot up for a sequence of a tenant that has none.

        The victim's tenant keeps another slot, and has computed at least as much by weight.
        """
        if not self._shares.is_shared or self.num_running[_tenant(sequence)]:
            return False
        victim = _tenant(self.next_victim())
        return self.num_running[victim] > 1 and self._shares.time(_tenant(sequence)) <= self._shares.time(victim)

    def check(self) -> None:
        """Assert that every slot is either free or used."""
        used = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted([*self._free, *used]) == list(range(self._num))  # noqa: S101 - our own invariants
        assert self.num_running == Counter(map(_tenant, self.running))  # noqa: S101


class Admission:
    """Moves sequences between queue and slots. No sequence overtakes one that only lacks cells.

    A tenant without a slot takes a slot from a tenant with several (`Slots.is_owed_to`).
    """

    def __init__(
        self, kv_cache: KVCache, slots: Slots, queue: WaitingQueue, telemetry: Telemetry, shares: FairShares
    ) -> None:
        self._kv_cache, self._slots, self._queue, self._telemetry = kv_cache, slots, queue, telemetry
        self._shares = shares

    def admit(self, now_s: float, tick: int) -> list[Event]:
        """Start waiting sequences in turn, as many as slots and cells allow."""
        events: list[Event] = []
        slots = self._slots
        has_several = len(slots.num_running) < len(slots.running)  # whether any tenant has
        is_owed = self._shares.is_shared and has_several and not self._queue.tenants <= slots.num_running.keys()
        if not (slots.num_free or self._has_paused or is_owed):
            return events
        for sequence in self._queue.in_turn(slots.turn_of):
            if sequence.request.is_paused:
                continue
            if not (slots.num_free or self._has_paused or slots.is_owed_to(sequence)):
                break
            match = self._match(sequence, now_s)
            while (self._has_paused and match is NotAdmitted.NO_CELLS) or (
                isinstance(match, PrefixMatch)
                and not slots.num_free
                and (self._has_paused or slots.is_owed_to(sequence))
            ):
                self.preempt(now_s)
                match = self._match(sequence, now_s)
            if match in (NotAdmitted.PREFIX_PENDING, NotAdmitted.READ_PENDING):
                continue
            if not isinstance(match, PrefixMatch) or not slots.num_free:
                break
            events += self._start(sequence, match, now_s, tick)
        return events

    def preempt(self, now_s: float) -> None:
        """Take slot and cells from the next victim, which waits and resumes later."""
        victim = self._slots.next_victim()
        num_computed_tokens = victim.num_computed_tokens
        slot = self._slots.release(victim)
        self._kv_cache.preempt(victim, now_s)
        self._requeue(victim, slot, num_computed_tokens, now_s)

    def restart(self, sequence: Sequence, now_s: float) -> None:
        """Take slot and cells from a sequence after its copy or load failed; it waits, then computes all of its tokens."""
        request = sequence.request
        slot = self._slots.release(sequence)
        self._kv_cache.discard(sequence)
        if sequence.choice == 0 and request.progress.first_token_s is None:
            request.progress.num_cached, request.progress.cached_from = 0, None
        self._requeue(sequence, slot, 0, now_s)

    def _requeue(self, sequence: Sequence, slot: int, num_computed_tokens: int, now_s: float) -> None:
        sequence.num_taken_back = 0
        sequence.num_preempted += 1
        self._queue.add(sequence)
        self._telemetry.preempted(sequence, slot, num_computed_tokens, now_s)

    def _match(self, sequence: Sequence, now_s: float) -> PrefixMatch | NotAdmitted:
        return self._kv_cache.match(sequence, now_s, is_alone=not self._slots.running)

    @property
    def _has_paused(self) -> bool:
        """Whether a running sequence is paused; it could wait without a slot."""
        return any(sequence.request.is_paused for sequence in self._slots.running)

    def _start(self, sequence: Sequence, match: PrefixMatch, now_s: float, tick: int) -> list[Event]:
        request, sink = sequence.request, self._telemetry.sink
        self._queue.take(sequence)
        slot = self._slots.allocate(sequence, tick)
        is_first = request.progress.started_s is None
        if is_first:
            request.progress.started_s = now_s
        self._telemetry.started(sequence, slot, now_s)
        self._kv_cache.allocate(sequence, match, now_s)
        if match.num_tokens:
            sink.prefix_shared(request.key, sequence.choice, match.num_tokens, match.source_name)
            if is_first:
                progress = request.progress
                progress.num_cached, progress.cached_from = match.num_tokens, match.source_name
        return [Started(request.key)] if is_first else []


def _tenant(sequence: Sequence) -> str:
    return sequence.request.options.tenant


class RequestFinisher:
    """Takes sequences and requests out of queue, slots and cache, and returns the events of their end.

    requests: open requests by key.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        slots: Slots,
        queue: WaitingQueue,
        telemetry: Telemetry,
        requests: dict[int, Request],
        shares: FairShares,
    ) -> None:
        self._kv_cache, self._slots, self._queue, self._telemetry = kv_cache, slots, queue, telemetry
        self._requests, self._shares = requests, shares

    def poll(self, now_s: float, *, is_stopping: bool) -> list[Event]:
        """Finish requests that are cancelled, past a deadline or read too slowly; all requests when stopping."""
        events: list[Event] = []
        for request in tuple(self._requests.values()):
            reason = due_reason(request, now_s, is_stopping=is_stopping)
            if reason is not None:
                events += self.finish_request(request, reason, now_s)
        return events

    def fail_all(self, error: PacelineError, now_s: float, failures: list[Exception]) -> list[Event]:
        """Finish every request with an error; exceptions raised on the way are added to `failures`."""
        events: list[Event] = []
        for request in tuple(self._requests.values()):
            try:
                events += self.finish_request(request, FinishReason.ERROR, now_s, error)
            except Exception as failure:  # noqa: BLE001 - the caller looks at it
                failures.append(failure)
        return events

    def finish_request(
        self, request: Request, reason: FinishReason, now_s: float, error: PacelineError | None = None
    ) -> list[Event]:
        """Finish the open choices of a request."""
        events: list[Event] = []
        for sequence in request.sequences:
            if sequence.reason is None:
                sequence.end(reason, error)
                events += self.finish(sequence, now_s)
        return events

    def finish(self, sequence: Sequence, now_s: float) -> list[Event]:
        """Return the last chunk of a sequence with a latched reason, and release its slot and cells."""
        if sequence.output.finish():
            sequence.end(FinishReason.STOP)
        assert sequence.reason is not None  # noqa: S101 - latched by the caller
        chunk = sequence.output.last_chunk(sequence.reason, sequence.error)
        request = sequence.request
        request.num_open -= 1
        slot = None
        if sequence.slot is not None:
            slot = self._slots.release(sequence)
            self._kv_cache.release(sequence)
        else:
            self._queue.discard(sequence)
        self._telemetry.ended(sequence, slot, now_s)
        if request.num_open:
            return [Delta(request.key, chunk, choice=sequence.choice)]
        usage = request.usage(now_s)
        self._retire(request, now_s)
        chunk = msgspec.structs.replace(chunk, usage=usage)
        return [Delta(request.key, chunk, is_last=True, choice=sequence.choice), Released(request.key)]

    def next_deadline_s(self) -> float:
        """Return the time of the first deadline of a request; infinite without deadlines."""
        return min(
            (request.deadline_s() for request in self._requests.values() if request.has_deadline), default=math.inf
        )

    def _retire(self, request: Request, now_s: float) -> None:
        del self._requests[request.key]
        self._shares.remove(request)
        worst = min(request.sequences, key=lambda sequence: (sequence.reason or FinishReason.LENGTH).rank)
        assert worst.reason is not None  # noqa: S101 - all have ended
        self._telemetry.request_ended(request.key, worst.reason, request.usage(now_s), now_s, worst.error)
        for sequence in request.sequences:
            del sequence.request
