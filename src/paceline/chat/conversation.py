"""A conversation: which roles, fields and contents its messages may have, and whether a prompt continues its last message.

Pure; any thread. Knows no template and no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline import validation
from paceline.chat.chat_media import ChatMedia, PartReader
from paceline.chat.json_values import checked_json
from paceline.chat.message_parts import THINKING_TYPES, IgnoredMembers, refuse_unsupported, text_of_part
from paceline.errors import InvalidParams, InvalidType

MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_TOOL_CALLS = 1024
MAX_ARGUMENTS_DEPTH = 64
MAX_ARGUMENTS_BYTES = 16 << 20

_READ_MEMBERS = (
    "role",
    "content",
    "name",
    "refusal",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "prefix",
)
# Members that SDKs and providers add to messages, and that say nothing to a model. The text of `thinking_blocks` and
# `reasoning_details` is in `reasoning_content` or `reasoning` as well.
_KNOWN_MEMBERS = frozenset(
    (
        *_READ_MEMBERS,
        "annotations",
        "cache_control",
        "citations",
        "created_at",
        "encrypted_content",
        "finish_reason",
        "id",
        "index",
        "logprobs",
        "metadata",
        "model",
        "parsed",
        "phase",
        "provider_metadata",
        "provider_options",
        "provider_specific_fields",
        "providerMetadata",
        "providerOptions",
        "reasoning_details",
        "reasoning_signature",
        "response_metadata",
        "status",
        "stop_reason",
        "thinking_blocks",
        "timestamp",
        "token_ids",
        "type",
        "usage",
        "usage_metadata",
        "weight",
    )
)
_KNOWN_CALL_MEMBERS = frozenset(
    (
        "id",
        "type",
        "function",
        "custom",
        "index",
        "cache_control",
        "caller",
        "extra_content",
        "provider_specific_fields",
        "status",
        "thought_signature",
    )
)
_KNOWN_FUNCTION_MEMBERS = frozenset(("name", "arguments", "parsed_arguments", "index", "description"))

_PLAIN_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def parse_messages(
    messages: object, name: str = "messages", ignored: IgnoredMembers | None = None
) -> list[dict[str, Any]]:
    """Check a conversation and return its messages as plain mappings.

    Each has `role` and `content`, and, if given, `name`, `reasoning_content`, `tool_calls` and `tool_call_id`.

    Args:
        messages: A list of messages. A role is one of `ROLES`, or another plain word for models that know more. A content
            is a text or a list of text parts {"type": "text", "text": ...}; one that is null or missing is empty, or an
            assistant's `refusal`. An assistant's message may have `tool_calls`, whose arguments are JSON as text or an object,
            or the older `function_call`, and `reasoning_content` (or `reasoning`, `thinking`). The role "function" is that of
            "tool". Members of other names change nothing.
        name: The name of the list in error messages.
        ignored: Collects the members that have no effect here; None: they are not reported.

    Raises:
        InvalidParams: A message is malformed, or none has a content; the error names the place, such as
            messages[2].content[0].text.
        Unsupported: A message has a known part that is not supported: images, audio, files.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        example = '[{"role": "user", "content": "Hello!"}]'
        raise InvalidType(f"{name} must be a list of messages, such as {example}, not {type(messages).__name__}")
    if not messages:
        raise InvalidParams(f"{name} must have at least one message: an empty list is a conversation without any")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"{name} must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    ignored = IgnoredMembers() if ignored is None else ignored
    parsed = [_parse_message(f"{name}[{index}]", message, ignored) for index, message in enumerate(messages)]
    if not any(map(_says_something, messages)):
        raise InvalidParams(
            f"{name}[0].content is missing or empty, as in every message; give a text or a list of parts"
        )
    return parsed


def _says_something(message: Mapping[str, Any]) -> bool:
    """Return whether a message has a content, which may be an empty text, or calls."""
    return isinstance(message.get("content"), str) or any(
        message.get(member) for member in ("content", "refusal", "tool_calls", "function_call")
    )


