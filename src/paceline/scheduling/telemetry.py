"""Reports of the scheduler: to instruments, and to people who watch an engine. On the engine's thread.

The log for watchers records nothing unless someone has asked within the last `LEASE_S`: without watchers it costs one look at
a flag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, TypeVar

from paceline.errors import PacelineError
from paceline.kv_cache import KVCache, Namespace, TenantTree
from paceline.scheduling.records import (
    EmbeddingPlan,
    EndRecord,
    Mark,
    MarkKind,
    PlanOutput,
    RowRecord,
    SlotsSnapshot,
    SlotView,
    StepPlan,
    TelemetrySink,
    TickActivity,
    TickRecord,
    WaitingSequence,
)
from paceline.sequence import Limits, Request, Row, RowOutput, Sequence
from paceline.streaming.chunk import FinishReason, Usage

LEASE_S: Final = 5.0
"""Seconds without a question after which the log ends."""

MOST_TICKS: Final = 1024
MOST_MARKS: Final = 256
MOST_WAITING: Final = 64

_ENDINGS: Final[Mapping[FinishReason, MarkKind]] = {
    FinishReason.STOP: "ended",
    FinishReason.LENGTH: "ended",
    FinishReason.REPETITION: "ended",
    FinishReason.CANCELLED: "cancelled",
}
_Entry = TypeVar("_Entry", TickActivity, Mark)


class ActivityLog:
    """The last ticks and marks of an engine, in one sequence of numbers. started_s: the engine's clock at its beginning."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self.is_on = False
        self.last_number = 0
        self._asked_s = started_s
        self._ticks: deque[TickActivity] = deque(maxlen=MOST_TICKS)
        self._marks: deque[Mark] = deque(maxlen=MOST_MARKS)

    def ask(self, now_s: float) -> None:
        """Record from now on, for at least `LEASE_S`."""
        self.is_on, self._asked_s = True, now_s

    def ticks(self, after: int) -> tuple[TickActivity, ...]:
        """Return the ticks after a number."""
        return _after(self._ticks, after)

    def marks(self, after: int) -> tuple[Mark, ...]:
        """Return the marks after a number."""
        return _after(self._marks, after)

    def add_tick(self, record: TickRecord, tenants: Mapping[int, str], now_s: float) -> None:
        """Record a tick, or end the log if no reader has asked for a while. tenants: of requests by key."""
        if now_s - self._asked_s > LEASE_S:
            self.is_on = False
            self._ticks.clear()
            self._marks.clear()
            return
        owners = tuple([tenants[row.key] for row in record.rows]) if any(tenants.values()) else ()
        self.last_number += 1
        self._ticks.append(TickActivity(self.last_number, record, owners))

    def add_mark(self, what: MarkKind, sequence: Sequence, slot: int | None, now_s: float) -> None:
        """Record an event in the life of a sequence."""
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


def _after(entries: deque[_Entry], number: int) -> tuple[_Entry, ...]:
    num = 0
    for entry in reversed(entries):
        if entry.number <= number:
            break
        num += 1
    return tuple(islice(entries, len(entries) - num, None))


class Telemetry:
    """Makes records of the scheduler's state, for instruments (`sink`) and for watchers (`log`)."""

    def __init__(self, sink: TelemetrySink, limits: Limits, log: ActivityLog) -> None:
        self.sink, self.log = sink, log
        self._limits = limits
        self._index = 0
        self.num_running = 0
        self.num_waiting = 0

    @property
    def wants_ticks(self) -> bool:
        """Whether anyone wants reports of ticks."""
        return self.log.is_on or self.sink.wants_ticks

    def started(self, sequence: Sequence, slot: int, now_s: float) -> None:
        """Report that a sequence got a slot, for the first time or again."""
        self.sink.request_started(sequence.request.key, sequence.choice, slot, now_s)
        if self.log.is_on:
            self.log.add_mark("started", sequence, slot, now_s)

    def preempted(self, sequence: Sequence, slot: int, num_computed_tokens: int, now_s: float) -> None:
        """Report that a sequence lost its slot and will resume."""
        key = sequence.request.key
        self.sink.slot_freed(key, sequence.choice, slot, now_s)
        self.sink.preempted(key, sequence.choice, num_computed_tokens, now_s)
        if self.log.is_on:
            self.log.add_mark("preempted", sequence, slot, now_s)

    def ended(self, sequence: Sequence, slot: int | None, now_s: float) -> None:
        """Report the end of a sequence. Its reason is latched. slot: None if it waited."""
        if slot is not None:
            self.sink.slot_freed(sequence.request.key, sequence.choice, slot, now_s)
        if self.log.is_on:
            assert sequence.reason is not None  # noqa: S101 - latched by the caller
            self.log.add_mark(_ENDINGS.get(sequence.reason, "failed"), sequence, slot, now_s)

    def request_ended(
        self, key: int, reason: FinishReason, usage: Usage, now_s: float, error: PacelineError | None
    ) -> None:
        """Report the end of a request."""
        code = None if error is None else error.code
        self.sink.request_ended(EndRecord(key=key, reason=reason, usage=usage, now_s=now_s, error_code=code))

    def tick(
        self,
        plan: StepPlan,
        output: PlanOutput,
        rows: tuple[RowRecord, ...],
        tenants: Mapping[int, str],
        now_s: float,
    ) -> None:
        """Report a generation tick. tenants: of the rows' requests by key; read only while the log is on."""
        self._index += 1
        record = TickRecord(
            index=self._index,
            kind="generate",
            start_s=plan.start_s,
            elapsed_s=now_s - plan.start_s,
            step_s=output.step_s,
            rows=rows,
            num_slots=self._limits.num_slots,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_cells=plan.num_cells,
            budget=self._limits.n_batch,
        )
        self._report(record, tenants, now_s)

    def embedding_tick(self, plan: EmbeddingPlan, output: PlanOutput, now_s: float, num_waiting: int) -> None:
        """Report an embedding tick."""
        if not self.wants_ticks:
            return
        self._index += 1
        record = TickRecord(
            index=self._index,
            kind="embed",
            start_s=plan.start_s,
            elapsed_s=now_s - plan.start_s,
            step_s=output.step_s,
            rows=(),
            num_slots=self._limits.num_slots,
            num_running=self.num_running,
            num_waiting=num_waiting,
            num_cells=0,
            budget=self._limits.embed_tokens,
            num_embedded=len(plan.items),
            num_embedded_tokens=sum(len(item.token_ids) for item in plan.items),
        )
        self._report(record, {}, now_s)

    def _report(self, record: TickRecord, tenants: Mapping[int, str], now_s: float) -> None:
        self.sink.tick_finished(record)
        if self.log.is_on:
            self.log.add_tick(record, tenants, now_s)


