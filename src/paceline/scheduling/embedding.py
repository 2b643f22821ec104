"""When embedding requests get a tick: texts and prompts with media that become vectors.

Many texts share a pass; a prompt with images or audio has a tick of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import zip_longest

from paceline.cost_model import TickCostModel
from paceline.errors import Aborted, PacelineError
from paceline.kv_cache import Operation
from paceline.scheduling.records import (
    Embedded,
    EmbeddingItem,
    EmbeddingPlan,
    EmbeddingRequest,
    Event,
    PlanOutput,
    Released,
    Started,
    due_reason,
    embedding_error,
)
from paceline.scheduling.telemetry import Telemetry
from paceline.sequence import Limits
from paceline.streaming.chunk import FinishReason


class EmbeddingQueue:
    """First come first served within a tenant, and tenants take turns, with each pass.

    Texts of several requests share a pass if they are pooled in the same way.
    """

    def __init__(self) -> None:
        self.requests: deque[EmbeddingRequest] = deque()
        self._of_tenants: dict[str, deque[EmbeddingRequest]] = {}  # the next tenant comes first

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: EmbeddingRequest) -> None:
        """Append a request."""
        self.requests.append(request)
        self._of_tenants.setdefault(request.options.tenant, deque()).append(request)

    def remove(self, request: EmbeddingRequest) -> None:
        """Remove a request."""
        self.requests.remove(request)
        own = self._of_tenants[request.options.tenant]
        own.remove(request)
        if not own:
            del self._of_tenants[request.options.tenant]

    def take(self, max_texts: int, max_tokens: int) -> list[EmbeddingItem]:
        """Return the texts of the next pass in order: at least one, as many as both limits allow; a text with media is alone."""
        items: list[EmbeddingItem] = []
        num_tokens = 0
        for request in self._in_turn():
            if items and request.pooling != items[0].request.pooling:
                continue
            for index in range(request.num_planned, len(request.texts)):
                num_tokens += len(request.texts[index])
                has_media = bool(request.media_of(index))
                if items and (has_media or num_tokens > max_tokens or len(items) == max_texts):
                    return items
                items.append(EmbeddingItem(request, index))
                request.num_planned = index + 1
                if has_media:
                    return items
        return items

    def _in_turn(self) -> Iterator[EmbeddingRequest]:
        """Return the first request of each tenant, then the second, and so on; the next pass begins with another tenant."""
        rounds = zip_longest(*self._of_tenants.values())
        if len(self._of_tenants) > 1:
            tenant = next(iter(self._of_tenants))
            self._of_tenants[tenant] = self._of_tenants.pop(tenant)
        return (request for requests in rounds for request in requests if request is not None)


class EmbeddingScheduler:
    """The embedding requests of an engine, and when they get a tick.

    Embedding and generation share time: while both have work, the next tick goes to the kind that had less time. requests: open
    requests; read-only.
    """

    def __init__(self, limits: Limits, telemetry: Telemetry) -> None:
        self._limits = limits
        self._telemetry = telemetry
        self._queue = EmbeddingQueue()
        self.requests = self._queue.requests
        self._cost = TickCostModel(n_ubatch=limits.embed_tokens)
        self._spent_s = 0.0  # seconds of embedding less seconds of generation, while both had work

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, request: EmbeddingRequest) -> None:
        """Queue a request."""
        request.vectors = [None] * len(request.texts)
        self._queue.add(request)

    def find(self, key: int) -> EmbeddingRequest | None:
        """Return the open request with this key."""
        return next((request for request in self._queue.requests if request.key == key), None)

    def next_deadline_s(self) -> float:
        """Return the time of the first deadline of a request; infinite without deadlines."""
        return min((request.deadline_s() for request in self._queue.requests), default=math.inf)

    def poll(self, now_s: float, *, is_stopping: bool) -> list[Event]:
        """Finish requests that are cancelled or past a deadline; all requests when stopping."""
        events: list[Event] = []
        for request in tuple(self._queue.requests):
            reason = due_reason(request, now_s, is_stopping=is_stopping)
            if reason is not None:
                events += self._finish(request, reason, now_s, embedding_error(reason))
        return events

    def fail_all(self, error: PacelineError, now_s: float) -> list[Event]:
        """Finish all requests with an error."""
        events: list[Event] = []
        for request in tuple(self._queue.requests):
            events += self._finish(request, FinishReason.ERROR, now_s, error)
        return events

    def has_turn(self, *, is_generating: bool) -> bool:
        """Return whether the next tick is an embedding tick."""
        if not is_generating:
            self._spent_s = 0.0
        return bool(self._queue) and self._spent_s <= 0

    def note_generation(self, seconds: float) -> None:
        """Count the time of a generation tick, while embedding requests are open."""
        self._spent_s -= seconds

    def plan(
        self, operations: list[Operation], now_s: float, *, is_generating: bool
    ) -> tuple[EmbeddingPlan, list[Event]]:
        """Return the next pass, which is short while sequences generate, and events of the requests that start with it."""
        events: list[Event] = []
        items = self._queue.take(self._limits.embed_texts, self._max_tokens(is_generating))
        for item in items:
            if item.request.progress.started_s is None:
                item.request.progress.started_s = now_s
                events.append(Started(item.request.key))
        return EmbeddingPlan(operations, items, items[0].request.pooling, now_s), events

    def apply(self, plan: EmbeddingPlan, output: PlanOutput, now_s: float) -> list[Event]:
        """Add the vectors to their requests, and finish complete requests."""
        events: list[Event] = []
        for item, vector, error in zip(plan.items, output.vectors, output.errors, strict=True):
            if item.request not in self._queue.requests:
                continue
            if isinstance(error, Aborted):
                item.request.num_planned = min(item.request.num_planned, item.index)
            elif error is not None:
                events += self._finish(item.request, FinishReason.ERROR, now_s, error)
            else:
                request = item.request
                request.num_done += request.vectors[item.index] is None  # else it was computed again
                request.vectors[item.index] = vector
                if request.num_done == len(request.texts):
                    events += self._finish(request, FinishReason.STOP, now_s, None)
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        if output.num_passes == 1 and not any(isinstance(error, Aborted) for error in output.errors):
            self._cost.observe(num_tokens, 0, output.step_s)
        if self._queue:
            self._spent_s += output.step_s
        self._telemetry.embedding_tick(plan, output, now_s, len(self._queue))
        return events

    def _max_tokens(self, is_generating: bool) -> int:
        limit = self._limits.itl_target_s if is_generating else self._limits.max_tick_s
        tokens = self._limits.embed_tokens
        while tokens > 1 and self._cost.seconds(tokens, 0) > limit:
            tokens //= 2
        return tokens

    def _finish(
        self, request: EmbeddingRequest, reason: FinishReason, now_s: float, error: PacelineError | None
    ) -> list[Event]:
        self._queue.remove(request)
        if not self._queue:  # the next request does not pay for this one's time
            self._spent_s = 0.0
        self._telemetry.request_ended(request.key, reason, request.usage(now_s), now_s, error)
        return [Embedded(request.key, request.vectors, error), Released(request.key)]
