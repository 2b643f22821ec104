"""Embedding requests: texts and prompts with media that become vectors, and when they get a tick.

Many texts share a pass; a prompt with images or audio has a tick of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

from paceline.errors import Aborted, Cancelled, DeadlineExceeded, EngineStopped, PacelineError
from paceline.kv_cache import MediaItem, Operation
from paceline.media import Attachment
from paceline.request import RequestOptions
from paceline.scheduling.cost_model import TickCostModel
from paceline.scheduling.events import Embedded, Event, Released, Started
from paceline.scheduling.finisher import due_reason
from paceline.scheduling.limits import Limits
from paceline.scheduling.plan import EmbeddingPlan, PlanOutput
from paceline.scheduling.telemetry import RequestRecord, Telemetry
from paceline.streaming.chunk import FinishReason, Usage


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingRequest:
    """Token ids of texts, to be pooled in one way. `vectors` fills up as ticks pass.

    media: items of images and audio, which start at cells of all texts one behind another, where there are zeros for them.
    attachments: what they are of, in order, until they are encoded. embeddings: of items by their starts, or why there are none.
    """

    key: int
    texts: list[list[int]]
    pooling: str | None
    options: RequestOptions
    submitted_s: float
    media: tuple[MediaItem, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    embeddings: Any = None
    cancelled: bool = False
    started_s: float | None = None
    vectors: list[Any] = field(default_factory=list)
    num_planned: int = 0
    num_done: int = 0
    _media_of: dict[int, list[MediaItem]] = field(init=False, default_factory=dict)
    _starts: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Note which text each item is in."""
        if self.media:
            self._starts = list(accumulate(map(len, self.texts[:-1]), initial=0))
            for item in self.media:
                self._media_of.setdefault(bisect_right(self._starts, item.start) - 1, []).append(item)

    def media_of(self, index: int) -> tuple[MediaItem, ...]:
        """Return the items of a text."""
        return tuple(self._media_of.get(index, ()))

    def start_of(self, index: int) -> int:
        """Return the cell at which a text starts, where all stand one behind another; 0 for a request without media."""
        return self._starts[index] if self._starts else 0

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text without media; 0 if there is none."""
        return max((len(one) for index, one in enumerate(self.texts) if index not in self._media_of), default=0)

    @property
    def longest_media_prompt(self) -> int:
        """Tokens of the longest text with media; 0 if there is none."""
        return max((len(self.texts[index]) for index in self._media_of), default=0)

    @property
    def largest_whole_item(self) -> int:
        """Cells of the largest item that one pass has to compute, as its attention is not causal; 0 if there is none."""
        return max((one.num_cells for one in self.media if not one.is_causal), default=0)

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))

    def deadline_s(self) -> float:
        """Return when its next deadline passes."""
        limits = [math.inf if self.options.timeout_s is None else self.options.timeout_s]
        if self.started_s is None and self.options.queue_timeout_s is not None:
            limits.append(self.options.queue_timeout_s)
        return self.submitted_s + min(limits)

    def usage(self, now_s: float) -> Usage:
        """Return token counts and times so far; passes count as prefill."""
        started = now_s if self.started_s is None else self.started_s
        return Usage(prompt_tokens=self.num_tokens, queue_s=started - self.submitted_s, prefill_s=now_s - started)

    def record(self) -> RequestRecord:
        """Return the record for instruments."""
        return RequestRecord(
            key=self.key,
            request_id=self.options.request_id,
            kind="embed",
            prompt_tokens=self.num_tokens,
            num_choices=len(self.texts),
            max_tokens=None,
            priority=self.options.priority,
            submitted_s=self.submitted_s,
        )


def embedding_error(reason: FinishReason) -> PacelineError:
    """Return what the caller of an embedding request gets that ended for this reason."""
    if reason is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the request ran out of time")
    return EngineStopped("the engine was shut down")


@dataclass(slots=True)
class EmbeddingItem:
    """One text of a request."""

    request: EmbeddingRequest
    index: int

    @property
    def token_ids(self) -> list[int]:
        """Its tokens, with zeros in the cells of media items."""
        return self.request.texts[self.index]

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """Its media items."""
        return self.request.media_of(self.index)

    def segments(self) -> list[list[int] | MediaItem]:
        """Return its token ids and media items in order."""
        found: list[list[int] | MediaItem] = []
        start, ids = self.request.start_of(self.index), self.token_ids
        begin = 0
        for item in self.media:
            if item.start - start > begin:
                found.append(ids[begin : item.start - start])
            found.append(item)
            begin = item.end - start
        return [*found, ids[begin:]] if begin < len(ids) else found


class EmbeddingQueue:
    """First come first served within a tenant, and tenants take turns, with each pass.

    Texts of several requests share a pass if they are pooled in the same way.
    """

    def __init__(self) -> None:
        self.requests: deque[EmbeddingRequest] = deque()
        self._of_tenants: dict[str, deque[EmbeddingRequest]] = {}  # the tenant whose turn it is comes first

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
        """Return the texts of the next pass, in order: at least one, and as many as both limits allow.

        One with media is alone.
        """
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
        """Yield the first request of each tenant, then the second ones, and so on; the next pass begins with another tenant."""
        rounds = zip_longest(*self._of_tenants.values())
        if len(self._of_tenants) > 1:
            tenant = next(iter(self._of_tenants))
            self._of_tenants[tenant] = self._of_tenants.pop(tenant)
        return (request for requests in rounds for request in requests if request is not None)


class EmbeddingScheduler:
    """The embedding requests of an engine, and when they get a tick.

    Embedding and generation share time: while both have work, whichever has had less of it is next. requests: the open ones;
    read-only.
    """

    def __init__(self, limits: Limits, telemetry: Telemetry) -> None:
        self._limits = limits
        self._telemetry = telemetry
        self._queue = EmbeddingQueue()
        self.requests = self._queue.requests
        self._cost = TickCostModel(n_ubatch=limits.embed_tokens)
        self._spent_s = 0.0  # by embedding, less what generation spent while both had work

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, request: EmbeddingRequest) -> None:
        """Queue a request."""
        request.vectors = [None] * len(request.texts)
        self._queue.add(request)

    def find(self, key: int) -> EmbeddingRequest | None:
        """Return the open request of this key."""
        return next((one for one in self._queue.requests if one.key == key), None)

    def next_deadline_s(self) -> float:
        """Return when the first request passes a deadline; infinite without deadlines."""
        return min((one.deadline_s() for one in self._queue.requests), default=math.inf)

    def poll(self, now_s: float, *, is_stopping: bool) -> list[Event]:
        """Finish requests that are cancelled or past a deadline; all of them when stopping."""
        events: list[Event] = []
        for request in tuple(self._queue.requests):
            reason = due_reason(request, now_s, is_stopping=is_stopping)
            if reason is not None:
                events += self._finish(request, reason, now_s, embedding_error(reason))
        return events

    def fail_all(self, error: PacelineError, now_s: float) -> list[Event]:
        """Finish all of them with an error."""
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
        """Count the time of a generation tick; call it while requests are open."""
        self._spent_s -= seconds

    def plan(
        self, operations: list[Operation], now_s: float, *, is_generating: bool
    ) -> tuple[EmbeddingPlan, list[Event]]:
        """Return the next pass, short while sequences generate, and the events of requests that start with it."""
        events: list[Event] = []
        items = self._queue.take(self._limits.embed_texts, self._max_tokens(is_generating))
        for item in items:
            if item.request.started_s is None:
                item.request.started_s = now_s
                events.append(Started(item.request.key))
        return EmbeddingPlan(operations, items, items[0].request.pooling, now_s), events

    def apply(self, plan: EmbeddingPlan, output: PlanOutput, now_s: float) -> list[Event]:
        """Add the vectors to their requests, and finish those that have all."""
        events: list[Event] = []
        for item, vector, error in zip(plan.items, output.vectors, output.errors, strict=True):
            if item.request not in self._queue.requests:
                continue
            if isinstance(error, Aborted):
                item.request.num_planned = min(item.request.num_planned, item.index)
            elif error is not None:
                events += self._finish(item.request, FinishReason.ERROR, now_s, error)
            else:
                events += self._add_vector(item, vector, now_s)
        num_tokens = sum(len(item.token_ids) for item in plan.items)
        if output.num_passes == 1 and not any(isinstance(error, Aborted) for error in output.errors):
            self._cost.observe(num_tokens, 0, output.step_s)
        if self._queue:
            self._spent_s += output.step_s
        self._telemetry.embedding_tick(plan, output, now_s, len(self._queue))
        return events

    def _add_vector(self, item: EmbeddingItem, vector: object, now_s: float) -> list[Event]:
        item.request.num_done += item.request.vectors[item.index] is None  # else it was computed again
        item.request.vectors[item.index] = vector
        if item.request.num_done == len(item.request.texts):
            return self._finish(item.request, FinishReason.STOP, now_s, None)
        return []

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
        if not self._queue:  # the next request owes nothing for this one's time
            self._spent_s = 0.0
        self._telemetry.request_ended(request.key, reason, request.usage(now_s), now_s, error)
        return [Embedded(request.key, request.vectors, error), Released(request.key)]
