"""A response in the shape of OpenAI's API: whole, and as the events of a stream. One thread at a time.

The head repeats the request. In a stream each item is added, grows by deltas and is done.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.chat import ChatChunk, ChatCompletion, MessageDelta, ParsedMessage, ToolCall, ToolCallDelta
from paceline.params import SamplingParams
from paceline.server.api_errors import COMPLETE_FINISH_REASONS, ApiError
from paceline.server.dialects.dialect import DialectReply
from paceline.server.dialects.request_body import warned
from paceline.server.dialects.responses.input_items import Item, new_item_id
from paceline.server.dialects.responses.response_tools import CustomInput, ToolNames, ToolOrigin, custom_input_of
from paceline.server.dialects.responses.responses_request import ResponsesBody
from paceline.server.dialects.token_reports import ChatLogprob, Pieces, RunningTimings, TokenAligner, final_timings
from paceline.server.json_bodies import encode_in_parts
from paceline.server.sse import NAMED_SSE, EventWriter, named_event
from paceline.streaming import FinishReason, Usage
from paceline.streaming.chunk import CUT_REASONS

Status = Literal["in_progress", "completed", "incomplete", "failed"]


def new_response_id() -> str:
    """Return an id for a response."""
    return f"resp_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead(DialectReply):
    """The response to one request: the members that are known before its output.

    Attributes:
        id: The id of the response.
        created_at: Unix seconds.
        echo: The members that repeat the request.
        pieces: The bytes of every token.
        num_prompt: Tokens of the prompt.
        num_top: Most likely tokens reported with each token; None: no log-probabilities.
        names: The tool of each function.
        warnings: Sentences for the client.
        clock: Makes timings for every event; None: only the last event has timings.
        keep: Stores the whole response; returns the reason if it could not.
        begun: The events that were sent before the model was loaded; None: none were.
    """

    id: str
    created_at: int
    echo: Mapping[str, Any]
    pieces: Pieces
    num_prompt: int = 0
    num_top: int | None = None
    names: ToolNames = field(default_factory=ToolNames)
    warnings: tuple[str, ...] = ()
    clock: Callable[[], float] | None = None
    keep: Callable[[Item, Sequence[Item]], str | None] = lambda _response, _output: None
    begun: ResponseEvents | None = None

    def events(self) -> ResponseEvents:
        """Return the encoder of the stream's events."""
        return ResponseEvents(self, self.begun)

    def whole(self, completion: ChatCompletion) -> bytes:
        """Encode a response that is not streamed."""
        (choice,) = completion.choices
        aligner = TokenAligner(self.pieces, self.num_top)
        aligner.add(choice.token_ids, choice.logprobs or ())
        num_reasoning, _ = aligner.take(choice.message.reasoning_content)
        _, logprobs = aligner.take(choice.message.content)
        is_cut = choice.finish_reason in CUT_REASONS
        output = _output(choice.message, logprobs, self.names, is_cut=is_cut)
        warnings = [] if choice.warning is None else [str(choice.warning)]
        body = self.ended(output, choice.finish_reason, _usage(completion.usage, num_reasoning), warnings)
        timings = final_timings(completion.usage, completion.usage.completion_tokens)
        return encode_in_parts(body | {"timings": timings})

    def body(
        self,
        status: Status,
        output: Sequence[Item] = (),
        *,
        usage: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
        reason: str | None = None,
        warnings: Sequence[str] = (),
    ) -> Item:
        """Return the response object. reason: why it is incomplete."""
        body: Item = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self.echo,
            "output": output,
            "usage": usage,
        }
        return body | warned((*self.warnings, *warnings))

    def ended(
        self,
        output: Sequence[Item],
        finish_reason: FinishReason,
        usage: Mapping[str, Any],
        warnings: Sequence[str] = (),
    ) -> Item:
        """Return the response object at its end, stored if it is to be."""
        is_cut = finish_reason in CUT_REASONS
        status: Status = "incomplete" if is_cut else "completed"
        reason = "max_output_tokens" if is_cut else None
        body = self.body(status, output, usage=usage, reason=reason, warnings=warnings)
        why_not = self.keep(body, output)
        if why_not is None:
            return body
        return self.body(status, output, usage=usage, reason=reason, warnings=(*warnings, why_not)) | {"store": False}


