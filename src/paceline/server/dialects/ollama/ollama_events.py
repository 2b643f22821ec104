"""Responses of Ollama's API: whole, and as the lines of a stream. Pure; any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from paceline.chat import ChatChunk, ChatCompletion, MessageDelta, ParsedMessage, ToolCall
from paceline.completion import Completion
from paceline.server.dialects.token_reports import ChatLogprob, chat_logprobs
from paceline.server.json_bodies import encode_in_parts
from paceline.streaming import FinishReason, StreamChunk, TokenLogprobs, Usage

_encode = msgspec.json.Encoder().encode


def timestamp(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it; by default now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaReply:
    """What the response to a request reports.

    is_chat: whether it has a message, otherwise a response. num_top: most likely tokens reported with each token, None: no
    log-probabilities.
    """

    model: str
    is_chat: bool
    num_top: int | None = None
    warnings: tuple[str, ...] = ()

    def line(self, members: Mapping[str, Any]) -> bytes:
        """Encode one line of a stream, or a whole response. members: beside model and time."""
        encode = _encode if self.num_top is None else encode_in_parts
        return encode({"model": self.model, "created_at": timestamp(), **members})

    def said(self, content: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        """Return what was generated, as the endpoint has it."""
        if not self.is_chat:
            return {"response": content, **({"thinking": thinking} if thinking else {})}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        bodies = [_call_body(index, call) for index, call in enumerate(calls)]
        if bodies := [body for body in bodies if body is not None]:
            message["tool_calls"] = bodies
        return {"message": message}

    def scores(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[ChatLogprob]]:
        """Return the log-probabilities of tokens, if there are any and they were requested."""
        return {"logprobs": chat_logprobs(logprobs, self.num_top)} if logprobs and self.num_top is not None else {}

    def ending(self, reason: FinishReason, usage: Usage, warning: object = None) -> dict[str, Any]:
        """Return the members of the last line. Durations are nanoseconds."""
        warnings = [*self.warnings, *([] if warning is None else [str(warning)])]
        return {
            "done": True,
            "done_reason": "length" if reason is FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(usage.queue_s + usage.prefill_s + usage.decode_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(usage.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(usage.decode_s),
            **({"warnings": warnings} if warnings else {}),
        }


def _nanoseconds(seconds: float) -> int:
    """Return at least one, since clients divide by it."""
    return max(1, round(seconds * 1e9))


def _call_body(index: int, call: ToolCall) -> dict[str, Any] | None:
    """Return a call; none for one that was cut off, whose arguments no program should run with."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def loaded_body(reply: OllamaReply, *, unloads: bool) -> bytes:
    """Encode the response to a request without a prompt, which only loads the model."""
    return reply.line({**reply.said(), "done": True, "done_reason": "unload" if unloads else "load"})


def chat_body(reply: OllamaReply, completion: ChatCompletion) -> bytes:
    """Encode a chat that is not streamed, or a completion by the chat template."""
    (choice,) = completion.choices
    message = choice.message
    said = reply.said(message.content, message.reasoning_content, message.tool_calls)
    scores = reply.scores(choice.logprobs or ())
    return reply.line({**said, **scores, **reply.ending(choice.finish_reason, completion.usage, choice.warning)})


def completion_body(reply: OllamaReply, completion: Completion) -> bytes:
    """Encode a completion of a prompt as it is, not streamed."""
    (choice,) = completion.choices
    scores = reply.scores(choice.logprobs or ())
    return reply.line({**reply.said(choice.text), **scores, **reply.ending(choice.finish_reason, completion.usage)})


class CompletionLines:
    """The lines of a completion of a prompt as it is: call it with each chunk in order."""

    def __init__(self, reply: OllamaReply) -> None:
        self._reply = reply

    def __call__(self, prompt: int, chunk: StreamChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        """Return the lines of a chunk."""
        reply, lines = self._reply, []
        scores = reply.scores(chunk.logprobs)
        if chunk.text or scores:
            lines.append(reply.line({**reply.said(chunk.text), **scores, "done": False}))
        if chunk.finish_reason is not None:
            lines.append(reply.line({**reply.said(), **reply.ending(chunk.finish_reason, chunk.usage or Usage())}))
        return lines


class ChatLines:
    """The lines of a chat: call it with each chunk in order. Tool calls come whole, in the line before the last."""

    def __init__(self, reply: OllamaReply) -> None:
        self._reply = reply

    def __call__(self, prompt: int, chunk: ChatChunk) -> list[bytes]:  # noqa: ARG002 - there is one prompt
        """Return the lines of a chunk."""
        reply = self._reply
        parts = [part for delta in chunk.deltas if (part := self._part(delta)) is not None]
        scores = reply.scores(chunk.logprobs)
        if scores and not parts:
            parts = [reply.said()]
        lines = [
            reply.line({**part, **(scores if index == 0 else {}), "done": False}) for index, part in enumerate(parts)
        ]
        if chunk.finish_reason is not None:
            lines += self._end(chunk, chunk.finish_reason, chunk.message or ParsedMessage())
        return lines

    def _part(self, delta: MessageDelta) -> dict[str, Any] | None:
        if delta.tool_call is not None:
            return None
        return self._reply.said(delta.content, delta.reasoning_content)

    def _end(self, chunk: ChatChunk, reason: FinishReason, message: ParsedMessage) -> list[bytes]:
        reply = self._reply
        called = reply.said(calls=message.tool_calls)
        has_calls = "tool_calls" in called.get("message", {})
        calls = [reply.line({**called, "done": False})] if has_calls else []
        ending = reply.ending(reason, chunk.usage or Usage(), chunk.warning)
        return [*calls, reply.line({**reply.said(), **ending})]
