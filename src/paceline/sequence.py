"""Requests in the engine, their sequences and the rows of a pass: the records that scheduling and speculation work on.

A request has one sequence for each choice. A sequence counts tokens, not phases: its work is the tokens that are not computed
yet. Prefill, decode, a shared prefix and the recomputation after a preemption are the same row with other numbers.

Only the engine's thread uses these records; `Request.cancelled` may be set from any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum, auto
from typing import Any

import msgspec

from paceline.errors import PacelineError, Unsupported
from paceline.kv_cache import (
    TEXT_LAYOUT,
    TOKEN_BYTES,
    KVCacheLimits,
    MediaItem,
    Namespace,
    PendingPrefix,
    PromptLayout,
    pack_tokens,
)
from paceline.media import Attachment
from paceline.output import OutputProcessor, Vocabulary
from paceline.params import SamplingParams
from paceline.request import MAX_DRAFT, RequestOptions, turn_s
from paceline.streaming.chunk import FinishReason, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What backend and configuration allow.

    num_slots: sequences that run at once. n_batch: tokens of a tick; n_ubatch: computed at once. chunk_size: prefill tokens
    of one sequence in a tick. max_positions: tokens that one sequence can hold, at most num_cells, which is n_ctx rounded up to a
    multiple of 256. max_scored: rows of logits that a tick can
    spend on prompt tokens; max_drafted: on drafts, 0 without speculation. max_draft: most drafts of one sequence in a tick;
    min_draft: fewer than that are not verified. n_verify: tokens of a tick that has drafts, where that is less than n_batch.
    max_rollback: wrong drafts that can be cut from the end of a row, None: all of them; where there are more, all of the row
    is taken back and computed again. n_vocab: tokens of the vocabulary. itl_target_s: inter-token latency target;
    max_tick_s: the longest tick while no sequence decodes. embed_tokens, embed_texts: most of an embedding tick; a longer
    text has one of its own. max_embedding_tokens: of the longest text. num_cells, can_share_part, has_state_apart,
    host_bytes, boundary_ids: see `KVCacheLimits`; num_seq_ids: as many as slots, and more where parts of prefixes can be
    shared. cannot_generate: where max_positions is 0, what the model is instead, for the error of a request to generate.
    n_ctx_train: tokens that a sequence could have with a larger context; 0: not known.
    """

    num_slots: int
    n_batch: int
    chunk_size: int
    max_positions: int
    num_cells: int | None
    max_scored: int
    can_share_part: bool
    itl_target_s: float
    max_tick_s: float
    has_state_apart: bool = False
    boundary_ids: frozenset[int] = frozenset()
    num_seq_ids: int = 0
    host_bytes: int = 0
    n_ubatch: int = 512
    embed_tokens: int = 2048
    embed_texts: int = 64
    max_embedding_tokens: int = 2048
    max_drafted: int = 0
    max_draft: int = MAX_DRAFT
    min_draft: int = 1
    n_verify: int | None = None
    max_rollback: int | None = None
    n_vocab: int = 0
    cannot_generate: str = ""
    n_ctx_train: int = 0

    def longer_prompts(self, num_tokens: int) -> str:
        """Return how a prompt of `num_tokens`, more than `max_positions`, could be taken, for errors."""
        if max(num_tokens, self.max_positions + 1) <= self.n_ctx_train:
            return f"load the model with a larger n_ctx (at most {self.n_ctx_train})"
        most = max(self.max_positions, self.n_ctx_train)
        return f"take a model that was trained for longer texts (this model takes at most {most} tokens)"

    def for_kv_cache(self) -> KVCacheLimits:
        """Return the part that the KV cache needs."""
        return KVCacheLimits(
            num_seq_ids=self.num_seq_ids,
            num_cells=self.num_cells,
            can_share_part=self.can_share_part,
            has_state_apart=self.has_state_apart,
            host_bytes=self.host_bytes,
            itl_target_s=self.itl_target_s,
            boundary_ids=self.boundary_ids,
        )


