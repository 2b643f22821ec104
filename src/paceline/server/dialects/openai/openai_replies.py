"""Responses to chats and completions in OpenAI's shapes, whole and as the events of a stream. Pure but for `reply_to`."""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from paceline import __version__
from paceline.chat import ChatChunk, ChatCompletion, MessageDelta, ParsedMessage
from paceline.runtime import build_info
from paceline.server.api_errors import COMPLETE_FINISH_REASONS
from paceline.server.dialects.dialect import ChatProgress, DialectReply, model_warning
from paceline.server.dialects.openai.openai_requests import GenerationBody, ParsedRequest
from paceline.server.dialects.request_body import warned
from paceline.server.dialects.token_reports import (
    LogprobColumns,
    LogprobColumnsBuilder,
    Pieces,
    RunningTimings,
    TokenAligner,
    chat_logprobs,
    final_timings,
    prompt_logprobs,
    usage_body,
)
from paceline.server.json_bodies import encode_in_parts
from paceline.server.running_request import ProgressChunk
from paceline.server.service import Service
from paceline.server.sse import EventWriter
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage
from paceline.streaming.chunk import Completion

_MAX_UNREAD_BYTES = 2**16  # of tokens that no text of a message has been found for
_encode = msgspec.json.Encoder().encode


def reply_to(
    service: Service, body: GenerationBody, parsed: ParsedRequest, prompts: tuple[tuple[int, ...], ...], **kind: Any
) -> OpenAIReply:
    """Return the reply to a body with these prompts' token ids. kind: members that differ by endpoint."""
    engine, params = service.engine(), parsed.params
    reports_tokens = params.logprobs is not None or params.prompt_logprobs is not None
    stream = body.stream_options
    return OpenAIReply(
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
        warnings=(*parsed.warnings, *model_warning(service, body.model)),
        wants_prompt_logprobs=params.prompt_logprobs is not None and getattr(body, "prompt_logprobs", None) is not None,
        **kind,
    )


