"""What responses of completions and chat completions share: options, events of a stream, a choice's extra members.

Pure but for `response_options_of`, which is the event loop's.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from paceline import __version__
from paceline.chat import ChatChunk
from paceline.completion import Completion
from paceline.params import SamplingParams
from paceline.runtime import build_info
from paceline.server.api_errors import COMPLETE_FINISH_REASONS
from paceline.server.dialects.openai.openai_requests import GenerationBody, ParsedRequest, model_warning
from paceline.server.dialects.token_reports import Pieces, RunningTimings, final_timings, prompt_logprobs, usage_body
from paceline.server.json_bodies import encode_in_parts
from paceline.server.prefill_progress import ProgressChunk
from paceline.server.running_request import RunningRequest
from paceline.server.service import Service
from paceline.streaming import StreamChunk, TokenLogprobs, Usage


def response_options_of(
    service: Service, body: GenerationBody, parsed: ParsedRequest, prompts: tuple[tuple[int, ...], ...], **kind: Any
) -> ResponseOptions:
    """Collect the options from a request's body and its prompts' token ids. kind: members that differ by endpoint."""
    engine, params = service.engine(), parsed.params
    reports_tokens = params.logprobs is not None or params.prompt_logprobs is not None
    stream = body.stream_options
    return ResponseOptions(
        created=int(time.time()),
        model=service.names[0] if body.model is None else body.model,
        system_fingerprint=fingerprint(engine.model.fingerprint),
        prompts=prompts,
        n=params.n,
        text_pieces=engine.tokenizer.pieces(bool(parsed.options.get("special"))) if reports_tokens else (),
        token_pieces=engine.tokenizer.pieces(True) if reports_tokens else (),
        num_top=params.logprobs,
        echoes=params.echo,
        token_ids=bool(body.return_token_ids),
        include_usage=bool(stream and stream.include_usage),
        continuous_usage=bool(stream and stream.continuous_usage_stats),
        clock=time.monotonic if body.timings_per_token else None,
        warnings=(*parsed.warnings, *model_warning(body, service.known_names)),
        **kind,
    )


def wants_prompt_logprobs(body: GenerationBody, params: SamplingParams) -> bool:
    """Return whether the body asks for the prompt's log-probabilities by themselves."""
    return params.prompt_logprobs is not None and getattr(body, "prompt_logprobs", None) is not None


async def whole_response(
    running_request: RunningRequest,
    options: ResponseOptions,
    encode: Callable[[ResponseOptions, Sequence[Completion]], bytes],
) -> Response:
    """Wait for the completions and return the response that is not streamed."""
    async with running_request:
        completions = await running_request.collect()
    content = await asyncio.to_thread(encode, options, completions)
    return Response(content, media_type="application/json")


@cache
def fingerprint(model: bytes) -> str:
    """Return the system_fingerprint of this version, its llama.cpp and the model; as llama-server's it begins with b."""
    facts = f"{__version__} {build_info().llama_cpp_commit} ".encode() + model
    return "b" + hashlib.sha256(facts).hexdigest()[:12]


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What the responses to a request report, and under which names.

    text_pieces, token_pieces: the bytes of every token, without and with those of control tokens. prompts: token ids.
    num_top: the number of most likely tokens reported with each token; None: no log-probabilities.
    wants_prompt_logprobs: report those of the prompt by themselves. echoes: repeat the prompt's text, and with it its
    log-probabilities if any are reported. shows_thinking: whether thinking is part of a chat's message. thinking_pieces: as
    token_pieces, where a chat's format has thinking, whose tokens are counted. clock: for timings in every event; None: in the
    last one only.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    text_pieces: Pieces = ()
    token_pieces: Pieces = ()
    num_top: int | None = None
    echoes: bool = False
    wants_prompt_logprobs: bool = False
    shows_thinking: bool = True
    thinking_pieces: Pieces = ()
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    warnings: tuple[str, ...] = ()
    clock: Callable[[], float] | None = None

    @property
    def head(self) -> dict[str, Any]:
        """The members that every response and every event begins with."""
        names = ("id", "object", "created", "model", "system_fingerprint")
        return {name: getattr(self, name) for name in names}

    def num_scored(self, prompt: int) -> int:
        """Return the number of log-probabilities reported of this prompt."""
        wanted = self.wants_prompt_logprobs or (self.echoes and self.num_top is not None)
        return len(self.prompts[prompt]) - 1 if wanted else 0

    def whole(
        self,
        choices: Iterable[Any],
        usages: Sequence[Usage],
        warnings: Sequence[str] = (),
        num_reasoning: int | None = None,
    ) -> bytes:
        """Encode a response that is not streamed. num_reasoning: tokens of thinking, in chats. Takes time: for threads."""
        encoded = b",".join(map(encode_in_parts, choices))
        last = {"usage": usage_body(usages, num_reasoning), **self.closing(usages, warnings)}
        return b'%b,"choices":[%b],%b' % (_encode(self.head)[:-1], encoded, _encode(last)[1:])

    def closing(self, usages: Sequence[Usage], warnings: Sequence[str] = ()) -> dict[str, Any]:
        """Return the members at the end of a response or stream: timings of a single prompt, and warnings."""
        timings = {"timings": final_timings(usages[0], usages[0].completion_tokens)} if len(usages) == 1 else {}
        warned = (*self.warnings, *warnings)
        return timings | ({"warnings": warned} if warned else {})


