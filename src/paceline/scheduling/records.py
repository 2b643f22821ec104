"""Records of the scheduler: plans and their outcome, events, embedding requests, and reports for instruments and watchers.

Events name requests by key and know no channel.
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
from paceline.kv_cache import MediaItem, Operation, TransferOutput
from paceline.media import Attachment
from paceline.request import RequestOptions
from paceline.sequence import Request, Row, RowOutput
from paceline.streaming.chunk import FinishReason, StreamChunk, Usage

MOST_DELAY_S: Final = 1.0
"""Of a reply: less than `LEASE_S`, so that the log stays on until then."""

MAX_NODES: Final = 4096

MarkKind = Literal["started", "preempted", "ended", "cancelled", "failed"]


class StepPlan(msgspec.Struct):
    """A generation tick: cache operations in order, then one pass over the rows, with these adapters.

    lost_s: seconds that the pass loses as prompts wait (`LostTime`); None where none waits, or no row decodes.
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
    """The outcome of a plan, row by row or text by text.

    step_s: seconds of the passes themselves. num_passes: how many it took; 1 where nothing failed. transfers: the outcome
    of the operations; None where there were none.
    """

    rows: list[RowOutput] = []
    vectors: list[Any] = []
    errors: list[PacelineError | None] = []
    transfers: TransferOutput | None = None
    step_s: float = 0.0
    num_passes: int = 0


class Started(msgspec.Struct):
    """The request left the queue: one of its sequences got a slot, or its first text a place in a pass."""

    key: int


class Delta(msgspec.Struct):
    """A chunk of a request that has not ended."""

    key: int
    chunk: StreamChunk


class HeldBack(msgspec.Struct):
    """A choice drew tokens of which no chunk was made: they may belong to a stop, or are fewer than its interval."""

    key: int
    choice: int


class Ended(msgspec.Struct):
    """The terminal chunk of a request; nothing but `Released` follows."""

    key: int
    chunk: StreamChunk


class Released(msgspec.Struct):
    """The request's slots are free and its memory is reclaimable."""

    key: int


class Embedded(msgspec.Struct):
    """An embedding request has ended: a vector for each of its texts, or why there are none."""

    key: int
    vectors: list[Any]
    error: PacelineError | None


class Answered(msgspec.Struct):
    """The result of a command with this key that asked the engine for something."""

    key: int
    result: Any


Event = Answered | Started | Delta | HeldBack | Ended | Released | Embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request as instruments see it. key: unique in this engine; request_id: the caller's name, if it gave one."""

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
    """One sequence's share of a tick. Of num_tokens computed, num_new tokens came out; 0 while a prompt is unfinished.

    num_decode: where the row went on from generated tokens, how many of them it had: 1, or more that are computed again beside
    a wrong draft; the rest of num_tokens - num_drafts is prefill. first: whether the sequence's first token came out.
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
        """Return the same with what came out of a row with drafts: what was drawn behind its end did not."""
        return msgspec.structs.replace(self, num_new=num_new)


class TickRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tick that computed something. Seconds on the engine's clock; step_s: of elapsed_s, the pass itself.

    num_running: sequences that have one of the num_slots slots, with or without a row; num_waiting: requests in the queue.
    An embedding tick has no rows: num_embedded texts of num_embedded_tokens tokens became vectors.
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
        """What the engine took for itself: of elapsed_s, outside of the pass."""
        return self.elapsed_s - self.step_s

    @property
    def num_decode(self) -> int:
        """Generated tokens that were computed: one for each row that decoded, and those computed again."""
        return sum(row.num_decode for row in self.rows)

    @property
    def num_prefill(self) -> int:
        """Prompt tokens computed."""
        return sum(row.num_tokens - row.num_decode - row.num_drafts for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How a request ended.

    reason: of its choices' reasons the one that stands first in `FinishReason`, so ERROR where one failed. error_code: of
    that choice's error, if it has one.
    """

    key: int
    reason: FinishReason
    usage: Usage
    now_s: float
    error_code: str | None = None


class TelemetrySink(Protocol):
    """Receives what happens; `Instrument` documents each hook. drafter_failed: with an error of which no request hears."""

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


SlotState = Literal["idle", "prefilling", "decoding", "paused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot. Where it is idle, all but `id` has its default.

    state: "prefilling" while tokens other than the newest are left to compute, so also after a preemption; "paused" where the
    request's reader is too slow. key: of the request in its engine; request_id: the caller's name for it; choice: which of its
    choices. num_prompt_tokens: of the prompt, num_cached of them taken from the cache; num_computed_tokens: tokens in cells;
    num_generated: tokens drawn, those of a stop included; max_tokens: the request's; None: no limit of its own. running_s:
    seconds since the request got its first slot. tenant: of the request; num_preempted: how often the choice lost its slot.
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

    @property
    def is_processing(self) -> bool:
        """Whether a sequence has it."""
        return self.key is not None

    @property
    def num_remaining(self) -> int | None:
        """Tokens that may still be drawn; None where only the context limits them."""
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
    """A tick. number: its place in the log. tenants: of each row; empty where none has one."""

    number: int
    record: TickRecord
    tenants: tuple[str, ...] = ()


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to a sequence beside ticks. number: its place in the log; slot: None for one that ended in the queue.

    reason: of one that ended, was cancelled or failed.
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
    """A sequence without a slot. waits_for: the key of the request that computes its prefix just now."""

    key: int
    request_id: str | None
    choice: int
    tenant: str
    num_prompt_tokens: int
    num_generated: int
    waiting_s: float
    is_preempted: bool
    waits_for: int | None
    priority: int


class TreeNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the radix tree, as `NodeView` has it. running: key and choice of sequences, `MOST_OWNERS` at most."""

    id: int
    parent: int | None
    start: int
    end: int
    running: tuple[tuple[int, int], ...]
    num_cached: int
    on_device: bool
    on_host: bool
    has_state: bool


class TenantTree(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's part of the radix tree. num_nodes, num_tokens: with those that are not shown, as far as they were counted."""

    tenant: str
    nodes: tuple[TreeNode, ...]
    num_nodes: int
    num_tokens: int
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineActivity:
    """What an engine does after a tick, and what it did before.

    Attributes:
        started_s: When the log's numbers began. Another value than before: the engine began anew, in another process or after
            a failure of its own, and what was known of it is void.
        now_s: Seconds on the engine's clock.
        last_number: The number of the newest tick or mark: what to ask from the next time.
        slots: All slots.
        waiting: Sequences in their turn, `MOST_WAITING` at most.
        num_waiting: All sequences without a slot; num_embedding: embedding requests.
        ticks, marks: Those after the number that was asked from, as far as they are kept.
        trees: By tenant; None where no tree was asked for.
        num_cells: Cells in use; num_free: not in use, None where memory is not made of cells; num_running_cells: in use by
            running sequences.
        host_bytes: In host memory.
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
