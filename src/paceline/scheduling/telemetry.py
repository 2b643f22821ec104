"""What the scheduler reports: records of requests and ticks for instruments, and what each slot does. On the engine's thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from paceline.errors import PacelineError
from paceline.scheduling.limits import Limits
from paceline.streaming.chunk import FinishReason, Usage

if TYPE_CHECKING:
    from paceline.scheduling.activity import ActivityLog
    from paceline.scheduling.plan import EmbeddingPlan, PlanOutput, Row, RowOutput, StepPlan
    from paceline.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request as instruments see it. key: unique in this engine; request_id: the caller's name, if it gave one."""

    key: int
    request_id: str | None
    kind: Literal["generate", "embed"]
    prompt_tokens: int
    num_choices: int
    max_tokens: int | None
    priority: int
    submitted_s: float


class RowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's share of a tick. Of num_tokens computed, num_new tokens came out; 0 while a prompt is unfinished.

    num_decode: where the row went on from generated tokens, how many of them it had: 1, or more that are computed again beside
    a wrong draft; the rest of num_tokens - num_drafts is prefill. first: whether the sequence's first token came out.
    """

    slot: int
    key: int
    choice: int
    position: int
    num_tokens: int
    num_decode: int
    num_drafts: int
    num_new: int
    first: bool

    def taken(self, num_new: int) -> RowRecord:
        """Return the same with what came out of a row with drafts: what was drawn behind its end did not."""
        return msgspec.structs.replace(self, num_new=num_new)


class TickRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tick that computed something. Seconds on the engine's clock; step_s: of elapsed_s, the pass itself.

    num_running: sequences that have one of the num_slots slots, with or without a row; num_waiting: requests in the queue.
    An embedding tick has no rows: num_embedded texts of num_embedded_tokens tokens became vectors.
    """

    index: int
    kind: Literal["generate", "embed"]
    start_s: float
    elapsed_s: float
    step_s: float
    rows: tuple[RowRecord, ...]
    num_slots: int
    num_running: int
    num_waiting: int
    num_cells: int
    budget: int
    num_embedded: int = 0
    num_embedded_tokens: int = 0

    @property
    def own_s(self) -> float:
        """What the engine took for itself: of elapsed_s, outside of the pass."""
        return self.elapsed_s - self.step_s

    @property
    def num_decode(self) -> int:
        """Generated tokens that were computed: one for each row that decoded, and those computed again."""
        return sum(row.num_decode for row in self.rows)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens computed."""
        return sum(row.num_tokens - row.num_decode - row.num_drafts for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How a request ended.

    reason: of its choices' reasons the one that stands first in `FinishReason`, so ERROR where one failed. error_code: of
    that choice's error, if it has one.
    """

    key: int
    reason: FinishReason
    usage: Usage
    now_s: float
    error_code: str | None = None


class TelemetrySink(Protocol):
    """Receives what happens; `Instrument` documents each hook. drafter_failed: with an error of which no request hears."""

    @property
    def wants_ticks(self) -> bool: ...  # noqa: D102
    def request_queued(self, record: RequestRecord) -> None: ...  # noqa: D102
    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None: ...  # noqa: D102
    def request_ended(self, record: EndRecord) -> None: ...  # noqa: D102
    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None: ...  # noqa: D102
    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None: ...  # noqa: D102
    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None: ...  # noqa: D102
    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None: ...  # noqa: D102
    def evicted(self, num_tokens: int, source: str, now_s: float) -> None: ...  # noqa: D102
    def paused(self, key: int, is_paused: bool, now_s: float) -> None: ...  # noqa: D102
    def tick_finished(self, record: TickRecord) -> None: ...  # noqa: D102
    def drafter_failed(self, error: PacelineError) -> None: ...  # noqa: D102


