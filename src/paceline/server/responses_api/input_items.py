"""The items that a response is made from: checked, completed with their ids, and read as messages of a conversation.

Items are plain JSON as OpenAI's API has them, so that they can be kept and handed out again. Pure; any thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline import validation
from paceline.chat.chat_media import OmittedAttachment
from paceline.chat.conversation import MAX_MESSAGES
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.media import Attachment
from paceline.server.media_input.request_media import RequestMedia, check_detail

Item = dict[str, Any]

INPUT_ROLES = ("user", "system", "developer", "assistant")
STATUSES = ("in_progress", "completed", "incomplete")

_MEDIA_PARTS: Mapping[str, tuple[str, ...]] = {
    "input_image": ("image_url", "detail", "file_id"),
    "input_file": ("file_data", "file_url", "filename", "file_id", "detail"),
    "input_audio": ("input_audio",),
}
"""Parts with images and audio, with their members beside type."""
# Members that an item of a type may have beside type, id and status.
_MEMBERS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content", "phase"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output", "name"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
}
# Members about OpenAI's own services, which say nothing while they are empty.
_EMPTY_MEMBERS = frozenset({"caller", "namespace", "async", "created_by"})
# Members of a part beside type and its text; none changes what the model reads.
_PART_MEMBERS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_item_id(kind: str) -> str:
    """Return an id for an item of this type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"


def parse_items(
    value: object, earlier: Sequence[Item] = (), find: Callable[[str], Item | None] = lambda _: None
) -> list[Item]:
    """Check the input of a response and return its items, each whole: with type, id and status.

    An id that an item before has already is replaced by a new one: lists of items are paged through by their ids.

    Args:
        value: A text, which is the user's, or a list of items.
        earlier: The items that come before.
        find: Returns the item that an `item_reference` names.

    Raises:
        InvalidParams: An item is malformed, or is the output of a call that no earlier item has; the message names the place,
            such as input[2].content[0].text.
        Unsupported: An item is known but not supported: files by id, calls of OpenAI's own tools.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidType(f"input must be a text or a list of items, not {type(value).__name__}")
    if not value and not earlier:
        raise InvalidParams("input must have at least one item")
    if len(value) + len(earlier) > MAX_MESSAGES:
        raise InvalidParams(f"input must have at most {MAX_MESSAGES} items, not {len(value) + len(earlier)}")
    called = {item["call_id"] for item in earlier if item["type"] == "function_call"}
    ids = {item["id"] for item in earlier}
    items = []
    for index, one in enumerate(value):
        item = _parse_item(f"input[{index}]", one, find)
        if item["id"] in ids:
            item = {**item, "id": new_item_id(item["type"])}
        ids.add(item["id"])
        if item["type"] == "function_call":
            called.add(item["call_id"])
        elif item["type"] == "function_call_output":
            _check_called(f"input[{index}]", item["call_id"], called)
        items.append(item)
    return items


def messages_of(items: Iterable[Item], earlier: Sequence[Item], media: RequestMedia) -> list[dict[str, Any]]:
    """Return the messages that the items of a conversation make, behind earlier ones.

    What an assistant did in one turn (thinking, text, calls) is one message. media: reads images and audio. Raises as
    `RequestMedia.of_url`; places are in the input.
    """
    messages: list[dict[str, Any]] = []
    places = [f"the earlier item {index}" for index in range(len(earlier))]
    for index, item in enumerate([*earlier, *items]):
        place = places[index] if index < len(earlier) else f"input[{index - len(earlier)}]"
        kind = item["type"]
        if kind == "function_call_output":
            content = _content(f"{place}.output", item["output"], media)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        elif kind == "message" and item["role"] != "assistant":
            content = _content(f"{place}.content", item["content"], media)
            messages.append({"role": item["role"], "content": content})
        else:
            _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item of the assistant's to its last message, or begin the next one."""
    kind = item["type"]
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    has_text = last is not None and bool(last["content"])
    has_calls = last is not None and "tool_calls" in last
    begins = (
        last is None
        or (kind == "reasoning" and (has_text or has_calls))
        or (kind == "message" and has_text and not has_calls)
    )
    if last is None or begins:
        last = {"role": "assistant", "content": []}
        messages.append(last)
    if kind == "message":
        last["content"] += _texts(item["content"])
    elif kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
    else:
        parts = item["content"] or item["summary"]
        known = [last["reasoning_content"]] if "reasoning_content" in last else []
        last["reasoning_content"] = "\n\n".join([*known, *(part["text"] for part in parts)])


