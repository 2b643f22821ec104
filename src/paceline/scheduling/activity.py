"""What an engine does, for people who watch it: its last ticks, slots, queue, radix tree and memory. On the engine's thread.

Nothing is recorded unless someone has asked within the last `LEASE_S`: the log of an engine that is not watched costs a look
at a flag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from paceline.scheduling.telemetry import SlotsSnapshot, TickRecord
from paceline.streaming.chunk import FinishReason

if TYPE_CHECKING:
    from paceline.kv_cache import KVCache, Namespace, TreeView
    from paceline.scheduling.plan import Row
    from paceline.scheduling.sequence import Request, Sequence

LEASE_S: Final = 5.0
"""A log that no question has been put to for so long ends."""

MOST_DELAY_S: Final = 1.0
"""Of a reply: less than `LEASE_S`, so that the log stays on until then."""

MOST_TICKS: Final = 1024
MOST_MARKS: Final = 256
MOST_WAITING: Final = 64
MOST_OWNERS: Final = 32
MAX_NODES: Final = 4096

MarkKind = Literal["started", "preempted", "ended", "cancelled", "failed"]

_ENDINGS: Final[Mapping[FinishReason, MarkKind]] = {
    FinishReason.STOP: "ended",
    FinishReason.LENGTH: "ended",
    FinishReason.CANCELLED: "cancelled",
}


class TickActivity(msgspec.Struct, frozen=True):
    """A tick. number: its place in the log. tenants: of each row; empty where none has one."""

    number: int
    record: TickRecord
    tenants: tuple[str, ...] = ()


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a sequence beside ticks. number: its place in the log; slot: None for one that ended in the queue.

    reason: of one that ended, was cancelled or failed.
    """

    number: int
    what: MarkKind
    key: int
    choice: int
    slot: int | None
    now_s: float
    tenant: str
    reason: FinishReason | None = None


class WaitingSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence without a slot. waits_for: the key of the request that computes its prefix just now."""

    key: int
    request_id: str | None
    choice: int
    tenant: str
    num_prompt_tokens: int
    num_generated: int
    waiting_s: float
    is_preempted: bool
    waits_for: int | None
    priority: int


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the radix tree, as `NodeView` has it. running: key and choice of sequences, `MOST_OWNERS` at most."""

    id: int
    parent: int | None
    start: int
    end: int
    running: tuple[tuple[int, int], ...]
    num_cached: int
    on_device: bool
    on_host: bool
    has_state: bool