class Telemetry:
    """Makes records of the scheduler's state, for the sink and for the log of those who watch."""

    def __init__(self, sink: TelemetrySink, limits: Limits, log: ActivityLog) -> None:
        self.sink, self.log = sink, log
        self._limits = limits
        self._index = 0
        self.num_running = 0
        self.num_waiting = 0

    @property
    def wants_ticks(self) -> bool:
        """Whether a tick is to be reported to anyone."""
        return self.log.is_on or self.sink.wants_ticks

    def started(self, sequence: Sequence, slot: int, now_s: float) -> None:
        """Report that a sequence got a slot, for the first time or again."""
        self.sink.request_started(sequence.request.key, sequence.choice, slot, now_s)
        if self.log.is_on:
            self.log.started(sequence, slot, now_s)

    def preempted(self, sequence: Sequence, slot: int, num_computed_tokens: int, now_s: float) -> None:
        """Report that a sequence lost its slot and will resume."""
        key = sequence.request.key
        self.sink.slot_freed(key, sequence.choice, slot, now_s)
        self.sink.preempted(key, sequence.choice, num_computed_tokens, now_s)
        if self.log.is_on:
            self.log.preempted(sequence, slot, now_s)

    def ended(self, sequence: Sequence, slot: int | None, now_s: float) -> None:
        """Report the end of a sequence. slot: which it had; None where it waited."""
        if slot is not None:
            self.sink.slot_freed(sequence.request.key, sequence.choice, slot, now_s)
        if self.log.is_on:
            self.log.ended(sequence, slot, now_s)

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
        self.sink.tick_finished(record)
        if self.log.is_on:
            self.log.add_tick(record, tenants, now_s)

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
        self.sink.tick_finished(record)
        if self.log.is_on:
            self.log.add_tick(record, {}, now_s)


def row_record(row: Row, result: RowOutput) -> RowRecord:
    """Return the record of a row; to be called before its tokens are applied."""
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


SlotState = Literal["idle", "prefilling", "decoding", "paused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot. Where it is idle, all but `id` has its default.

    state: "prefilling" while tokens other than the newest are left to compute, so also after a preemption; "paused" where the
    request's reader is too slow. key: of the request in its engine; request_id: the caller's name for it; choice: which of its
    choices. num_prompt_tokens: of the prompt, num_cached of them taken from the cache; num_computed_tokens: tokens in cells;
    num_generated: tokens drawn, those of a stop included; max_tokens: the request's; None: no limit of its own. running_s:
    seconds since the request got its first slot. tenant: of the request; num_preempted: how often the choice lost its slot.
    """

    id: int
    state: SlotState = "idle"
    key: int | None = None
    request_id: str | None = None
    choice: int = 0
    num_prompt_tokens: int = 0
    num_cached: int = 0
    num_computed_tokens: int = 0
    num_generated: int = 0
    max_tokens: int | None = None
    running_s: float = 0.0
    tenant: str = ""
    num_preempted: int = 0
    priority: int = 0

    @property
    def is_processing(self) -> bool:
        """Whether a sequence has it."""
        return self.key is not None

    @property
    def num_remaining(self) -> int | None:
        """Tokens that may still be drawn; None where only the context limits them."""
        return None if self.max_tokens is None else self.max_tokens - self.num_generated


@dataclass(frozen=True, slots=True)
class SlotsSnapshot:
    """All slots, by id. num_waiting: sequences and embedding requests without a slot."""

    slots: tuple[SlotView, ...]
    num_waiting: int

    def __iter__(self) -> Iterator[SlotView]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_processing(self) -> int:
        """Slots that a sequence has."""
        return sum(slot.is_processing for slot in self.slots)


def slots_snapshot(
    running: Iterable[Sequence], *, num_slots: int, num_waiting: int, now_s: float = 0.0
) -> SlotsSnapshot:
    """Return the slots of an engine that has num_slots. now_s: on the engine's clock."""
    slots = [SlotView(id=slot) for slot in range(num_slots)]
    for sequence in running:
        assert sequence.slot is not None  # noqa: S101 - it runs
        slots[sequence.slot] = _view(sequence, sequence.slot, now_s)
    return SlotsSnapshot(tuple(slots), num_waiting)


def _view(sequence: Sequence, slot: int, now_s: float) -> SlotView:
    request = sequence.request
    return SlotView(
        id=slot,
        state="paused" if request.is_paused else "decoding" if sequence.is_decoding else "prefilling",
        key=request.key,
        request_id=request.options.request_id,
        choice=sequence.choice,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached=request.num_cached,
        num_computed_tokens=sequence.num_computed_tokens,
        num_generated=sequence.num_tokens - sequence.num_prompt_tokens,
        max_tokens=request.params.max_tokens,
        running_s=0.0 if request.started_s is None else now_s - request.started_s,
        tenant=request.options.tenant,
        num_preempted=sequence.num_preempted,
        priority=request.options.priority,
    )
