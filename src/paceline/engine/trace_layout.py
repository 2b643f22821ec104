"""Where the things of a trace stand in its picture: columns of ticks, cells in them, stays in slots, ends. Pure, in seconds.

Ticks that lie closer together than a picture can show become one column, so that a picture has a bounded number of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from paceline.engine.metrics_snapshot import CANCELLED, COMPLETED
from paceline.engine.trace_events import Preempted, SlotFreed, Started, Trace, TraceEvent, moment_s
from paceline.scheduling.instrument import EndRecord, RequestRecord, TickRecord
from paceline.streaming.chunk import FinishReason

Sort = Literal["prefill", "decode", "embed"]
Ending = Literal["ended", "cancelled", "failed", "preempted"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a slot did in a column; slot None: texts were embedded. num_tokens: of its busiest tick.

    begin, end: which part of the lane's height it takes, from above: all of it where the slot did one thing in every tick.
    """

    slot: int | None
    sort: Sort
    num_tokens: int
    begin: float = 0.0
    end: float = 1.0


@dataclass(frozen=True, slots=True)
class Column:
    """Neighbouring ticks that are drawn as one; most often a single one. num_waiting: the most requests that waited."""

    start_s: float
    end_s: float
    num_ticks: int
    num_waiting: int
    cells: tuple[Cell, ...]


@dataclass(slots=True)
class Stay:
    """A sequence's time in a slot. end_s, ending: when and how it left; None where the trace ends before."""

    slot: int
    key: int
    choice: int
    start_s: float
    end_s: float | None = None
    ending: Ending | None = None


@dataclass(frozen=True, slots=True)
class Unseated:
    """The end of a request that was in no slot then. is_embedding: whether it needed none."""

    now_s: float
    ending: Ending
    is_embedding: bool


@dataclass(frozen=True, slots=True)
class Layout:
    """All that a picture shows. requests, ends: by key."""

    start_s: float
    end_s: float
    slots: tuple[int, ...]
    has_embedding: bool
    columns: tuple[Column, ...]
    stays: tuple[Stay, ...]
    unseated: tuple[Unseated, ...]
    requests: dict[int, RequestRecord]
    ends: dict[int, EndRecord]


MAX_EMPTY_SLOTS: Final = 256
"""Slots in which nothing ever was are shown while the engine has no more than this."""

_LEAST: Final = 0.15  # of a lane's height: what happened at all can be seen


def arrange(trace: Trace, num_columns: int) -> Layout:
    """The layout of a trace in a picture that can show so many columns."""
    ticks = [event for event in trace.events if isinstance(event, TickRecord)]
    start_s, end_s = _span(trace, ticks)
    columns = tuple(_columns(ticks, (end_s - start_s) / num_columns))
    seating = _Seating()
    for event in trace.events:
        seating.follow(event)
    ends = {event.key: event for event in trace.events if isinstance(event, EndRecord)}
    return Layout(
        start_s=start_s,
        end_s=end_s,
        slots=_slots(ticks, seating.stays),
        has_embedding=any(cell.slot is None for column in columns for cell in column.cells),
        columns=columns,
        stays=tuple(seating.stays),
        unseated=tuple(seating.unseated),
        requests={event.key: event for event in trace.events if isinstance(event, RequestRecord)},
        ends=ends,
    )


def _span(trace: Trace, ticks: Sequence[TickRecord]) -> tuple[float, float]:
    """From the first moment to the last; never empty."""
    moments = [moment for event in trace.events if (moment := moment_s(event)) is not None]
    moments += [tick.start_s + tick.elapsed_s for tick in ticks]
    start_s = min(moments, default=0.0)
    return start_s, max(max(moments, default=0.0), start_s + 0.001)


def _slots(ticks: Sequence[TickRecord], stays: Sequence[Stay]) -> tuple[int, ...]:
    num_slots = max((tick.num_slots for tick in ticks), default=0)
    seen = {row.slot for tick in ticks for row in tick.rows} | {stay.slot for stay in stays}
    return tuple(sorted(seen.union(range(num_slots if num_slots <= MAX_EMPTY_SLOTS else 0))))


def _columns(ticks: Iterable[TickRecord], least_s: float) -> Iterator[Column]:
    """Ticks in their order; a tick goes into the column before it where that is still narrower than `least_s`."""
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
    )


def _cells(ticks: Sequence[TickRecord]) -> Iterator[Cell]:
    """By slot, from the bottom up, each as high as its share of the column's ticks: what is idle stays empty."""
    tokens: dict[int | None, dict[Sort, list[int]]] = {}
    for tick in ticks:
        for slot, sort, num_tokens in _shares(tick):
            tokens.setdefault(slot, {}).setdefault(sort, []).append(num_tokens)
    for slot, by_sort in tokens.items():
        heights = {sort: max(len(counts) / len(ticks), _LEAST) for sort, counts in sorted(by_sort.items())}
        scale, end = max(1.0, sum(heights.values())), 1.0
        for sort, height in heights.items():
            begin = end - height / scale
            yield Cell(slot, sort, max(by_sort[sort]), begin, end)
            end = begin


def _shares(tick: TickRecord) -> Iterator[tuple[int | None, Sort, int]]:
    """What each slot computed. Drafts that are verified are decoding."""
    if tick.kind == "embed":
        yield None, "embed", tick.num_embedded_tokens or tick.num_embedded
        return
    for row in tick.rows:
        num_decode = row.num_decode + row.num_drafts
        if row.num_tokens > num_decode:
            yield row.slot, "prefill", row.num_tokens - num_decode
        if num_decode:
            yield row.slot, "decode", num_decode


class _Seating:
    """Follows who sits where. In which order the hooks of one moment came does not matter."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []
        self.unseated: list[Unseated] = []
        self._embedding: set[int] = set()
        self._latest: dict[int, dict[int, Stay]] = {}  # by key and choice

    def follow(self, event: TraceEvent) -> None:
        match event:
            case RequestRecord(kind="embed"):
                self._embedding.add(event.key)
            case Started():
                stay = Stay(event.slot, event.key, event.choice, event.now_s)
                self.stays.append(stay)
                self._latest.setdefault(event.key, {})[event.choice] = stay
            case Preempted():
                self._leave(event, "preempted")
            case SlotFreed():
                self._leave(event, "ended")
            case EndRecord():
                self._end(event, _ending(event.reason))

    def _leave(self, event: Preempted | SlotFreed, ending: Ending) -> None:
        stay = self._latest.get(event.key, {}).get(event.choice)
        if stay is not None:
            stay.end_s = event.now_s
            stay.ending = stay.ending if ending == "ended" and stay.ending else ending

    def _end(self, event: EndRecord, ending: Ending) -> None:
        """The reason is that of the choices that were last to leave; the others left by themselves."""
        seated = [stay for stay in self._latest.pop(event.key, {}).values() if stay.ending != "preempted"]
        for stay in seated:
            stay.end_s = event.now_s if stay.end_s is None else stay.end_s
        last_s = max((stay.end_s or 0.0 for stay in seated), default=None)
        if last_s is None:
            self.unseated.append(Unseated(event.now_s, ending, event.key in self._embedding))
        for stay in seated:
            stay.ending = ending if stay.end_s == last_s else "ended"


def _ending(reason: FinishReason) -> Ending:
    if reason in COMPLETED:
        return "ended"
    return "cancelled" if reason in CANCELLED else "failed"
