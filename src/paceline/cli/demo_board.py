"""Which request is in which slot and how far it is, as an instrument sees it.

The hooks run on the engine's thread, `seats` and the numbers on any. Knows no text: that is the readers'.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Literal

from paceline.scheduling.instrument import Instrument, RequestRecord, TickRecord

State = Literal["prefill", "decode", "paused", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A slot and the sequence that is in it, or was the last.

    key: the engine's name of the request; order: its place among those that the engine accepted, from 0.
    num_computed: tokens of the sequence that are in memory; num_generated: tokens that came out.
    """

    key: int
    order: int
    choice: int
    num_prompt: int
    num_computed: int = 0
    num_generated: int = 0
    state: State = "prefill"


class Board(Instrument):
    """Follows the slots of an engine from its first request on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[int, RequestRecord]] = {}
        self._seats: dict[int, Seat] = {}
        self._paused: set[int] = set()
        self._num_queued = 0
        self.num_ticks = 0
        self.num_generated = 0

    def seats(self) -> dict[int, Seat]:
        """By slot; a slot that nobody had yet is missing."""
        with self._lock:
            return {slot: self._shown(seat) for slot, seat in self._seats.items()}

    @property
    def num_waiting(self) -> int:
        """Sequences that have no slot yet."""
        return self._num_queued

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        with self._lock:
            return sum(seat.state != "left" for seat in self._seats.values())

    def request_queued(self, record: RequestRecord) -> None:
        """It is the next in order."""
        with self._lock:
            self._requests[record.key] = (len(self._requests), record)

    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002 - the hook's shape
        """The slot is its."""
        with self._lock:
            order, record = self._requests[key]
            self._seats[slot] = Seat(key=key, order=order, choice=choice, num_prompt=record.prompt_tokens)

    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None:  # noqa: ARG002
        """It stays to be seen until another takes the slot."""
        with self._lock:
            self._seats[slot] = replace(self._seats[slot], state="left")

    def paused(self, key: int, is_paused: bool, now_s: float) -> None:  # noqa: ARG002
        """Its reader is behind, or has caught up."""
        with self._lock:
            (self._paused.add if is_paused else self._paused.discard)(key)

    def tick_finished(self, record: TickRecord) -> None:
        """Who had a row is further on."""
        with self._lock:
            self.num_ticks += 1
            self._num_queued = record.num_waiting
            for row in record.rows:
                self.num_generated += row.num_new
                seat = self._seats[row.slot]
                if (seat.key, seat.choice) == (row.key, row.choice):
                    self._seats[row.slot] = replace(
                        seat,
                        num_computed=row.position + row.num_tokens,
                        num_generated=seat.num_generated + row.num_new,
                        state=_state(seat, row.num_new),
                    )

    def _shown(self, seat: Seat) -> Seat:
        return replace(seat, state="paused") if seat.key in self._paused and seat.state != "left" else seat


def _state(seat: Seat, num_new: int) -> State:
    if seat.state == "left":
        return "left"
    return "decode" if num_new or seat.num_generated else "prefill"
