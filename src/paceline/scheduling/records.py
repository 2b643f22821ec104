"""Records of the scheduler: plans and their outcome, events, embedding requests, and reports for instruments and watchers.

Events name requests by key and know no channel. All times are seconds on the engine's clock.
A worker sends the events of requests to its front, and a replica to the front of its cluster, as they are here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, Literal, Protocol

import msgspec

from paceline.errors import Cancelled, DeadlineExceeded, EngineStopped, PacelineError
from paceline.kv_cache import MediaItem, Operation, TenantTree, TransferOutput
from paceline.media import Attachment
from paceline.request import RequestOptions
from paceline.sequence import Progress, Request, Row, RowOutput, next_deadline_s
from paceline.streaming.chunk import FinishReason, StreamChunk, TokenLogprobs, Usage

MOST_DELAY_S: Final = 1.0
"""Longest delay of a reply about the engine's activity. The log of ticks stays on that long (`telemetry.LEASE_S`)."""

MAX_NODES: Final = 4096
"""Most nodes of a tenant's radix tree in such a reply."""

# ---- plans


class StepPlan(msgspec.Struct):
    """A generation tick: cache operations in order, then one pass over the rows with these adapters.

    lost_s: seconds that the pass loses because prompts wait (`LostTime`); None if no prompt waits or no row decodes.
    """

    operations: list[Operation]
    rows: list[Row]
    lora: tuple[tuple[str, float], ...] = ()
    start_s: float = 0.0
    num_cells: int = 0
    lost_s: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.rows and not self.operations


class EmbeddingPlan(msgspec.Struct):
    """An embedding tick: cache operations, then one pass over these texts."""

    operations: list[Operation]
    items: list[EmbeddingItem]
    pooling: str | None
    start_s: float = 0.0
    is_empty: bool = False


Plan = StepPlan | EmbeddingPlan


class PlanOutput(msgspec.Struct):
    """The outcome of a plan, one entry for each row or text.

    step_s: seconds of the passes. num_passes: number of passes, 1 if nothing failed. transfers: outcome of the cache
    operations; None if there were none.
    """

    rows: list[RowOutput] = []
    vectors: list[Any] = []
    errors: list[PacelineError | None] = []
    transfers: TransferOutput | None = None
    step_s: float = 0.0
    num_passes: int = 0


# ---- events


class _Event(msgspec.Struct, array_like=True):
    key: int


class Started(_Event, tag="s"):
    """The request left the queue: a sequence of it got a slot, or its first text a place in a pass.

    Attributes:
        progress: Of the request; set for another process.
    """

    progress: Progress | None = None


class Delta(_Event, tag="d"):
    """A choice drew tokens.

    A worker sets the fields from `drawn` on. Its front needs them to end the request or to continue it elsewhere.

    Attributes:
        chunk: For the reader; None if the tokens may belong to a stop, or are fewer than the interval.
        is_last: Whether the request has ended; nothing but `Released` follows.
        choice: Of the request.
        drawn: All tokens drawn since the last event, with held back tokens and the tokens of a stop.
        unsent_logprobs: If log-probabilities are wanted: of the tokens held back after the chunk; of `drawn` without a chunk.
        sampler_state: See `GenerationState`.
        progress: Of the request, if it has changed since the last event.
    """

    chunk: StreamChunk | None
    is_last: bool = False
    choice: int = 0
    drawn: tuple[int, ...] = ()
    unsent_logprobs: tuple[TokenLogprobs, ...] = ()
    sampler_state: bytes | None = None
    progress: Progress | None = None


class Released(_Event, tag="r"):
    """The request's slots are free and its memory is reclaimable."""


class Embedded(_Event, tag="e"):
    """An embedding request has ended: a vector for each of its texts, or why there are none.

    From another process the vectors come as the bytes of float32 numbers.
    """

    vectors: list[Any]
    error: PacelineError | None


class Failed(_Event, tag="x"):
    """A request could not be prepared in another process, and never reached an engine."""

    error: PacelineError


class Answered(msgspec.Struct):
    """The result of a command with this key that asked the engine for something."""

    key: int
    result: Any


RequestEvent = Started | Delta | Released | Embedded | Failed
"""An event of a request, as it goes between processes."""

Event = Answered | RequestEvent


