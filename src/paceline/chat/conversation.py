"""A conversation: which roles, fields and contents its messages may have, and whether a prompt continues its last message.

Pure; any thread. Knows no template and no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline import validation
from paceline.chat.chat_media import ChatMedia, PartReader
from paceline.chat.json_values import checked_json
from paceline.errors import InvalidParams, InvalidType, Unsupported

MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = ("role", "content", "name", "refusal", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
# Fields of OpenAI's API or llama-server that are accepted only while they are empty.
UNSUPPORTED_FIELDS = ("function_call", "audio", "annotations")
MAX_TOOL_CALLS = 1024
MAX_ARGUMENTS_DEPTH = 64
MAX_ARGUMENTS_BYTES = 16 << 20
PART_TYPES = ("text", "refusal")
UNSUPPORTED_PARTS = ("image_url", "input_audio", "input_video", "file", "image", "audio", "video", "media_marker")

_PLAIN_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def parse_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Check a conversation and return its messages as plain mappings.

    Each has `role` and `content`, and, if given, `name`, `reasoning_content`, `tool_calls` and `tool_call_id`.

    Args:
        messages: A list of messages. A role is one of `ROLES`, or another plain word for models that know more. A content
            is a text or a list of text parts {"type": "text", "text": ...}; an assistant's may be null, and is then its
            `refusal` or empty. An assistant's message may have `tool_calls`, whose arguments are JSON as text or an object,
            and `reasoning_content` (or `reasoning`). The role "function" is that of "tool".
        name: What error messages call the list.

    Raises:
        InvalidParams: A message is malformed, or a result is of a tool call that no earlier message has; the message names
            the place, such as messages[2].content[0].text.
        Unsupported: A message has what is known but not supported: images, audio, files.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidType(f"{name} must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidParams(f"{name} must have at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"{name} must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    parsed = [_parse_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]
    _check_results(name, parsed)
    return parsed


def _parse_message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    role = _parse_role(place, message)
    _check_fields(place, message)
    parsed: dict[str, Any] = {"role": role, "content": _parse_content(place, role, message)}
    if message.get("name") is not None:
        parsed["name"] = validation.text(f"{place}.name", message["name"])
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        parsed["reasoning_content"] = validation.text(f"{place}.reasoning_content", reasoning)
    if message.get("tool_calls"):
        parsed["tool_calls"] = _parse_calls(f"{place}.tool_calls", role, message["tool_calls"])
    if message.get("tool_call_id"):
        parsed["tool_call_id"] = validation.text(f"{place}.tool_call_id", message["tool_call_id"])
    return parsed


def _parse_role(place: str, message: Mapping[Any, Any]) -> str:
    if "role" not in message:
        raise InvalidParams(f"{place}.role is missing; it is one of {', '.join(map(repr, ROLES))}")
    role = validation.text(f"{place}.role", message["role"])
    if not _PLAIN_ROLE.fullmatch(role):
        raise InvalidParams(
            f"{place}.role must be one of {', '.join(map(repr, ROLES))}, or a plain word, not {role[:80]!r}"
        )
    return "tool" if role == "function" else role


def _check_fields(place: str, message: Mapping[Any, Any]) -> None:
    for key, value in message.items():
        if key in UNSUPPORTED_FIELDS and value not in (None, "", [], {}):
            _refuse_unsupported(f"{place}.{key}", "audio, annotations and the older function_call")
        if key not in FIELDS and key not in UNSUPPORTED_FIELDS:
            shown = str(key)[:80]
            raise InvalidParams(f"{place}.{shown} is not known; a message has {', '.join(FIELDS)}")


def _parse_content(place: str, role: str, message: Mapping[Any, Any]) -> str | list[dict[str, str]]:
    if "content" not in message and message.get("refusal") is None and not message.get("tool_calls"):
        raise InvalidParams(f"{place}.content is missing; it is a text or a list of text parts")
    content = message.get("content")
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        return "" if refusal is None else validation.text(f"{place}.refusal", refusal)
    place = f"{place}.content"
    if isinstance(content, str):
        return validation.text(place, content)
    if not isinstance(content, list):
        kind = "null" if content is None else type(content).__name__
        raise InvalidType(f"{place} must be a text or a list of text parts, not {kind}")
    if not content and role == "assistant":
        return ""
    if not content:
        raise InvalidParams(f"{place} must have at least one part")
    return [_parse_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _parse_part(place: str, part: object) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise InvalidType(f"{place} must be an object with type and text, not {type(part).__name__}")
    kind = part.get("type")
    if isinstance(kind, str) and kind in UNSUPPORTED_PARTS:
        _refuse_unsupported(f"{place}.type", f"parts of the type {kind!r}")
    kind = validation.choice(f"{place}.type", kind, PART_TYPES)
    if kind not in part:
        raise InvalidParams(f"{place}.{kind} is missing")
    for key in part:
        if key not in ("type", kind):
            raise InvalidParams(f"{place}.{str(key)[:80]} is not known; a part of this type has type and {kind}")
    return {"type": "text", "text": validation.text(f"{place}.{kind}", part[kind])}


def _parse_calls(place: str, role: str, calls: object) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidParams(f"{place} is for messages of the role assistant, not {role!r}")
    if not isinstance(calls, list):
        raise InvalidType(f"{place} must be a list of tool calls, not {type(calls).__name__}")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidParams(f"{place} must be at most {MAX_TOOL_CALLS} calls, not {len(calls)}")
    return [_parse_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _parse_call(place: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidType(f"{place} must be an object with id, type and function")
    if call.get("type") not in (None, "function"):
        _refuse_unsupported(f"{place}.type", f"calls of the type {str(call['type'])[:80]!r}")
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        plain = checked_json(f"{place}.function.arguments", arguments, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        arguments = json.dumps(plain, ensure_ascii=False)
    parsed: dict[str, Any] = {
        "type": "function",
        "function": {
            "name": validation.text(f"{place}.function.name", function.get("name")),
            "arguments": _arguments_text(f"{place}.function.arguments", arguments),
        },
    }
    if call.get("id"):
        parsed["id"] = validation.text(f"{place}.id", call["id"])
    return parsed


def _arguments_text(place: str, arguments: object) -> str:
    """Return arguments as JSON; clients spell calls without arguments in three ways."""
    text = "" if arguments is None else validation.text(place, arguments)
    return text if text.strip() else "{}"


def _check_results(name: str, messages: list[dict[str, Any]]) -> None:
    """Raise `InvalidParams` where a result of a tool comes before any call, or names a call that there is not."""
    called: set[str] = set()
    has_call = False
    for index, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            has_call = True
            called.add(call.get("id", ""))
        if message["role"] == "tool":
            wanted = message.get("tool_call_id")
            if not has_call or (wanted is not None and wanted not in called and "" not in called):
                what = f"for the call {wanted[:80]!r}" if wanted else "of a tool"
                raise InvalidParams(f"{name}[{index}] is a result {what}, and no earlier message has that call")


def _refuse_unsupported(place: str, what: str) -> NoReturn:
    raise Unsupported(f"{place}: {what} are not supported yet; leave them out")


@dataclass(frozen=True, slots=True)
class Turn:
    """Parsed messages and how the prompt ends; the fields mean what `ChatFormat.render`'s parameters do.

    media: the images for whose marks `messages` have; None where the messages are texts alone. warnings: sentences about parts
    of the conversation that were left out or altered.
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
        prefills: Whether a last message of the role assistant is continued when the request does not say.
        read_part: Finds the images among the parts of contents; None: messages have none.

    Raises:
        InvalidParams: A message is malformed, or options contradict each other.
        Unsupported: A message has parts that are known, and not read here.
    """
    media = None if read_part is None else ChatMedia(messages, read_part)
    parsed = parse_messages(messages if media is None else media.messages)
    if media is not None and not media.attachments:
        media = None
    if continues:
        if generates:
            raise InvalidParams(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
            )
        return Turn(parsed, add_generation_prompt=False, continue_final_message=True, media=media)
    if continues is False or not prefills or parsed[-1]["role"] != "assistant":
        return Turn(parsed, add_generation_prompt=generates is not False, media=media)
    if len(parsed) > 1 and parsed[-2]["role"] == "assistant":
        raise InvalidParams("messages end with two of the assistant's, and only one can be continued; join them")
    if len(parsed) > 1 and _is_empty(parsed[-1]["content"]):
        return Turn(parsed[:-1], media=media)
    return Turn(parsed, add_generation_prompt=False, continue_final_message=True, media=media)


def _is_empty(content: str | list[dict[str, str]]) -> bool:
    return not content if isinstance(content, str) else not any(part["text"] for part in content)
