"""When embedding gets a tick, and what goes into it.

Embedding and generation take turns by time: while both have work, whichever has had less of it goes next.
"""

from __future__ import annotations

import math

from paceline.errors import Aborted, Cancelled, DeadlineExceeded, EngineStopped, PacelineError
from paceline.scheduling.embedding import EmbeddingItem, EmbeddingQueue, EmbeddingRequest
from paceline.scheduling.events import Embedded, Event, Released, Started
from paceline.scheduling.limits import Limits
from paceline.scheduling.pace import Pace
from paceline.scheduling.plan import EmbeddingPlan, Operation, PlanOutput
from paceline.scheduling.reports import Reports
from paceline.streaming.chunk import FinishReason


class EmbeddingTicks:
    """The embedding requests of an engine. `events` is the scheduler's list, to which endings are added."""

    def __init__(self, limits: Limits, reports: Reports, events: list[Event]) -> None:
        self._limits = limits
        self._reports = reports
        self._queue = EmbeddingQueue()
        self._pace = Pace(n_ubatch=limits.embed_tokens)
        self._spent_s = 0.0  # by embedding, less what generation spent while both had work
        self._events = events

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, request: EmbeddingRequest) -> None:
        """Queues a request."""
        request.vectors = [None] * len(request.texts)
        self._queue.requests.append(request)

    def find(self, key: int) -> EmbeddingRequest | None:
        """The request of this key, if it has not ended."""
        return next((one for one in self._queue.requests if one.key == key), None)

    def next_deadline_s(self) -> float:
        """When the first of them would end for want of time."""
        return min((one.deadline_s() for one in self._queue.requests), default=math.inf)

    def poll(self, now_s: float, *, is_stopping: bool) -> None:
        """Ends what was cancelled, is too late, or is in the way of the end."""
        for request in tuple(self._queue.requests):
            if request.cancelled:
                self._end(request, FinishReason.CANCELLED, now_s, Cancelled("the request was cancelled"))
            elif now_s >= request.deadline_s():
                self._end(request, FinishReason.DEADLINE, now_s, DeadlineExceeded("the request ran out of time"))
            elif is_stopping:
                self._end(request, FinishReason.SHUTDOWN, now_s, EngineStopped("the engine was shut down"))

    def fail_all(self, error: PacelineError, now_s: float) -> None:
        """Ends all of them with an error."""
        for request in tuple(self._queue.requests):
            self._end(request, FinishReason.ERROR, now_s, error)

    def has_turn(self, *, is_generating: bool) -> bool:
        """Whether the next tick is an embedding tick."""
        if not self._queue or not is_generating:
            self._spent_s = 0.0
        return bool(self._queue) and self._spent_s <= 0

    def note_generation(self, seconds: float) -> None:
        """A generation tick took so long."""
        self._spent_s -= seconds if self._queue else 0.0

    def plan(self, operations: list[Operation], now_s: float, *, is_generating: bool) -> EmbeddingPlan:
        """The next pass: short while somebody decodes."""
        items = self._queue.take(self._limits.embed_texts, self._max_tokens(is_generating))
        for item in items:
            if item.request.started_s is None:
                item.request.started_s = now_s
                self._events.append(Started(item.request.key))
        return EmbeddingPlan(operations, items, items[0].request.pooling, now_s)

    def apply(self, plan: EmbeddingPlan, output: PlanOutput, now_s: float) -> None:
        """Hands the vectors to their requests, and ends those that have all."""
        for item, vector, error in zip(plan.items, output.vectors, output.errors, strict=True):
            if item.request not in self._queue.requests:
                continue
            if isinstance(error, Aborted):
                item.request.num_planned = min(item.request.num_planned, item.index)
            elif error is not None:
                self._end(item.request, FinishReason.ERROR, now_s, error)
            else:
                self._keep(item, vector, now_s)
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        if output.num_passes == 1:
            self._pace.observe(num_tokens, 0, output.step_s)
        self._spent_s += output.step_s
        self._reports.embedding_tick(plan, output, now_s, len(self._queue))

    def _keep(self, item: EmbeddingItem, vector: object, now_s: float) -> None:
        item.request.num_done += item.request.vectors[item.index] is None  # else it was computed again
        item.request.vectors[item.index] = vector
        if item.request.num_done == len(item.request.texts):
            self._end(item.request, FinishReason.END, now_s, None)

    def _max_tokens(self, is_generating: bool) -> int:
        limit = self._limits.itl_target_s if is_generating else self._limits.max_tick_s
        tokens = self._limits.embed_tokens
        while tokens > 1 and self._pace.seconds(tokens, 0) > limit:
            tokens //= 2
        return tokens

    def _end(self, request: EmbeddingRequest, reason: FinishReason, now_s: float, error: PacelineError | None) -> None:
        self._queue.requests.remove(request)
        self._events += [Embedded(request.key, request.vectors, error), Released(request.key)]
        self._reports.request_ended(request.key, reason, request.usage(now_s), now_s, error)