def _parse_message(place: str, message: object, ignored: IgnoredMembers) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    role = _parse_role(place, message)
    ignored.check(place, "message", message, _KNOWN_MEMBERS)
    content, thoughts = _parse_content(place, role, message, ignored)
    parsed: dict[str, Any] = {"role": role, "content": content}
    if message.get("name") is not None:
        parsed["name"] = validation.text(f"{place}.name", message["name"])
    reasoning = _parse_reasoning(place, message) or thoughts
    if reasoning:
        parsed["reasoning_content"] = reasoning
    calls = _parse_calls(place, role, message, ignored)
    if calls:
        parsed["tool_calls"] = calls
    if message.get("tool_call_id"):
        parsed["tool_call_id"] = validation.text(f"{place}.tool_call_id", message["tool_call_id"])
    return parsed


def _parse_role(place: str, message: Mapping[Any, Any]) -> str:
    if "role" not in message:
        raise InvalidParams(f"{place}.role is missing; it is one of {', '.join(map(repr, ROLES))}")
    role = validation.text(f"{place}.role", message["role"])
    if not _PLAIN_ROLE.fullmatch(role):
        near = role.strip().lower()
        hint = f"; did you mean {near!r}?" if near in ROLES else ""
        raise InvalidParams(
            f"{place}.role must be one of {', '.join(map(repr, ROLES))}, or a plain word, not {role[:80]!r}{hint}"
        )
    return "tool" if role == "function" else role


def _parse_reasoning(place: str, message: Mapping[Any, Any]) -> str:
    name = next((name for name in ("reasoning_content", "reasoning", "thinking") if message.get(name)), None)
    return "" if name is None else validation.text(f"{place}.{name}", message[name])


def _parse_content(
    place: str, role: str, message: Mapping[Any, Any], ignored: IgnoredMembers
) -> tuple[str | list[dict[str, str]], str]:
    """Return the content without the parts with an assistant's thinking, and the thinking."""
    content = message.get("content")
    if content is None and role == "assistant" and message.get("refusal") is not None:
        return validation.text(f"{place}.refusal", message["refusal"]), ""
    place = f"{place}.content"
    if isinstance(content, str):
        return validation.text(place, content), ""
    if content is None or content == []:
        return "", ""
    if not isinstance(content, list):
        raise InvalidType(f"{place} must be a text or a list of text parts, not {type(content).__name__}")
    thoughts, parts = [], []
    for index, part in enumerate(content):
        kind, text = text_of_part(f"{place}[{index}]", part, ignored)
        if role == "assistant" and kind in THINKING_TYPES:
            thoughts.append(text)
        else:
            parts.append({"type": "text", "text": text})
    return parts or "", "\n\n".join(thoughts)


def _parse_calls(
    place: str, role: str, message: Mapping[Any, Any], ignored: IgnoredMembers
) -> list[dict[str, Any]] | None:
    """Return the calls of a message, or its single call in the older form `function_call`."""
    calls, older = message.get("tool_calls"), message.get("function_call")
    name = f"{place}.tool_calls" if calls or not older else f"{place}.function_call"
    if not calls and not older:
        return None
    if role != "assistant":
        raise InvalidParams(f"{name} is for messages of the role assistant, not {role!r}")
    if not calls:
        return [{"type": "function", "function": _parse_function(name, older, ignored)}]
    if not isinstance(calls, list):
        raise InvalidType(f"{name} must be a list of tool calls, not {type(calls).__name__}")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidParams(f"{name} must be at most {MAX_TOOL_CALLS} calls, not {len(calls)}")
    return [_parse_call(f"{name}[{index}]", call, ignored) for index, call in enumerate(calls)]


def _parse_call(place: str, call: object, ignored: IgnoredMembers) -> dict[str, Any]:
    kind = call.get("type") if isinstance(call, Mapping) else None
    if kind not in (None, "function", "custom"):
        refuse_unsupported(f"{place}.type", f"calls of the type {str(kind)[:80]!r}")
    member = "custom" if kind == "custom" else "function"
    if not isinstance(call, Mapping) or not isinstance(call.get(member), Mapping):
        raise InvalidType(f"{place} must be an object with id, type and {member}")
    ignored.check(place, "call", call, _KNOWN_CALL_MEMBERS)
    function = call[member]
    if member == "custom":
        arguments = {"input": validation.text(f"{place}.custom.input", function.get("input"))}
        function = {"name": function.get("name"), "arguments": arguments}
    parsed: dict[str, Any] = {
        "type": "function",
        "function": _parse_function(f"{place}.{member}", function, ignored),
    }
    if call.get("id"):
        parsed["id"] = validation.text(f"{place}.id", call["id"])
    return parsed


