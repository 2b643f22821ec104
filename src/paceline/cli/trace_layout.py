"""The layout of a trace's picture: columns of ticks with cells, stays in slots, ends of requests. Pure; times in seconds.

Ticks closer together than the picture can show are merged into one column, so the number of columns is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.observability.metrics_snapshot import CANCELLED, COMPLETED
from paceline.observability.trace_events import (
    EngineRestarted,
    Preempted,
    RequestStarted,
    SlotFreed,
    Trace,
    TraceEvent,
    event_time,
)
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord
from paceline.streaming.chunk import FinishReason

Sort = Literal["prefill", "decode", "embed"]
Ending = Literal["ended", "cancelled", "failed", "preempted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """The work of a slot in a column; slot None: texts were embedded. num_tokens: in its busiest tick.

    begin, end: its part of the lane's height, from above: all of it if the slot did the same sort of work in every tick.
    """

    slot: int | None
    sort: Sort
    num_tokens: int
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class Burst:
    """The drafts of a slot in a column's ticks. num_won: tokens that came out beyond one a tick, which are accepted drafts."""

    slot: int
    num_drafts: int
    num_won: int


@dataclass(frozen=True, slots=True)
class Column:
    """One tick, or neighbouring ticks drawn as one. num_waiting: the most queued requests."""

    start_s: float
    end_s: float
    num_ticks: int
    num_waiting: int
    cells: tuple[Cell, ...]
    bursts: tuple[Burst, ...] = ()


@dataclass(slots=True)
class SlotStay:
    """A sequence's time in a slot. end_s, ending: when and how it left; None if the trace ends before."""

    slot: int
    key: int
    choice: int
    start_s: float
    end_s: float | None = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class EndOutsideSlot:
    """The end of a request that was in no slot at that time. is_embedding: it needed none."""

    now_s: float
    ending: Ending
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything a picture shows. requests, ends: by key."""

    start_s: float
    end_s: float
    slots: tuple[int, ...]
    has_embedding: bool
    columns: tuple[Column, ...]
    stays: tuple[SlotStay, ...]
    outside: tuple[EndOutsideSlot, ...]
    requests: dict[int, RequestRecord]
    ends: dict[int, EndRecord]

    @property
    def most_drafts(self) -> int:
        """The most drafts of a slot in a column; 0 without speculation."""
        return max((burst.num_drafts for column in self.columns for burst in column.bursts), default=0)


MAX_EMPTY_SLOTS: Final = 256
"""Slots that were never used are shown if the engine has at most this many slots."""

_LEAST: Final = 0.15  # of a lane's height, so that rare work stays visible


def arrange(trace: Trace, num_columns: int) -> Layout:
    """Return the layout of a trace in a picture of at most num_columns columns."""
    ticks = [event for event in trace.events if isinstance(event, TickRecord)]
    start_s, end_s = _span(trace, ticks)
    columns = tuple(_columns(ticks, (end_s - start_s) / num_columns))
    tracker = _SlotTracker()
    for event in trace.events:
        tracker.follow(event)
    ends = {event.key: event for event in trace.events if isinstance(event, EndRecord)}
    return Layout(
        start_s=start_s,
        end_s=end_s,
        slots=_slots(ticks, tracker.stays),
        has_embedding=any(cell.slot is None for column in columns for cell in column.cells),
        columns=columns,
        stays=tuple(tracker.stays),
        outside=tuple(tracker.outside),
        requests={event.key: event for event in trace.events if isinstance(event, RequestRecord)},
        ends=ends,
    )


def _span(trace: Trace, ticks: Sequence[TickRecord]) -> tuple[float, float]:
    """Return the first and the last time, at least a millisecond apart."""
    times = [time_s for event in trace.events if (time_s := event_time(event)) is not None]
    times += [tick.start_s + tick.elapsed_s for tick in ticks]
    start_s = min(times, default=0.0)
    return start_s, max(max(times, default=0.0), start_s + 0.001)


def _slots(ticks: Sequence[TickRecord], stays: Sequence[SlotStay]) -> tuple[int, ...]:
    num_slots = max((tick.num_slots for tick in ticks), default=0)
    seen = {row.slot for tick in ticks for row in tick.rows} | {stay.slot for stay in stays}
    return tuple(sorted(seen.union(range(num_slots if num_slots <= MAX_EMPTY_SLOTS else 0))))


def _columns(ticks: Iterable[TickRecord], least_s: float) -> Iterator[Column]:
    """Merge a tick into the column before it while that stays narrower than `least_s`."""
    group: list[TickRecord] = []
    for tick in ticks:
        if group and tick.start_s + tick.elapsed_s - group[0].start_s > least_s:
            yield _column(group)
            group = []
        group.append(tick)
    if group:
        yield _column(group)


def _column(ticks: Sequence[TickRecord]) -> Column:
    last = ticks[-1]
    return Column(
        start_s=ticks[0].start_s,
        end_s=last.start_s + last.elapsed_s,
        num_ticks=len(ticks),
        num_waiting=max(tick.num_waiting for tick in ticks),
        cells=tuple(_cells(ticks)),
        bursts=tuple(_bursts(ticks)),
    )


def _bursts(ticks: Sequence[TickRecord]) -> Iterator[Burst]:
    """Return the drafts by slot."""
    found: dict[int, tuple[int, int]] = {}
    for row in (row for tick in ticks for row in tick.rows if row.num_drafts):
        num_drafts, num_won = found.get(row.slot, (0, 0))
        found[row.slot] = (num_drafts + row.num_drafts, num_won + max(0, row.num_new - 1))
    for slot, (num_drafts, num_won) in found.items():
        yield Burst(slot, num_drafts, num_won)


def _cells(ticks: Sequence[TickRecord]) -> Iterator[Cell]:
    """Return the cells by slot, from the bottom up; the height is the fraction of the column's ticks with that work."""
    tokens: dict[int | None, dict[Sort, list[int]]] = {}
    for tick in ticks:
        for slot, sort, num_tokens in _tick_work(tick):
            tokens.setdefault(slot, {}).setdefault(sort, []).append(num_tokens)
    for slot, by_sort in tokens.items():
        heights = {sort: max(len(counts) / len(ticks), _LEAST) for sort, counts in sorted(by_sort.items())}
        scale, end = max(1.0, sum(heights.values())), 1.0
        for sort, height in heights.items():
            begin = end - height / scale
            yield Cell(slot, sort, max(by_sort[sort]), begin, end)
            end = begin