@cache
def fingerprint(model: bytes) -> str:
    """Return the system_fingerprint of this version, its llama.cpp and the model; as llama-server's it begins with b."""
    facts = f"{__version__} {build_info().llama_cpp_commit} ".encode() + model
    return "b" + hashlib.sha256(facts).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIReply(DialectReply):
    """The response to one request for a chat or for completions.

    Attributes:
        id: The id of the response.
        object: The type that it reports.
        created: Unix seconds.
        model: The name that it reports.
        system_fingerprint: The version of the server and the model.
        prompts: Token ids.
        n: Choices of each prompt.
        is_chat: Whether choices are messages; otherwise they are texts.
        text_pieces: The bytes of every token as in a text: control tokens have none.
        token_pieces: The bytes of every token.
        num_top: Most likely tokens reported with each token; None: no log-probabilities.
        echoes: Whether texts begin with the prompt, and their log-probabilities with the prompt's.
        wants_prompt_logprobs: Whether choices have log-probabilities of the prompt by themselves.
        shows_thinking: Whether thinking is part of a message.
        thinking_pieces: As token_pieces, if the chat's format has thinking; its tokens are counted.
        token_ids: Whether choices have the ids of their tokens.
        include_usage: Whether a stream ends with its usage.
        continuous_usage: Whether every event has the usage so far.
        warnings: Sentences for the client.
        clock: Makes timings for every event; None: only the last event has timings.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    prompts: tuple[tuple[int, ...], ...]
    n: int = 1
    is_chat: bool = False
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

    def events(self) -> ChoiceStream[Any]:
        """Return the encoder of the stream's events."""
        return ChatCompletionStream(self) if self.is_chat else CompletionStream(self)

    def whole(self, completion: Any) -> bytes:
        """Encode a `ChatCompletion`, or completions in the order of the prompts."""
        return chat_body(self, completion) if self.is_chat else completion_body(self, completion)

    @property
    def head(self) -> dict[str, Any]:
        """The members that every response and every event begins with."""
        names = ("id", "object", "created", "model", "system_fingerprint")
        return {name: getattr(self, name) for name in names}

    def num_scored(self, prompt: int) -> int:
        """Return the number of log-probabilities reported of this prompt."""
        wanted = self.wants_prompt_logprobs or (self.echoes and self.num_top is not None)
        return len(self.prompts[prompt]) - 1 if wanted else 0

    def encode(
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
        return timings | warned((*self.warnings, *warnings))


def choice_body(
    index: int,
    shown: dict[str, Any],
    logprobs: Any = None,
    finish_reason: FinishReason | None = None,
    *,
    stop: str | int | None = None,
    extras: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a choice: its own members first, then the message, delta or text. Members that were not asked for are left out."""
    if stop is None and not extras:  # most chunks
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish_reason}
    own = {} if stop is None else {"stop_reason": stop}
    return {"index": index, **own, **(extras or {}), **shown, "logprobs": logprobs, "finish_reason": finish_reason}


def prompt_extras(
    reply: OpenAIReply, prompt: int, scores: Sequence[TokenLogprobs], token_ids: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the members of a choice with token ids, and with the prompt's ids and log-probabilities."""
    extras: dict[str, Any] = {}
    if reply.token_ids:
        extras = {} if token_ids is None else {"token_ids": token_ids}
        extras["prompt_token_ids"] = reply.prompts[prompt]
    if reply.wants_prompt_logprobs:
        extras["prompt_logprobs"] = prompt_logprobs(scores)
    return extras


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


class ChoiceStream(EventWriter, Generic[C]):
    """The events of a stream, one choice each: the head once for all, usage and warnings with the last event."""

    def __init__(self, reply: OpenAIReply) -> None:
        self._reply = reply
        self._encode: Callable[[Any], bytes] = encode_in_parts if reply.token_pieces else _encode
        self._head = _encode(reply.head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if reply.include_usage else b"]}"
        self._num_prompt = sum(map(len, reply.prompts))
        self._num_generated = 0
        self._num_reasoning: int | None = None  # tokens of thinking so far, in chats
        self._usages: list[Usage] = []
        self._warnings: list[str] = []
        clock = reply.clock
        self._timings = None if clock is None else RunningTimings(clock, self._num_prompt, clock())
        self._scores: list[PromptLogprobsBuffer[C]] = [
            PromptLogprobsBuffer(reply.num_scored(index)) for index in range(len(reply.prompts))
        ]

    def __call__(self, prompt: int, chunk: C) -> list[bytes]:
        """Return the JSON of the events of a chunk of this prompt."""
        self._num_generated += len(chunk.token_ids)
        if chunk.usage is not None:
            self._usages.append(chunk.usage)
        ready = self._scores[prompt].pass_on(chunk)
        events = [self._event(choice) for passed in ready for choice in self._choices(prompt, passed)]
        if chunk.finish_reason in COMPLETE_FINISH_REASONS and self._is_over:
            events[-1:] = self._ending(events[-1])
        return events

    @abstractmethod
    def _choices(self, prompt: int, chunk: C) -> Sequence[dict[str, Any] | msgspec.Raw]:
        """Return the choices of a chunk's events, one for each event; `Raw` if they are encoded already."""

    def _reports_tokens(self, chunk: C) -> bool:
        return bool(chunk.token_ids) and (self._reply.token_ids or self._reply.num_top is not None)

    @property
    def _is_over(self) -> bool:
        return len(self._usages) == len(self._reply.prompts)

    def _event(self, choice: dict[str, Any] | msgspec.Raw) -> bytes:
        event = self._head + self._encode(choice) + self._tail
        if self._reply.continuous_usage:
            usage = usage_body(
                [Usage(prompt_tokens=self._num_prompt, completion_tokens=self._num_generated)], self._num_reasoning
            )
            event = b'%b%b],"usage":%b}' % (self._head, self._encode(choice), _encode(usage))
        if self._timings is None or self._is_over:
            return event
        return _with_members(event, {"timings": self._timings.during_decode(self._num_generated)})

    def _during_prefill(self, choice: dict[str, Any], progress: ProgressChunk) -> bytes:
        members: dict[str, Any] = {"prompt_progress": progress.body(self._num_prompt)}
        if self._timings is not None:
            members["timings"] = self._timings.during_prefill(progress.processed, progress.cache, progress.elapsed_s)
        return _with_members(self._head + _encode(choice) + self._tail, members)

    def _ending(self, last: bytes) -> list[bytes]:
        """Return a choice's last event and the events that follow it at the end of the stream."""
        closing = self._reply.closing(self._usages, self._warnings)
        if not self._reply.include_usage:
            return [_with_members(last, closing)]
        usage = self._head + b'],"usage":' + _encode(usage_body(self._usages, self._num_reasoning)) + b"}"
        return [last, _with_members(usage, closing)]


def _with_members(event: bytes, members: dict[str, Any]) -> bytes:
    return event[:-1] + b"," + _encode(members)[1:] if members else event


# ---- chats


def chat_body(reply: OpenAIReply, completion: ChatCompletion) -> bytes:
    """Encode a chat that is not streamed."""
    scores, warnings, num_reasoning = completion.prompt_logprobs or (), [], 0
    choices = []
    for choice in completion.choices:
        if choice.warning is not None:
            warnings.append(str(choice.warning))
        if reply.thinking_pieces and choice.message.reasoning_content:
            aligner = TokenAligner(reply.thinking_pieces)
            aligner.add(choice.token_ids, ())
            num_reasoning += aligner.take(choice.message.reasoning_content)[0]
        choices.append(
            choice_body(
                choice.index,
                {"message": _message(choice.message, shows_thinking=reply.shows_thinking)},
                _chat_logprobs(reply, choice.logprobs or ()),
                choice.finish_reason,
                stop=choice.stop,
                extras=prompt_extras(reply, 0, scores, choice.token_ids),
            )
        )
    return reply.encode(choices, [completion.usage], warnings, num_reasoning)


def _message(message: ParsedMessage, *, shows_thinking: bool) -> dict[str, Any]:
    """Return the assistant's message; its content is null beside tool calls if there is none."""
    calls = [
        {"id": call.id, "function": {"arguments": call.arguments, "name": call.name}, "type": "function"}
        for call in message.tool_calls
    ]
    content = message.content if message.content or not calls else None
    body: dict[str, Any] = {"content": content, "role": "assistant", "refusal": None}
    if shows_thinking and message.reasoning_content:
        body["reasoning_content"] = message.reasoning_content
    return {**body, "tool_calls": calls} if calls else body


def _chat_logprobs(reply: OpenAIReply, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    return None if reply.num_top is None else {"content": chat_logprobs(logprobs, reply.num_top), "refusal": None}


class ChatCompletionStream(ChoiceStream[ChatChunk]):
    """The events of a chat, which has one prompt, number 0.

    The first event of a choice has the role, the last one the finish reason; both have no text.
    """

    def __init__(self, reply: OpenAIReply) -> None:
        super().__init__(reply)
        self._begun: set[int] = set()
        pieces = reply.thinking_pieces
        self._aligners = [TokenAligner(pieces, max_bytes=_MAX_UNREAD_BYTES) for _ in range(reply.n)] if pieces else []
        self._num_reasoning = 0

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:
        """Return the JSON of the events of a chunk; for progress an event without text, as llama-server sends it."""
        if not isinstance(chunk, ChatProgress):
            return super().__call__(prompt, chunk)
        begun = choice_body(0, {"delta": {"role": "assistant", "content": None}})
        return [self._during_prefill(begun, chunk.prefill)]

    def _choices(self, prompt: int, chunk: ChatChunk) -> list[dict[str, Any] | msgspec.Raw]:
        reply, index = self._reply, chunk.choice
        choices: list[dict[str, Any] | msgspec.Raw] = []
        if self._aligners:
            self._count_thinking(chunk)
        if index not in self._begun:
            self._begun.add(index)
            extras = prompt_extras(reply, prompt, self._scores[prompt].values)
            choices.append(choice_body(index, {"delta": {"role": "assistant", "content": None}}, extras=extras))
        shown = [delta for delta in chunk.deltas if reply.shows_thinking or not delta.reasoning_content]
        if self._reports_tokens(chunk):  # with the first part that they brought
            first = _delta(shown.pop(0)) if shown else {"content": ""}
            extras = {"token_ids": chunk.token_ids} if reply.token_ids else {}
            choices.append(choice_body(index, {"delta": first}, _chat_logprobs(reply, chunk.logprobs), extras=extras))
        choices += [_choice_of_part(index, delta) for delta in shown]
        if chunk.finish_reason in COMPLETE_FINISH_REASONS:
            if chunk.warning is not None:
                self._warnings.append(str(chunk.warning))
            choices.append(choice_body(index, {"delta": {}}, None, chunk.finish_reason, stop=chunk.stop))
        return choices

    def _count_thinking(self, chunk: ChatChunk) -> None:
        aligner = self._aligners[chunk.choice]
        aligner.add(chunk.token_ids, ())
        for delta in chunk.deltas:
            if delta.tool_call is not None:
                aligner.clear()
                continue
            num_tokens, _ = aligner.take(delta.reasoning_content or delta.content)
            if delta.reasoning_content:
                self._num_reasoning = (self._num_reasoning or 0) + num_tokens


_TEXT_CHOICE = b'{"index":%d,"delta":{"%b":%b},"logprobs":null,"finish_reason":null}'


def _choice_of_part(index: int, delta: MessageDelta) -> dict[str, Any] | msgspec.Raw:
    """Return a choice with a part of its message and nothing else, as most events have; texts are encoded at once."""
    if delta.tool_call is not None:
        return choice_body(index, {"delta": _delta(delta)})
    name = b"reasoning_content" if delta.reasoning_content else b"content"
    return msgspec.Raw(_TEXT_CHOICE % (index, name, _encode(delta.reasoning_content or delta.content)))


def _delta(delta: MessageDelta) -> dict[str, Any]:
    """Return a part of the message. Of a tool call the first part has the id, the type and the name."""
    call = delta.tool_call
    if call is None:
        return {"reasoning_content": delta.reasoning_content} if delta.reasoning_content else {"content": delta.content}
    if not call.name:
        return {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
    function = {"arguments": call.arguments, "name": call.name}
    return {"tool_calls": [{"index": call.index, "function": function, "id": call.id, "type": "function"}]}


# ---- completions


def completion_body(reply: OpenAIReply, completions: Sequence[Completion]) -> bytes:
    """Encode completions that are not streamed, in the order of the prompts. Indices of choices count over all prompts."""
    choices = []
    for prompt, completion in enumerate(completions):
        scores = completion.prompt_logprobs or ()
        for choice in completion.choices:
            columns = None
            if reply.num_top is not None and choice.logprobs is not None:
                writer = LogprobColumnsBuilder(reply.text_pieces, reply.token_pieces, reply.num_top)
                echoed = _echoed_columns(reply, prompt, scores, writer)
                columns = writer.write(choice.token_ids, choice.logprobs, echoed)
            choices.append(
                choice_body(
                    prompt * reply.n + choice.index,
                    {"text": choice.text},
                    columns,
                    choice.finish_reason,
                    stop=choice.stop,
                    extras=prompt_extras(reply, prompt, scores, choice.token_ids),
                )
            )
    return reply.encode(choices, [completion.usage for completion in completions])


def _echoed_columns(
    reply: OpenAIReply, prompt: int, scores: Sequence[TokenLogprobs], writer: LogprobColumnsBuilder
) -> LogprobColumns:
    columns = LogprobColumns()
    if reply.echoes:
        writer.write(reply.prompts[prompt], (None, *scores), columns)
        writer.end_prompt()
    return columns


class CompletionStream(ChoiceStream[StreamChunk]):
    """The events of completions. A chunk without text is an event only if its ids or log-probabilities are reported."""

    def __init__(self, reply: OpenAIReply) -> None:
        super().__init__(reply)
        self._writers: dict[int, LogprobColumnsBuilder] = {}

    def _choices(self, prompt: int, chunk: StreamChunk) -> Sequence[dict[str, Any]]:
        is_complete = chunk.finish_reason in COMPLETE_FINISH_REASONS
        if not (chunk.text or is_complete or self._reports_tokens(chunk)):
            return ()
        reply, index = self._reply, prompt * self._reply.n + chunk.choice
        scores: Sequence[TokenLogprobs] = self._scores[prompt].values
        writer = self._writers.get(index)
        is_first = writer is None
        if writer is None:
            writer = LogprobColumnsBuilder(reply.text_pieces, reply.token_pieces, reply.num_top or 0)
            self._writers[index] = writer
        logprobs = None
        if reply.num_top is not None:
            before = _echoed_columns(reply, prompt, scores, writer) if is_first else LogprobColumns()
            logprobs = writer.write(chunk.token_ids, chunk.logprobs, before)
        if is_first:
            extras = prompt_extras(reply, prompt, scores, chunk.token_ids)
        else:
            extras = {"token_ids": chunk.token_ids} if reply.token_ids else {}
        reason = chunk.finish_reason if is_complete else None
        return (choice_body(index, {"text": chunk.text}, logprobs, reason, stop=chunk.stop, extras=extras),)
