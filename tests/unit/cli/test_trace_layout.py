"""Where things stand in a trace's picture: columns and their cells, stays in slots and how they ended."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from tests.unit.observability.recorded import busy, two_requests

from paceline.cli.trace_layout import MAX_EMPTY_SLOTS, Burst, Cell, EndOutsideSlot, arrange
from paceline.observability.trace_events import EngineRestarted, Preempted, RequestStarted, SlotFreed, Trace, TraceEvent
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


def test_a_tick_is_a_column_and_a_row_a_cell() -> None:
    """Each tick has a column of its own if the picture is wide enough."""
    found = arrange(two_requests(), 1000)
    cells = [{(cell.slot, cell.sort, cell.num_tokens) for cell in column.cells} for column in found.columns]
    assert cells == [
        {(0, "prefill", 64)},
        {(0, "prefill", 36), (1, "prefill", 10)},
        {(0, "decode", 1), (1, "decode", 1)},
        {(0, "decode", 1)},
    ]
    assert [column.num_ticks for column in found.columns] == [1] * 4
    assert found.columns[1].start_s == pytest.approx(0.0164)
    assert (found.start_s, found.end_s) == (0.0, pytest.approx(0.0513))
    assert (found.slots, found.has_embedding) == ((0, 1, 2, 3), False)


def test_neighbouring_ticks_become_one_column() -> None:
    """Every tick is in one column, and the longest queue is kept."""
    ticks = [tick(0.5 * index, row(index % 2, 1, 1), num_waiting=index) for index in range(100)]
    found = arrange(Trace(tuple(ticks)), 10)
    assert sum(column.num_ticks for column in found.columns) == 100
    assert len(found.columns) == 10
    assert found.columns[0].num_waiting == 9
    assert {cell.slot for cell in found.columns[0].cells} == {0, 1}
    for one, other in itertools.pairwise(found.columns):
        assert one.end_s <= other.start_s


def test_a_slot_that_did_both_sorts_shares_its_height() -> None:
    """The height follows the number of ticks; decode is below, and each has the tokens of its busiest tick."""
    ticks = (tick(0.0, row(0, 30)), tick(0.5, row(0, 1, 1)), tick(1.0, row(0, 4, 1, 3)), tick(1.5, row(0, 1, 1)))
    (column,) = arrange(Trace(ticks), 1).columns
    assert column.cells == (Cell(0, "decode", 4, 0.25, 1.0), Cell(0, "prefill", 30, 0.0, 0.25))


def test_a_slot_that_idled_leaves_its_height_empty() -> None:
    """The idle part of the lane stays empty, but rare work keeps a visible height."""
    ticks = [tick(0.5 * index, row(0, 1, 1), *([row(1, 1, 1)] if index == 7 else [])) for index in range(50)]
    ticks[20:30] = [tick(0.5 * index) for index in range(20, 30)]
    (column,) = arrange(Trace(tuple(ticks)), 1).columns
    assert column.cells == (Cell(0, "decode", 1, pytest.approx(0.2), 1.0), Cell(1, "decode", 1, 0.85, 1.0))


def test_a_row_that_decodes_and_recomputes_is_both() -> None:
    """Beside one decode token a row may hold prefill."""
    (column,) = arrange(Trace((tick(0.0, row(2, 11, 1)),)), 10).columns
    assert column.cells == (Cell(2, "decode", 1, 0.5, 1.0), Cell(2, "prefill", 10, 0.0, 0.5))


def test_the_number_of_columns_has_a_bound() -> None:
    """Ten thousand ticks give no more columns than the picture can show, with and without pauses."""
    close = [tick(0.5 * index, row(0, 1, 1)) for index in range(10_000)]
    apart = [tick(0.5 * index + 3 * (index // 7), row(0, 1, 1)) for index in range(10_000)]
    for ticks in (close, apart):
        assert 250 <= len(arrange(Trace(tuple(ticks)), 500).columns) <= 1000


def test_embedding_ticks_have_a_lane_of_their_own() -> None:
    """Their cells belong to no slot."""
    found = arrange(busy(30), 1000)
    assert found.has_embedding
    assert {cell.sort for column in found.columns for cell in column.cells if cell.slot is None} == {"embed"}


ENDED = [SlotFreed(1, 0, 2, 3.0), end(1, FinishReason.CANCELLED, 3.0)]
MOVED = [Preempted(1, 0, 9, 3.0), SlotFreed(1, 0, 2, 3.0)]


@pytest.mark.parametrize("events", [*itertools.permutations(ENDED)])
def test_a_stay_ends_as_its_request_did(events: tuple[TraceEvent, ...]) -> None:
    """The order of hooks with the same time does not matter."""
    (stay,) = arrange(Trace((RequestStarted(1, 0, 2, 1.0), *events)), 10).stays
    assert (stay.slot, stay.start_s, stay.end_s, stay.ending) == (2, 1.0, 3.0, "cancelled")


@pytest.mark.parametrize("events", [*itertools.permutations(MOVED)])
def test_a_preempted_sequence_has_several_stays(events: tuple[TraceEvent, ...]) -> None:
    """The first stay ends with the preemption, the second with the request's ending."""
    later = [RequestStarted(1, 0, 0, 4.0), end(1, FinishReason.ERROR, 5.0)]
    one, other = arrange(Trace((RequestStarted(1, 0, 2, 1.0), *events, *later)), 10).stays
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
    found = arrange(Trace(events), 100)
    assert [(stay.key, stay.slot, stay.end_s, stay.ending) for stay in found.stays] == [
        (0, 0, 0.5, "preempted"),
        (1, 1, 0.5, "preempted"),
        (2, 2, 0.3, "ended"),
        (0, 3, 7.0, "ended"),
    ]
    assert [(one.now_s, one.ending) for one in found.outside] == [(6.0, "cancelled")]


