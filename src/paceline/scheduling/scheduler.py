"""Plans each tick and applies its outcome. Pure: no threads, no llama.cpp; time comes from a clock.

    waiting ──admit──> running (a slot each) ──apply──> ended
       ^                  │
       └─────preempt──────┘

One thread calls it; other threads may only set `Request.cancelled`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline.clock import Clock
from paceline.cost_model import DecodeCost, MeasuredPass, TickCostModel
from paceline.errors import Aborted, NoKvSlot, PacelineError
from paceline.kv_cache import (
    TEXT_LAYOUT,
    DiskBlocks,
    DiskLookup,
    DiskStore,
    KVCache,
    Namespace,
    PromptLayout,
    SavedState,
    TransferOutput,
)
from paceline.scheduling.admission import Admission, RequestFinisher, Slots, WaitingQueue
from paceline.scheduling.embedding import EmbeddingScheduler
from paceline.scheduling.fair_shares import FairShares
from paceline.scheduling.records import (
    Answered,
    Delta,
    EmbeddingPlan,
    EmbeddingRequest,
    EngineActivity,
    Event,
    Plan,
    PlanOutput,
    RequestRecord,
    SlotsSnapshot,
    StepPlan,
    TelemetrySink,
)
from paceline.scheduling.step_planner import LostTime, StepPlanner
from paceline.scheduling.strategies import BatchStrategy
from paceline.scheduling.telemetry import (
    ActivityLog,
    Telemetry,
    row_record,
    slots_snapshot,
    tenant_trees,
    tenants_of,
    waiting_sequences,
)
from paceline.sequence import Limits, Request, Row, RowOutput, Sequence, uses_adapter
from paceline.speculation.depth_chooser import DepthChooser
from paceline.speculation.drafter import Drafter, Drafters
from paceline.speculation.drafting import DraftChain, Speculation
from paceline.streaming.chunk import FinishReason

_LEARN_EVERY = 8


class _Question(NamedTuple):
    key: int
    answer: Callable[[], Any]
    due_s: float


class Scheduler:
    """Admission, plans and their outcome for one engine.

    `plan` and `apply` take turns; commands come between them. `apply` returns the events for the callers. drafter: proposes
    tokens; several drafters are asked in their order; None: no speculation. store: keeps prefixes on a disk.
    """

    def __init__(
        self,
        limits: Limits,
        strategy: BatchStrategy,
        clock: Clock,
        sink: TelemetrySink,
        drafter: Drafter | Drafters | None = None,
        store: DiskStore | None = None,
    ) -> None:
        self._limits, self._strategy, self._clock, self._sink = limits, strategy, clock, sink
        self._store = store
        self.cost_model = TickCostModel(n_ubatch=limits.n_ubatch)
        self._decode_cost = DecodeCost(self.cost_model)
        self._speculation: Speculation | DraftChain | None = None
        if isinstance(drafter, tuple):
            self._speculation = DraftChain([self._speculation_with(link) for link in drafter])
        elif drafter is not None:
            self._speculation = self._speculation_with(drafter)
        self._tick = 0
        self._num_sequences = 0
        self.reports_held_back = False  # whether a replay log wants events for tokens that are in no chunk yet
        self._start()

    def _speculation_with(self, drafter: Drafter) -> Speculation:
        limits = self._limits
        chooser = DepthChooser(self.cost_model, self._decode_cost, limits.itl_target_s, limits.max_rollback)
        return Speculation(drafter, limits, chooser, self._clock, self._sink.drafter_failed)

    def _start(self) -> None:
        self._events: list[Event] = []
        self._telemetry = Telemetry(self._sink, self._limits, ActivityLog(self._clock.now()))
        self._shares = FairShares(self._limits.max_positions)
        self._slots, self._queue = Slots(self._limits.num_slots, self._shares), WaitingQueue()
        self._requests: dict[int, Request] = {}
        self.kv_cache = KVCache(self._limits, self._sink, self.cost_model, self._store)
        self._admission = Admission(self.kv_cache, self._slots, self._queue, self._telemetry, self._shares)
        self._finisher = RequestFinisher(
            self.kv_cache, self._slots, self._queue, self._telemetry, self._requests, self._shares
        )
        self._lost_time = LostTime(self._decode_cost)
        self._step_planner = StepPlanner(
            self._limits, self._strategy, self.kv_cache, self.cost_model, self._lost_time, self._shares
        )
        self._embedding = EmbeddingScheduler(self._limits, self._telemetry)
        self._is_stopping = False
        self._needs_poll = True
        self._waits_for_readers = True
        self._questions: list[_Question] = []
        self._interval_changed: set[int] = set()
        self.is_idle = True

    def calibrate(self, passes: Iterable[MeasuredPass], idle_cell_s: float = 0.0) -> None:
        """Learn from passes that were measured before the first request; idle_cell_s: see `TickCostModel`."""
        kept = list(passes)
        self.cost_model.idle_cell_s = idle_cell_s
        self.cost_model.calibrate(kept)
        for num_tokens, num_cells, seconds, num_outputs in kept:
            if num_outputs == num_tokens:
                self._decode_cost.observe(num_tokens, num_cells, seconds)

    # ---- commands

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._requests[request.key] = request
        self._shares.add(request.options)
        self._needs_poll = self._needs_poll or request.has_deadline or request.cancelled or self._is_stopping
        self._sink.request_queued(RequestRecord.of(request))
        for sequence in request.sequences:
            self._num_sequences += 1
            sequence.key = sequence.order = self._num_sequences
            sequence.request = request
        for sequence in [sequence for sequence in request.sequences if sequence.reason is None]:
            if sequence.num_uncomputed_tokens > 0 and (sequence.drawing or sequence.is_scoring):
                self._queue.add(sequence)
            else:
                sequence.end(FinishReason.LENGTH)
                self._events += self._finisher.finish(sequence, self._clock.now())

    def submit_embedding(self, request: EmbeddingRequest) -> None:
        """Queue an embedding request."""
        self._sink.request_queued(RequestRecord.of(request))
        self._embedding.submit(request)

    def cancel(self, key: int) -> None:
        """End a request before the next plan; no effect if it has ended."""
        request = self._requests.get(key) or self._embedding.find(key)
        if request is not None:
            request.cancelled = True
            self._needs_poll = True

    def set_paused(self, key: int, *, is_paused: bool) -> None:
        """Keep a request out of ticks, or resume it."""
        is_paused = is_paused and self._waits_for_readers
        request = self._requests.get(key)
        if request is not None and request.is_paused != is_paused:
            request.is_paused = is_paused
            self._sink.paused(key, is_paused, self._clock.now())

    def set_interval(self, key: int, interval: int) -> None:
        """Change the number of tokens that a chunk of a request needs; held text that is enough now goes out with this tick."""
        request = self._requests.get(key)
        if request is not None:
            request.set_interval(interval)
            self._interval_changed.add(key)

    def end_slow(self, key: int) -> None:
        """End a request before the next plan, as its reader is too slow."""
        request = self._requests.get(key)
        if request is not None:
            request.is_slow = True
            self._needs_poll = True

    def ask(self, key: int, answer: Callable[[], Any], due_s: float = 0.0) -> None:
        """Emit `Answered` after the first tick that ends at due_s or later, or finds nothing to do."""
        self._questions.append(_Question(key, answer, due_s))

    def answer(self, key: int, result: object) -> None:
        """Emit `Answered` with the events of this tick."""
        self._events.append(Answered(key, result))

    def end_lookup(self, lookup: DiskLookup, blocks: DiskBlocks) -> None:
        """Take what was found on a disk into host memory."""
        self.kv_cache.end_lookup(lookup, blocks, self._clock.now())

    def export(self, key: int, namespace: Namespace, tokens: bytes, layout: PromptLayout = TEXT_LAYOUT) -> None:
        """Emit `Answered` with the saved ranges of a prefix in order, once all of it is in host memory; there may be none."""
        self.kv_cache.request_export(key, namespace, tokens, layout)

    def import_ranges(
        self, namespace: Namespace, tokens: bytes, ranges: tuple[tuple[int, int, SavedState], ...]
    ) -> list[Any]:
        """Put saved ranges of a prefix into host memory and return the ranges that are there; none if there is no room."""
        return self.kv_cache.import_ranges(namespace, tokens, ranges, self._clock.now())

    def observe(self, after: int, max_nodes: int | None) -> Callable[[], EngineActivity]:
        """Record ticks for a while, and return a function for `ask`; see `EngineActivity`."""
        self._telemetry.log.ask(self._clock.now())
        return lambda: self._activity(after, max_nodes)

    def forget_adapter(self, adapter: str) -> None:
        """Drop everything that was computed with an adapter, of which no request is open."""
        self.kv_cache.forget(lambda namespace: uses_adapter(namespace, adapter), self._clock.now())

    def drain(self) -> None:
        """Wait for no reader from now on: paused requests run to their end."""
        self._waits_for_readers = False
        for key in self._requests:
            self.set_paused(key, is_paused=False)

    def stop(self) -> None:
        """End everything before the next plan."""
        self._is_stopping = self._needs_poll = True

    def fail_all(self, error: PacelineError, failures: list[Exception]) -> list[Event]:
        """End every request at once with an error and return the events, after a failure of the engine itself.

        Exceptions raised on the way are added to `failures`, and the other requests end all the same.
        """
        now = self._clock.now()
        self._events += self._finisher.fail_all(error, now, failures)
        try:
            self._events += self._embedding.fail_all(error, now)
        except Exception as failure:  # noqa: BLE001 - the caller looks at it
            failures.append(failure)
        return self._take_events()

    def reset(self) -> None:
        """Forget everything but tick costs and empty the device, after a failure of the engine itself."""
        self.end_drafting()
        self._start()
        self.kv_cache.clear()

    def end_drafting(self) -> None:
        """Let drafters learn the rest of all sequences and forget them, after the last tick."""
        if self._speculation is not None:
            self._speculation.reset()

    # ---- a tick

    def plan(self) -> Plan:
        """Return the plan of the next tick; an empty one if there is nothing to do before a command or a deadline."""
        now = self._clock.now()
        self._finish_due(now)
        if self._speculation is not None:
            self._speculation.forget_gone()
        self.kv_cache.begin_tick(is_generating=any(not sequence.request.is_paused for sequence in self._slots.running))
        if self._queue.sequences:
            self._events += self._admission.admit(now, self._tick)
        self.kv_cache.take_checkpoints()
        ready = [sequence for sequence in self._slots.running if not sequence.request.is_paused]
        next_victim = self._slots.next_victim if len(self._slots.running) > 1 else None
        self.kv_cache.offload(next_victim, now, is_generating=bool(ready))
        self._note_load(ready)
        if self._embedding.requests and self._embedding.has_turn(is_generating=bool(ready)):
            operations = self.kv_cache.take_operations()
            plan, events = self._embedding.plan(operations, now, is_generating=bool(ready))
            self._events += events
            return plan
        return self._plan_step(ready, now)

    def _finish_due(self, now_s: float) -> None:
        """Finish requests that are cancelled, past a deadline or stopped; most ticks have none."""
        if self._needs_poll:
            self._events += self._finisher.poll(now_s, is_stopping=self._is_stopping)
            self._needs_poll = any(request.has_deadline for request in self._requests.values())
        if self._embedding.requests:
            self._events += self._embedding.poll(now_s, is_stopping=self._is_stopping)
        self.kv_cache.end_overdue_lookups(now_s)

    def _note_load(self, ready: list[Sequence]) -> None:
        self._telemetry.num_running, self._telemetry.num_waiting = len(self._slots.running), len(self._queue.sequences)
        is_offloading = bool(self._queue.sequences) and self.kv_cache.is_saving
        self.is_idle = not (ready or self._embedding.requests or is_offloading or self.kv_cache.is_exporting)
        self.is_idle = self.is_idle and not self.kv_cache.is_saving_idle

    def _plan_step(self, ready: list[Sequence], now_s: float) -> StepPlan:
        self._tick += bool(ready)
        planner = self._step_planner
        plan = planner.plan(ready, self._tick, now_s)
        for sequence in planner.failed:
            sequence.end(FinishReason.ERROR, planner.error)
            self._events += self._finisher.finish(sequence, now_s)
        if self._speculation is not None and plan.rows:
            for sequence, error in self._speculation.add_drafts(plan.rows, self.kv_cache):
                plan.rows = [row for row in plan.rows if row.sequence is not sequence]
                sequence.end(FinishReason.ERROR, error)
                self._events += self._finisher.finish(sequence, now_s)
        plan.operations, plan.num_cells = self.kv_cache.take_operations(), self.kv_cache.num_cells
        return plan

    def apply(self, plan: Plan, output: PlanOutput) -> list[Event]:
        """Apply the outcome of a plan and return the events of the tick."""
        now = self._clock.now()
        restarted = self._apply_transfers(plan, output.transfers, now) if output.transfers else set()
        if self.kv_cache.is_exporting:
            self._events += [Answered(key, ranges) for key, ranges in self.kv_cache.take_exports()]
        if isinstance(plan, EmbeddingPlan):
            self._events += self._embedding.apply(plan, output, now)
        elif plan.rows:
            self._apply_step(plan, output, restarted, now)
        if self._interval_changed:
            self._flush_by_interval()
        if self._questions:
            self._answer()
        return self._take_events()

    def _answer(self) -> None:
        now_s, questions = self._clock.now(), self._questions
        self._questions = []
        for question in questions:
            if self.is_idle or question.due_s <= now_s:
                self._events.append(Answered(question.key, question.answer()))
            else:
                self._questions.append(question)

    def _apply_transfers(self, plan: Plan, transfers: TransferOutput, now_s: float) -> set[Sequence]:
        """Apply the outcome of the operations; return the sequences that restart because an operation failed."""
        self.kv_cache.complete(plan.operations, transfers, now_s)
        restarted = {sequence for sequence in self._slots.running if sequence.seq_id in transfers.failed_seq_ids}
        for seq_id in transfers.failed_seq_ids - {sequence.seq_id for sequence in restarted}:
            self.kv_cache.discard_cached(seq_id, now_s)
        for sequence in restarted:
            self._admission.restart(sequence, now_s)
        return restarted

    def _apply_step(self, plan: StepPlan, output: PlanOutput, restarted: set[Sequence], now_s: float) -> None:
        is_watched = self._telemetry.wants_ticks
        tenants = tenants_of(plan.rows) if self._telemetry.log.is_on else {}
        if self._shares.is_shared:
            self._charge(plan, output, restarted)
        records = []
        is_pressed = False
        for row, result in zip(plan.rows, output.rows, strict=True):
            if row.num_drafts:
                self._note_drafts(row, result)
            if row.sequence in restarted:
                continue
            record = row_record(row, result) if is_watched and result.computed else None
            num_before = row.sequence.num_tokens
            if not result.computed and isinstance(result.error, (NoKvSlot, Aborted)):
                is_pressed = is_pressed or isinstance(result.error, NoKvSlot)
            else:
                self._apply_row(row, result, now_s)
            if record is not None:
                records.append(record.taken(row.sequence.num_tokens - num_before) if row.num_drafts else record)
        if output.num_passes == 1 and not is_pressed and not restarted:
            self._learn(plan, output)
        if self._embedding.requests:
            self._embedding.note_generation(output.step_s)
        if is_watched:
            self._telemetry.tick(plan, output, tuple(records), tenants, now_s)
        if is_pressed:
            self._relieve_pressure(now_s)

    def _charge(self, plan: StepPlan, output: PlanOutput, restarted: set[Sequence]) -> None:
        """Charge the tenants for the rows that were computed and stay."""
        rows = [
            row
            for row, result in zip(plan.rows, output.rows, strict=True)
            if result.computed and row.sequence not in restarted
        ]
        planned = {row.sequence for row in plan.rows}
        left_out = [
            sequence.request.options.tenant
            for sequence in self._slots.running
            if sequence not in planned and not sequence.request.is_paused
        ]
        self._shares.charge(rows, self._queue.tenants.union(left_out))

    def _learn(self, plan: StepPlan, output: PlanOutput) -> None:
        """Learn costs and lost time from a pass; of passes that only decode, the cost model learns the first and every eighth."""
        self._lost_time.observe(output.step_s, plan.lost_s)
        num_drafts = sum([result.num_verified for result in output.rows])
        num_left_out = sum([row.num_drafts for row in plan.rows]) - num_drafts
        num_tokens = sum([len(row.token_ids) for row in plan.rows]) - num_left_out
        pass_s = output.step_s - max([result.waited_s for result in output.rows])
        if not plan.lora and num_tokens == len(plan.rows) + num_drafts and all(row.draws for row in plan.rows):
            self._decode_cost.observe(num_tokens, plan.num_cells + num_tokens, pass_s)
        if num_tokens > len(plan.rows) or self._tick < _LEARN_EVERY or self._tick % _LEARN_EVERY == 0:
            num_outputs = sum([row.num_outputs for row in plan.rows]) - num_left_out
            self.cost_model.observe(num_tokens, plan.num_cells + num_tokens, pass_s, num_outputs)
            self.kv_cache.update_idle_limit()

    def _apply_row(self, row: Row, result: RowOutput, now_s: float) -> None:
        sequence = row.sequence
        if result.computed:
            self._take_computed(row, result, now_s)
        is_after_end = bool(result.token_ids) and sequence.reason is not None
        if result.error is not None and not is_after_end:
            sequence.end(FinishReason.ERROR, result.error)
        if sequence.request.cancelled:
            sequence.end(FinishReason.CANCELLED)
        if sequence.reason is not None:
            self._events += self._finisher.finish(sequence, now_s)
        elif (chunk := sequence.output.chunk()) is not None or (self.reports_held_back and result.token_ids):
            self._events.append(Delta(sequence.request.key, chunk, choice=sequence.choice))

    def _take_computed(self, row: Row, result: RowOutput, now_s: float) -> None:
        """Count the cells of a row, and take its scored and drawn tokens."""
        sequence, start = row.sequence, row.sequence.num_computed_tokens
        if not result.is_taken_back:
            self.kv_cache.commit(sequence, len(row.token_ids) - row.num_drafts + result.num_accepted)
        sequence.last_tick = self._tick
        if result.scored:
            first, sequence.num_scored = sequence.num_scored + 1, sequence.num_scored + len(result.scored)
            sequence.output.add_prompt_logprobs(sequence.token_ids[first : sequence.num_scored + 1], result.scored)
        if result.token_ids:
            self._accept(sequence, result, now_s)
        elif sequence.num_uncomputed_tokens == 0:
            sequence.end(FinishReason.STOP if result.is_complete else FinishReason.LENGTH)
        if sequence.num_computed_tokens > sequence.num_tokens:  # accepted drafts after the end
            self.kv_cache.truncate(sequence, sequence.num_tokens if self._limits.max_rollback is None else start)
        if result.is_taken_back or sequence.num_taken_back:
            sequence.note_taken_back(is_taken_back=result.is_taken_back)

    def _note_drafts(self, row: Row, result: RowOutput) -> None:
        assert self._speculation is not None  # noqa: S101 - else there are no drafts
        self._speculation.note(row, result)
        if result.computed:
            row.sequence.num_drafted += result.num_verified

    def _accept(self, sequence: Sequence, result: RowOutput, now_s: float) -> None:
        """Append the drawn tokens up to the first that ends the choice."""
        request = sequence.request
        if request.progress.first_token_s is None:
            request.progress.first_token_s = now_s
        num_before, logprobs = sequence.num_tokens, result.logprobs
        for index, token_id in enumerate(result.token_ids):
            sequence.token_ids.append(token_id)
            sequence.num_tokens += 1
            reason = sequence.output.take(token_id, logprobs[index] if logprobs else None)
            if reason is None and sequence.num_tokens > self._limits.max_positions:
                reason = FinishReason.LENGTH
            if reason is not None:
                sequence.end(reason)
                break
        sequence.num_accepted += min(result.num_accepted, sequence.num_tokens - num_before)
        if result.is_complete:
            sequence.end(FinishReason.STOP)

    def _flush_by_interval(self) -> None:
        """Emit chunks that a smaller interval allows; after the rows, so that a chunk and the drawn tokens are of one moment."""
        for request in [self._requests[key] for key in self._interval_changed if key in self._requests]:
            for sequence in request.sequences:
                if sequence.reason is None and (chunk := sequence.output.chunk()) is not None:
                    self._events.append(Delta(request.key, chunk, choice=sequence.choice))
        self._interval_changed.clear()

    def _relieve_pressure(self, now_s: float) -> None:
        """Free cells after a pass found none: evict a cached prefix, else preempt; a lone sequence ends with an error."""
        running = self._slots.running
        if self.kv_cache.evict(now_s) or self.kv_cache.is_freeing:  # requests that ended in this tick may free enough
            return
        if len(running) > 1:
            self._admission.preempt(now_s)
        elif running:
            error = NoKvSlot("the KV cache has no room for this request, though it runs alone; raise n_ctx")
            running[0].end(FinishReason.ERROR, error)
            self._events += self._finisher.finish(running[0], now_s)

    def _take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    # ---- state

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences with a slot, in order of admission; read-only."""
        return tuple(self._slots.running)

    def slots(self) -> SlotsSnapshot:
        """Return the state of each slot."""
        return slots_snapshot(
            self._slots.running,
            num_slots=self._limits.num_slots,
            num_waiting=self.num_waiting,
            now_s=self._clock.now(),
        )

    def _activity(self, after: int, max_nodes: int | None) -> EngineActivity:
        now_s, log, num_free = self._clock.now(), self._telemetry.log, self.kv_cache.num_free
        running = self._slots.running
        return EngineActivity(
            started_s=log.started_s,
            now_s=now_s,
            last_number=log.last_number,
            slots=self.slots(),
            waiting=waiting_sequences(self._queue.sequences, now_s),
            num_waiting=len(self._queue),
            num_embedding=len(self._embedding),
            ticks=log.ticks(after),
            marks=log.marks(after),
            trees=None if max_nodes is None else tenant_trees(self.kv_cache, running, self._requests, max_nodes),
            num_cells=self.kv_cache.num_cells,
            num_free=None if math.isinf(num_free) else int(num_free),
            num_running_cells=self.kv_cache.num_running_cells,
            host_bytes=self.kv_cache.host_bytes,
        )

    @property
    def num_waiting(self) -> int:
        """Waiting sequences and embedding requests."""
        return len(self._queue) + len(self._embedding)

    def next_deadline_s(self) -> float:
        """Return the time of the first deadline of a request or of reading a prefix; infinite without deadlines."""
        return min([self._finisher.next_deadline_s(), self._embedding.next_deadline_s(), self.kv_cache.next_due_s])

    def check(self) -> None:
        """Assert the invariants between ticks."""
        self._slots.check()
        self.kv_cache.check()
        running, waiting = self._slots.running, self._queue.sequences
        assert len(set(running) | set(waiting)) == len(running) + len(waiting)  # noqa: S101 - our own invariants
        for request in self._requests.values():
            is_open = [sequence for sequence in request.sequences if sequence.reason is None]
            assert len(is_open) == request.num_open > 0, request  # noqa: S101
            assert all((sequence in running) != (sequence in waiting) for sequence in is_open)  # noqa: S101
        for sequence in running:
            assert sequence.num_computed_tokens <= sequence.num_tokens <= self._limits.max_positions  # noqa: S101
        assert all(sequence.num_computed_tokens == 0 and sequence.slot is None for sequence in waiting)  # noqa: S101
