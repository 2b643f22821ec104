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
    CacheSequence,
    KVCacheLimits,
    MediaItem,
    Namespace,
    PromptLayout,
    SequenceGroup,
    pack_tokens,
)
from paceline.media import Attachment
from paceline.output import OutputProcessor, Vocabulary
from paceline.params import SamplingParams
from paceline.request import MAX_DRAFT, RequestOptions, turn_s
from paceline.streaming.chunk import FinishReason, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(KVCacheLimits):
    """The limits that backend and configuration set.

    num_slots: sequences that run at once. n_batch: tokens of a tick; n_ubatch: tokens computed at once; n_verify: tokens of a
    tick that has drafts, if fewer than n_batch. chunk_size: prefill tokens of one sequence in a tick. max_positions: tokens of
    one sequence, at most num_cells, which is n_ctx rounded up to a multiple of 256; 0 if the model cannot generate, and
    cannot_generate then names its kind. n_ctx_train: tokens of a sequence with a larger context, 0 if not known.
    max_scored: rows of logits in a tick for prompt tokens; max_drafted: for drafts, 0 without speculation. max_draft: most
    drafts of a sequence in a tick; min_draft: fewer are not verified. max_rollback: wrong drafts that can be cut from the end
    of a row, None: all; after more wrong drafts the whole row is computed again. itl_target_s: inter-token latency target;
    max_tick_s: the longest tick while no sequence decodes. embed_tokens, embed_texts: most in an embedding tick; a longer text
    has a tick of its own. max_embedding_tokens: of the longest text. n_vocab: tokens of the vocabulary. num_seq_ids: as many
    as slots, more if parts of prefixes can be shared.
    """

    num_slots: int
    n_batch: int
    chunk_size: int
    max_positions: int
    max_scored: int
    max_tick_s: float
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
        """Return advice for the error of a prompt of `num_tokens` tokens, more than `max_positions`."""
        if max(num_tokens, self.max_positions + 1) <= self.n_ctx_train:
            return f"load the model with a larger n_ctx (at most {self.n_ctx_train})"
        most = max(self.max_positions, self.n_ctx_train)
        return f"take a model that was trained for longer texts (this model takes at most {most} tokens)"


class GenerationState(msgspec.Struct, array_like=True, kw_only=True):
    """The state of one choice outside the engine that runs it: enough for another engine to continue the choice.

    token_ids: generated tokens. num_sent: number of generated tokens at the last chunk; None before the first chunk.
    unsent_logprobs: of the tokens that are in no chunk, if logprobs are wanted. num_scored: prompt tokens with
    sent log-probabilities. reason: of a choice that has ended. sampler_state: for samplers with draws that depend on more than
    seed and tokens.
    """

    token_ids: list[int] = []
    num_sent: int | None = None
    unsent_logprobs: list[TokenLogprobs] = []
    num_scored: int = 0
    reason: FinishReason | None = None
    sampler_state: bytes | None = None


