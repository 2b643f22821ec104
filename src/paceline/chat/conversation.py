"""A conversation: which roles, fields and contents its messages may have, and whether a prompt continues its last message.

Pure; any thread. Knows no template and no model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, Unsupported

MAX_MESSAGES = 16_384
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = ("role", "content", "name", "refusal")
# Fields of OpenAI's API or llama-server that are accepted only while they are empty.
UNSUPPORTED_FIELDS = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "audio", "annotations")
PART_TYPES = ("text", "refusal")
UNSUPPORTED_PARTS = ("image_url", "input_audio", "input_video", "file", "image", "audio", "video", "media_marker")

_PLAIN_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def parse_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Check a conversation and return its messages as plain mappings of `role`, `content` and, if given, `name`.

    Args:
        messages: A list of messages. A role is one of `ROLES`, or another plain word for models that know more. A content
            is a text or a list of text parts {"type": "text", "text": ...}; an assistant's may be null, and is then its
            `refusal` or empty.
        name: What error messages call the list.

    Raises:
        InvalidParams: A message is malformed; the message names the place, such as messages[2].content[0].text.
        Unsupported: A message has what is known but not supported: images, audio, files, tools, reasoning.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidType(f"{name} must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidParams(f"{name} must have at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"{name} must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    return [_parse_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]


def _parse_message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    role = _parse_role(place, message)
    _check_fields(place, message)
    parsed: dict[str, Any] = {"role": role, "content": _parse_content(place, role, message)}
    if message.get("name") is not None:
        parsed["name"] = validation.text(f"{place}.name", message["name"])
    return parsed


def _parse_role(place: str, message: Mapping[Any, Any]) -> str:
    if "role" not in message:
        raise InvalidParams(f"{place}.role is missing; it is one of {', '.join(map(repr, ROLES))}")
    role = validation.text(f"{place}.role", message["role"])
    if not _PLAIN_ROLE.fullmatch(role):
        raise InvalidParams(
            f"{place}.role must be one of {', '.join(map(repr, ROLES))}, or a plain word, not {role[:80]!r}"
        )
    if role in ("tool", "function"):
        _refuse_unsupported(f"{place}.role", "results of tools")
    return role


def _check_fields(place: str, message: Mapping[Any, Any]) -> None:
    for key, value in message.items():
        if key in UNSUPPORTED_FIELDS and value not in (None, "", [], {}):
            _refuse_unsupported(f"{place}.{key}", "tools, reasoning and audio")
        if key not in FIELDS and key not in UNSUPPORTED_FIELDS:
            shown = str(key)[:80]
            raise InvalidParams(f"{place}.{shown} is not known; a message has {', '.join(FIELDS)}")


def _parse_content(place: str, role: str, message: Mapping[Any, Any]) -> str | list[dict[str, str]]:
    if "content" not in message and message.get("refusal") is None:
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


def _refuse_unsupported(place: str, what: str) -> NoReturn:
    raise Unsupported(f"{place}: {what} are not supported yet; leave them out")


@dataclass(frozen=True, slots=True)
class Turn:
    """Parsed messages and how the prompt ends; the fields mean what `ChatTemplate.render`'s parameters do."""

    messages: Sequence[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def next_turn(
    messages: object,
    *,
    continues: bool | None = None,
    generates: bool | None = None,
    prefills: bool = False,
) -> Turn:
    """Parse a conversation and decide how its prompt ends.

    Args:
        messages: The conversation, see `parse_messages`.
        continues: `continue_final_message` of the request; None if it has none.
        generates: `add_generation_prompt` of the request; None if it has none.
        prefills: Whether a last message of the role assistant is continued when the request does not say.

    Raises:
        InvalidParams: A message is malformed, or options contradict each other.
        Unsupported: A message has tools, reasoning, images or audio.
    """
    parsed = parse_messages(messages)
    if continues:
        if generates:
            raise InvalidParams(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false"
            )
        return Turn(parsed, add_generation_prompt=False, continue_final_message=True)
    if continues is False or not prefills or parsed[-1]["role"] != "assistant":
        return Turn(parsed, add_generation_prompt=generates is not False)
    if len(parsed) > 1 and parsed[-2]["role"] == "assistant":
        raise InvalidParams("messages end with two of the assistant's, and only one can be continued; join them")
    if len(parsed) > 1 and _is_empty(parsed[-1]["content"]):
        return Turn(parsed[:-1])
    return Turn(parsed, add_generation_prompt=False, continue_final_message=True)


def _is_empty(content: str | list[dict[str, str]]) -> bool:
    return not content if isinstance(content, str) else not any(part["text"] for part in content)
