"""Options of a request beside its prompt and its sampling: priority, deadlines, delivery. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, Self, TypeVar, Unpack

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.keywords import Float, RequestKeywords, set_constructor

if TYPE_CHECKING:
    from functools import _Wrapped

Truncate = Literal["left", "right", "middle"]
SlowReader = Literal["pause", "cancel"]

SECONDS_PER_PRIORITY = 10.0
"""Aging: seconds of waiting that make up for one level of priority."""

_LARGE = 1_000_000
MAX_DRAFT = 64
"""Most tokens of one sequence that speculation proposes in a tick."""
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0
"""Bounds of a tenant's weight."""
MAX_INTERVAL = 1_000_000
"""Tokens; more than any choice has."""
_INT32 = 2**31 - 1
_MAX_PRESERVED = 1024
TIMEOUTS = ("queue_timeout_s", "ttft_timeout_s", "timeout_s")


def turn_s(submitted_s: float, priority: int) -> float:
    """Return the key by which waiting requests are ordered, lowest first.

    All age at the same rate, so this order does not change while they wait, and only finitely many can come before one.
    """
    return submitted_s - SECONDS_PER_PRIORITY * priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How the engine schedules and delivers a request. Immutable. None is the default of every field.

    Attributes:
        priority: Higher runs first, among the requests of its tenant; ten seconds of waiting make up for one level (aging).
        queue_timeout_s: Seconds from submit until the request must run; None: no limit. A request that exceeds one of the
            three limits ends with the finish reason DEADLINE; the text until then is delivered.
        ttft_timeout_s: Seconds from submit until its first token; None: no limit.
        timeout_s: Seconds from submit until its end; None: no limit.
        truncate: Which tokens of a too long prompt are dropped: "left", "right" or "middle"; None refuses the prompt. A
            truncated prompt leaves room for max_tokens, at most half of the positions. Texts to embed and documents to
            rerank are truncated to max_embedding_tokens; a bos token in front and an eos or sep token at the end stay.
        interval: Tokens per chunk, the last chunk aside; `Stream.interval` changes it while the stream runs.
        lora: Scales of adapters, by the names that the engine was given; other adapters do not apply.
        max_buffered_tokens: Unread tokens from which on backpressure applies, see slow_reader; None: no limit.
        slow_reader: The reaction to this: "pause" pauses the sequence until its reader has caught up, "cancel" ends it with the
            finish reason SLOW_READER.
        add_special: Whether a text prompt gets the bos and eos tokens that the vocabulary asks for.
        parse_special: Whether control tokens spelled out in a text prompt, such as <|im_start|>, become control tokens.
        suffix: Text after the output: the model fills in what is missing between the prompt and it, if its vocabulary has tokens
            for that. Control tokens spelled out in the two texts stay text. With truncate="left" a prompt that is too long
            loses its beginning; other sides are refused, and the suffix is never cut.
        special: Whether generated control tokens are part of the text; they always are in token_ids.
        preserved_tokens: Ids of control tokens that are part of the text even without special, for readers that need them.
        cache_prompt: Whether the request may reuse cached prefixes, and its own may be reused.
        speculation: Whether tokens may be proposed ahead of decoding, if the engine has a drafter. The output is the same.
        max_draft: Most tokens that are proposed in a tick, 0 to 64; None: as many as pay.
        tenant: Owner of the request. Only requests of the same tenant and cache_salt share prefixes and compiled grammars;
            others cannot even find out by timing. Tenants share slots and prompt tokens, and one tenant cannot fill the queue
            for the others.
        tenant_weight: Share of the tenant while several tenants wait, in proportion to the others, 0.001 to 1000. The weight of
            a tenant's latest request counts.
        cache_salt: See tenant.
        request_id: The caller's name for the request in records and traces.
        traceparent: The W3C trace context of the caller, as of the HTTP header; replicas of a cluster take it up.

    Raises:
        InvalidParams: A value is out of its range; the message names the field.
        InvalidType: A value has the wrong type, or a field is unknown.
    """

    priority: int = 0
    queue_timeout_s: float | None = None
    ttft_timeout_s: float | None = None
    timeout_s: float | None = None
    truncate: Truncate | None = None
    interval: int = 1
    lora: Annotated[Any, Mapping[str, Float] | tuple[tuple[str, Float], ...]] = ()
    max_buffered_tokens: int | None = None
    slow_reader: SlowReader = "pause"
    add_special: bool = True
    parse_special: bool = False
    suffix: str | None = None
    special: bool = False
    preserved_tokens: tuple[int, ...] = ()
    cache_prompt: bool = True
    speculation: bool = True
    max_draft: int | None = None
    tenant: str = ""
    tenant_weight: float = 1.0
    cache_salt: str = ""
    request_id: str | None = None
    traceparent: str | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[RequestKeywords]) -> None: ...

    def __new__(cls, **options: Any) -> Self:
        """Refuse unknown options, naming the nearest known one."""
        validation.reject_unknown(options, OPTION_NAMES, "RequestOptions")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        validation.set_defaults(self)
        self._set("priority", validation.integer("priority", self.priority, -_LARGE, _LARGE))
        self._set("interval", validation.integer("interval", self.interval, 1, MAX_INTERVAL))
        for name in TIMEOUTS:
            if getattr(self, name) is not None:
                self._set(name, validation.number(name, getattr(self, name), above=0, high=1e9))
        if self.truncate is not None:
            self._set("truncate", validation.choice("truncate", self.truncate, ("left", "right", "middle")))
        if self.max_buffered_tokens is not None:
            most = validation.integer("max_buffered_tokens", self.max_buffered_tokens, 1, _INT32)
            self._set("max_buffered_tokens", most)
        if self.max_draft is not None:
            self._set("max_draft", validation.integer("max_draft", self.max_draft, 0, MAX_DRAFT))
        self._set("slow_reader", validation.choice("slow_reader", self.slow_reader, ("pause", "cancel")))
        for name in ("add_special", "parse_special", "special", "cache_prompt", "speculation"):
            validation.boolean(name, getattr(self, name))
        self._set("preserved_tokens", _token_ids(self.preserved_tokens))
        self._set("tenant_weight", validation.number("tenant_weight", self.tenant_weight, MIN_WEIGHT, MAX_WEIGHT))
        for name in ("tenant", "cache_salt"):
            self._set(name, validation.text(name, getattr(self, name)))
        for name in ("request_id", "suffix", "traceparent"):
            if getattr(self, name) is not None:
                self._set(name, validation.text(name, getattr(self, name)))
        self._set("lora", _scales(self.lora))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_cache_scope: ContextVar[tuple[str, str]] = ContextVar("cache_scope", default=("", ""))
P = ParamSpec("P")
R = TypeVar("R")


def current_cache_scope() -> tuple[str, str]:
    """Return tenant and cache_salt of the request that is being prepared. Caches of compiled input have them in their keys."""
    return _cache_scope.get()


@contextmanager
def cache_scope(tenant: str, cache_salt: str = "") -> Iterator[None]:
    """Prepare a request of this tenant and cache_salt within the block, and in threads that get a copy of the context."""
    token = _cache_scope.set((tenant, cache_salt))
    try:
        yield
    finally:
        _cache_scope.reset(token)


def cached_in_scope(maxsize: int) -> Callable[[Callable[P, R]], _Wrapped[P, R, P, R]]:
    """Cache a function as `functools.lru_cache` does, with results that no other cache scope gets or can time."""

    def decorate(function: Callable[P, R]) -> _Wrapped[P, R, P, R]:
        cached: Any = lru_cache(maxsize)(lambda _scope, *args, **kwargs: function(*args, **kwargs))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            found: R = cached(current_cache_scope(), *args, **kwargs)
            return found

        call.cache_info = cached.cache_info  # type: ignore[attr-defined] # as `lru_cache` has it
        return call

    return decorate


def _token_ids(ids: object) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidType(f"preserved_tokens must be a list of token ids, not {type(ids).__name__}")
    if len(ids) > _MAX_PRESERVED:
        raise InvalidParams(f"preserved_tokens must be at most {_MAX_PRESERVED}, not {len(ids)}")
    return tuple(sorted({validation.integer("preserved_tokens", token, 0, _INT32) for token in ids}))


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(RequestOptions))
set_constructor(RequestOptions, RequestKeywords)


def _scales(lora: object) -> tuple[tuple[str, float], ...]:
    """Return names and scales, sorted; drop scales of 0."""
    pairs = tuple(lora.items()) if isinstance(lora, Mapping) else lora
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidType(f"lora must map names of adapters to scales, not {lora!r:.80}")
    scales = {
        validation.text("lora: the name", name): validation.number(f"lora[{name!r}]", scale, -1e6, 1e6)
        for name, scale in pairs
    }
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale != 0))
