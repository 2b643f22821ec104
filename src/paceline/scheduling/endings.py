"""How sequences and requests end: once, on every path, with all that was held back.

Order: the reason is latched, held-back text is let go, the last chunk goes out, slot and memory are freed.
"""

from __future__ import annotations

import math

import msgspec

from paceline.errors import PacelineError
from paceline.scheduling.events import Delta, Ended, Event, Released
from paceline.scheduling.memory import Memory
from paceline.scheduling.reports import Reports
from paceline.scheduling.sequence import Request, Sequence
from paceline.scheduling.slots import Slots
from paceline.scheduling.waiting import Waiting
from paceline.streaming.chunk import FinishReason


class Endings:
    """Takes sequences and requests out of the scheduler's places and says so."""

    def __init__(
        self,
        slots: Slots,
        memory: Memory,
        waiting: Waiting,
        requests: dict[int, Request],
        reports: Reports,
        events: list[Event],
    ) -> None:
        self._slots, self._memory, self._waiting, self._requests = slots, memory, waiting, requests
        self._reports, self._events = reports, events

    def poll(self, now_s: float, *, is_stopping: bool) -> None:
        """Ends what was cancelled, is too late, too slow, or in the way of the end."""
        for request in tuple(self._requests.values()):
            if request.cancelled:
                self.end_request(request, FinishReason.CANCELLED, now_s)
            elif request.has_deadline and now_s >= request.deadline_s():
                self.end_request(request, FinishReason.DEADLINE, now_s)
            elif is_stopping:
                self.end_request(request, FinishReason.SHUTDOWN, now_s)
            elif request.is_slow:
                self.end_request(request, FinishReason.SLOW_READER, now_s)

    def end_request(
        self, request: Request, reason: FinishReason, now_s: float, error: PacelineError | None = None
    ) -> None:
        """Ends all choices of a request that have not ended."""
        for sequence in request.sequences:
            if sequence.reason is None:
                sequence.end(reason, error)
                self.finish(sequence, now_s)

    def finish(self, sequence: Sequence, now_s: float) -> None:
        """Delivers the last chunk of a sequence whose reason is latched, and frees what it has."""
        if sequence.answer.finish():
            sequence.end(FinishReason.STOP)
        assert sequence.reason is not None  # noqa: S101 - latched by the caller
        chunk = sequence.answer.last_chunk(sequence.reason, sequence.error)
        request = sequence.request
        request.num_open -= 1
        self._events.append(
            Delta(request.key, chunk)
            if request.num_open
            else Ended(request.key, msgspec.structs.replace(chunk, usage=request.usage(now_s)))
        )
        self._free(sequence, now_s)
        if not request.num_open:
            self._retire(request, now_s)

    def _free(self, sequence: Sequence, now_s: float) -> None:
        if sequence.slot is not None:
            slot = self._slots.free(sequence)
            self._memory.end(sequence)
            self._reports.watch.slot_freed(sequence.request.key, sequence.choice, slot, now_s)
        else:
            self._waiting.discard(sequence)

    def _retire(self, request: Request, now_s: float) -> None:
        del self._requests[request.key]
        self._events.append(Released(request.key))
        worst = min(
            request.sequences, key=lambda one: FinishReason.LENGTH.rank if one.reason is None else one.reason.rank
        )
        assert worst.reason is not None  # noqa: S101 - all have ended
        self._reports.request_ended(request.key, worst.reason, request.usage(now_s), now_s, worst.error)

    def next_deadline_s(self) -> float:
        """When the first request would end for want of time."""
        return min((one.deadline_s() for one in self._requests.values() if one.has_deadline), default=math.inf)
