"""What goes into the next tick, and what the last one brought. Pure: no threads, no llama.cpp; time comes from a clock.

    waiting ──admit──> running (a slot each) ──apply──> ended
       ^                  │
       └─────preempt──────┘

One thread calls it. `Request.cancelled` alone may be set from others.
"""

from __future__ import annotations

from paceline.errors import Aborted, NoKvSlot, PacelineError, StrategyError
from paceline.scheduling.adapter_turns import AdapterTurns
from paceline.scheduling.admission import Admission
from paceline.scheduling.clock import Clock
from paceline.scheduling.embedding import EmbeddingRequest
from paceline.scheduling.embedding_ticks import EmbeddingTicks
from paceline.scheduling.endings import Endings
from paceline.scheduling.events import Delta, Event, Exported, HeldBack, Imported, Inspected
from paceline.scheduling.limits import Limits
from paceline.scheduling.memory import Memory
from paceline.scheduling.pace import Pace
from paceline.scheduling.plan import EmbeddingPlan, Plan, PlanOutput, Row, RowOutput, StepPlan
from paceline.scheduling.prefix_tree import Namespace, Saved
from paceline.scheduling.reports import Reports, Watch, row_record
from paceline.scheduling.rows import rows_of, set_limits
from paceline.scheduling.sequence import Request, Sequence
from paceline.scheduling.slots import Slots
from paceline.scheduling.slots_snapshot import SlotsSnapshot, slots_snapshot
from paceline.scheduling.view import BatchStrategy, View
from paceline.scheduling.waiting import Waiting
from paceline.streaming.chunk import FinishReason

_IDLE_COST = 0.02
# What a cell costs that is another's, and skipped, of what one costs that is attended to: with flash attention on a CPU.
_SKIPPED = 0.2
_FREE_CELLS = 256  # llama.cpp looks at so many at a time, so that a few more cost nothing
_LEARN_EVERY = 8