class TenantTree(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's part of the radix tree. num_nodes, num_tokens: with those that are not shown, as far as they were counted."""

    tenant: str
    nodes: tuple[TreeNode, ...]
    num_nodes: int
    num_tokens: int
    is_complete: bool


_Entry = TypeVar("_Entry", TickActivity, Mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActivity:
    """What an engine does after a tick, and what it did before.

    Attributes:
        started_s: When the log's numbers began. Another value than before: the engine began anew, in another process or after
            a failure of its own, and what was known of it is void.
        now_s: Seconds on the engine's clock.
        last_number: The number of the newest tick or mark: what to ask from the next time.
        slots: All slots.
        waiting: Sequences in their turn, `MOST_WAITING` at most.
        num_waiting: All sequences without a slot; num_embedding: embedding requests.
        ticks, marks: Those after the number that was asked from, as far as they are kept.
        trees: By tenant; None where no tree was asked for.
        num_cells: Cells in use; num_free: not in use, None where memory is not made of cells; num_running_cells: in use by
            running sequences.
        host_bytes: In host memory.
    """

    started_s: float
    now_s: float
    last_number: int
    slots: SlotsSnapshot
    waiting: tuple[WaitingSequence, ...] = ()
    num_waiting: int = 0
    num_embedding: int = 0
    ticks: tuple[TickActivity, ...] = ()
    marks: tuple[Mark, ...] = ()
    trees: tuple[TenantTree, ...] | None = None
    num_cells: int = 0
    num_free: int | None = None
    num_running_cells: int = 0
    host_bytes: int = 0


class ActivityLog:
    """The last ticks and marks of an engine, numbered in one row. started_s: the engine's clock at its beginning."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.is_on = False
        self.last_number = 0
        self._asked_s = started_s
        self._ticks: deque[TickActivity] = deque(maxlen=MOST_TICKS)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)

    def ask(self, now_s: float) -> None:
        """Record from now on, for `LEASE_S` at least."""
        self.is_on, self._asked_s = True, now_s

    def ticks(self, after: int) -> tuple[TickActivity, ...]:
        """Return the ticks behind a number."""
        return _behind(self._ticks, after)

    def marks(self, after: int) -> tuple[Mark, ...]:
        """Return the marks behind a number."""
        return _behind(self._marks, after)

    def add_tick(self, record: TickRecord, tenants: Mapping[int, str], now_s: float) -> None:
        """Record a tick, and end the log where it has not been asked for a while. tenants: of requests by key."""
        if now_s - self._asked_s > LEASE_S:
            self.is_on = False
            self._ticks.clear()
            self._marks.clear()
            return
        owners = tuple([tenants[row.key] for row in record.rows]) if any(tenants.values()) else ()
        self.last_number += 1
        self._ticks.append(TickActivity(self.last_number, record, owners))

    def started(self, sequence: Sequence, slot: int, now_s: float) -> None:
        """Record that a sequence got a slot."""
        self._add_mark("started", sequence, slot, now_s)

    def preempted(self, sequence: Sequence, slot: int, now_s: float) -> None:
        """Record that a sequence lost its slot and will resume."""
        self._add_mark("preempted", sequence, slot, now_s)

    def ended(self, sequence: Sequence, slot: int | None, now_s: float) -> None:
        """Record the end of a sequence, whose reason is latched. slot: None for one that waited."""
        assert sequence.reason is not None  # noqa: S101 - latched by the caller
        self._add_mark(_ENDINGS.get(sequence.reason, "failed"), sequence, slot, now_s)

    def _add_mark(self, what: MarkKind, sequence: Sequence, slot: int | None, now_s: float) -> None:
        request = sequence.request
        self.last_number += 1
        mark = Mark(
            number=self.last_number,
            what=what,
            key=request.key,
            choice=sequence.choice,
            slot=slot,
            now_s=now_s,
            tenant=request.options.tenant,
            reason=sequence.reason,
        )
        self._marks.append(mark)


def _behind(entries: deque[_Entry], after: int) -> tuple[_Entry, ...]:
    num = 0
    for entry in reversed(entries):
        if entry.number <= after:
            break
        num += 1
    return tuple(islice(entries, len(entries) - num, None))


def tenants_of(rows: Iterable[Row]) -> dict[int, str]:
    """Return the tenants of the rows' requests by key, before the rows are applied: that may end the requests."""
    return {row.sequence.request.key: row.sequence.request.options.tenant for row in rows}


def waiting_sequences(queue: Iterable[Sequence], now_s: float) -> tuple[WaitingSequence, ...]:
    """Return the first `MOST_WAITING` of a queue as records."""
    return tuple(_waiting(one, now_s) for one in islice(queue, MOST_WAITING))


def _waiting(sequence: Sequence, now_s: float) -> WaitingSequence:
    request, waits_for = sequence.request, sequence.waits_for
    pending = waits_for.sequence.request.key if waits_for is not None and waits_for.is_pending else None
    return WaitingSequence(
        key=request.key,
        request_id=request.options.request_id,
        choice=sequence.choice,
        tenant=request.options.tenant,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated=sequence.num_tokens - sequence.num_prompt_tokens,
        waiting_s=now_s - request.submitted_s,
        is_preempted=sequence.num_preempted > 0,
        waits_for=pending,
        priority=sequence.priority,
    )


def tenant_trees(
    kv_cache: KVCache, running: Iterable[Sequence], requests: Mapping[int, Request], max_nodes: int
) -> tuple[TenantTree, ...]:
    """Return the radix tree by tenant, at most max_nodes of each. requests: the open ones by key."""
    names: dict[object, tuple[int, int]] = {one: (one.request.key, one.choice) for one in running}

    def tenant_of(namespace: Namespace) -> str:
        if len(namespace) == 1:  # of a request that shares nothing: its key
            request = requests.get(namespace[0]) if isinstance(namespace[0], int) else None
            return "" if request is None else request.options.tenant
        return str(namespace[1])

    views, is_whole = kv_cache.view(tenant_of, max_nodes)
    return tuple(_tenant_tree(tenant, view, names, is_whole=is_whole) for tenant, view in views.items())


def _tenant_tree(tenant: str, view: TreeView, names: Mapping[object, tuple[int, int]], *, is_whole: bool) -> TenantTree:
    nodes = tuple(
        TreeNode(
            id=one.id,
            parent=one.parent,
            start=one.start,
            end=one.end,
            running=tuple([names[owner] for owner in one.running[:MOST_OWNERS] if owner in names]),
            num_cached=one.num_cached,
            on_device=one.on_device,
            on_host=one.on_host,
            has_state=one.has_state,
        )
        for one in view.nodes
    )
    return TenantTree(
        tenant=tenant,
        nodes=nodes,
        num_nodes=view.num_nodes,
        num_tokens=view.num_tokens,
        is_complete=is_whole and view.is_complete,
    )
