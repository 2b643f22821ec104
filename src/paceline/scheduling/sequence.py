"""A request in the engine, and its sequences: one for each answer that it wants.

A sequence counts tokens, not phases: what is known of it and not computed yet is its work. Prefill, decode, a shared
prefix and the recomputation after a preemption are the same row with other numbers. Engine's thread only; `cancelled` may
be set from any.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import InitVar, dataclass, field

from paceline.errors import PacelineError
from paceline.params import SamplingParams
from paceline.request import SECONDS_PER_PRIORITY, RequestOptions
from paceline.scheduling.answer import Answer
from paceline.scheduling.instrument import RequestRecord
from paceline.scheduling.limits import Vocabulary
from paceline.scheduling.prefix_tree import WIDTH, Namespace
from paceline.streaming.chunk import FinishReason, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What was known of one choice when the engine that ran it was lost.

    token_ids: all that it had generated. num_told: how many of them there were when its last chunk was made; None where
    none was. untold: the logprobs of those that are in no chunk, where logprobs are wanted. num_scored: prompt tokens whose
    log-probabilities were told. reason: why it has ended, if it has.
    """

    token_ids: tuple[int, ...] = ()
    num_told: int | None = None
    untold: tuple[TokenLogprobs, ...] = ()
    num_scored: int = 0
    reason: FinishReason | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What a caller submitted, and what has become of it. Made on the caller's thread, then the engine's.

    samplers: one a choice, the backend's own, told all that is known. lora: names of adapters with their scales. echo: the
    prompt's text where it is part of the answer. pasts: of a request that goes on after its engine was lost, one a choice;
    None for a choice of which nothing was told. Times are seconds on the engine's clock; submitted_s is set anew when the
    engine accepts it.
    """

    key: int
    prompt: list[int]
    params: SamplingParams
    options: RequestOptions
    samplers: tuple[object, ...]
    submitted_s: float
    lora: tuple[tuple[str, float], ...] = ()
    echo: str = ""
    vocabulary: InitVar[Vocabulary]
    pasts: InitVar[Many[Past | None]] = ()
    cancelled: bool = False
    is_paused: bool = False
    is_slow: bool = False
    is_matched: bool = False
    started_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    cached_from: str | None = None
    has_deadline: bool = field(init=False)
    sequences: list[Sequence] = field(init=False)
    num_open: int = field(init=False)

    def __post_init__(self, vocabulary: Vocabulary, pasts: Many[Past | None]) -> None:
        options = self.options
        timeouts = (options.timeout_s, options.ttft_timeout_s, options.queue_timeout_s)
        self.has_deadline = any(timeout is not None for timeout in timeouts)
        lives = [*pasts, *[None] * (self.params.n - len(pasts))]
        tokens = packed(self.prompt)  # here, on the caller's thread: of a long prompt that takes half a millisecond
        self.sequences = [Sequence(self, choice, vocabulary, tokens, past) for choice, past in enumerate(lives)]
        self.num_open = sum(one.reason is None for one in self.sequences)

    def deadline_s(self) -> float:
        """When it ends for want of time, as things stand."""
        options, limits = self.options, [math.inf]
        if options.timeout_s is not None:
            limits.append(options.timeout_s)
        if options.ttft_timeout_s is not None and self.first_token_s is None:
            limits.append(options.ttft_timeout_s)
        if options.queue_timeout_s is not None and self.started_s is None:
            limits.append(options.queue_timeout_s)
        return self.submitted_s + min(limits)

    def usage(self, now_s: float) -> Usage:
        """What it took."""
        started = now_s if self.started_s is None else self.started_s
        first = self.first_token_s
        return Usage(
            prompt_tokens=len(self.prompt),
            cached_tokens=self.num_cached,
            cached_from=self.cached_from,
            completion_tokens=sum(one.answer.num_generated for one in self.sequences),
            queue_s=started - self.submitted_s,
            prefill_s=(now_s if first is None else first) - started,
            decode_s=0.0 if first is None else now_s - first,
            ttft_s=None if first is None else first - self.submitted_s,
        )

    def record(self) -> RequestRecord:
        """As instruments see it."""
        return RequestRecord(
            key=self.key,
            request_id=self.options.request_id,
            kind="generate",
            prompt_tokens=len(self.prompt),
            num_choices=self.params.n,
            max_tokens=self.params.max_tokens,
            priority=self.options.priority,
            submitted_s=self.submitted_s,
        )


def prefix_namespace(options: RequestOptions) -> Namespace:
    """With whom requests of these options share prefixes: the same adapters, tenant and salt."""
    return (options.lora, options.tenant, options.cache_salt)


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as the prefix tree keeps them."""
    return array("i", token_ids).tobytes()


