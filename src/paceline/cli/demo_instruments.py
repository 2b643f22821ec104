"""What the demo observes of its engine: which request is in which slot, figures that leave pauses out, and a trace file.

The hooks run on the engine's thread, the methods that return something on any.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

from paceline.clock import Clock, MonotonicClock
from paceline.observability.instruments import Instrument
from paceline.observability.metrics import Metrics
from paceline.observability.metrics_snapshot import MetricsSnapshot
from paceline.observability.trace_events import EventInstrument, PrefixShared, TraceEvent, call_hook
from paceline.scheduling.records import EndRecord, RequestRecord, TickRecord

State = Literal["prefill", "decode", "paused", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOccupant:
    """The sequence that is in a slot, or was the last one there.

    Attributes:
        key: The engine's number of the request.
        order: Its place among the requests that the engine accepted, from 0.
        choice: Which of its choices this is.
        num_prompt: Tokens of the prompt.
        num_computed_tokens: Tokens whose KV is computed.
        num_generated: Tokens generated so far.
        state: "left" once the sequence has ended and no other has taken the slot.
    """

    key: int
    order: int
    choice: int
    num_prompt: int
    num_computed_tokens: int = 0
    num_generated: int = 0
    state: State = "prefill"


class SlotBoard(Instrument):
    """Track which sequence is in which slot, from the engine's first request on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[int, RequestRecord]] = {}
        self._occupants: dict[int, SlotOccupant] = {}
        self._paused: set[int] = set()
        self._num_queued = 0
        self.num_ticks = 0
        self.num_generated = 0
        self.num_drafts = self.num_won = 0  # drafts, and tokens that came of them beyond one a row

    def occupants(self) -> dict[int, SlotOccupant]:
        """Return the occupants by slot; a slot that was never taken is missing."""
        with self._lock:
            return {slot: self._shown(occupant) for slot, occupant in self._occupants.items()}

    @property
    def num_waiting(self) -> int:
        """Sequences that have no slot yet."""
        return self._num_queued

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        with self._lock:
            return sum(occupant.state != "left" for occupant in self._occupants.values())

    def request_queued(self, record: RequestRecord) -> None:
        """Note the request and its place in the order."""
        with self._lock:
            self._requests[record.key] = (len(self._requests), record)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002 - the hook's shape
        """Put the sequence into its slot."""
        with self._lock:
            order, record = self._requests[key]
            self._occupants[slot] = SlotOccupant(key=key, order=order, choice=choice, num_prompt=record.prompt_tokens)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002
        """Mark the occupant as gone; it stays visible until another takes the slot."""
        with self._lock:
            self._occupants[slot] = replace(self._occupants[slot], state="left")

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:  # noqa: ARG002
        """Note whether the request is paused because its reader is behind."""
        with self._lock:
            (self._paused.add if is_paused else self._paused.discard)(key)

    def tick_finished(self, record: TickRecord) -> None:
        """Advance the occupants that had a row in the tick."""
        with self._lock:
            self.num_ticks += 1
            self._num_queued = record.num_waiting
            for row in record.rows:
                self.num_generated += row.num_new
                if row.num_drafts:
                    self.num_drafts += row.num_drafts
                    self.num_won += max(0, row.num_new - 1)
                occupant = self._occupants[row.slot]
                if (occupant.key, occupant.choice) == (row.key, row.choice):
                    self._occupants[row.slot] = replace(
                        occupant,
                        num_computed_tokens=row.position + row.num_tokens,
                        num_generated=occupant.num_generated + row.num_new,
                        state=_state(occupant, row.num_new),
                    )

    def _shown(self, occupant: SlotOccupant) -> SlotOccupant:
        return (
            replace(occupant, state="paused") if occupant.key in self._paused and occupant.state != "left" else occupant
        )


def _state(occupant: SlotOccupant, num_new: int) -> State:
    if occupant.state == "left":
        return "left"
    return "decode" if num_new or occupant.num_generated else "prefill"


