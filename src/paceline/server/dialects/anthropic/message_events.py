"""Messages as Anthropic's API has them: whole, and as the events of a stream. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from paceline.chat import ChatChunk, ChatCompletion, MessageDelta, ParsedMessage
from paceline.server.sse import NAMED_SSE, Framing, named_event
from paceline.streaming import FinishReason, Usage

MESSAGE_FRAMING = Framing(NAMED_SSE.media_type, NAMED_SSE.frame, named_event(b"ping", b'{"type":"ping"}'))
"""Named events, and an event as the ping."""

_PINGS_PER_DELTA = 4

BlockType = Literal["text", "thinking", "tool_use"]

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReply:
    """What the response to a request reports.

    num_prompt: tokens of the prompt. max_tokens: of the request. stops: the request's stop sequences. shows_thinking:
    whether blocks of thinking have its text.
    """

    id: str
    model: str
    num_prompt: int
    max_tokens: int | None
    stops: tuple[str, ...] = ()
    shows_thinking: bool = True
    warnings: tuple[str, ...] = ()

    def head(self, content: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the members that a message begins with."""
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def ending(self, reason: FinishReason, stop: str | int | None, usage: Usage) -> dict[str, Any]:
        """Return stop_reason and stop_sequence."""
        sequence = stop if isinstance(stop, str) and stop in self.stops else None
        return {"stop_reason": self._stop_reason(reason, sequence, usage), "stop_sequence": sequence}

    def _stop_reason(self, reason: FinishReason, sequence: str | None, usage: Usage) -> str:
        if reason is FinishReason.LENGTH:
            is_full = self.max_tokens is None or usage.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if reason is FinishReason.TOOL_CALLS else "end_turn"


def message_body(reply: MessageReply, completion: ChatCompletion) -> bytes:
    """Encode a response that is not streamed."""
    (choice,) = completion.choices
    warnings = [*reply.warnings, *([] if choice.warning is None else [str(choice.warning)])]
    body = {
        **reply.head(_blocks(reply, choice.message)),
        **reply.ending(choice.finish_reason, choice.stop, completion.usage),
        "usage": usage_of(completion.usage),
    }
    return _encode(body | ({"warnings": warnings} if warnings else {}))


def usage_of(usage: Usage) -> dict[str, int]:
    """Return Anthropic's usage: tokens from the cache are not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _blocks(reply: MessageReply, message: ParsedMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning_content:
        thinking = message.reasoning_content if reply.shows_thinking else ""
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input_of(call.arguments)}
        for call in message.tool_calls
    ]


def _input_of(arguments: str) -> dict[str, Any]:
    """Return arguments as an object. Of arguments that were cut off it has the complete members."""
    try:
        found = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class MessageEvents:
    """The events of one message: call it with each chunk in order. Blocks follow each other, each begun and ended."""

    def __init__(self, reply: MessageReply, *, counts_pings: bool = True) -> None:
        """counts_pings: whether the client takes a ping for a sign of life."""
        self._reply, self._counts_pings = reply, counts_pings
        self._num_pings = 0
        self._index = -1
        self._open: tuple[BlockType, int] | None = None  # with the number of the call
        self._usage = Usage(prompt_tokens=reply.num_prompt)

    def opening(self) -> bytes:
        """Return the message's start. The end corrects its counts: the number of cached tokens is not known yet."""
        reply = self._reply
        message = {**reply.head(), "stop_reason": None, "stop_sequence": None, "usage": usage_of(self._usage)}
        if reply.warnings:
            message["warnings"] = reply.warnings
        return _event("message_start", message=message)

    def heartbeat(self) -> bytes:
        """Return the ping, during the prefill with an event that changes nothing for clients that count no pings."""
        self._num_pings += 1
        if self._counts_pings or self._index >= 0 or self._num_pings % _PINGS_PER_DELTA:
            return MESSAGE_FRAMING.ping
        delta = {"stop_reason": None, "stop_sequence": None}
        return MESSAGE_FRAMING.ping + _event("message_delta", delta=delta, usage=usage_of(self._usage))

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        """Return the events of a chunk."""
        events = [event for delta in chunk.deltas for event in self._delta(delta)]
        if chunk.finish_reason is not None:
            events += self._end(chunk, chunk.finish_reason)
        return events

    def _delta(self, delta: MessageDelta) -> list[bytes]:
        call = delta.tool_call
        if call is not None:
            piece = {"type": "input_json_delta", "partial_json": call.arguments}
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            return [*self._turn_to("tool_use", call.index, block), *self._pieces(piece, call.arguments)]
        if delta.reasoning_content:
            begun = self._turn_to("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""})
            piece = {"type": "thinking_delta", "thinking": delta.reasoning_content}
            return [*begun, *self._pieces(piece, delta.reasoning_content if self._reply.shows_thinking else "")]
        begun = self._turn_to("text", 0, {"type": "text", "text": ""})
        return [*begun, *self._pieces({"type": "text_delta", "text": delta.content}, delta.content)]

    def _pieces(self, piece: dict[str, Any], text: str) -> list[bytes]:
        return [_event("content_block_delta", index=self._index, delta=piece)] if text else []

    def _turn_to(self, kind: BlockType, number: int, block: dict[str, Any]) -> list[bytes]:
        """Return the events that end the open block and begin a block of this kind; none if it is open."""
        if self._open == (kind, number):
            return []
        closed = self._close()
        self._open, self._index = (kind, number), self._index + 1
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        kind, _ = self._open
        self._open = None
        # Clients expect a signature; there is nothing here that could verify one.
        signature = {"type": "signature_delta", "signature": ""}
        signed = [_event("content_block_delta", index=self._index, delta=signature)] if kind == "thinking" else []
        return [*signed, _event("content_block_stop", index=self._index)]

    def _end(self, chunk: ChatChunk, reason: FinishReason) -> list[bytes]:
        usage = chunk.usage or self._usage
        more = {} if chunk.warning is None else {"warnings": [*self._reply.warnings, str(chunk.warning)]}
        ending = self._reply.ending(reason, chunk.stop, usage)
        delta = _event("message_delta", delta=ending, usage=usage_of(usage), **more)
        return [*self._close(), delta, _event("message_stop")]


def _event(kind: str, **members: Any) -> bytes:
    return named_event(kind.encode(), _encode({"type": kind, **members}))
