"""An engine held back, and figures that do not know of it."""

from __future__ import annotations

import pytest

from paceline.cli.demo_pace import Pacer
from paceline.observability.metrics import HOOKS
from paceline.observability.trace_file import EVENTS, EventInstrument
from paceline.scheduling.records import EndRecord, RequestRecord, RowRecord, TickRecord
from paceline.streaming import FinishReason, Usage
from paceline.testing.fake_backend import ManualClock


class Rehearsal:
    """A request of three tokens; its ticks take 10 ms each."""

    def __init__(self, pace: Pacer, clock: ManualClock) -> None:
        self.pace, self.clock = pace, clock

    def tick(self, index: int) -> None:
        start_s = self.clock.now()
        self.clock.advance(0.01)
        row = RowRecord(
            slot=0, key=1, choice=0, position=index, num_tokens=1, num_decode=int(index > 0), num_drafts=0, num_new=1,
            first=index == 0,
        )  # fmt: skip
        self.pace.tick_finished(
            TickRecord(
                index=index, kind="generate", start_s=start_s, elapsed_s=0.01, step_s=0.01, rows=(row,), num_slots=1,
                num_running=1, num_waiting=0, num_cells=0, budget=512,
            )
        )  # fmt: skip

    def play(self) -> None:
        record = RequestRecord(
            key=1, request_id=None, kind="generate", prompt_tokens=1, num_choices=1, max_tokens=3, priority=0,
            submitted_s=self.clock.now(),
        )  # fmt: skip
        self.pace.request_queued(record)
        self.pace.request_started(1, 0, 0, self.clock.now())
        for index in range(3):
            self.tick(index)
        self.pace.slot_freed(1, 0, 0, self.clock.now())
        end = EndRecord(key=1, reason=FinishReason.LENGTH, usage=Usage(), now_s=self.clock.now())
        self.pace.request_ended(end)


class Resting:
    """Stands in for the event that a rest waits for; lets the clock pass instead."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.is_hurried = clock, False

    def wait(self, timeout_s: float) -> None:
        self.clock.advance(timeout_s)

    def is_set(self) -> bool:
        return self.is_hurried


def rehearsed(ticks_per_s: float, *, is_hurried: bool = False) -> tuple[Pacer, ManualClock]:
    clock = ManualClock()
    pace = Pacer(ticks_per_s, clock)
    pace._hurry = Resting(clock)  # type: ignore[assignment]
    pace._hurry.is_hurried = is_hurried  # type: ignore[attr-defined]
    Rehearsal(pace, clock).play()
    return pace, clock


def test_ticks_begin_no_more_often_than_asked() -> None:
    """Ten ticks a second: after 10 ms of work come 90 of rest."""
    pace, clock = rehearsed(10)
    assert clock.now() == pytest.approx(0.3) and pace.rested_s == pytest.approx(0.27)


@pytest.mark.parametrize(("ticks_per_s", "is_hurried"), [(0, False), (10, True), (1000, False)])
def test_there_is_no_rest_without_a_limit_or_in_a_hurry_or_in_slow_ticks(ticks_per_s: float, is_hurried: bool) -> None:
    """An engine that is slower than the limit, or with a run that is to end, is left alone."""
    pace, clock = rehearsed(ticks_per_s, is_hurried=is_hurried)
    assert clock.now() == pytest.approx(0.03) and pace.rested_s == 0


def test_figures_match_an_engine_that_never_rests() -> None:
    """Times to and between tokens, and the whole, are the same held back and not."""
    slow, fast = rehearsed(10)[0], rehearsed(0)[0]
    assert slow.elapsed_s == pytest.approx(fast.elapsed_s) == pytest.approx(0.03)
    for name in ("paceline_ttft_seconds", "paceline_itl_seconds", "paceline_request_seconds"):
        assert slow.metrics.snapshot().histogram(name).sum == pytest.approx(
            fast.metrics.snapshot().histogram(name).sum
        ), name


def test_a_moment_within_a_rest_is_its_beginning() -> None:
    """A request that is submitted while the engine rests has waited for nothing when it is over."""
    pace, _ = rehearsed(10)
    late = RequestRecord(
        key=2, request_id=None, kind="generate", prompt_tokens=1, num_choices=1, max_tokens=3, priority=0,
        submitted_s=0.05,
    )  # fmt: skip
    pace.request_queued(late)
    pace.request_started(2, 0, 0, 0.1)
    assert pace.metrics.snapshot().histogram("paceline_queue_time_seconds").largest == pytest.approx(0)


def test_every_hook_reaches_the_metrics() -> None:
    """A hook that is added to the engine must become an event, which the pacer passes on."""
    assert set(HOOKS) <= vars(EventInstrument).keys() and set(HOOKS) == EVENTS.keys()
