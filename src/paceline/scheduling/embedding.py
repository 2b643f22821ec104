"""Embedding requests: texts that become vectors, many to a pass."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import Cancelled, DeadlineExceeded, EngineStopped, PacelineError
from paceline.request import RequestOptions
from paceline.scheduling.telemetry import RequestRecord
from paceline.streaming.chunk import FinishReason, Usage


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
        """Its tokens."""
        return self.request.texts[self.index]


class EmbeddingQueue:
    """First come first served; texts of several requests share a pass where they are pooled in the same way."""

    def __init__(self) -> None:
        self.requests: deque[EmbeddingRequest] = deque()

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, max_texts: int, max_tokens: int) -> list[EmbeddingItem]:
        """Return the texts of the next pass, in order: at least one, and as many as both limits allow."""
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
