"""The stays of sequences in slots: when they began, when and how they ended."""

from __future__ import annotations

import itertools

import pytest

from paceline.cli.trace import stays_of
from paceline.observability.trace_file import EngineRestarted, Preempted, RequestStarted, SlotFreed, Trace, TraceEvent
from paceline.scheduling.records import EndRecord, RowRecord, TickRecord
from paceline.streaming.chunk import FinishReason, Usage


def row(slot: int, num_tokens: int, num_decode: int = 0, num_drafts: int = 0) -> RowRecord:
    return RowRecord(
        slot=slot,
        key=slot,
        choice=0,
        position=0,
        num_tokens=num_tokens,
        num_decode=num_decode,
        num_drafts=num_drafts,
        num_new=0,
        first=False,
    )


def tick(start_s: float, *rows: RowRecord, num_slots: int = 4, num_waiting: int = 0) -> TickRecord:
    return TickRecord(
        index=0,
        kind="generate",
        start_s=start_s,
        elapsed_s=0.5,
        step_s=0.5,
        rows=rows,
        num_slots=num_slots,
        num_running=1,
        num_waiting=num_waiting,
        num_cells=0,
        budget=64,
    )


def end(key: int, reason: FinishReason, now_s: float) -> EndRecord:
    return EndRecord(key=key, reason=reason, usage=Usage(), now_s=now_s)


ENDED = [SlotFreed(1, 0, 2, 3.0), end(1, FinishReason.CANCELLED, 3.0)]
MOVED = [Preempted(1, 0, 9, 3.0), SlotFreed(1, 0, 2, 3.0)]


@pytest.mark.parametrize("events", [*itertools.permutations(ENDED)])
def test_a_stay_ends_as_its_request_did(events: tuple[TraceEvent, ...]) -> None:
    """The order of hooks with the same time does not matter."""
    (stay,) = stays_of(Trace((RequestStarted(1, 0, 2, 1.0), *events)))
    assert (stay.slot, stay.start_s, stay.end_s, stay.ending) == (2, 1.0, 3.0, "cancelled")


@pytest.mark.parametrize("events", [*itertools.permutations(MOVED)])
def test_a_preempted_sequence_has_several_stays(events: tuple[TraceEvent, ...]) -> None:
    """The first stay ends with the preemption, the second with the request's ending."""
    later = [RequestStarted(1, 0, 0, 4.0), end(1, FinishReason.ERROR, 5.0)]
    one, other = stays_of(Trace((RequestStarted(1, 0, 2, 1.0), *events, *later)))
    assert (one.ending, one.end_s, other.ending, other.end_s) == ("preempted", 3.0, "failed", 5.0)


def test_a_restart_empties_all_slots_at_the_end_of_the_last_tick() -> None:
    """Running sequences continue in slots of the next worker or end without one; earlier stays keep their ending."""
    events = (
        *(RequestStarted(key, 0, key, 0.0) for key in (0, 1, 2)),
        SlotFreed(2, 0, 2, 0.3),
        end(2, FinishReason.STOP, 0.3),
        tick(0.0, row(0, 8), row(1, 8)),
        EngineRestarted(5.0),
        RequestStarted(0, 0, 3, 5.5),
        end(1, FinishReason.CANCELLED, 6.0),
        end(0, FinishReason.STOP, 7.0),
    )
    found = stays_of(Trace(events))
    assert [(stay.key, stay.slot, stay.end_s, stay.ending) for stay in found] == [
        (0, 0, 0.5, "preempted"),
        (1, 1, 0.5, "preempted"),
        (2, 2, 0.3, "ended"),
        (0, 3, 7.0, "ended"),
    ]


def test_a_reason_is_that_of_the_last_choices() -> None:
    """Choices that left earlier ended on their own."""
    events = [
        RequestStarted(1, 0, 0, 1.0),
        RequestStarted(1, 1, 1, 1.0),
        SlotFreed(1, 0, 0, 2.0),
        end(1, FinishReason.DEADLINE, 3.0),
    ]
    one, other = stays_of(Trace(tuple(events)))
    assert (one.ending, other.ending) == ("ended", "failed")


def test_a_stay_that_the_trace_does_not_see_end_is_open() -> None:
    """A stay without an end remains open: the process died, or the trace was closed before."""
    (stay,) = stays_of(Trace((RequestStarted(1, 0, 0, 1.0), tick(1.0, row(0, 1, 1)))))
    assert (stay.end_s, stay.ending) == (None, None)