class Scheduler:
    """Admission, plans and their results for one engine.

    `plan` and `apply` take turns; commands come between them. Everything that a request is told goes out as the events
    that `apply` answers.
    """

    def __init__(self, limits: Limits, strategy: BatchStrategy, clock: Clock, watch: Watch) -> None:
        self._limits, self._strategy, self._clock = limits, strategy, clock
        self._watch = watch
        self.pace = Pace(n_ubatch=limits.n_ubatch)
        self._note_idle_cells()
        self._tick = 0
        self._num_sequences = 0
        self.tells_held_back = False  # whether somebody keeps account of tokens that nobody can read yet
        self._begin()

    def _begin(self) -> None:
        limits, watch = self._limits, self._watch
        self._events: list[Event] = []
        self._reports = Reports(watch, limits)
        self._slots = Slots(limits.num_slots)
        self.memory = Memory(limits, self._reports, self.pace)
        self._waiting = Waiting()
        self._requests: dict[int, Request] = {}
        self._admission = Admission(self.memory, self._slots, self._waiting, self._reports, self._events)
        self._endings = Endings(self._slots, self.memory, self._waiting, self._requests, self._reports, self._events)
        self._embedding = EmbeddingTicks(limits, self._reports, self._events)
        self._turns = AdapterTurns(limits.itl_target_s)
        self._is_stopping = False
        self._heeds_readers = True
        self._inspections: list[int] = []
        self.is_idle = True

    # ---- commands

    def submit(self, request: Request) -> None:
        """Takes a request in; it waits for its turn."""
        self._requests[request.key] = request
        self._reports.watch.request_queued(request.record())
        for sequence in request.sequences:
            self._num_sequences += 1
            sequence.key = sequence.order = self._num_sequences
        for sequence in [one for one in request.sequences if one.reason is None]:
            if sequence.num_left > 0 and (sequence.drawing or sequence.is_scoring):
                self._waiting.add(sequence)
            else:
                sequence.end(FinishReason.LENGTH)
                self._endings.finish(sequence, self._clock.now())

    def submit_embedding(self, request: EmbeddingRequest) -> None:
        """Takes an embedding request in."""
        self._reports.watch.request_queued(request.record())
        self._embedding.submit(request)

    def cancel(self, key: int) -> None:
        """Ends a request before the next plan; nothing happens where it has ended."""
        request = self._requests.get(key) or self._embedding.find(key)
        if request is not None:
            request.cancelled = True

    def set_paused(self, key: int, *, is_paused: bool) -> None:
        """Lets a request sit out ticks, or go on."""
        is_paused = is_paused and self._heeds_readers
        request = self._requests.get(key)
        if request is not None and request.is_paused != is_paused:
            request.is_paused = is_paused
            self._reports.watch.paused(key, is_paused, self._clock.now())

    def end_slow(self, key: int) -> None:
        """Ends a request whose reader is too slow, before the next plan."""
        request = self._requests.get(key)
        if request is not None:
            request.is_slow = True

    def export(self, key: int, namespace: Namespace, tokens: bytes) -> None:
        """Answers what memory has of a path, when all of that is in host memory."""
        self.memory.exporting.ask(key, namespace, tokens)

    def import_ranges(
        self, key: int, namespace: Namespace, tokens: bytes, ranges: tuple[tuple[int, int, Saved], ...]
    ) -> None:
        """Puts saved ranges of a path into host memory."""
        self.memory.host.take_in(namespace, tokens, ranges, self._clock.now())
        self._events.append(Imported(key, self.memory.exporting.ranges_of(namespace, tokens)))

    def inspect(self, key: int) -> None:
        """Answers with the next events what each slot does."""
        self._inspections.append(key)

    def drain(self) -> None:
        """From now on nobody is waited for: what paused for its reader goes on to its end."""
        self._heeds_readers = False
        for key in self._requests:
            self.set_paused(key, is_paused=False)

    def stop(self) -> None:
        """Ends everything before the next plan."""
        self._is_stopping = True

    def fail_all(self, error: PacelineError) -> list[Event]:
        """Ends everything at once with an error, and answers the events: after a failure of our own."""
        now = self._clock.now()
        for request in tuple(self._requests.values()):
            self._endings.end_request(request, FinishReason.ERROR, now, error)
        self._embedding.fail_all(error, now)
        return self._take_events()

    def begin_anew(self) -> None:
        """Forgets everything but what ticks cost, and has the memory emptied: after a mistake of our own."""
        self._begin()
        self.memory.empty_all()

    # ---- a tick

    def plan(self) -> Plan:
        """What the next tick does. May be empty: then there is nothing to do before a command or a deadline."""
        now = self._clock.now()
        self._endings.poll(now, is_stopping=self._is_stopping)
        self._embedding.poll(now, is_stopping=self._is_stopping)
        is_generating = any(not one.request.is_paused for one in self._slots.running)
        self.memory.begin_tick(is_generating=is_generating)
        self._admission.admit(now, self._tick)
        self._take_snapshots()
        ready = [sequence for sequence in self._slots.running if not sequence.request.is_paused]
        self._move(now, is_generating=bool(ready))
        self._reports.num_running, self._reports.num_waiting = len(self._slots.running), len(self._waiting)
        is_held_up = len(self._waiting) > 0 and self.memory.is_moving
        is_asked = self.memory.exporting.is_waiting
        self.is_idle = not (ready or len(self._embedding) or is_held_up or is_asked)
        if self._embedding.has_turn(is_generating=bool(ready)):
            return self._embedding.plan(self.memory.take_operations(), now, is_generating=bool(ready))
        return self._plan_step(ready, now)

    def _move(self, now_s: float, *, is_generating: bool) -> None:
        """What leaves the device in this tick, in nobody's way yet."""
        self.memory.tidy(self._idle_cells(), now_s, is_generating=is_generating)
        if self.memory.room.is_short and len(self._slots.running) > 1:
            self.memory.save_ahead(self._slots.next_to_give_way(), is_generating=is_generating)

    def _take_snapshots(self) -> None:
        """Where memory is only saved whole: the state before a prompt's last token, for those who ask the same again."""
        if self._limits.can_share_part:
            return
        for sequence in self._slots.running:
            if not sequence.has_snapshot and sequence.num_computed == sequence.num_prompt - 1:
                sequence.has_snapshot = True
                self.memory.snapshot(sequence)

    def _idle_cells(self) -> int:
        """How many cells that nobody uses may stay: they may cost a lone stream so much of its speed."""
        return self._max_idle_cells

    def _note_idle_cells(self) -> None:
        empty = self.pace.seconds(1, 0)
        per_thousand = _SKIPPED * (self.pace.seconds(1, 1000) - empty)
        most = int(1000 * _IDLE_COST * empty / per_thousand) if per_thousand > 0 else 2**31
        self._max_idle_cells = max(_FREE_CELLS, most)

    def _itl_target_s(self) -> float:
        """What is left of it beside what moves; at least half, so that prompts go on."""
        target_s = self._limits.itl_target_s
        return max(target_s / 2, target_s - self.memory.moving_s)

    def _plan_step(self, ready: list[Sequence], now_s: float) -> StepPlan:
        lora, group = self._turns.choose(ready, now_s)
        candidates = set_limits(group, self._limits)
        rows = self._ask(candidates, now_s) if candidates else []
        return StepPlan(self.memory.take_operations(), rows, lora, now_s, self.memory.num_cells)

    def _ask(self, candidates: list[Sequence], now_s: float) -> list[Row]:
        """The strategy's rows. What it does wrong ends those that it was asked to plan, and nobody else."""
        self._tick += 1
        view = View(
            sequences=tuple(candidates),
            chunk_size=self._limits.chunk_size,
            num_cells=self.memory.num_cells,
            tick=self._tick,
            now_s=now_s,
            itl_target_s=self._itl_target_s(),
            max_tick_s=self._limits.max_tick_s,
            cost=self.pace,
        )
        try:
            return rows_of(self._strategy.plan(view, self._limits.n_batch), candidates, self._limits.n_batch)
        except Exception as error:  # noqa: BLE001 - whatever a strategy of the user's raises
            failure = StrategyError(f"batch strategy {type(self._strategy).__name__} failed: {error!r:.500}")
            failure.__cause__ = error
            for sequence in candidates:
                sequence.end(FinishReason.ERROR, failure)
                self._endings.finish(sequence, now_s)
            return []

    def apply(self, plan: Plan, output: PlanOutput) -> list[Event]:
        """Takes in what came of the plan, and answers everything that has to be told."""
        now = self._clock.now()
        if plan.operations:
            self.memory.moving.observe(plan.operations, output)
        for operation, data in output.saved:
            self.memory.host.saved(operation, data, now)
        for seq_id, sequence in output.failed.items():
            if sequence.slot is None:  # it has ended since it was given the id
                self.memory.forget_kept(seq_id, now)
            else:
                self._admission.start_over(sequence, now)
        for export in self.memory.exporting.take_done():
            ranges = self.memory.exporting.ranges_of(export.namespace, export.tokens)
            self._events.append(Exported(export.key, ranges))
        if isinstance(plan, EmbeddingPlan):
            self._embedding.apply(plan, output, now)
        elif plan.rows:
            self._apply_step(plan, output, now)
        self._events += [Inspected(key, self.slots()) for key in self._inspections]
        self._inspections.clear()
        return self._take_events()

    def _apply_step(self, plan: StepPlan, output: PlanOutput, now_s: float) -> None:
        watched = self._reports.watch.wants_ticks
        records = []
        is_pressed = False
        failed = set(output.failed.values())
        for row, result in zip(plan.rows, output.rows, strict=True):
            if row.sequence in failed:  # it starts over
                continue
            if watched and result.computed:
                records.append(row_record(row, result))
            if not result.computed and isinstance(result.error, (NoKvSlot, Aborted)):
                is_pressed = is_pressed or isinstance(result.error, NoKvSlot)
            else:
                self._apply_row(row, result, now_s)
        if output.num_passes == 1 and not is_pressed and not failed:
            self._learn(plan, output)
        self._embedding.note_generation(output.step_s)
        if watched:
            self._reports.tick(plan, output, tuple(records), now_s)
        if is_pressed:
            self._relieve(now_s)

    def _learn(self, plan: StepPlan, output: PlanOutput) -> None:
        """What the pass took; of the many that only decode, every eighth says enough."""
        num_tokens = sum([len(row.token_ids) for row in plan.rows])
        if num_tokens > len(plan.rows) or self._tick % _LEARN_EVERY == 0:
            self.pace.observe(num_tokens, plan.num_cells + num_tokens, output.step_s)
            self._note_idle_cells()

    def _apply_row(self, row: Row, result: RowOutput, now_s: float) -> None:
        sequence = row.sequence
        if result.computed:
            sequence.num_computed += len(row.token_ids)
            self.memory.computed(sequence, len(row.token_ids))
            sequence.last_tick = self._tick
            if result.scored:
                sequence.num_scored += len(result.scored)
                sequence.answer.prompt_logprobs += result.scored
            if result.token_ids:
                self._accept(sequence, result, now_s)
            elif sequence.num_left == 0:
                sequence.end(FinishReason.LENGTH)
        if result.error is not None:
            sequence.end(FinishReason.ERROR, result.error)
        if sequence.request.cancelled:
            sequence.end(FinishReason.CANCELLED)
        if sequence.reason is not None:
            self._endings.finish(sequence, now_s)
        elif (chunk := sequence.answer.chunk()) is not None:
            self._events.append(Delta(sequence.request.key, chunk))
        elif self.tells_held_back and result.token_ids:
            self._events.append(HeldBack(sequence.request.key, sequence.choice))

    def _accept(self, sequence: Sequence, result: RowOutput, now_s: float) -> None:
        """Takes the drawn tokens in, one after the other, to the one that ends the answer."""
        request = sequence.request
        if request.first_token_s is None:
            request.first_token_s = now_s
        logprobs = result.logprobs
        for index, token_id in enumerate(result.token_ids):
            sequence.known.append(token_id)
            sequence.num_known += 1
            reason = sequence.answer.take(token_id, logprobs[index] if logprobs else None)
            if reason is None and sequence.num_known > self._limits.max_positions:
                reason = FinishReason.LENGTH
            if reason is not None:
                sequence.end(reason)
                return

    def _relieve(self, now_s: float) -> None:
        """Memory is full: one gives way, the least important and youngest; alone, it has no room at all."""
        running = self._slots.running
        if self.memory.give_way(now_s):  # kept paths go first
            return
        if self.memory.is_freeing:  # somebody has ended in this tick: perhaps that is room enough
            return
        if len(running) > 1:
            self._admission.preempt(now_s)
        elif running:
            error = NoKvSlot("the KV cache has no room for this request, though it runs alone; raise n_ctx")
            running[0].end(FinishReason.ERROR, error)
            self._endings.finish(running[0], now_s)

    def _take_events(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events

    # ---- what it holds

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that have a slot, by admission; read-only."""
        return tuple(self._slots.running)

    def slots(self) -> SlotsSnapshot:
        """What each slot does."""
        return slots_snapshot(
            self._slots.running,
            num_slots=self._limits.num_slots,
            num_waiting=self.num_waiting,
            now_s=self._clock.now(),
        )

    @property
    def num_waiting(self) -> int:
        """Sequences and embedding requests that wait."""
        return len(self._waiting) + len(self._embedding)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._requests) + len(self._embedding)

    def next_deadline_s(self) -> float:
        """When the first request would end for want of time; infinite where none has a limit."""
        return min([self._endings.next_deadline_s(), self._embedding.next_deadline_s()])

    def check(self) -> None:
        """Asserts what must hold between ticks."""
        self._slots.check()
        self.memory.check()
        running, waiting = self._slots.running, list(self._waiting)
        assert len(set(running) | set(waiting)) == len(running) + len(waiting)  # noqa: S101 - our own invariants
        for request in self._requests.values():
            open_ones = [one for one in request.sequences if one.reason is None]
            assert len(open_ones) == request.num_open > 0, request  # noqa: S101
            assert all((one in running) != (one in waiting) for one in open_ones)  # noqa: S101
        for sequence in running:
            assert sequence.num_computed <= sequence.num_known <= self._limits.max_positions  # noqa: S101
        assert all(one.num_computed == 0 and one.slot is None for one in waiting)  # noqa: S101