class Progress(msgspec.Struct, array_like=True):
    """The progress of a request apart from its tokens.

    Attributes:
        started_s: When it left the queue, on the system-wide clock that a worker and its front read.
        first_token_s: When its first token was drawn.
        num_cached: Prompt tokens that came from the cache when it started.
        cached_from: The source of most of these tokens.
    """

    started_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    cached_from: str | None = None

    def moved(self, by_s: float) -> Progress:
        """Return a copy with its times moved."""
        return msgspec.structs.replace(
            self,
            started_s=None if self.started_s is None else self.started_s + by_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s + by_s,
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Request(SequenceGroup):
    """A submitted request and its state. The caller's thread makes it, then the engine's thread owns it.

    samplers: of the backend, one for each choice; they have accepted all tokens so far. lora: names of adapters with their
    scales. echo: the prompt's text if it is part of the output. media: images and audio of the prompt; the prompt gets their
    keys in their cells. embeddings: of the media by their first cells, as the backend takes them, or the error. attachments:
    the sources of the media. states: one for each choice of a request that another engine began, None for a choice without a
    token. Times are seconds on the engine's clock; submitted_s is set again when the engine accepts the request.
    """

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
    is_slow: bool = False
    progress: Progress = field(default_factory=Progress)
    has_deadline: bool = field(init=False)
    layout: PromptLayout = field(init=False, default=TEXT_LAYOUT)
    sequences: list[Sequence] = field(init=False)
    num_open: int = field(init=False)

    def __post_init__(self, vocabulary: Vocabulary, states: SequenceOf[GenerationState | None]) -> None:
        options = self.options
        timeouts = (options.timeout_s, options.ttft_timeout_s, options.queue_timeout_s)
        self.has_deadline = any(timeout is not None for timeout in timeouts)
        if self.media:
            if self.params.prompt_logprobs is not None:
                raise Unsupported("prompt_logprobs are of tokens, and this prompt has images or sound")
            self.layout = PromptLayout(self.media)
            self.prompt = self.layout.keyed(self.prompt)
        begun = [*states, *[None] * (self.params.n - len(states))]
        tokens = pack_tokens(self.prompt)  # on the caller's thread, as a long prompt takes half a millisecond
        self.sequences = [Sequence(self, choice, vocabulary, tokens, state) for choice, state in enumerate(begun)]
        self.num_open = sum(sequence.reason is None for sequence in self.sequences)

    def deadline_s(self) -> float:
        """Return the time of its next deadline; infinite without one."""
        if not self.has_deadline:
            return math.inf
        return next_deadline_s(self.options, self.submitted_s, self.progress)

    def set_interval(self, interval: int) -> None:
        """Change the number of tokens that a chunk needs, from the next chunk on."""
        self.options = replace(self.options, interval=interval)
        for sequence in self.sequences:
            sequence.output.interval = interval

    def set_lora(self, lora: tuple[tuple[str, float], ...]) -> None:
        """Change the adapters, and so the prefixes it shares; only before the engine accepts the request."""
        if lora != self.lora:
            self.lora, self.options = lora, replace(self.options, lora=lora)

    def usage(self, now_s: float) -> Usage:
        """Return token counts and times so far."""
        progress = self.progress
        started, first = now_s if progress.started_s is None else progress.started_s, progress.first_token_s
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=progress.num_cached,
            cached_from=progress.cached_from,
            completion_tokens=sum(sequence.output.num_generated for sequence in self.sequences),
            draft_tokens=sum(sequence.num_drafted for sequence in self.sequences),
            accepted_tokens=sum(sequence.num_accepted for sequence in self.sequences),
            queue_s=started - self.submitted_s,
            prefill_s=(now_s if first is None else first) - started,
            decode_s=0.0 if first is None else now_s - first,
            ttft_s=None if first is None else first - self.submitted_s,
        )


def next_deadline_s(options: RequestOptions, submitted_s: float, progress: Progress) -> float:
    """Return the time of a request's next deadline; infinite without one."""
    limits = [math.inf]
    if options.timeout_s is not None:
        limits.append(options.timeout_s)
    if options.ttft_timeout_s is not None and progress.first_token_s is None:
        limits.append(options.ttft_timeout_s)
    if options.queue_timeout_s is not None and progress.started_s is None:
        limits.append(options.queue_timeout_s)
    return submitted_s + min(limits)