def event_elsewhere(event: RequestEvent, key: int, by_s: float) -> RequestEvent:
    """Return an event as another front or engine has it: under another key, and with its times moved."""
    if isinstance(event, (Started, Delta)) and event.progress is not None:
        return msgspec.structs.replace(event, key=key, progress=event.progress.moved(by_s))
    return msgspec.structs.replace(event, key=key)


# ---- embedding requests


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingRequest:
    """Token ids of texts, to be pooled in one way; `vectors` fills up as ticks pass.

    media: images and audio, placed by cells as if all texts were one; the texts have zeros in these cells. attachments: the
    sources of the media in order, until they are encoded. embeddings: of the media by their starts, or the error.
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
    progress: Progress = field(default_factory=Progress)
    vectors: list[Any] = field(default_factory=list)
    num_planned: int = 0
    num_done: int = 0
    _media_of: dict[int, list[MediaItem]] = field(init=False, default_factory=dict)
    _starts: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Sort the media by the texts that hold them."""
        if self.media:
            self._starts = list(accumulate(map(len, self.texts[:-1]), initial=0))
            for item in self.media:
                self._media_of.setdefault(bisect_right(self._starts, item.start) - 1, []).append(item)

    def media_of(self, index: int) -> tuple[MediaItem, ...]:
        """Return the media of a text."""
        return tuple(self._media_of.get(index, ()))

    def start_of(self, index: int) -> int:
        """Return the first cell of a text among the cells of all texts; 0 for a request without media."""
        return self._starts[index] if self._starts else 0

    @property
    def longest_text(self) -> int:
        """Tokens of the longest text without media; 0 if there is none."""
        return max((len(text) for index, text in enumerate(self.texts) if index not in self._media_of), default=0)

    @property
    def longest_media_prompt(self) -> int:
        """Tokens of the longest text with media; 0 if there is none."""
        return max((len(self.texts[index]) for index in self._media_of), default=0)

    @property
    def largest_whole_item(self) -> int:
        """Cells of the largest item that one pass has to compute, as its attention is not causal; 0 if there is none."""
        return max((item.num_cells for item in self.media if not item.is_causal), default=0)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))

    def deadline_s(self) -> float:
        """Return the time of its next deadline; infinite without one."""
        progress = Progress(self.progress.started_s, first_token_s=math.inf)  # it waits for no first token
        return next_deadline_s(self.options, self.submitted_s, progress)

    def usage(self, now_s: float) -> Usage:
        """Return token counts and times so far; passes count as prefill."""
        started_s = self.progress.started_s
        started = now_s if started_s is None else started_s
        return Usage(prompt_tokens=self.num_tokens, queue_s=started - self.submitted_s, prefill_s=now_s - started)


@dataclass(slots=True)
class EmbeddingItem:
    """One text of a request."""

    request: EmbeddingRequest
    index: int

    @property
    def token_ids(self) -> list[int]:
        """Its tokens, with zeros in the cells of media."""
        return self.request.texts[self.index]

    @property
    def media(self) -> tuple[MediaItem, ...]:
        """Its media."""
        return self.request.media_of(self.index)

    def segments(self) -> list[list[int] | MediaItem]:
        """Return its token ids and media in order."""
        found: list[list[int] | MediaItem] = []
        start, ids = self.request.start_of(self.index), self.token_ids
        begin = 0
        for item in self.media:
            if item.start - start > begin:
                found.append(ids[begin : item.start - start])
            found.append(item)
            begin = item.end - start
        return [*found, ids[begin:]] if begin < len(ids) else found


def embedding_error(reason: FinishReason) -> PacelineError:
    """Return the error that an embedding request gets when it ends for this reason."""
    if reason is FinishReason.CANCELLED:
        return Cancelled("the request was cancelled")
    if reason is FinishReason.DEADLINE:
        return DeadlineExceeded("the request ran out of time")
    return EngineStopped("the engine was shut down")