@dataclass(frozen=True, slots=True)
class Promise:
    """A running sequence that is about to have computed the first `end` tokens of others that wait for it."""

    sequence: Sequence
    end: int

    @property
    def stands(self) -> bool:
        """Whether it still runs and has not got there."""
        by = self.sequence
        return by.slot is not None and not by.request.is_paused and by.num_computed < self.end


class Sequence:
    """One choice's life. What a strategy may read of it is `view.SequenceView`."""

    __slots__ = (
        "answer", "choice", "computes_all", "drawing", "error", "has_snapshot", "key", "known", "last_tick",
        "limit", "num_computed", "num_known", "num_prompt", "num_scored", "order", "packed", "priority", "reason", "request",
        "sampler", "seq_id", "slot", "waits_for",
    )  # fmt: skip

    def __init__(
        self, request: Request, choice: int, vocabulary: Vocabulary, tokens: bytes, past: Past | None = None
    ) -> None:
        params, options = request.params, request.options
        self.request, self.choice = request, choice
        self.key = self.order = 0
        self.sampler = request.samplers[choice] if request.samplers else None
        self.known = list(request.prompt)
        self.num_known = self.num_prompt = len(self.known)
        self.num_computed = 0
        self.num_scored = 0 if params.prompt_logprobs is not None and choice == 0 else self.num_prompt - 1
        self.drawing = params.max_tokens != 0
        self.answer = Answer(params, vocabulary, choice, options, request.echo)
        self.priority = options.priority
        self.slot: int | None = None
        self.seq_id: int | None = None
        self.packed = bytearray(tokens)
        self.has_snapshot = False
        self.waits_for: Promise | None = None
        self.computes_all = False
        self.last_tick = 0
        self.limit = 0
        self.reason: FinishReason | None = None
        self.error: PacelineError | None = None
        if past is not None:
            self._resume(past)

    def _resume(self, past: Past) -> None:
        """Takes over what was generated and told before; all of it is left to compute."""
        self.known += past.token_ids
        self.num_known = len(self.known)
        self.num_scored = max(self.num_scored, past.num_scored)
        self.reason = past.reason
        self.answer.resume(past.token_ids, past.num_told, past.untold)

    @property
    def submitted_s(self) -> float:
        """When its request was accepted."""
        return self.request.submitted_s

    @property
    def reads_cache(self) -> bool:
        """Whether its beginning may come from memory; not where every prompt token has to be scored, or that failed."""
        return not self.is_scoring and not self.computes_all

    @property
    def writes_cache(self) -> bool:
        """Whether others may find what it computed."""
        return self.request.options.cache_prompt

    @property
    def namespace(self) -> Namespace:
        """With whom it shares: the same adapters, tenant and salt; nobody but its own choices without cache_prompt."""
        options = self.request.options
        return prefix_namespace(options) if options.cache_prompt else (self.request.key,)

    def token_bytes(self, num_tokens: int) -> bytes:
        """The first tokens that are known, as the prefix tree keeps them."""
        have = len(self.packed) // WIDTH
        if have < num_tokens:
            self.packed += packed(self.known[have:num_tokens])
        return bytes(self.packed[: num_tokens * WIDTH])

    @property
    def turn_key(self) -> tuple[float, int]:
        """Whose turn comes first. Waiting becomes priority at a constant rate, so that time changes nothing about it."""
        return (self.submitted_s - SECONDS_PER_PRIORITY * self.priority, self.order)

    @property
    def num_left(self) -> int:
        """Tokens to compute; of a prompt that nothing is drawn after, all but the last."""
        return self.num_known - self.num_computed - (not self.drawing)

    @property
    def is_decoding(self) -> bool:
        """Whether it has generated and only its newest token is left to compute."""
        return self.num_known > self.num_prompt and self.num_known - self.num_computed == 1

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are left whose log-probabilities were asked for."""
        return self.num_scored < self.num_prompt - 1

    def end(self, reason: FinishReason, error: PacelineError | None = None) -> None:
        """Latches why it ends; within one tick the reason of the higher rank stays."""
        if self.reason is None or reason.rank < self.reason.rank:
            self.reason, self.error = reason, error