class GenerationState(msgspec.Struct, array_like=True, kw_only=True):
    """What is known of one choice outside the engine that runs it: enough for another engine to continue it.

    token_ids: all that it has generated. num_sent: how many of them there were when its last chunk was made; None if none
    was. unsent_logprobs: of the tokens that are in no chunk, if logprobs are wanted. num_scored: prompt tokens whose
    log-probabilities were sent. reason: why it has ended, if it has. sampler_state: for samplers whose draws do not follow
    from seed and tokens alone.
    """

    token_ids: list[int] = []
    num_sent: int | None = None
    unsent_logprobs: list[TokenLogprobs] = []
    num_scored: int = 0
    reason: FinishReason | None = None
    sampler_state: bytes | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What a caller submitted, and its state. Made on the caller's thread, then the engine's.

    samplers: one a choice, of the backend, which have accepted all tokens so far. lora: names of adapters with their scales.
    echo: the prompt's text where it is part of the output. media: items of the prompt, in whose cells their keys are put.
    embeddings: of those items, by their first cells, as the backend takes them; or why there are none. attachments: what they
    are made of.
    states: of a request that another engine began, one a choice; None for a choice without a token. Times are seconds on the
    engine's clock; submitted_s is set again when the engine accepts it.
    """

    key: int
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions
    samplers: tuple[object, ...]
    submitted_s: float
    lora: tuple[tuple[str, float], ...] = ()
    echo: str = ""
    media: tuple[MediaItem, ...] = ()
    embeddings: Mapping[int, Any] | PacelineError = field(default_factory=dict)
    attachments: tuple[Attachment, ...] = ()
    vocabulary: InitVar[Vocabulary]
    states: InitVar[SequenceOf[GenerationState | None]] = ()
    cancelled: bool = False
    is_paused: bool = False
    is_slow: bool = False
    is_matched: bool = False
    started_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    cached_from: str | None = None
    has_deadline: bool = field(init=False)
    layout: PromptLayout = field(init=False, default=TEXT_LAYOUT)
    sequences: list[Sequence] = field(init=False)
    num_open: int = field(init=False)

    def __post_init__(self, vocabulary: Vocabulary, states: SequenceOf[GenerationState | None]) -> None:
        options = self.options
        timeouts = (options.timeout_s, options.ttft_timeout_s, options.queue_timeout_s)
        self.has_deadline = any(timeout is not None for timeout in timeouts)
        if self.media:
            self._lay_out()
        begun = [*states, *[None] * (self.params.n - len(states))]
        tokens = pack_tokens(
            self.prompt
        )  # here, on the caller's thread: of a long prompt that takes half a millisecond
        self.sequences = [Sequence(self, choice, vocabulary, tokens, state) for choice, state in enumerate(begun)]
        self.num_open = sum(one.reason is None for one in self.sequences)

    def _lay_out(self) -> None:
        """Take in where the media items are. Raises `InvalidParams` for wrong places, `Unsupported` for scored prompts."""
        if self.params.prompt_logprobs is not None:
            raise Unsupported("prompt_logprobs are of tokens, and this prompt has images or sound")
        self.layout = PromptLayout(self.media)
        self.prompt = self.layout.keyed(self.prompt)

    def deadline_s(self) -> float:
        """Return when its next deadline passes; infinite without one."""
        if not self.has_deadline:
            return math.inf
        return next_deadline_s(self.options, self.submitted_s, self.started_s, self.first_token_s)

    def set_interval(self, interval: int) -> None:
        """Change how many tokens a chunk needs, from the next chunk on."""
        self.options = replace(self.options, interval=interval)
        for sequence in self.sequences:
            sequence.output.interval = interval

    def set_lora(self, lora: tuple[tuple[str, float], ...]) -> None:
        """Change the adapters, and with them whose prefixes it shares; only before the engine accepts the request."""
        if lora != self.lora:
            self.lora, self.options = lora, replace(self.options, lora=lora)

    def usage(self, now_s: float) -> Usage:
        """Return token counts and times so far."""
        started = now_s if self.started_s is None else self.started_s
        first = self.first_token_s
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.num_cached,
            cached_from=self.cached_from,
            completion_tokens=sum(one.output.num_generated for one in self.sequences),
            draft_tokens=sum(one.num_drafted for one in self.sequences),
            accepted_tokens=sum(one.num_accepted for one in self.sequences),
            queue_s=started - self.submitted_s,
            prefill_s=(now_s if first is None else first) - started,
            decode_s=0.0 if first is None else now_s - first,
            ttft_s=None if first is None else first - self.submitted_s,
        )


def next_deadline_s(
    options: RequestOptions, submitted_s: float, started_s: float | None, first_token_s: float | None
) -> float:
    """Return when the next deadline of a request passes; infinite without one. Times are None for what has not happened."""
    limits = [math.inf]
    if options.timeout_s is not None:
        limits.append(options.timeout_s)
    if options.ttft_timeout_s is not None and first_token_s is None:
        limits.append(options.ttft_timeout_s)
    if options.queue_timeout_s is not None and started_s is None:
        limits.append(options.queue_timeout_s)
    return submitted_s + min(limits)


def most_drafts(params: SamplingParams, options: RequestOptions) -> int:
    """Return how many tokens of a choice may be proposed in a tick.

    None where something looks at one token after the other outside of the pass: a logits processor, and what lets a lazy grammar
    sleep while the model thinks.
    """
    is_woken = params.grammar is not None and params.thinking is not None
    if not options.speculation or is_woken or params.logits_processors:
        return 0
    return MAX_DRAFT if options.max_draft is None else options.max_draft


def prefix_namespace(options: RequestOptions) -> Namespace:
    """Return the namespace within which requests of these options share prefixes: adapters, tenant and salt."""
    return (options.lora, options.tenant, options.cache_salt)


def uses_adapter(namespace: Namespace, adapter: str) -> bool:
    """Return whether what lies in a namespace was computed with an adapter; no sequence of it may run."""
    adapters = namespace[0]  # of a request without cache_prompt its key, and it leaves nothing
    return isinstance(adapters, tuple) and any(key == adapter for key, _ in adapters)


class Sequence:
    """One choice's life. A strategy reads it as a `view.SequenceView`.

    request: set while the scheduler has the request open, and only then: a request and its sequences form no reference cycle
    before and after.
    """

    request: Request

    __slots__ = (
        "admitted_s",
        "choice",
        "computes_all",
        "drawing",
        "error",
        "key",
        "last_tick",
        "layout",
        "limit",
        "max_draft",
        "num_accepted",
        "num_computed_tokens",
        "num_drafted",
        "num_preempted",
        "num_prompt_tokens",
        "num_scored",
        "num_taken_back",
        "num_tokens",
        "order",
        "output",
        "packed",
        "priority",
        "reason",
        "request",
        "sampler",
        "seq_id",
        "slot",
        "token_ids",
        "waits_for",
    )  # fmt: skip

    def __init__(
        self, request: Request, choice: int, vocabulary: Vocabulary, tokens: bytes, state: GenerationState | None = None
    ) -> None:
        params, options = request.params, request.options
        self.choice = choice
        self.key = self.order = 0
        self.sampler = request.samplers[choice] if request.samplers else None
        self.token_ids = list(request.prompt)
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.layout = request.layout
        self.num_scored = 0 if params.prompt_logprobs is not None and choice == 0 else self.num_prompt_tokens - 1
        self.drawing = params.max_tokens != 0
        self.max_draft = most_drafts(params, options)
        self.num_drafted = self.num_accepted = self.num_preempted = 0
        self.num_taken_back = 0  # generated tokens that are computed again, as they shared a row with a wrong draft
        self.output = OutputProcessor(params, vocabulary, choice, options, request.echo)
        self.priority = options.priority
        self.slot: int | None = None
        self.admitted_s: float | None = None
        self.seq_id: int | None = None
        self.packed = bytearray(tokens)
        self.waits_for: PendingPrefix | None = None
        self.computes_all = False
        self.last_tick = 0
        self.limit = 0
        self.reason: FinishReason | None = None
        self.error: PacelineError | None = None
        if state is not None:
            self._resume(state)

    def _resume(self, state: GenerationState) -> None:
        """Take over what was generated and sent before; all of it is left to compute."""
        self.token_ids += state.token_ids
        self.num_tokens = len(self.token_ids)
        self.num_scored = max(self.num_scored, state.num_scored)
        self.reason = state.reason
        self.output.resume(state.token_ids, state.num_sent, state.unsent_logprobs)

    @property
    def submitted_s(self) -> float:
        """When its request was accepted; if several tenants share the slots, when it got its slot."""
        return self.request.submitted_s if self.admitted_s is None else self.admitted_s

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot is not None

    @property
    def reads_cache(self) -> bool:
        """Whether a prefix may come from the cache; not where every prompt token is scored, or after a failed load."""
        return not self.is_scoring and not self.computes_all

    @property
    def writes_cache(self) -> bool:
        """Whether its tokens may be cached for others."""
        return self.request.options.cache_prompt

    @property
    def namespace(self) -> Namespace:
        """What it shares prefixes with: the same adapters, tenant and salt; without cache_prompt only its own choices."""
        options = self.request.options
        return prefix_namespace(options) if options.cache_prompt else (self.request.key,)

    def token_bytes(self, num_tokens: int) -> bytes:
        """Return the first tokens as the radix tree keeps them."""
        have = len(self.packed) // TOKEN_BYTES
        if have < num_tokens:
            self.packed += pack_tokens(self.token_ids[have:num_tokens])
        return bytes(self.packed[: num_tokens * TOKEN_BYTES])

    @property
    def turn_key(self) -> tuple[float, int]:
        """Order of admission among the sequences of a tenant; a slot does not change it."""
        request = self.request
        return (turn_s(request.submitted_s, request.options.priority), self.order)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute; where nothing is drawn after the prompt, all but its last."""
        return self.num_tokens - self.num_computed_tokens - (not self.drawing)

    @property
    def is_decoding(self) -> bool:
        """Whether it has generated and only its newest token is left to compute, with those before that were taken back."""
        num_left = self.num_tokens - self.num_computed_tokens
        return self.num_tokens > self.num_prompt_tokens and 1 <= num_left <= 1 + self.num_taken_back

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are left whose log-probabilities were requested."""
        return self.num_scored < self.num_prompt_tokens - 1

    def note_taken_back(self, *, is_taken_back: bool) -> None:
        """Count what a row leaves to be computed again. is_taken_back: whether that is all of the row."""
        num_left = self.num_tokens - self.num_computed_tokens - 1
        self.num_taken_back = num_left if is_taken_back else max(0, min(num_left, self.num_taken_back))

    def end(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """Latch the finish reason; within one tick the one of the higher rank stays."""
        if self.reason is None or reason.rank < self.reason.rank:
            self.reason, self.error = reason, error


class RowKind(Enum):
    """What a row is computed from, and how. A pass has rows of one kind: llama.cpp's batches and attention are of one."""

    TOKENS = auto()
    EMBEDDINGS = auto()  # any part of a media item
    WHOLE_EMBEDDINGS = auto()  # all of a media item, as its attention is not causal


