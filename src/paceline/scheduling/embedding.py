"""Embedding requests: texts that become vectors, many to a pass."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from paceline.request import RequestOptions
from paceline.scheduling.instrument import RequestRecord
from paceline.streaming.chunk import Usage


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingRequest:
    """Token ids of texts, to be pooled in one way. `vectors` fills up as ticks pass."""

    key: int
    texts: list[list[int]]
    pooling: str | None
    options: RequestOptions
    submitted_s: float
    cancelled: bool = False
    started_s: float | None = None
    vectors: list[Any] = field(default_factory=list)
    num_planned: int = 0
    num_done: int = 0

    @property
    def num_tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))

    def deadline_s(self) -> float:
        """When it ends for want of time, as things stand."""
        limits = [math.inf if self.options.timeout_s is None else self.options.timeout_s]
        if self.started_s is None and self.options.queue_timeout_s is not None:
            limits.append(self.options.queue_timeout_s)
        return self.submitted_s + min(limits)

    def usage(self, now_s: float) -> Usage:
        """What it took; the passes count as prefill."""
        started = now_s if self.started_s is None else self.started_s
        return Usage(prompt_tokens=self.num_tokens, queue_s=started - self.submitted_s, prefill_s=now_s - started)

    def record(self) -> RequestRecord:
        """As instruments see it."""
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


@dataclass(slots=True)
class EmbeddingItem:
    """One text of a request."""

    request: EmbeddingRequest
    index: int

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        return self.request.texts[self.index]


class EmbeddingQueue:
    """First come first served; texts of several requests share a pass where they are pooled in the same way."""

    def __init__(self) -> None:
        self.requests: deque[EmbeddingRequest] = deque()

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, max_texts: int, max_tokens: int) -> list[EmbeddingItem]:
        """The texts of the next pass: at least one, else as many as both limits allow, in order."""
        items: list[EmbeddingItem] = []
        num_tokens = 0
        for request in self.requests:
            if request.pooling != self.requests[0].pooling:
                continue
            for index in range(request.num_planned, len(request.texts)):
                num_tokens += len(request.texts[index])
                if items and (num_tokens > max_tokens or len(items) == max_texts):
                    return items
                items.append(EmbeddingItem(request, index))
                request.num_planned = index + 1
        return items