def test_a_reason_is_that_of_the_last_choices() -> None:
    """Choices that left earlier ended on their own."""
    events = [
        RequestStarted(1, 0, 0, 1.0),
        RequestStarted(1, 1, 1, 1.0),
        SlotFreed(1, 0, 0, 2.0),
        end(1, FinishReason.DEADLINE, 3.0),
    ]
    one, other = arrange(Trace(tuple(events)), 10).stays
    assert (one.ending, other.ending) == ("ended", "failed")


def test_an_end_without_a_slot_is_kept() -> None:
    """A request can be cancelled in the queue, or while it waits after a preemption."""
    events = [end(1, FinishReason.CANCELLED, 1.0), RequestStarted(2, 0, 0, 1.0)]
    events += [Preempted(2, 0, 9, 2.0), end(2, FinishReason.SHUTDOWN, 4.0)]
    found = arrange(Trace(tuple(events)), 10)
    assert found.outside == (EndOutsideSlot(1.0, "cancelled", False), EndOutsideSlot(4.0, "failed", False))
    assert found.stays[0].ending == "preempted"


def test_a_stay_that_the_trace_does_not_see_end_is_open() -> None:
    """A stay without an end remains open: the process died, or the trace was closed before."""
    (stay,) = arrange(Trace((RequestStarted(1, 0, 0, 1.0), tick(1.0, row(0, 1, 1)))), 10).stays
    assert (stay.end_s, stay.ending) == (None, None)


def test_rows_of_sequences_that_came_before_the_trace_are_shown() -> None:
    """A trace of a recorder that was added to a running engine has a layout."""
    found = arrange(Trace((tick(0.0, row(9, 1, 1), num_slots=2),)), 10)
    assert (found.slots, found.stays, len(found.columns)) == ((0, 1, 9), (), 1)


def test_empty_slots_are_shown_up_to_a_number() -> None:
    """With more than MAX_EMPTY_SLOTS slots, only used ones are shown."""
    for num_slots, num_shown in ((MAX_EMPTY_SLOTS, MAX_EMPTY_SLOTS), (MAX_EMPTY_SLOTS + 1, 1)):
        assert len(arrange(Trace((tick(0.0, row(9, 1, 1), num_slots=num_slots),)), 10).slots) == num_shown


def test_an_empty_trace_has_a_layout() -> None:
    """An empty trace has no columns and a positive duration."""
    found = arrange(Trace(()), 10)
    assert (found.columns, found.stays, found.slots) == ((), (), ())
    assert found.end_s > found.start_s


def drafted(slot: int, num_drafts: int, num_new: int) -> RowRecord:
    """A decoding row with drafts, of which all but one of its new tokens were accepted."""
    return msgspec.structs.replace(row(slot, 1 + num_drafts, 1, num_drafts), num_new=num_new)


def test_drafts_of_a_slot_are_bursts_of_its_column() -> None:
    """Together where ticks are; a row that had drafts and lost its pass won nothing."""
    ticks = [tick(0.0, drafted(0, 4, 3), row(1, 1, 1)), tick(0.5, drafted(0, 2, 1), drafted(1, 3, 0))]
    wide, narrow = arrange(Trace(tuple(ticks)), 1000), arrange(Trace(tuple(ticks)), 1)
    assert [column.bursts for column in wide.columns] == [(Burst(0, 4, 2),), (Burst(0, 2, 0), Burst(1, 3, 0))]
    assert [column.bursts for column in narrow.columns] == [(Burst(0, 6, 2), Burst(1, 3, 0))]
    assert (wide.most_drafts, narrow.most_drafts) == (4, 6)
    assert arrange(two_requests(), 100).most_drafts == 0