def _content(place: str, value: str | Sequence[Mapping[str, str]], media: RequestMedia) -> str | list[Any]:
    """Return a content with its images and audio read."""
    if isinstance(value, str):
        return value
    parts: list[Any] = []
    for index, part in enumerate(value):
        if part["type"] in _MEDIA_PARTS:
            parts.append(_attachment_of(f"{place}[{index}]", part, media))
        else:
            parts += _texts([part])
    return parts


def _attachment_of(place: str, part: Mapping[str, Any], media: RequestMedia) -> Attachment | OmittedAttachment:
    if part["type"] == "input_audio":
        return media.of_audio(f"{place}.input_audio", part["input_audio"])
    name = next(name for name in ("image_url", "file_data", "file_url") if name in part)
    return media.of_url(f"{place}.{name}", part[name])


def _texts(parts: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [{"type": "text", "text": part["refusal" if part["type"] == "refusal" else "text"]} for part in parts]


def _parse_item(place: str, item: object, find: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, Mapping):
        raise InvalidType(f"{place} must be an object, not {type(item).__name__}")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        return _referenced(place, item, find)
    if not isinstance(kind, str):
        raise InvalidType(f"{place}.type must be a text, not {type(kind).__name__}")
    if kind not in _MEMBERS:
        known = ", ".join((*_MEMBERS, "item_reference"))
        raise Unsupported(f"{place}.type {kind[:80]!r} is not supported; an item is one of {known}")
    _check_members(place, kind, item)
    parse = {
        "message": _parse_message,
        "function_call": _parse_call,
        "function_call_output": _parse_output,
        "reasoning": _parse_reasoning,
    }[kind]
    status = item.get("status")
    return {
        "id": _identifier(f"{place}.id", item.get("id")) or new_item_id(kind),
        "type": kind,
        "status": "completed" if status is None else validation.choice(f"{place}.status", status, STATUSES),
        **parse(place, item),
    }


def _referenced(place: str, item: Mapping[Any, Any], find: Callable[[str], Item | None]) -> Item:
    wanted = _identifier(f"{place}.id", item.get("id"))
    if not wanted:
        raise InvalidParams(f"{place} must be an item with a type, or a message with a role")
    found = find(wanted)
    if found is None:
        raise InvalidParams(f"{place}.id: there is no stored item {wanted[:80]!r}; send the item itself")
    return found


def _check_members(place: str, kind: str, item: Mapping[Any, Any]) -> None:
    for name, value in item.items():
        if name in ("type", "id", "status") or name in _MEMBERS[kind]:
            continue
        if name not in _EMPTY_MEMBERS:
            shown = ", ".join(("type", "id", "status", *sorted(_MEMBERS[kind])))
            raise InvalidParams(f"{place}.{str(name)[:80]} is not known; an item of the type {kind} has {shown}")
        if value not in (None, False, "", {"type": "direct"}):
            raise Unsupported(f"{place}.{name} is not supported; leave it out")


def _parse_message(place: str, item: Mapping[Any, Any]) -> Item:
    role = validation.choice(f"{place}.role", item.get("role"), INPUT_ROLES)
    content = item.get("content")
    kinds = ("output_text", "input_text", "refusal") if role == "assistant" else ("input_text", *_MEDIA_PARTS)
    if isinstance(content, str):
        parts = [_text_part(kinds[0], validation.text(f"{place}.content", content))]
    elif not isinstance(content, list):
        raise InvalidType(f"{place}.content must be a text or a list of parts, not {_kind_of(content)}")
    elif not content and role != "assistant":
        raise InvalidParams(f"{place}.content must have at least one part")
    else:
        parts = [_parse_part(f"{place}.content[{index}]", part, kinds) for index, part in enumerate(content)]
    return {"role": role, "content": parts}


def _parse_part(place: str, part: object, kinds: Collection[str]) -> Item:
    if not isinstance(part, Mapping):
        raise InvalidType(f"{place} must be an object with type and text, not {type(part).__name__}")
    kind = part.get("type")
    kind = validation.choice(f"{place}.type", kind, kinds)
    if kind in _MEDIA_PARTS:
        return _parse_media(place, kind, part)
    text_name = "refusal" if kind == "refusal" else "text"
    for name in part:
        if name not in ("type", text_name) and name not in _PART_MEMBERS:
            raise InvalidParams(f"{place}.{str(name)[:80]} is not known; a part has type and {text_name}")
    text = validation.text(f"{place}.{text_name}", part.get(text_name))
    if kind == "refusal":
        return {"type": "refusal", "refusal": text}
    return _text_part("input_text" if "output_text" not in kinds else "output_text", text)


def _parse_media(place: str, kind: str, part: Mapping[Any, Any]) -> Item:
    """Check the shape of an image or audio, which is read when the messages are made."""
    known = _MEDIA_PARTS[kind]
    given = {name: value for name, value in part.items() if name != "type" and value is not None}
    for name in given:
        if name not in known and name not in _PART_MEMBERS:
            raise InvalidParams(f"{place}.{str(name)[:80]} is not known; a part of this type has {', '.join(known)}")
    if kind == "input_audio":
        return {"type": kind, "input_audio": _checked_audio(f"{place}.input_audio", given.get("input_audio"))}
    if "file_id" in given:
        raise Unsupported(f"{place}.file_id: this server keeps no files; send the data themselves")
    check_detail(place, given.get("detail"))
    sources = [name for name in ("image_url", "file_data", "file_url") if name in given]
    if len(sources) != 1:
        wanted = " or ".join(name for name in known if name in ("image_url", "file_data", "file_url"))
        raise InvalidParams(
            f"{place} must have {wanted}, and one of them" if sources else f"{place} must have {wanted}"
        )
    return {"type": kind} | {name: validation.text(f"{place}.{name}", given[name]) for name in known if name in given}


def _checked_audio(place: str, value: object) -> Item:
    """Return the texts of an audio, so that the item can be kept; whether they are a file is found when it is read."""
    if not isinstance(value, Mapping):
        raise InvalidType(f"{place} must be an object with data and format, not {_kind_of(value)}")
    return {str(name): validation.text(f"{place}.{str(name)[:80]}", one) for name, one in value.items()}


def _text_part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def _parse_call(place: str, item: Mapping[Any, Any]) -> Item:
    arguments = item.get("arguments")
    return {
        "call_id": _needed(f"{place}.call_id", item.get("call_id")),
        "name": _needed(f"{place}.name", item.get("name")),
        "arguments": "" if arguments is None else validation.text(f"{place}.arguments", arguments),
    }


def _parse_output(place: str, item: Mapping[Any, Any]) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        kinds = ("input_text", *_MEDIA_PARTS)
        parts = [_parse_part(f"{place}.output[{index}]", part, kinds) for index, part in enumerate(output)]
        output = parts or ""
    elif not isinstance(output, str):
        raise InvalidType(f"{place}.output must be a text or a list of text parts, not {_kind_of(output)}")
    else:
        output = validation.text(f"{place}.output", output)
    return {"call_id": _needed(f"{place}.call_id", item.get("call_id")), "output": output}


def _parse_reasoning(place: str, item: Mapping[Any, Any]) -> Item:
    encrypted = item.get("encrypted_content")
    if encrypted is not None:
        validation.text(f"{place}.encrypted_content", encrypted)
    return {
        "summary": _reasoning_parts(f"{place}.summary", item.get("summary"), "summary_text"),
        "content": _reasoning_parts(f"{place}.content", item.get("content"), "reasoning_text"),
    }


def _reasoning_parts(place: str, parts: object, kind: str) -> list[Item]:
    if parts is None:
        return []
    if not isinstance(parts, list):
        raise InvalidType(f"{place} must be a list of parts, not {type(parts).__name__}")
    checked = []
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise InvalidType(f"{place}[{index}] must be an object with type and text, not {type(part).__name__}")
        validation.choice(f"{place}[{index}].type", part.get("type"), (kind,))
        checked.append({"type": kind, "text": validation.text(f"{place}[{index}].text", part.get("text"))})
    return checked


def _check_called(place: str, call_id: str, called: Collection[str]) -> None:
    if call_id not in called:
        raise InvalidParams(
            f"{place}.call_id {call_id[:80]!r} is of no function_call before it; send the call along, or name the response "
            "that made it as previous_response_id"
        )


def _needed(place: str, value: object) -> str:
    text = validation.text(place, value)
    if not text:
        raise InvalidParams(f"{place} must not be empty")
    return text


def _identifier(place: str, value: object) -> str:
    return "" if value is None else validation.text(place, value)


def _kind_of(value: object) -> str:
    return "null" if value is None else type(value).__name__