def due_reason(request: Request | EmbeddingRequest, now_s: float, *, is_stopping: bool = False) -> FinishReason | None:
    """Return the reason for which a request has to end now; None if it may go on.

    Of several reasons the first counts: cancel, deadline, shutdown, slow reader. The engine's thread, embeddings and a front
    without a worker all use this order.
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


# ---- reports for instruments


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request as instruments see it. key: unique in this engine; request_id: the caller's name for it, if there is one."""

    key: int
    request_id: str | None
    kind: Literal["generate", "embed"]
    prompt_tokens: int
    num_choices: int
    max_tokens: int | None
    priority: int
    submitted_s: float

    @classmethod
    def of(cls, request: Request | EmbeddingRequest) -> RequestRecord:
        """Return the record of a request."""
        kind: Literal["generate", "embed"] = "embed"
        if isinstance(request, Request):
            kind, num_choices, max_tokens = "generate", request.params.n, request.params.max_tokens
            prompt_tokens = len(request.prompt)
        else:
            num_choices, max_tokens, prompt_tokens = len(request.texts), None, request.num_tokens
        return cls(
            key=request.key,
            request_id=request.options.request_id,
            kind=kind,
            prompt_tokens=prompt_tokens,
            num_choices=num_choices,
            max_tokens=max_tokens,
            priority=request.options.priority,
            submitted_s=request.submitted_s,
        )


class RowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's share of a tick.

    num_tokens: computed tokens. num_new: tokens that came out; 0 while a prompt is unfinished. num_decode: generated tokens
    among the computed ones: 1, or more if a wrong draft made the row compute some again; the rest of num_tokens - num_drafts
    is prefill. first: whether the sequence's first token came out.
    """

    slot: int
    key: int
    choice: int
    position: int
    num_tokens: int
    num_decode: int
    num_drafts: int
    num_new: int
    first: bool

    def taken(self, num_new: int) -> RowRecord:
        """Return a copy with the tokens of a row with drafts that count; tokens drawn after the sequence ended do not."""
        return msgspec.structs.replace(self, num_new=num_new)


class TickRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tick that computed something.

    step_s: seconds of the pass, a part of elapsed_s. num_running: sequences with a slot, with or without a row; num_waiting:
    requests in the queue. An embedding tick has no rows: num_embedded texts of num_embedded_tokens tokens became vectors.
    """

    index: int
    kind: Literal["generate", "embed"]
    start_s: float
    elapsed_s: float
    step_s: float
    rows: tuple[RowRecord, ...]
    num_slots: int
    num_running: int
    num_waiting: int
    num_cells: int
    budget: int
    num_embedded: int = 0
    num_embedded_tokens: int = 0

    @property
    def own_s(self) -> float:
        """Seconds of the tick outside of the pass."""
        return self.elapsed_s - self.step_s

    @property
    def num_decode(self) -> int:
        """Generated tokens that were computed, with tokens that were computed again."""
        return sum(row.num_decode for row in self.rows)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens that were computed."""
        return sum(row.num_tokens - row.num_decode - row.num_drafts for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """The end of a request.

    reason: the first in the order of `FinishReason` among the reasons of its choices, so ERROR if a choice failed.
    error_code: of that choice's error, if it has one.
    """

    key: int
    reason: FinishReason
    usage: Usage
    now_s: float
    error_code: str | None = None


class TelemetrySink(Protocol):
    """Receives reports; `Instrument` documents each hook. drafter_failed: with an error that no request hears of."""

    @property
    def wants_ticks(self) -> bool: ...  # noqa: D102
    def request_queued(self, record: RequestRecord) -> None: ...  # noqa: D102
    def request_started(self, key: int, choice: int, slot: int, now_s: float) -> None: ...  # noqa: D102
    def request_ended(self, record: EndRecord) -> None: ...  # noqa: D102
    def slot_freed(self, key: int, choice: int, slot: int, now_s: float) -> None: ...  # noqa: D102
    def preempted(self, key: int, choice: int, num_computed_tokens: int, now_s: float) -> None: ...  # noqa: D102
    def prefix_shared(self, key: int, choice: int, num_tokens: int, source: str) -> None: ...  # noqa: D102
    def prefix_instability(self, key: int, num_cached: int, num_matched: int, now_s: float) -> None: ...  # noqa: D102
    def evicted(self, num_tokens: int, source: str, now_s: float) -> None: ...  # noqa: D102
    def paused(self, key: int, is_paused: bool, now_s: float) -> None: ...  # noqa: D102
    def tick_finished(self, record: TickRecord) -> None: ...  # noqa: D102
    def drafter_failed(self, error: PacelineError) -> None: ...  # noqa: D102


# ---- reports for watchers

SlotState = Literal["idle", "prefilling", "decoding", "paused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot. An idle slot has only its id; all other fields have their defaults.

    state: "prefilling" while tokens beside the newest are left to compute, so also after a preemption; "paused" if the
    request's reader is too slow. key: of the request; request_id: the caller's name for it; choice: the number of the choice.
    num_cached: prompt tokens taken from the cache; cached_from: the source of most of them, as in `Usage`;
    num_computed_tokens: tokens in cells; num_generated: drawn tokens, with those of a stop; max_tokens: of the request, None if
    only the context limits it. running_s: seconds since the request got its first slot. num_preempted: times that the choice
    lost its slot.
    """

    id: int
    state: SlotState = "idle"
    key: int | None = None
    request_id: str | None = None
    choice: int = 0
    num_prompt_tokens: int = 0
    num_cached: int = 0
    num_computed_tokens: int = 0
    num_generated: int = 0
    max_tokens: int | None = None
    running_s: float = 0.0
    tenant: str = ""
    num_preempted: int = 0
    priority: int = 0
    cached_from: str | None = None

    @property
    def is_processing(self) -> bool:
        """Whether a sequence has the slot."""
        return self.key is not None

    @property
    def num_remaining(self) -> int | None:
        """Tokens that may still be drawn; None if only the context limits them."""
        return None if self.max_tokens is None else self.max_tokens - self.num_generated