def echo_of(body: ResponsesBody, params: SamplingParams, model: str, *, stored: bool) -> dict[str, Any]:
    """Return the members of a response that repeat the request."""
    reasoning, text = body.reasoning, body.text
    optional = ("user", "safety_identifier", "prompt_cache_key")
    return {
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "service_tier": "default",
        "store": stored,
        "temperature": params.temperature,
        "text": {
            "format": (text.format if text else None) or {"type": "text"},
            **({"verbosity": text.verbosity} if text and text.verbosity else {}),
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool_echo(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        **{name: getattr(body, name) for name in optional if getattr(body, name) is not None},
    }


# Members of tools that OpenAI runs with keys for other servers. No response repeats them.
_SECRETS = frozenset({"authorization", "headers", "domain_secrets"})


def _tool_echo(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return _without_secrets(tool)
    return {"parameters": None, "strict": True, "description": None, **tool}


def _without_secrets(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "namespace":
        return {**tool, "tools": [_without_secrets(member) for member in tool["tools"]]}
    if kind in ("function", "custom"):
        return dict(tool)
    kept = dict(tool)
    places: list[dict[str, Any]] = [kept]
    while places:
        members = places.pop()
        for name in [name for name in members if name in _SECRETS]:
            del members[name]
        for name, value in members.items():
            if isinstance(value, Mapping):
                members[name] = copied = dict(value)
                places.append(copied)
    return kept


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """Return the usage of a response. num_reasoning: tokens of its thinking."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


# ---- items of the output


def _part(kind: str, text: str, logprobs: Sequence[ChatLogprob] = ()) -> Item:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"type": "reasoning_text", "text": text}


def _item(kind: str, item_id: str, parts: Sequence[Item], status: Status) -> Item:
    own: Item = {"role": "assistant"} if kind == "message" else {"summary": []}
    return {"id": item_id, "type": kind, "status": status, **own, "content": list(parts)}


def _call_kind(origin: ToolOrigin) -> str:
    return "custom_tool_call" if origin.is_custom else "function_call"


def _call_item(item_id: str, call_id: str, origin: ToolOrigin, text: str, status: Status) -> Item:
    """Return a call of a tool. text: the arguments of a function, or the input of a custom tool."""
    known = {"id": item_id, "type": _call_kind(origin), "status": status, "call_id": call_id, "name": origin.name}
    namespace = {"namespace": origin.namespace} if origin.namespace else {}
    return known | namespace | {"input" if origin.is_custom else "arguments": text}


def _call_status(call: ToolCall) -> Status:
    """Return the status of a call that has ended: a stop text may have cut its arguments off."""
    return "completed" if call.is_whole else "incomplete"


def _output(message: ParsedMessage, logprobs: Sequence[ChatLogprob], names: ToolNames, *, is_cut: bool) -> list[Item]:
    """Return the items of a generated message: thinking, text, calls. is_cut: whether the last one is incomplete."""
    items: list[Item] = []
    thinking, calls = message.reasoning_content, message.tool_calls
    if thinking:
        items.append(_item("reasoning", new_item_id("reasoning"), [_part("reasoning", thinking)], "completed"))
    if message.content.strip() or not (calls or thinking):  # blanks around calls are no text
        items.append(
            _item("message", new_item_id("message"), [_part("message", message.content, logprobs)], "completed")
        )
    for call in calls:
        origin = names.origin_of(call.name)
        text = custom_input_of(call.arguments) if origin.is_custom else call.arguments
        items.append(_call_item(new_item_id(_call_kind(origin)), call.id, origin, text, _call_status(call)))
    if is_cut:
        items[-1]["status"] = "incomplete"
    return items


_MAX_UNFOUND_BYTES = 1 << 16  # so that looking for a text stays fast


@dataclass(slots=True, kw_only=True)
class _OpenCall:
    """A call that grows.

    Attributes:
        delta: Its first delta.
        origin: The tool that it calls.
        arguments: Pieces of the function's arguments.
        input: The input of a custom tool.
    """

    delta: ToolCallDelta
    origin: ToolOrigin
    arguments: list[str] = field(default_factory=list)
    input: CustomInput | None = None

    @property
    def event_name(self) -> str:
        """The common part of the names of its events."""
        return "function_call_arguments" if self.input is None else "custom_tool_call_input"


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """An item that grows. kind: its type; texts: the pieces of its text or arguments."""

    kind: str
    id: str
    index: int
    call: _OpenCall | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    def item(self, status: Status, *, has_content: bool) -> Item:
        text = "".join(self.texts)
        if self.call is not None:
            return _call_item(self.id, self.call.delta.id, self.call.origin, text if has_content else "", status)
        return _item(self.kind, self.id, [self.part(text)] if has_content else [], status)

    def part(self, text: str) -> Item:
        return _part(self.kind, text, self.logprobs)


class ResponseEvents(EventWriter):
    """The events of one response.

    Attributes:
        head: The members that are known before the output.
        num_events: Events so far.
    """

    framing, done = NAMED_SSE, b""

    def __init__(self, head: ResponseHead, begun: ResponseEvents | None = None) -> None:
        """Begin a response. begun: the events that were sent before the head was known, of a response with the same id."""
        self.head, self.in_threads = head, head.num_top is not None
        self._aligner = TokenAligner(head.pieces, head.num_top, _MAX_UNFOUND_BYTES)
        self.num_events: int = 0 if begun is None else begun.num_events
        self._num_generated = 0
        self._num_reasoning = 0
        self._output: list[Item] = []
        self._open: _OpenItem | None = None
        self._blanks = ""  # of a message that has not begun
        self._has_ended = False
        clock = head.clock
        self._timings = None if clock is None else RunningTimings(clock, head.num_prompt, clock())

    def opening(self) -> bytes:
        """Return the events before the first chunk."""
        body = self.head.body("in_progress")
        created = b"" if self.num_events else self._event("response.created", response=body)
        return created + self._event("response.in_progress", response=body)

    def heartbeat(self) -> bytes:
        """Return the event that is sent while there is no other one, since clients count events and no comments.

        Empty after the end.
        """
        if self._has_ended:
            return b""
        body = self.head.body("in_progress", self._output_with_open("in_progress"))
        return self._event("response.in_progress", response=body)

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        """Return the events of a chunk."""
        self._num_generated += len(chunk.token_ids)
        self._aligner.add(chunk.token_ids, chunk.logprobs)
        deltas = sorted(chunk.deltas, key=lambda delta: not self._goes_on(delta.tool_call))
        events = [event for delta in deltas for event in self._of_delta(delta)]
        if chunk.finish_reason in COMPLETE_FINISH_REASONS and chunk.usage is not None:  # there is one choice
            events += self._ending(chunk, chunk.finish_reason, chunk.usage)
        return events

    def failure(self, api_error: ApiError) -> bytes:
        """Return the events that report an error at the end of the stream. Changes nothing: one may be made in advance."""
        output = self._output_with_open("incomplete")
        members = {"code": api_error.code, "message": api_error.message, "param": api_error.param}
        code = "rate_limit_exceeded" if api_error.status == 429 else "server_error"
        body = self.head.body("failed", output, error={"code": code, "message": api_error.message})
        number = self.num_events
        return _event("error", number, **members) + _event("response.failed", number + 1, response=body)

    def _output_with_open(self, status: Status) -> list[Item]:
        """Return the items so far. status: the status of the open item."""
        return [*self._output, *([] if self._open is None else [self._open.item(status, has_content=True)])]

    def _goes_on(self, call: ToolCallDelta | None) -> bool:
        """Return whether a delta belongs to the open call. Text after the call in the same chunk is written after it."""
        known = None if self._open is None else self._open.call
        return call is not None and known is not None and known.delta.index == call.index

    def _of_delta(self, delta: MessageDelta) -> list[bytes]:
        if delta.tool_call is not None:
            return self._of_call(delta.tool_call)
        if delta.reasoning_content:
            return self._of_text("reasoning", delta.reasoning_content)
        text = self._blanks + delta.content
        self._blanks = ""
        if not text.strip() and (self._open is None or self._open.kind != "message"):
            self._blanks = text
            return []
        return self._of_text("message", text)

    def _of_text(self, kind: str, text: str) -> list[bytes]:
        events, item = self._current(kind)
        count, logprobs = self._aligner.take(text)
        item.texts.append(text)
        where = {"item_id": item.id, "output_index": item.index, "content_index": 0}
        if kind == "message":
            item.logprobs += logprobs
            delta = self._event("response.output_text.delta", **where, delta=text, logprobs=logprobs, **self._rates())
        else:
            self._num_reasoning += count
            delta = self._event("response.reasoning_text.delta", **where, delta=text, **self._rates())
        return [*events, delta]

    def _of_call(self, delta: ToolCallDelta) -> list[bytes]:
        self._aligner.clear()
        events: list[bytes] = []
        item = self._open
        if item is None or item.call is None or not self._goes_on(delta):
            events = self._close("completed")
            origin = self.head.names.origin_of(delta.name)
            call = _OpenCall(delta=delta, origin=origin, input=CustomInput() if origin.is_custom else None)
            item = self._begin(_call_kind(origin), call)
            events.append(self._added(item))
        assert item.call is not None  # noqa: S101 - it was begun with one
        item.call.arguments.append(delta.arguments)
        grown = delta.arguments if item.call.input is None else item.call.input.feed(delta.arguments)
        return [*events, *self._of_input(item, grown)]

    def _of_input(self, item: _OpenItem, piece: str) -> list[bytes]:
        if not piece or item.call is None:
            return []
        item.texts.append(piece)
        where = {"item_id": item.id, "output_index": item.index}
        return [self._event(f"response.{item.call.event_name}.delta", **where, delta=piece, **self._rates())]

    def _current(self, kind: str) -> tuple[list[bytes], _OpenItem]:
        """Return the open item of this kind. Its events close an item of another kind and begin this one."""
        if self._open is not None and self._open.kind == kind:
            return [], self._open
        events = self._close("completed")
        item = self._begin(kind)
        events.append(self._added(item))
        where = {"item_id": item.id, "output_index": item.index, "content_index": 0}
        return [*events, self._event("response.content_part.added", **where, part=item.part(""))], item

    def _begin(self, kind: str, call: _OpenCall | None = None) -> _OpenItem:
        self._open = _OpenItem(kind=kind, id=new_item_id(kind), index=len(self._output), call=call)
        return self._open

    def _added(self, item: _OpenItem) -> bytes:
        shown = item.item("in_progress", has_content=False)
        return self._event("response.output_item.added", output_index=item.index, item=shown)

    def _close(self, status: Status) -> list[bytes]:
        item, self._open = self._open, None
        if item is None:
            return []
        call, events = item.call, list[bytes]()
        if call is not None and call.input is not None:
            events += self._of_input(item, call.input.finish())
        text = "".join(item.texts)
        if call is not None and status == "completed":
            status = _call_status(ToolCall(call.delta.name, "".join(call.arguments)))
        done = item.item(status, has_content=True)
        self._output.append(done)
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if call is not None:
            whole = {"name": call.origin.name, "arguments": text} if call.input is None else {"input": text}
            events.append(self._event(f"response.{call.event_name}.done", **where, **whole))
        else:
            where["content_index"] = 0
            if item.kind == "message":
                events.append(self._event("response.output_text.done", **where, text=text, logprobs=item.logprobs))
            else:
                events.append(self._event("response.reasoning_text.done", **where, text=text))
            events.append(self._event("response.content_part.done", **where, part=item.part(text)))
        return [*events, self._event("response.output_item.done", output_index=item.index, item=done)]

    def _ending(self, chunk: ChatChunk, reason: FinishReason, usage: Usage) -> list[bytes]:
        self._has_ended = True
        events: list[bytes] = []
        if self._open is None and not self._output:  # nothing but blanks
            events, item = self._current("message")
            item.texts.append(self._blanks)
        is_cut = reason in CUT_REASONS
        events += self._close("incomplete" if is_cut else "completed")
        warnings = [] if chunk.warning is None else [str(chunk.warning)]
        body = self.head.ended(self._output, reason, _usage(usage, self._num_reasoning), warnings)
        timings = final_timings(usage, usage.completion_tokens)
        name = "response.incomplete" if is_cut else "response.completed"
        return [*events, self._event(name, response=body, timings=timings)]

    def _rates(self) -> dict[str, Any]:
        return {} if self._timings is None else {"timings": self._timings.during_decode(self._num_generated)}

    def _event(self, kind: str, **members: Any) -> bytes:
        number = self.num_events
        self.num_events += 1
        return _event(kind, number, **members)


def early_events(model: str) -> ResponseEvents:
    """Return the first events of a response, sent while its model is loaded. They repeat no fields of the request."""
    echo = echo_of(ResponsesBody.model_validate({}), SamplingParams(), model, stored=False)
    return ResponseEvents(ResponseHead(id=new_response_id(), created_at=int(time.time()), echo=echo, pieces=()))


def _event(kind: str, number: int, **members: Any) -> bytes:
    return named_event(kind.encode(), encode_in_parts({"type": kind, "sequence_number": number, **members}))