class ChoiceBase(msgspec.Struct, kw_only=True):
    """What every choice has: its index and paceline's own members; those not asked for are left out."""

    index: int
    stop_reason: str | int | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: Sequence[dict[str, Any] | None] | UnsetType = UNSET


def prompt_extras(options: ResponseOptions, prompt: int, scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the keywords of `ChoiceBase` that concern the prompt."""
    ids = options.prompts[prompt]
    extras: dict[str, Any] = {"prompt_token_ids": ids} if options.token_ids else {}
    if options.wants_prompt_logprobs:
        extras["prompt_logprobs"] = prompt_logprobs(scores)
    return extras


class EventEncoder:
    """Encodes the events of one stream: the head once for all, usage and warnings with the last event.

    num_reasoning: tokens of thinking so far, in chats.
    """

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._encode: Callable[[Any], bytes] = encode_in_parts if options.token_pieces else _encode
        self._head = _encode(options.head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if options.include_usage else b"]}"
        self._num_prompt = sum(map(len, options.prompts))
        self._num_generated = 0
        self.num_reasoning: int | None = None
        self._usages: list[Usage] = []
        self._warnings: list[str] = []
        clock = options.clock
        self._timings = None if clock is None else RunningTimings(clock, self._num_prompt, clock())

    def warn(self, warning: str) -> None:
        """Add a warning, which the last event has."""
        self._warnings.append(warning)

    def note(self, chunk: StreamChunk | ChatChunk) -> None:
        """Count a chunk's tokens and usage; call before its choices are encoded."""
        self._num_generated += len(chunk.token_ids)
        if chunk.usage is not None:
            self._usages.append(chunk.usage)

    @property
    def is_over(self) -> bool:
        """True after the terminal chunk of every prompt."""
        return len(self._usages) == len(self._options.prompts)

    def of(self, choice: ChoiceBase) -> bytes:
        """Encode an event with one choice."""
        event = self._head + self._encode(choice) + self._tail
        if self._options.continuous_usage:
            usage = Usage(prompt_tokens=self._num_prompt, completion_tokens=self._num_generated)
            event = (
                self._head
                + self._encode(choice)
                + b'],"usage":'
                + _encode(usage_body([usage], self.num_reasoning))
                + b"}"
            )
        if self._timings is None or self.is_over:
            return event
        return _with_members(event, {"timings": self._timings.during_decode(self._num_generated)})

    def during_prefill(self, choice: ChoiceBase, progress: ProgressChunk) -> bytes:
        """Encode an event before the first token."""
        event = self._head + _encode(choice) + self._tail
        members: dict[str, Any] = {"prompt_progress": progress.body(self._num_prompt)}
        if self._timings is not None:
            members["timings"] = self._timings.during_prefill(progress.processed, progress.cache, progress.elapsed_s)
        return _with_members(event, members)

    def ending(self, last: bytes) -> list[bytes]:
        """Return the last event of a choice and those that follow it at the end of the stream."""
        closing = self._options.closing(self._usages, self._warnings)
        if not self._options.include_usage:
            return [_with_members(last, closing)]
        usage = self._head + b'],"usage":' + _encode(usage_body(self._usages, self.num_reasoning)) + b"}"
        return [last, _with_members(usage, closing)]


def _with_members(event: bytes, members: dict[str, Any]) -> bytes:
    return event[:-1] + b"," + _encode(members)[1:] if members else event


C = TypeVar("C", StreamChunk, ChatChunk)


@dataclass(slots=True)
class PromptLogprobsBuffer(Generic[C]):
    """Collects `num_wanted` log-probabilities of a prompt from a stream, and holds back its chunks until then."""

    num_wanted: int
    values: list[TokenLogprobs] = field(default_factory=list)
    _held: list[C] = field(default_factory=list)

    def pass_on(self, chunk: C) -> list[C]:
        """Take in a chunk and return the chunks that can be sent now."""
        if self.num_wanted == 0:
            return [chunk]
        self.values += chunk.prompt_logprobs
        self._held.append(chunk)
        if len(self.values) < self.num_wanted and chunk.usage is None:
            return []
        ready, self._held = self._held, []
        return ready


class ChoiceStream(ABC, Generic[C]):
    """Turns chunks into the events of a stream: call it with each chunk in order."""

    def __init__(self, options: ResponseOptions) -> None:
        self._options = options
        self._events = EventEncoder(options)
        self._scores: list[PromptLogprobsBuffer[C]] = [
            PromptLogprobsBuffer(options.num_scored(index)) for index in range(len(options.prompts))
        ]

    def __call__(self, prompt: int, chunk: C) -> list[bytes]:
        """Return the JSON of the events of a chunk of this prompt."""
        self._events.note(chunk)
        ready = self._scores[prompt].pass_on(chunk)
        events = [self._events.of(choice) for one in ready for choice in self._choices(prompt, one)]
        if chunk.finish_reason in COMPLETE_FINISH_REASONS and self._events.is_over:
            events[-1:] = self._events.ending(events[-1])
        return events

    @abstractmethod
    def _choices(self, prompt: int, chunk: C) -> Sequence[ChoiceBase]:
        """Return the choices of a chunk's events, one for each event."""

    def _reports_tokens(self, chunk: C) -> bool:
        """Return whether a chunk has tokens whose ids or log-probabilities are reported."""
        return bool(chunk.token_ids) and (self._options.token_ids or self._options.num_top is not None)