def _parse_function(place: str, function: object, ignored: IgnoredMembers) -> dict[str, str]:
    if not isinstance(function, Mapping):
        raise InvalidType(f"{place} must be an object with name and arguments, not {type(function).__name__}")
    ignored.check(place, "function", function, _KNOWN_FUNCTION_MEMBERS)
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        plain = checked_json(f"{place}.arguments", arguments, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        arguments = json.dumps(plain, ensure_ascii=False)
    return {
        "name": validation.text(f"{place}.name", function.get("name")),
        "arguments": _arguments_text(f"{place}.arguments", arguments),
    }


def _arguments_text(place: str, arguments: object) -> str:
    """Return arguments as text; clients spell calls without arguments in three ways."""
    text = "" if arguments is None else validation.text(place, arguments)
    return text if text.strip() else "{}"


@dataclass(frozen=True, slots=True)
class Turn:
    """Parsed messages and the end of their prompt.

    Attributes:
        messages: The messages, with marks in place of attachments.
        add_generation_prompt: As in `ChatFormat.render`.
        continue_final_message: As in `ChatFormat.render`.
        media: The attachments; None if the messages have texts alone.
        warnings: Sentences about parts of the conversation that were left out or changed.
    """

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    media: ChatMedia | None = None
    warnings: tuple[str, ...] = ()


def next_turn(
    messages: object,
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    prefills: bool = False,
    read_part: PartReader | None = None,
) -> Turn:
    """Parse a conversation and decide how its prompt ends.

    Args:
        messages: The conversation, see `parse_messages`.
        continues: `continue_final_message` of the request; None if it has none.
        generates: `add_generation_prompt` of the request; None if it has none.
        prefills: Whether a last message of the role assistant is continued when the request does not say. A message with
            calls is not, and a message whose `prefix` is true is continued in any case.
        read_part: Finds the images among the parts of contents; None: messages have none.

    Raises:
        InvalidParams: A message is malformed, or options contradict each other.
        Unsupported: A message has parts that are known, and not read here.
    """
    media = None if read_part is None else ChatMedia(messages, read_part)
    ignored = IgnoredMembers()
    given = messages if media is None else media.messages
    parsed = parse_messages(given, ignored=ignored)
    warnings = (*(() if media is None else media.warnings), *ignored.warnings())
    if media is not None and not media.attachments:
        media = None
    has_prefix = _has_prefix(parsed, given)
    if continues:
        if generates:
            raise InvalidParams(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
            )
        return Turn(parsed, add_generation_prompt=False, continue_final_message=True, media=media, warnings=warnings)
    may_continue = has_prefix or (prefills and not parsed[-1].get("tool_calls"))
    if continues is False or not may_continue or parsed[-1]["role"] != "assistant":
        return Turn(parsed, add_generation_prompt=generates is not False, media=media, warnings=warnings)
    if len(parsed) > 1 and parsed[-2]["role"] == "assistant" and not has_prefix:
        raise InvalidParams("messages end with two of the assistant's, and only one can be continued; join them")
    says_more = has_prefix and ("tool_calls" in parsed[-1] or "reasoning_content" in parsed[-1])
    if len(parsed) > 1 and _is_empty(parsed[-1]["content"]) and not says_more:
        return Turn(parsed[:-1], media=media, warnings=warnings)
    return Turn(parsed, add_generation_prompt=False, continue_final_message=True, media=media, warnings=warnings)


def _has_prefix(parsed: Sequence[Mapping[str, Any]], messages: Any) -> bool:
    """Return whether the last message is the assistant's, and its member `prefix` says that the model continues it."""
    prefix = messages[-1].get("prefix")
    if prefix is None or parsed[-1]["role"] != "assistant":
        return False
    return validation.boolean(f"messages[{len(parsed) - 1}].prefix", prefix)


def _is_empty(content: str | list[dict[str, str]]) -> bool:
    return not content if isinstance(content, str) else not any(part["text"] for part in content)