def _tick_work(tick: TickRecord) -> Iterator[tuple[int | None, Sort, int]]:
    """Return the tokens that each slot computed. Verifying drafts counts as decode."""
    if tick.kind == "embed":
        yield None, "embed", tick.num_embedded_tokens or tick.num_embedded
        return
    for row in tick.rows:
        num_decode = row.num_decode + row.num_drafts
        if row.num_tokens > num_decode:
            yield row.slot, "prefill", row.num_tokens - num_decode
        if num_decode:
            yield row.slot, "decode", num_decode


class _SlotTracker:
    """Track which sequence is in which slot. The order of hooks with the same time does not matter."""

    def __init__(self) -> None:
        self.stays: list[SlotStay] = []
        self.outside: list[EndOutsideSlot] = []
        self._embedding: set[int] = set()
        self._ticked_s = 0.0  # the end of the last tick
        self._latest: dict[int, dict[int, SlotStay]] = {}  # by key and choice

    def follow(self, event: TraceEvent) -> None:
        match event:
            case RequestRecord(kind="embed"):
                self._embedding.add(event.key)
            case RequestStarted():
                stay = SlotStay(event.slot, event.key, event.choice, event.now_s)
                self.stays.append(stay)
                self._latest.setdefault(event.key, {})[event.choice] = stay
            case Preempted():
                self._leave(event, "preempted")
            case SlotFreed():
                self._leave(event, "ended")
            case EndRecord():
                self._end(event, _ending(event.reason))
            case TickRecord():
                self._ticked_s = event.start_s + event.elapsed_s
            case EngineRestarted():
                self._restart()

    def _restart(self) -> None:
        """Empty all slots, as their process died after its last tick."""
        for stay in (stay for choices in self._latest.values() for stay in choices.values() if stay.end_s is None):
            stay.end_s, stay.ending = max(stay.start_s, self._ticked_s), "preempted"

    def _leave(self, event: Preempted | SlotFreed, ending: Ending) -> None:
        stay = self._latest.get(event.key, {}).get(event.choice)
        if stay is not None:
            stay.end_s = event.now_s
            stay.ending = stay.ending if ending == "ended" and stay.ending else ending

    def _end(self, event: EndRecord, ending: Ending) -> None:
        """Set the request's ending on the choices that left last; the others ended on their own."""
        seated = [stay for stay in self._latest.pop(event.key, {}).values() if stay.ending != "preempted"]
        for stay in seated:
            stay.end_s = event.now_s if stay.end_s is None else stay.end_s
        last_s = max((stay.end_s or 0.0 for stay in seated), default=None)
        if last_s is None:
            self.outside.append(EndOutsideSlot(event.now_s, ending, event.key in self._embedding))
        for stay in seated:
            stay.ending = ending if stay.end_s == last_s else "ended"


def _ending(reason: FinishReason) -> Ending:
    if reason in COMPLETED:
        return "ended"
    return "cancelled" if reason in CANCELLED else "failed"
