"""The response as OpenAI's API has it: its head, which repeats the request, and the items of its output. Pure; any thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.chat import ChatCompletion, ParsedMessage, ToolCall
from paceline.params import SamplingParams
from paceline.server.api_errors import ApiError
from paceline.server.dialects.logprobs import ChatLogprob, Pieces
from paceline.server.dialects.responses.custom_input import custom_input_of
from paceline.server.dialects.responses.input_items import Item, new_item_id
from paceline.server.dialects.responses.response_tools import ToolNames, ToolOrigin
from paceline.server.dialects.responses.responses_body import ResponsesBody
from paceline.server.dialects.token_aligner import TokenAligner
from paceline.server.dialects.usage import final_timings
from paceline.server.json_bodies import encode_in_parts
from paceline.streaming import FinishReason, Usage

Status = Literal["in_progress", "completed", "incomplete", "failed"]

Keep = Callable[[Item, Sequence[Item]], str | None]
"""Stores a response, given its JSON and its output; returns why it could not, or None."""


def no_store(response: Item, output: Sequence[Item]) -> str | None:  # noqa: ARG001 - the shape of `Keep`
    """Store nothing."""
    return None


def new_response_id() -> str:
    """Return an id for a response."""
    return f"resp_{secrets.token_hex(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The members of a response that are known before its output.

    echo: the members that repeat the request. pieces: the bytes of every token. num_top: likely tokens that are reported with
    each; None: no log-probabilities. names: the tool of each function. clock: for timings in every event. keep: stores the
    response when it is whole.
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
    keep: Keep = no_store

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
        warned = (*self.warnings, *warnings)
        return body | ({"warnings": warned} if warned else {})

    def ended(
        self,
        output: Sequence[Item],
        finish_reason: FinishReason,
        usage: Mapping[str, Any],
        warnings: Sequence[str] = (),
    ) -> Item:
        """Return the response object at its end, stored if it is to be."""
        is_cut = finish_reason == FinishReason.LENGTH
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


def usage_of(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """Return the usage of a response. num_reasoning: tokens of its thinking."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def failure_of(api_error: ApiError) -> dict[str, Any]:
    """Return the error member of a response that failed."""
    code = "rate_limit_exceeded" if api_error.status == 429 else "server_error"
    return {"code": code, "message": api_error.message}


# ---- items of the output


def text_part(text: str, logprobs: Sequence[ChatLogprob] = ()) -> Item:
    """Return the part of a message's text."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning_part(text: str) -> Item:
    """Return the part of a thinking's text."""
    return {"type": "reasoning_text", "text": text}


def message_item(item_id: str, parts: Sequence[Item], status: Status) -> Item:
    """Return a message."""
    return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": list(parts)}


def reasoning_item(item_id: str, parts: Sequence[Item], status: Status) -> Item:
    """Return a thinking."""
    return {"id": item_id, "type": "reasoning", "status": status, "summary": [], "content": list(parts)}


def call_kind(origin: ToolOrigin) -> str:
    """Return the type of the item that calls of a tool are."""
    return "custom_tool_call" if origin.is_custom else "function_call"


def call_item(item_id: str, call_id: str, origin: ToolOrigin, text: str, status: Status) -> Item:
    """Return a call of a tool. text: the arguments of a function, or the input of a custom tool."""
    known = {"id": item_id, "type": call_kind(origin), "status": status, "call_id": call_id, "name": origin.name}
    namespace = {"namespace": origin.namespace} if origin.namespace else {}
    return known | namespace | {"input" if origin.is_custom else "arguments": text}


def status_of(call: ToolCall) -> Status:
    """Return the status of a call that has ended: a stop text may have cut its arguments off."""
    return "completed" if call.is_whole else "incomplete"


def has_message(message: ParsedMessage) -> bool:
    """Return whether a generated message has text of its own: blanks around calls are none, and nothing at all is one."""
    return bool(message.content.strip()) or not (message.tool_calls or message.reasoning_content)


def output_of(message: ParsedMessage, logprobs: Sequence[ChatLogprob], names: ToolNames, *, is_cut: bool) -> list[Item]:
    """Return the items of a generated message: thinking, text, calls. is_cut: whether the last one is incomplete."""
    items: list[Item] = []
    if message.reasoning_content:
        items.append(reasoning_item(new_item_id("reasoning"), [reasoning_part(message.reasoning_content)], "completed"))
    if has_message(message):
        items.append(message_item(new_item_id("message"), [text_part(message.content, logprobs)], "completed"))
    items += [_whole_call(call, names.origin_of(call.name)) for call in message.tool_calls]
    if is_cut:
        items[-1]["status"] = "incomplete"
    return items


def _whole_call(call: ToolCall, origin: ToolOrigin) -> Item:
    text = custom_input_of(call.arguments) if origin.is_custom else call.arguments
    return call_item(new_item_id(call_kind(origin)), call.id, origin, text, status_of(call))


def whole_response(head: ResponseHead, completion: ChatCompletion) -> bytes:
    """Encode a response that is not streamed."""
    (choice,) = completion.choices
    aligner = TokenAligner(head.pieces, head.num_top)
    aligner.add(choice.token_ids, choice.logprobs or ())
    num_reasoning, _ = aligner.take(choice.message.reasoning_content)
    _, logprobs = aligner.take(choice.message.content)
    is_cut = choice.finish_reason == FinishReason.LENGTH
    output = output_of(choice.message, logprobs, head.names, is_cut=is_cut)
    warnings = [] if choice.warning is None else [str(choice.warning)]
    body = head.ended(output, choice.finish_reason, usage_of(completion.usage, num_reasoning), warnings)
    timings = final_timings(completion.usage, completion.usage.completion_tokens)
    return encode_in_parts(body | {"timings": timings})