class Row(msgspec.Struct):
    """The cells of a sequence that a tick computes, one for each of token_ids, from `position` on.

    draws: whether the last one's logits give its next token. num_drafts: how many of token_ids, at their end, are only
    proposed; the row then draws behind the last known token and behind every draft up to the first wrong one. targets: the
    prompt tokens that follow the first of token_ids, to be scored. num_logprobs: of what is drawn or scored; None for none.
    item: the media item whose cells these are, from its cell `offset` on; `position` is where it begins, and token_ids are
    parts of its key.
    """

    sequence: Sequence
    position: int
    token_ids: list[int]
    draws: bool
    targets: list[int]
    num_logprobs: int | None
    item: MediaItem | None = None
    offset: int = 0
    num_drafts: int = 0

    @property
    def kind(self) -> RowKind:
        """What it is computed from."""
        if self.item is None:
            return RowKind.TOKENS
        return RowKind.EMBEDDINGS if self.item.is_causal else RowKind.WHOLE_EMBEDDINGS

    @property
    def drafts(self) -> list[int]:
        """The proposed tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_outputs(self) -> int:
        """How many of its tokens' logits are computed."""
        return self.draws + self.num_drafts or len(self.targets)

    def num_right(self, token_ids: SequenceOf[int]) -> int:
        """Return how many of its drafts are right, where these tokens were drawn."""
        num_right = 0
        for draft, token_id in zip(self.drafts, token_ids, strict=False):
            if draft != token_id:
                break
            num_right += 1
        return num_right


class RowOutput(msgspec.Struct):
    """The outcome of a row: drawn tokens with their logprobs (empty if not requested), scored targets; or an error.

    Of a row with drafts more than one token may be drawn: the right drafts, and one behind them. With `computed` and an
    error, the tokens are in the KV cache and the draw behind token_ids failed. is_complete: nothing may follow, so that the
    choice ends; without a token if none was left to draw. num_verified: drafts that were in the pass: a backend leaves out
    those that a constraint forbids, and all behind them. num_accepted: of these the right ones, which are in the KV cache as
    well; a token may be drawn that is a draft left out. is_taken_back: as a draft was wrong and memory could not be cut there,
    nothing of the row is in the KV cache; what was drawn stands. waited_s: seconds before the pass in which masks along its
    drafts were filled.
    """

    token_ids: SequenceOf[int] = ()
    logprobs: SequenceOf[TokenLogprobs] = ()
    scored: SequenceOf[TokenLogprobs] = ()
    error: PacelineError | None = None
    computed: bool = True
    is_complete: bool = False
    num_verified: int = 0
    num_accepted: int = 0
    is_taken_back: bool = False
    waited_s: float = 0.0
