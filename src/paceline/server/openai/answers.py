"""What completions and chat completions tell alike: who answers, events of a stream, a choice's extras. Pure; any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from paceline.server.openai.logprobs import Pieces, prompt_logprobs
from paceline.server.openai.usage import usage_body
from paceline.server.timings import TimingsSoFar, timings_of
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage

FINISH = {FinishReason.END: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""OpenAI's words; the other reasons are told as errors."""

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Telling:
    """What a request wants to be told, and in whose name.

    shown, spelt: the bytes of every token, without and with those of control tokens. prompts: the token ids of each.
    num_top: of how many tokens log-probabilities are told; None: of none. scores_prompt: whether those of the prompt are told
    by themselves; echoes: whether its text is, and with it its log-probabilities where they are told at all. clock: of
    timings in every event; None: only the last one has them.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    shown: Pieces = ()
    spelt: Pieces = ()
    num_top: int | None = None
    echoes: bool = False
    scores_prompt: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    warnings: tuple[str, ...] = ()
    clock: Callable[[], float] | None = None

    @property
    def head(self) -> dict[str, Any]:
        """The members that every answer and every event begins with."""
        names = ("id", "object", "created", "model", "system_fingerprint")
        return {name: getattr(self, name) for name in names}

    def num_scored(self, prompt: int) -> int:
        """How many log-probabilities of this prompt are told."""
        wanted = self.scores_prompt or (self.echoes and self.num_top is not None)
        return len(self.prompts[prompt]) - 1 if wanted else 0

    def whole(self, choices: Sequence[Any], usages: Sequence[Usage]) -> bytes:
        """An answer that comes at once."""
        return _encode({**self.head, "choices": choices, "usage": usage_body(usages), **self.closing(usages)})

    def closing(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The members that a whole answer or the last event ends with: llama-server's timings, of one prompt, and warnings."""
        timings = {"timings": timings_of(usages[0], usages[0].completion_tokens)} if len(usages) == 1 else {}
        return timings | ({"warnings": self.warnings} if self.warnings else {})


class AnyChoice(msgspec.Struct, kw_only=True):
    """What every choice has: its index, and paceline's own members; of these, those that were not asked for are not there."""

    index: int
    stop_reason: str | int | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: Sequence[dict[str, Any] | None] | UnsetType = UNSET


def prompt_extras(telling: Telling, prompt: int, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """What is told of a prompt beside its choices' text: keywords of `AnyChoice`."""
    ids = telling.prompts[prompt]
    extras: dict[str, Any] = {"prompt_token_ids": ids} if telling.token_ids else {}
    if telling.scores_prompt:
        extras["prompt_logprobs"] = prompt_logprobs(telling.spelt, ids, scores)
    return extras


class Events:
    """Encodes the events of one stream: the same head every time, usage and warnings with the last."""

    def __init__(self, telling: Telling) -> None:
        self._telling = telling
        self._head = _encode(telling.head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if telling.include_usage else b"]}"
        self._num_prompt = sum(map(len, telling.prompts))
        self._num_generated = 0
        self._usages: list[Usage] = []
        clock = telling.clock
        self._timings = None if clock is None else TimingsSoFar(clock, self._num_prompt, clock())

    def note(self, chunk: StreamChunk) -> None:
        """Takes in what a chunk says of the usage; before its choices are told."""
        self._num_generated += len(chunk.token_ids)
        if chunk.usage is not None:
            self._usages.append(chunk.usage)

    @property
    def is_over(self) -> bool:
        """Whether every prompt has had its terminal chunk."""
        return len(self._usages) == len(self._telling.prompts)

    def of(self, choice: AnyChoice) -> bytes:
        """An event of one choice."""
        event = self._head + _encode(choice) + self._tail
        if self._telling.continuous_usage:
            usage = Usage(prompt_tokens=self._num_prompt, completion_tokens=self._num_generated)
            event = self._head + _encode(choice) + b'],"usage":' + _encode(usage_body([usage])) + b"}"
        if self._timings is None or self.is_over:
            return event
        return _with_members(event, {"timings": self._timings.told(self._num_generated)})

    def ending(self, last: bytes) -> list[bytes]:
        """The last event of a choice and what follows it at the end of the stream."""
        closing = self._telling.closing(self._usages)
        if not self._telling.include_usage:
            return [_with_members(last, closing)]
        usage = self._head + b'],"usage":' + _encode(usage_body(self._usages)) + b"}"
        return [last, _with_members(usage, closing)]


def _with_members(event: bytes, members: dict[str, Any]) -> bytes:
    return event[:-1] + b"," + _encode(members)[1:] if members else event


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a prompt that come in a stream, `num_wanted` of them. Until they are there its chunks wait."""

    num_wanted: int
    values: list[TokenLogprobs] = field(default_factory=list)
    _held: list[StreamChunk] = field(default_factory=list)

    def pass_on(self, chunk: StreamChunk) -> list[StreamChunk]:
        """The chunks that can be told now."""
        if self.num_wanted == 0:
            return [chunk]
        self.values += chunk.prompt_logprobs
        self._held.append(chunk)
        if len(self.values) < self.num_wanted and chunk.usage is None:
            return []
        ready, self._held = self._held, []
        return ready
