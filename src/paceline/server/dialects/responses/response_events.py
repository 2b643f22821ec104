"""The events of a streamed response: each item is added, grows by deltas and is done. One thread at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.chat import ChatChunk, MessageDelta, ToolCall, ToolCallDelta
from paceline.params import SamplingParams
from paceline.server.api_errors import COMPLETE_FINISH_REASONS, ApiError
from paceline.server.dialects.logprobs import ChatLogprob
from paceline.server.dialects.responses.custom_input import CustomInput
from paceline.server.dialects.responses.input_items import Item, new_item_id
from paceline.server.dialects.responses.response_object import (
    ResponseHead,
    Status,
    call_item,
    call_kind,
    echo_of,
    failure_of,
    message_item,
    new_response_id,
    reasoning_item,
    reasoning_part,
    status_of,
    text_part,
    usage_of,
)
from paceline.server.dialects.responses.response_tools import ToolOrigin
from paceline.server.dialects.responses.responses_body import ResponsesBody
from paceline.server.dialects.token_aligner import TokenAligner
from paceline.server.dialects.usage import RunningTimings, final_timings
from paceline.server.json_bodies import encode_in_parts
from paceline.server.sse import named_event
from paceline.streaming import FinishReason, Usage

_MAX_UNFOUND_BYTES = 1 << 16  # so that looking for a text stays fast


@dataclass(slots=True, kw_only=True)
class _OpenCall:
    """A call that grows.

    delta: its first one. origin: the tool that it is of. arguments: pieces of the function's. input: of a custom tool.
    """

    delta: ToolCallDelta
    origin: ToolOrigin
    arguments: list[str] = field(default_factory=list)
    input: CustomInput | None = None

    @property
    def event_name(self) -> str:
        """Return the common part of the names of its events."""
        return "function_call_arguments" if self.input is None else "custom_tool_call_input"

    def grown(self, arguments: str) -> str:
        """Return the text that a piece of the arguments adds to the item."""
        return arguments if self.input is None else self.input.feed(arguments)


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
            call = self.call
            return call_item(self.id, call.delta.id, call.origin, text if has_content else "", status)
        parts = [self.part(text)] if has_content else []
        return (message_item if self.kind == "message" else reasoning_item)(self.id, parts, status)

    def part(self, text: str) -> Item:
        return text_part(text, self.logprobs) if self.kind == "message" else reasoning_part(text)


class ResponseEvents:
    """Renders the chunks of one response; call it with each of them in order.

    head: the members that are known before the output. num_events: events so far.
    """

    def __init__(self, head: ResponseHead, begun: ResponseEvents | None = None) -> None:
        """Begin a response. begun: the events that were sent before the head was known, of a response with the same id."""
        self.head = head
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
        body = self.head.body("failed", output, error=failure_of(api_error))
        number = self.num_events
        return _event("error", number, **members) + _event("response.failed", number + 1, response=body)

    def _output_with_open(self, status: Status) -> list[Item]:
        """Return the items so far. status: of the open one."""
        return [*self._output, *([] if self._open is None else [self._open.item(status, has_content=True)])]

    def _goes_on(self, call: ToolCallDelta | None) -> bool:
        """Return whether a delta belongs to the call that is open. Text behind it in the same chunk comes after it."""
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
            item = self._begin(call_kind(origin), call)
            events.append(self._added(item))
        assert item.call is not None  # noqa: S101 - it was begun with one
        item.call.arguments.append(delta.arguments)
        return [*events, *self._of_input(item, item.call.grown(delta.arguments))]

    def _of_input(self, item: _OpenItem, piece: str) -> list[bytes]:
        """Return the event of the next piece of a call's arguments or input."""
        if not piece or item.call is None:
            return []
        item.texts.append(piece)
        where = {"item_id": item.id, "output_index": item.index}
        return [self._event(f"response.{item.call.event_name}.delta", **where, delta=piece, **self._rates())]

    def _current(self, kind: str) -> tuple[list[bytes], _OpenItem]:
        """Return the open item of this kind, with the events that close another one and begin it."""
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
        """Return the events that end the open item."""
        item, self._open = self._open, None
        if item is None:
            return []
        call, events = item.call, list[bytes]()
        if call is not None and call.input is not None:
            events += self._of_input(item, call.input.finish())
        text = "".join(item.texts)
        if call is not None and status == "completed":
            status = status_of(ToolCall(call.delta.name, "".join(call.arguments)))
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
        """Return the events that end the response."""
        self._has_ended = True
        events: list[bytes] = []
        if self._open is None and not self._output:  # nothing but blanks
            events, item = self._current("message")
            item.texts.append(self._blanks)
        is_cut = reason == FinishReason.LENGTH
        events += self._close("incomplete" if is_cut else "completed")
        warnings = [] if chunk.warning is None else [str(chunk.warning)]
        body = self.head.ended(self._output, reason, usage_of(usage, self._num_reasoning), warnings)
        timings = final_timings(usage, usage.completion_tokens)
        name = "response.incomplete" if is_cut else "response.completed"
        return [*events, self._event(name, response=body, timings=timings)]

    def _rates(self) -> dict[str, Any]:
        """Return the timings of an event while tokens are generated, if they are wanted."""
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
