"""How requests end: once, on every path, with all that was held back.

The reason is latched, held-back text is flushed, the last chunk goes out, then slot and cells are released.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from paceline.errors import PacelineError
from paceline.kv_cache import KVCache
from paceline.scheduling.admission import Slots, WaitingQueue
from paceline.scheduling.events import Delta, Ended, Event, Released
from paceline.scheduling.sequence import Request, Sequence
from paceline.scheduling.telemetry import Telemetry
from paceline.streaming.chunk import FinishReason

if TYPE_CHECKING:
    from paceline.scheduling.embedding import EmbeddingRequest


def due_reason(request: Request | EmbeddingRequest, now_s: float, *, is_stopping: bool = False) -> FinishReason | None:
    """Return why a request has to end now, None if it has not: a cancel wins over a deadline, that over a shutdown.

    A slow reader comes last. This is the one order for the engine's thread, for embeddings and for a front without a worker.
    """
    if request.cancelled:
        return FinishReason.CANCELLED
    if now_s >= request.deadline_s():
        return FinishReason.DEADLINE
    if is_stopping:
        return FinishReason.SHUTDOWN
    if isinstance(request, Request) and request.is_slow:
        return FinishReason.SLOW_READER
    return None


class RequestFinisher:
    """Takes sequences and requests out of queue, slots and cache, and returns the events of their end.

    requests: the open ones, by key.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        slots: Slots,
        queue: WaitingQueue,
        telemetry: Telemetry,
        requests: dict[int, Request],
    ) -> None:
        self._kv_cache, self._slots, self._queue, self._telemetry = kv_cache, slots, queue, telemetry
        self._requests = requests

    def poll(self, now_s: float, *, is_stopping: bool) -> list[Event]:
        """Finish requests that are cancelled, past a deadline or read too slowly; all of them when stopping."""
        events: list[Event] = []
        for request in tuple(self._requests.values()):
            reason = due_reason(request, now_s, is_stopping=is_stopping)
            if reason is not None:
                events += self.finish_request(request, reason, now_s)
        return events

    def fail_all(self, error: PacelineError, now_s: float, failures: list[Exception]) -> list[Event]:
        """Finish every request with an error; what the end of one raises is added to `failures`."""
        events: list[Event] = []
        for request in tuple(self._requests.values()):
            try:
                events += self.finish_request(request, FinishReason.ERROR, now_s, error)
            except Exception as failure:  # noqa: BLE001 - the caller's to look at
                failures.append(failure)
        return events

    def finish_request(
        self, request: Request, reason: FinishReason, now_s: float, error: PacelineError | None = None
    ) -> list[Event]:
        """Finish all choices of a request that are open."""
        events: list[Event] = []
        for sequence in request.sequences:
            if sequence.reason is None:
                sequence.end(reason, error)
                events += self.finish(sequence, now_s)
        return events

    def finish(self, sequence: Sequence, now_s: float) -> list[Event]:
        """Return the last chunk of a sequence whose reason is latched, and release what it has."""
        if sequence.output.finish():
            sequence.end(FinishReason.STOP)
        assert sequence.reason is not None  # noqa: S101 - latched by the caller
        chunk = sequence.output.last_chunk(sequence.reason, sequence.error)
        request = sequence.request
        request.num_open -= 1
        self._release(sequence, now_s)
        if request.num_open:
            return [Delta(request.key, chunk)]
        usage = request.usage(now_s)
        self._retire(request, now_s)
        return [Ended(request.key, msgspec.structs.replace(chunk, usage=usage)), Released(request.key)]

    def next_deadline_s(self) -> float:
        """Return when the first request passes a deadline; infinite without deadlines."""
        return min((one.deadline_s() for one in self._requests.values() if one.has_deadline), default=math.inf)

    def _release(self, sequence: Sequence, now_s: float) -> None:
        slot = None
        if sequence.slot is not None:
            slot = self._slots.release(sequence)
            self._kv_cache.release(sequence)
        else:
            self._queue.discard(sequence)
        self._telemetry.ended(sequence, slot, now_s)

    def _retire(self, request: Request, now_s: float) -> None:
        del self._requests[request.key]
        worst = min(
            request.sequences, key=lambda one: FinishReason.LENGTH.rank if one.reason is None else one.reason.rank
        )
        assert worst.reason is not None  # noqa: S101 - all have ended
        self._telemetry.request_ended(request.key, worst.reason, request.usage(now_s), now_s, worst.error)
        for sequence in request.sequences:
            del sequence.request
