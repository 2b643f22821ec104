"""What a request asks beside its prompt and its sampling: when it may wait, how it is delivered. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from paceline import validation
from paceline.errors import InvalidType

Truncate = Literal["left", "right", "middle"]
SlowReader = Literal["pause", "cancel"]

SECONDS_PER_PRIORITY = 10.0
"""Waiting turns into priority: so many seconds make up for one level."""

_LARGE = 1_000_000
_INT32 = 2**31 - 1
_TIMEOUTS = ("queue_timeout_s", "ttft_timeout_s", "timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How the engine treats a request. Immutable; wrong values raise `InvalidParams` and name the field.

    priority: higher comes first; ten seconds of waiting make up for one.
    queue_timeout_s, ttft_timeout_s, timeout_s: seconds from submit until it runs, until its first token, in all; None: no
        limit. What was generated until then is delivered, with the reason DEADLINE.
    truncate: where a prompt that has more tokens than fit is cut: its "left" or "right" end, or its "middle"; None refuses
        it. One that is cut leaves room for max_tokens, at most half of the positions; one that fits is never cut.
    interval: tokens that a chunk needs, its last one aside.
    lora: scales of adapters by the names that the engine was given; the others do not apply.
    max_buffered_tokens: how far the reader may fall behind; None: as far as it likes. Beyond it the sequence pauses until
        it has caught up, or ends with SLOW_READER (slow_reader="cancel").
    add_special, parse_special: how a prompt that is text becomes tokens, see `Tokenizer.encode`.
    special: whether control tokens show in the text; they always are in token_ids.
    cache_prompt: whether it may use what others computed of the same prompt, and they what it computes. tenant, cache_salt:
    only requests with the same two share prefixes; others cannot even tell by the time that it takes.
    request_id: the caller's name for it, in records and traces.
    """

    priority: int = 0
    queue_timeout_s: float | None = None
    ttft_timeout_s: float | None = None
    timeout_s: float | None = None
    truncate: Truncate | None = None
    interval: int = 1
    lora: Any = ()
    max_buffered_tokens: int | None = None
    slow_reader: SlowReader = "pause"
    add_special: bool = True
    parse_special: bool = False
    special: bool = False
    cache_prompt: bool = True
    tenant: str = ""
    cache_salt: str = ""
    request_id: str | None = None

    def __new__(cls, **options: Any) -> Self:
        """Refuses unknown options with the nearest known one."""
        validation.reject_unknown(options, OPTION_NAMES, "RequestOptions")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._set("priority", validation.integer("priority", self.priority, -_LARGE, _LARGE))
        self._set("interval", validation.integer("interval", self.interval, 1, _LARGE))
        for name in _TIMEOUTS:
            if getattr(self, name) is not None:
                self._set(name, validation.number(name, getattr(self, name), above=0, high=1e9))
        if self.truncate is not None:
            self._set("truncate", validation.choice("truncate", self.truncate, ("left", "right", "middle")))
        if self.max_buffered_tokens is not None:
            most = validation.integer("max_buffered_tokens", self.max_buffered_tokens, 1, _INT32)
            self._set("max_buffered_tokens", most)
        self._set("slow_reader", validation.choice("slow_reader", self.slow_reader, ("pause", "cancel")))
        for name in ("add_special", "parse_special", "special", "cache_prompt"):
            validation.boolean(name, getattr(self, name))
        for name in ("tenant", "cache_salt"):
            self._set(name, validation.text(name, getattr(self, name)))
        if self.request_id is not None:
            self._set("request_id", validation.text("request_id", self.request_id))
        self._set("lora", _scales(self.lora))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


OPTION_NAMES = frozenset(field.name for field in dataclasses.fields(RequestOptions))


def _scales(lora: object) -> tuple[tuple[str, float], ...]:
    """Names and scales in order; a scale of 0 is no adapter."""
    pairs = tuple(lora.items()) if isinstance(lora, Mapping) else lora
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidType(f"lora must map names of adapters to scales, not {lora!r:.80}")
    scales = {
        validation.text("lora: the name", name): validation.number(f"lora[{name!r}]", scale, -1e6, 1e6)
        for name, scale in pairs
    }
    return tuple(sorted((name, scale) for name, scale in scales.items() if scale != 0))