def row_record(row: Row, result: RowOutput) -> RowRecord:
    """Return the record of a row; called before its tokens are applied."""
    sequence = row.sequence
    assert sequence.slot is not None  # noqa: S101 - it had a row
    return RowRecord(
        slot=sequence.slot,
        key=sequence.request.key,
        choice=sequence.choice,
        position=row.position,
        num_tokens=len(row.token_ids) - row.num_drafts + result.num_verified,
        num_decode=len(row.token_ids) - row.num_drafts if sequence.is_decoding else 0,
        num_drafts=result.num_verified,
        num_new=len(result.token_ids),
        first=bool(result.token_ids) and sequence.num_tokens == sequence.num_prompt_tokens,
    )


def tenants_of(rows: Iterable[Row]) -> dict[int, str]:
    """Return the tenants of the rows' requests by key; called before the rows are applied, which may end the requests."""
    return {row.sequence.request.key: row.sequence.request.options.tenant for row in rows}


def slots_snapshot(
    running: Iterable[Sequence], *, num_slots: int, num_waiting: int, now_s: float = 0.0
) -> SlotsSnapshot:
    """Return the slots of an engine that has num_slots."""
    slots = [SlotView(id=slot) for slot in range(num_slots)]
    for sequence in running:
        request, slot = sequence.request, sequence.slot
        assert slot is not None  # noqa: S101 - it runs
        slots[slot] = SlotView(
            id=slot,
            state="paused" if request.is_paused else "decoding" if sequence.is_decoding else "prefilling",
            key=request.key,
            request_id=request.options.request_id,
            choice=sequence.choice,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached=request.progress.num_cached,
            cached_from=request.progress.cached_from,
            num_computed_tokens=sequence.num_computed_tokens,
            num_generated=sequence.num_tokens - sequence.num_prompt_tokens,
            max_tokens=request.params.max_tokens,
            running_s=0.0 if request.progress.started_s is None else now_s - request.progress.started_s,
            tenant=request.options.tenant,
            num_preempted=sequence.num_preempted,
            priority=request.options.priority,
        )
    return SlotsSnapshot(tuple(slots), num_waiting)


def waiting_sequences(queue: Iterable[Sequence], now_s: float) -> tuple[WaitingSequence, ...]:
    """Return records of the first `MOST_WAITING` sequences of a queue."""
    return tuple(_waiting(sequence, now_s) for sequence in islice(queue, MOST_WAITING))


def _waiting(sequence: Sequence, now_s: float) -> WaitingSequence:
    request, waits_for, lookup = sequence.request, sequence.waits_for, sequence.awaited
    return WaitingSequence(
        key=request.key,
        request_id=request.options.request_id,
        choice=sequence.choice,
        tenant=request.options.tenant,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_generated=sequence.num_tokens - sequence.num_prompt_tokens,
        waiting_s=now_s - request.submitted_s,
        is_preempted=sequence.num_preempted > 0,
        waits_for=waits_for.sequence.request.key if waits_for is not None and waits_for.is_pending else None,
        reads_disk=lookup is not None and not lookup.is_done and now_s < lookup.due_s,
        priority=sequence.priority,
    )


def tenant_trees(
    kv_cache: KVCache, running: Iterable[Sequence], requests: Mapping[int, Request], max_nodes: int
) -> tuple[TenantTree, ...]:
    """Return the radix tree by tenant, at most max_nodes nodes of each. requests: the open ones by key."""

    def tenant_of(namespace: Namespace) -> str:
        if len(namespace) == 1:  # of a request that shares nothing: its key
            request = requests.get(namespace[0]) if isinstance(namespace[0], int) else None
            return "" if request is None else request.options.tenant
        return str(namespace[1])

    names: dict[object, tuple[int, int]] = {sequence: (sequence.request.key, sequence.choice) for sequence in running}
    return kv_cache.view(tenant_of, names, max_nodes)
