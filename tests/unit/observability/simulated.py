"""A toy engine that drives an instrument's hooks: fixed costs, fixed order, nothing at random."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from paceline.observability.metrics import Instrument
from paceline.scheduling.records import EndRecord, RequestRecord, RowRecord, TickRecord
from paceline.streaming.chunk import FinishReason, Usage


@dataclass
class Job:
    """A request of one sequence: prompt tokens, then generated tokens, a burst of `burst` a tick."""

    key: int
    num_prompt_tokens: int
    num_wanted: int
    submitted_s: float = 0.0
    burst: int = 1
    request_id: str | None = None
    reason: FinishReason = FinishReason.LENGTH
    num_computed_tokens: int = 0
    num_made: int = 0
    ends_at_tick: int | None = None


@dataclass
class Simulation:
    """Ticks of `0.01 s + 0.1 ms a token`; at most `budget` tokens each, decoding first. All times are sums of these."""

    instrument: Instrument
    num_slots: int = 4
    budget: int = 64
    now_s: float = 0.0
    num_ticks: int = 0
    coming: deque[Job] = field(default_factory=deque)
    queue: deque[Job] = field(default_factory=deque)
    slots: dict[int, Job] = field(default_factory=dict)

    def submit(self, job: Job) -> None:
        """A request arrives at its moment."""
        self.coming.append(job)

    def run(self) -> None:
        """Tick until nothing is left."""
        while self.coming or self.queue or self.slots:
            self.tick()

    def tick(self) -> None:
        """One tick, or a wait for the next request."""
        if not self.queue and not self.slots and self.coming:
            self.now_s = max(self.now_s, self.coming[0].submitted_s)
        while self.coming and self.coming[0].submitted_s <= self.now_s:
            self._take(self.coming.popleft())
        self._admit()
        self._cancel()
        rows = self._rows()
        if not rows:
            return
        elapsed_s = 0.01 + 0.0001 * sum(row.num_tokens for row in rows)
        self.instrument.tick_finished(
            TickRecord(
                index=self.num_ticks,
                kind="generate",
                start_s=self.now_s,
                elapsed_s=elapsed_s,
                step_s=elapsed_s - 0.0002,
                rows=rows,
                num_slots=self.num_slots,
                num_running=len(self.slots),
                num_waiting=len(self.queue),
                num_cells=sum(job.num_computed_tokens for job in self.slots.values()),
                budget=self.budget,
            )
        )
        self.num_ticks += 1
        self.now_s += elapsed_s
        for slot, job in list(self.slots.items()):
            if job.num_made >= job.num_wanted:
                self.end(slot, job.reason)

    def embed(self, num_texts: int, num_tokens: int) -> None:
        """A tick that embeds texts."""
        elapsed_s = 0.01 + 0.0001 * num_tokens
        self.instrument.tick_finished(
            TickRecord(
                index=self.num_ticks,
                kind="embed",
                start_s=self.now_s,
                elapsed_s=elapsed_s,
                step_s=elapsed_s,
                rows=(),
                num_slots=self.num_slots,
                num_running=len(self.slots),
                num_waiting=len(self.queue),
                num_cells=0,
                budget=self.budget,
                num_embedded=num_texts,
                num_embedded_tokens=num_tokens,
            )
        )
        self.num_ticks += 1
        self.now_s += elapsed_s

    def preempt(self, slot: int) -> None:
        """The sequence loses its slot and all that it computed, and waits at the front of the queue."""
        job = self.slots.pop(slot)
        self.instrument.preempted(job.key, 0, job.num_computed_tokens, self.now_s)
        self.instrument.slot_freed(job.key, 0, slot, self.now_s)
        job.num_computed_tokens = 0
        self.queue.appendleft(job)

    def end(self, slot: int, reason: FinishReason) -> None:
        """The sequence in a slot ends."""
        job = self.slots.pop(slot)
        self.instrument.slot_freed(job.key, 0, slot, self.now_s)
        self._ended(job, reason)

    def _take(self, job: Job) -> None:
        self.instrument.request_queued(
            RequestRecord(
                key=job.key,
                request_id=job.request_id,
                kind="generate",
                prompt_tokens=job.num_prompt_tokens,
                num_choices=1,
                max_tokens=job.num_wanted,
                priority=0,
                submitted_s=job.submitted_s,
            )
        )
        self.queue.append(job)

    def _admit(self) -> None:
        for slot in range(self.num_slots):
            if slot not in self.slots and self.queue:
                self.slots[slot] = self.queue.popleft()
                self.instrument.request_started(self.slots[slot].key, 0, slot, self.now_s)

    def _cancel(self) -> None:
        for slot, job in list(self.slots.items()):
            if job.ends_at_tick is not None and job.ends_at_tick <= self.num_ticks:
                self.end(slot, job.reason)

    def _rows(self) -> tuple[RowRecord, ...]:
        left = self.budget
        rows = []
        for slot, job in sorted(self.slots.items(), key=lambda item: item[1].num_made == 0):
            num_uncomputed_tokens = job.num_prompt_tokens + job.num_made - job.num_computed_tokens
            num_tokens = min(num_uncomputed_tokens, left)
            if num_tokens:
                rows.append(self._row(slot, job, num_tokens, num_uncomputed_tokens))
                left -= num_tokens
        return tuple(rows)

    def _row(self, slot: int, job: Job, num_tokens: int, num_uncomputed_tokens: int) -> RowRecord:
        is_decode = job.num_made > 0 and num_uncomputed_tokens <= job.burst
        num_new = (
            job.burst
            if num_tokens == num_uncomputed_tokens and job.num_made
            else int(num_tokens == num_uncomputed_tokens)
        )
        row = RowRecord(
            slot=slot,
            key=job.key,
            choice=0,
            position=job.num_computed_tokens,
            num_tokens=num_tokens,
            num_decode=int(is_decode),
            num_drafts=num_tokens - 1 if is_decode else 0,
            num_new=num_new,
            first=num_new > 0 and job.num_made == 0,
        )
        job.num_computed_tokens += num_tokens
        job.num_made += num_new
        return row

    def _ended(self, job: Job, reason: FinishReason) -> None:
        usage = Usage(prompt_tokens=job.num_prompt_tokens, completion_tokens=job.num_made)
        code = "decode_error" if reason is FinishReason.ERROR else None
        self.instrument.request_ended(
            EndRecord(key=job.key, reason=reason, usage=usage, now_s=self.now_s, error_code=code)
        )
