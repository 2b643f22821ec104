"""What the `messages` of a chat may be. Pure; any thread. Knows no template and no model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, Unsupported

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FIELDS = ("role", "content", "name", "refusal")
# Known to OpenAI's API or llama-server; while they are empty it makes no difference that they are not served.
NOT_SERVED = ("tool_calls", "tool_call_id", "function_call", "reasoning_content", "audio", "annotations")
PART_TYPES = ("text", "refusal")
PARTS_NOT_SERVED = ("image_url", "input_audio", "input_video", "file", "image", "audio", "video", "media_marker")

_PLAIN_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


def checked_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """The messages as plain mappings of `role`, `content` and, where told, `name`, for `ChatFormat.render`.

    A role is one of `ROLES`, or another plain word for models that know more. A content is a text or a list of text parts
    {"type": "text", "text": ...}; an assistant's may be null, and counts as its `refusal` or an empty text. Raises
    `InvalidParams` naming the place, such as messages[2].content[0].text; `Unsupported` for what is known but not served
    yet: images, audio, files, tools, reasoning.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidType(f"{name} must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidParams(f"{name} must have at least one message")
    return [_checked_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]


def _checked_message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    role = _checked_role(place, message)
    _check_fields(place, message)
    checked: dict[str, Any] = {"role": role, "content": _checked_content(place, role, message)}
    if message.get("name") is not None:
        checked["name"] = validation.text(f"{place}.name", message["name"])
    return checked


def _checked_role(place: str, message: Mapping[Any, Any]) -> str:
    if "role" not in message:
        raise InvalidParams(f"{place}.role is missing; it is one of {', '.join(map(repr, ROLES))}")
    role = validation.text(f"{place}.role", message["role"])
    if not _PLAIN_ROLE.fullmatch(role):
        raise InvalidParams(
            f"{place}.role must be one of {', '.join(map(repr, ROLES))}, or a plain word, not {role[:80]!r}"
        )
    if role in ("tool", "function"):
        _not_served(f"{place}.role", "results of tools")
    return role


def _check_fields(place: str, message: Mapping[Any, Any]) -> None:
    for key, value in message.items():
        if key in NOT_SERVED and value not in (None, "", [], {}):
            _not_served(f"{place}.{key}", "tools, reasoning and audio")
        if key not in FIELDS and key not in NOT_SERVED:
            shown = str(key)[:80]
            raise InvalidParams(f"{place}.{shown} is not known; a message has {', '.join(FIELDS)}")


def _checked_content(place: str, role: str, message: Mapping[Any, Any]) -> str | list[dict[str, str]]:
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
    return [_checked_part(f"{place}[{index}]", part) for index, part in enumerate(content)]


def _checked_part(place: str, part: object) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise InvalidType(f"{place} must be an object with type and text, not {type(part).__name__}")
    kind = part.get("type")
    if isinstance(kind, str) and kind in PARTS_NOT_SERVED:
        _not_served(f"{place}.type", f"parts of the type {kind!r}")
    kind = validation.choice(f"{place}.type", kind, PART_TYPES)
    if kind not in part:
        raise InvalidParams(f"{place}.{kind} is missing")
    for key in part:
        if key not in ("type", kind):
            raise InvalidParams(f"{place}.{str(key)[:80]} is not known; a part of this type has type and {kind}")
    return {"type": "text", "text": validation.text(f"{place}.{kind}", part[kind])}


def _not_served(place: str, what: str) -> NoReturn:
    raise Unsupported(f"{place}: {what} are not supported yet; leave them out")