@dataclass(frozen=True, slots=True)
class _Rest:
    """A pause between two ticks, on the engine's clock; rested_s: the length of all pauses before it."""

    start_s: float
    end_s: float
    rested_s: float


class Pacer(EventInstrument):
    """Slow an engine down so that one can follow it, and measure it as if it had not been.

    A tiny model takes a millisecond a tick. This instrument rests after each tick, on the engine's thread, and passes every
    time on to its metrics without the rests before it. ticks_per_s: most ticks a second; 0: no limit, and no rests.
    """

    def __init__(self, ticks_per_s: float, clock: Clock | None = None) -> None:
        self._least_s = 1 / ticks_per_s if ticks_per_s else 0.0
        self._clock = MonotonicClock() if clock is None else clock
        self._metrics = Metrics()
        self._rests: list[_Rest] = []
        self._hurry = threading.Event()
        self._first_s: float | None = None
        self._last_s = 0.0

    def hurry(self) -> None:
        """Take no more rests, and end the present one. Any thread."""
        self._hurry.set()

    def snapshot(self) -> MetricsSnapshot:
        """Return the metrics, without the rests."""
        return self._metrics.snapshot()

    @property
    def elapsed_s(self) -> float:
        """Seconds from the first submit to the last end, without the rests."""
        return 0.0 if self._first_s is None else self._last_s - self._first_s

    @property
    def rested_s(self) -> float:
        """Seconds of all rests."""
        return self._total_s()

    def take(self, event: TraceEvent) -> None:
        """Pass an event on to the metrics, without the rests; after a tick, rest until the next one may begin."""
        shifted = self._shifted(event)
        call_hook(self._metrics, shifted)
        if isinstance(shifted, RequestRecord) and self._first_s is None:
            self._first_s = shifted.submitted_s
        elif isinstance(shifted, EndRecord):
            self._last_s = shifted.now_s
        if isinstance(event, TickRecord):
            self._rest(event.start_s + self._least_s)

    def _shifted(self, event: TraceEvent) -> TraceEvent:
        match event:
            case RequestRecord():
                return replace(event, submitted_s=self._without_rests(event.submitted_s))
            case TickRecord():
                return msgspec.structs.replace(event, start_s=self._without_rests(event.start_s))
            case PrefixShared():
                return event
            case _:
                return replace(event, now_s=self._without_rests(event.now_s))

    def _rest(self, until_s: float) -> None:
        start_s = self._clock.now()
        if self._least_s and start_s < until_s and not self._hurry.is_set():
            self._hurry.wait(until_s - start_s)
            self._rests.append(_Rest(start_s, self._clock.now(), self._total_s()))

    def _total_s(self) -> float:
        if not self._rests:
            return 0.0
        last = self._rests[-1]
        return last.rested_s + last.end_s - last.start_s

    def _without_rests(self, now_s: float) -> float:
        """Convert a time to a clock that stands still while the engine rests."""
        index = bisect_right(self._rests, now_s, key=lambda rest: rest.start_s) - 1
        if index < 0:
            return now_s
        rest = self._rests[index]
        return now_s - rest.rested_s - min(now_s, rest.end_s) + rest.start_s


class TraceFile:
    """The text file that a `TraceRecorder` writes to. A write that fails ends the trace and not the demo.

    Use it as a context manager. Raises `OSError` if the file cannot be opened, and never after.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w", encoding="utf-8", newline="\n")
        self._error: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text, unless a write has failed before."""
        self._try(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the file, unless a write has failed before."""
        self._try(self._file.flush)

    @property
    def problem(self) -> str | None:
        """Why the file is incomplete, as a sentence; None if no write has failed so far."""
        if self._error is None:
            return None
        return f"the trace {self._path} is incomplete: {self._error.strerror or self._error}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = _failure(self._file.close)
        self._error = self._error or failure

    def _try(self, work: Callable[[], object]) -> None:
        if self._error is None:
            self._error = _failure(work)


def _failure(work: Callable[[], object]) -> OSError | None:
    try:
        work()
    except OSError as error:
        return error
    return None