def most_drafts(params: SamplingParams, options: RequestOptions) -> int:
    """Return the number of tokens that may be proposed for a choice in a tick.

    None may be if something outside of the pass looks at each token: a logits processor, or the switch that lets a lazy grammar
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
    """Return whether the prefixes of a namespace were computed with an adapter; no sequence with it may run."""
    adapters = namespace[0]  # without cache_prompt the request's key; it leaves no prefixes
    return isinstance(adapters, tuple) and any(key == adapter for key, _ in adapters)


class Sequence(CacheSequence):
    """One choice of a request. A strategy reads it as a `SequenceView`.

    request: set only while the scheduler has the request open, so that a request and its sequences form no reference cycle
    before and after. num_taken_back: generated tokens that are computed again, as they shared a row with a wrong draft.
    """

    request: Request
    num_tokens: int

    __slots__ = (
        "choice", "drawing", "error", "key", "last_tick", "limit", "max_draft", "num_accepted", "num_drafted",
        "num_preempted", "num_scored", "num_taken_back", "num_tokens", "order", "output", "priority", "reason", "sampler",
        "slot",
    )  # fmt: skip

    def __init__(
        self, request: Request, choice: int, vocabulary: Vocabulary, tokens: bytes, state: GenerationState | None = None
    ) -> None:
        params, options = request.params, request.options
        super().__init__(list(request.prompt), tokens, request.layout)
        self.choice = choice
        self.key = self.order = 0
        self.sampler = request.samplers[choice] if request.samplers else None
        self.num_tokens = self.num_prompt_tokens
        self.num_scored = self.num_prompt_tokens - 1
        if params.prompt_logprobs is not None and choice == 0:
            self.num_scored = min(self.num_scored, params.first_scored - 1)
        self.drawing = params.max_tokens != 0
        self.max_draft = most_drafts(params, options)
        self.num_drafted = self.num_accepted = self.num_preempted = self.num_taken_back = 0
        self.output = OutputProcessor(params, vocabulary, choice, options, request.echo)
        self.priority = options.priority
        self.slot: int | None = None
        self.last_tick = self.limit = 0
        self.reason: FinishReason | None = None
        self.error: PacelineError | None = None
        if state is not None:  # its tokens are computed again
            self.token_ids += state.token_ids
            self.num_tokens = len(self.token_ids)
            self.num_scored += state.num_scored
            self.reason = state.reason
            self.output.resume(state.token_ids, state.num_sent, state.unsent_logprobs)

    @property
    def submitted_s(self) -> float:
        """Time at which its request was accepted."""
        return self.request.submitted_s

    @property
    def is_running(self) -> bool:
        """Whether it has a slot."""
        return self.slot is not None

    @property
    def writes_cache(self) -> bool:
        """Whether its tokens may be cached for others."""
        return self.request.options.cache_prompt

    @property
    def namespace(self) -> Namespace:
        """Namespace of shared prefixes: adapters, tenant and salt; without cache_prompt only the choices of its request."""
        options = self.request.options
        return prefix_namespace(options) if options.cache_prompt else (self.request.key,)

    @property
    def turn_key(self) -> tuple[float, int]:
        """Order of admission among the sequences of a tenant; a slot does not change it."""
        request = self.request
        return (turn_s(request.submitted_s, request.options.priority), self.order)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute; the prompt's last token does not count if nothing is drawn after it."""
        return self.num_tokens - self.num_computed_tokens - (not self.drawing)

    @property
    def is_decoding(self) -> bool:
        """Whether it has generated and only its newest token is left to compute, beside tokens that were taken back."""
        num_left = self.num_tokens - self.num_computed_tokens
        return self.num_tokens > self.num_prompt_tokens and 1 <= num_left <= 1 + self.num_taken_back

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.num_scored < self.num_prompt_tokens - 1

    @property
    def scored_from(self) -> int | None:
        """See `CacheSequence.scored_from`."""
        return self.num_scored if self.is_scoring else None

    def note_taken_back(self, *, is_taken_back: bool) -> None:
        """Count the tokens that a row leaves to be computed again. is_taken_back: whether all of the row is."""
        num_left = self.num_tokens - self.num_computed_tokens - 1
        self.num_taken_back = num_left if is_taken_back else max(0, min(num_left, self.num_taken_back))

    def end(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """Latch the finish reason; of several in a tick, the reason with the highest rank stays."""
        if self.reason is None or reason.rank < self.reason.rank:
            self.reason, self.error = reason, error


class RowKind(Enum):
    """The input of a row. A pass has rows of one kind, as llama.cpp's batches and attention are of one kind."""

    TOKENS = auto()
    EMBEDDINGS = auto()  # any part of a media item
    WHOLE_EMBEDDINGS = auto()  # all of a media item, as its attention is not causal


class Row(msgspec.Struct):
    """The cells of a sequence that a tick computes, one for each of token_ids, from `position` on.

    draws: whether the logits of the last cell give the next token. num_drafts: tokens at the end of token_ids that are only
    proposed; the row then draws after the last known token and after every draft up to the first wrong one. targets: prompt
    tokens to be scored, which follow the first of token_ids. num_logprobs: for each drawn or scored token; None for none.
    item: the media item that the cells belong to, from its cell `offset` on; `position` is then its first position, and
    token_ids are parts of its key.
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
        """The input of the row."""
        if self.item is None:
            return RowKind.TOKENS
        return RowKind.EMBEDDINGS if self.item.is_causal else RowKind.WHOLE_EMBEDDINGS

    @property
    def drafts(self) -> list[int]:
        """The proposed tokens."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_outputs(self) -> int:
        """Number of its tokens with computed logits."""
        return self.draws + self.num_drafts or len(self.targets)

    def num_right(self, token_ids: SequenceOf[int]) -> int:
        """Return the number of right drafts, given the drawn tokens."""
        num_right = 0
        for draft, token_id in zip(self.drafts, token_ids, strict=False):
            if draft != token_id:
                break
            num_right += 1
        return num_right


class RowOutput(msgspec.Struct):
    """The outcome of a row: drawn tokens with their logprobs (empty if not requested), scored targets; or an error.

    A row with drafts may draw several tokens: the right drafts and one token after them. With `computed` and an error, the
    tokens are in the KV cache and the draw after token_ids failed. is_complete: nothing may follow, so the choice ends, without
    a token if none was left to draw. num_verified: drafts that were in the pass; a backend leaves out a draft that a constraint
    forbids and all drafts after it. num_accepted: right drafts among them, which are in the KV cache too; the drawn token may
    equal a draft that was left out. is_taken_back: a draft was wrong and memory could not be cut there, so nothing of the row is
    in the KV cache; the drawn tokens stand. waited_s: seconds before the pass in which masks for its drafts were filled.
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
