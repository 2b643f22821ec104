"""What instruments are told: records made of the scheduler's state, only where somebody listens."""

from __future__ import annotations

from typing import Protocol

from paceline.errors import PacelineError
from paceline.scheduling.instrument import EndRecord, RequestRecord, RowRecord, TickRecord
from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import EmbeddingPlan, PlanOutput, Row, RowOutput, StepPlan
from paceline.streaming.chunk import FinishReason, Usage


class Watch(Protocol):
    """Whoever passes the hooks on to the instruments; `Instrument` says what each means."""

    @property
    def wants_ticks(self) -> bool: ...  # noqa: D102
    def request_queued(self, record: RequestRecord) -> None: ...  # noqa: D102
    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None: ...  # noqa: D102
    def request_ended(self, record: EndRecord) -> None: ...  # noqa: D102
    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None: ...  # noqa: D102
    def preempted(self, key: int, choice: int, num_computed: int, now_s: float) -> None: ...  # noqa: D102
    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None: ...  # noqa: D102
    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None: ...  # noqa: D102
    def evicted(self, num_tokens: int, source: str, now_s: float) -> None: ...  # noqa: D102
    def paused(self, key: int, is_paused: bool, now_s: float) -> None: ...  # noqa: D102
    def tick_finished(self, record: TickRecord) -> None: ...  # noqa: D102


class Reports:
    """Makes the records and passes them on."""

    def __init__(self, watch: Watch, limits: Limits) -> None:
        self.watch = watch
        self._limits = limits
        self._index = 0
        self.num_running = 0
        self.num_waiting = 0

    def request_ended(
        self, key: int, reason: FinishReason, usage: Usage, now_s: float, error: PacelineError | None
    ) -> None:
        """A request has ended."""
        code = None if error is None else error.code
        self.watch.request_ended(EndRecord(key=key, reason=reason, usage=usage, now_s=now_s, error_code=code))

    def tick(self, plan: StepPlan, output: PlanOutput, rows: tuple[RowRecord, ...], now_s: float) -> None:
        """A generation tick has ended."""
        self._index += 1
        self.watch.tick_finished(
            TickRecord(
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
        )

    def embedding_tick(self, plan: EmbeddingPlan, output: PlanOutput, now_s: float, num_waiting: int) -> None:
        """An embedding tick has ended."""
        if not self.watch.wants_ticks:
            return
        self._index += 1
        self.watch.tick_finished(
            TickRecord(
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
        )


def row_record(row: Row, result: RowOutput) -> RowRecord:
    """A row as instruments see it; to be made before the sequence moves on."""
    sequence = row.sequence
    assert sequence.slot is not None  # noqa: S101 - it had a row
    return RowRecord(
        slot=sequence.slot,
        key=sequence.request.key,
        choice=sequence.choice,
        position=row.position,
        num_tokens=len(row.token_ids),
        num_decode=int(row.position >= sequence.num_prompt and sequence.is_decoding),
        num_drafts=0,
        num_new=len(result.token_ids),
        first=bool(result.token_ids) and sequence.num_known == sequence.num_prompt,
    )