@dataclass(frozen=True, slots=True)
class SlotsSnapshot:
    """All slots, by id. num_waiting: sequences and embedding requests without a slot."""

    slots: tuple[SlotView, ...]
    num_waiting: int

    def __iter__(self) -> Iterator[SlotView]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_processing(self) -> int:
        """Slots that a sequence has."""
        return sum(slot.is_processing for slot in self.slots)


class TickActivity(msgspec.Struct, frozen=True):
    """A tick. number: its place in the log. tenants: one for each row; empty if no row has a tenant."""

    number: int
    record: TickRecord
    tenants: tuple[str, ...] = ()


MarkKind = Literal["started", "preempted", "ended", "cancelled", "failed"]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """An event in the life of a sequence.

    number: its place in the log. slot: None for a sequence that ended in the queue. reason: of a sequence that ended.
    """

    number: int
    what: MarkKind
    key: int
    choice: int
    slot: int | None
    now_s: float
    tenant: str
    reason: FinishReason | None = None


class WaitingSequence(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence without a slot.

    Attributes:
        waits_for: Key of the request that computes its prefix at the moment.
        reads_disk: Whether it waits for a read from the disk cache.
    """

    key: int
    request_id: str | None
    choice: int
    tenant: str
    num_prompt_tokens: int
    num_generated: int
    waiting_s: float
    is_preempted: bool
    waits_for: int | None
    reads_disk: bool
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActivity:
    """The state of an engine after a tick, and its recent ticks.

    Attributes:
        started_s: Start of the log's numbers. If it changed, the engine began anew, in another process or after a failure of
            its own, and everything known before is void.
        now_s: Seconds on the engine's clock.
        last_number: Number of the newest tick or mark; the next question starts after it.
        slots: All slots.
        waiting: Sequences in their turn, `MOST_WAITING` at most.
        num_waiting: All sequences without a slot; num_embedding: embedding requests.
        ticks, marks: Entries of the log after the number in the question, as far as they are kept.
        trees: The radix tree by tenant; None if the question asks for none.
        num_cells: Cells in use; num_free: free cells, None if memory is not made of cells; num_running_cells: cells that
            running sequences use.
        host_bytes: Bytes in host memory.
    """

    started_s: float
    now_s: float
    last_number: int
    slots: SlotsSnapshot
    waiting: tuple[WaitingSequence, ...] = ()
    num_waiting: int = 0
    num_embedding: int = 0
    ticks: tuple[TickActivity, ...] = ()
    marks: tuple[Mark, ...] = ()
    trees: tuple[TenantTree, ...] | None = None
    num_cells: int = 0
    num_free: int | None = None
    num_running_cells: int = 0
    host_bytes: int = 0
