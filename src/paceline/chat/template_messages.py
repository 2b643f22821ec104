"""Fits contents, roles and arguments of tool calls to the abilities of a chat template. Pure; any thread.

The cases are those of llama.cpp's chat layer (`common_chat_templates_apply`), so that a conversation becomes the same prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paceline.chat.conversation import MAX_ARGUMENTS_BYTES, MAX_ARGUMENTS_DEPTH
from paceline.chat.json_values import checked_json
from paceline.chat.message_rewrites import Message, joined_text, with_one_system
from paceline.errors import InvalidParams, TemplateError

# Templates that keep white space around a content, which drives their models into loops of reasoning.
_TRIMMED = "You have access to the following functions in JSONSchema format"


def for_template(messages: Sequence[Mapping[str, Any]], capabilities: Mapping[str, bool], source: str) -> list[Message]:
    """Return the messages with the roles and arguments that the template knows, and one leading system message.

    Args:
        messages: As `parse_messages` returns them.
        capabilities: Of the template, by llama.cpp's names.
        source: The template's Jinja source.

    Raises:
        InvalidParams: The template needs arguments of tool calls as objects, and some nest too deep or are too long.
        TemplateError: The template has no system messages, and there is no other message.
    """
    fitted = [dict(message) for message in messages]
    for index, message in enumerate(fitted):
        if _TRIMMED in source:
            _trim(message)
        if message["role"] == "developer" and "<|channel|>" not in source:
            message["role"] = "system"
        if "tool_calls" in message and capabilities["supports_object_arguments"]:
            message["tool_calls"] = _with_objects(f"messages[{index}].tool_calls", message["tool_calls"])
    fitted = with_one_system(fitted)
    if not capabilities["supports_system_role"] and len(fitted) == 1 and fitted[0]["role"] == "system":
        raise TemplateError(
            "the chat template has no system messages, and there is no other message to put the text into"
        )
    return fitted


def with_fitted_contents(messages: Sequence[Message], capabilities: Mapping[str, bool]) -> list[Message]:
    """Return the messages with contents as texts or parts, and without a system message, as the template takes them."""
    fitted = [{**message, "content": _content(message["content"], capabilities)} for message in messages]
    has_system = len(fitted) > 1 and fitted[0]["role"] == "system"
    return _without_system(fitted) if has_system and not capabilities["supports_system_role"] else fitted


def _content(content: Any, capabilities: Mapping[str, bool]) -> Any:
    takes_text, takes_parts = capabilities["supports_string_content"], capabilities["supports_typed_content"]
    if not takes_parts or (takes_text and isinstance(content, str)):
        return joined_text(content)
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _trim(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content.strip()
    else:
        message["content"] = [{**part, "text": part["text"].strip()} for part in content]
    if "reasoning_content" in message:
        message["reasoning_content"] = message["reasoning_content"].strip()


def _with_objects(place: str, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    converted = []
    for index, call in enumerate(calls):
        function = call["function"]
        arguments = _object_of(f"{place}[{index}].function.arguments", function["arguments"])
        converted.append({**call, "function": {**function, "arguments": arguments}})
    return converted


def _object_of(place: str, arguments: str) -> Mapping[str, Any] | None:
    """Return arguments as an object, which the template needs; a text that is no object becomes its only member."""
    try:
        found = json.loads(arguments, parse_constant=_refuse_constant)
    except ValueError:
        return {"arguments": arguments}
    except RecursionError:
        raise InvalidParams(f"{place} is nested more than {MAX_ARGUMENTS_DEPTH} deep") from None
    if found is not None and not isinstance(found, dict):
        found = {"arguments": found}
    checked: Mapping[str, Any] | None = checked_json(place, found, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
    return checked


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not valid JSON")


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the text of the system message before the text of the next message."""
    system, following = messages[0], messages[1]
    text = joined_text(system["content"]) + "\n" + joined_text(following["content"])
    content = text if isinstance(following["content"], str) else [{"type": "text", "text": text}]
    return [{**following, "content": content}, *messages[2:]]
