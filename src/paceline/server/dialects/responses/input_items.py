"""The items that a response is made from: checked, completed with their ids, and turned into messages of a chat.

Items are plain JSON in the shape of OpenAI's API: they can be kept and returned. Pure; any thread.

    reasoning, message, calls   ─>  one message of the assistant
    the result of a call        ─>  a message of the role tool

Tools that OpenAI runs have items of their own, which the model reads as calls of a function of that name. Some of these items
have the result in the item of the call.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from paceline import validation
from paceline.chat.conversation import MAX_ARGUMENTS_BYTES, MAX_ARGUMENTS_DEPTH, MAX_MESSAGES, OmittedAttachment
from paceline.chat.message_parts import checked_json
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.media import Attachment
from paceline.server.dialects.request_body import checked_list, checked_object
from paceline.server.dialects.responses.response_tools import CUSTOM_INPUT, InputWarnings, ToolNames
from paceline.server.request_media import RequestMedia, check_detail

Item = dict[str, Any]

INPUT_ROLES = ("user", "system", "developer", "assistant")
STATUSES = (
    "in_progress", "completed", "incomplete", "failed", "searching", "generating", "interpreting", "calling",
)  # fmt: skip

MEDIA_PARTS: Mapping[str, tuple[str, ...]] = {
    "input_image": ("image_url", "detail", "file_id"),
    "input_file": ("file_data", "file_url", "filename", "file_id", "detail"),
    "input_audio": ("input_audio",),
}
"""Parts with images and audio, with their members beside type."""
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
# Members that items of a type may have beside type, id and status; others are ignored with a warning.
_MEMBERS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content", "phase"}),
    "function_call": frozenset({"call_id", "name", "namespace", "arguments"}),
    "function_call_output": frozenset({"call_id", "output", "name", "namespace"}),
    "custom_tool_call": frozenset({"call_id", "name", "namespace", "input"}),
    "custom_tool_call_output": frozenset({"call_id", "output", "name", "namespace"}),
    "reasoning": frozenset({"summary", "content", "encrypted_content"}),
}
# Members that say nothing to a model.
_SILENT_MEMBERS = frozenset({"type", "id", "status", "caller", "async", "created_by", "metadata"})
# Members of a part beside type and its text; none changes what the model reads.
_PART_MEMBERS = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def new_item_id(kind: str) -> str:
    """Return an id for an item of this type."""
    return f"{_PREFIXES.get(kind, 'item')}_{secrets.token_hex(16)}"


def is_call(kind: str) -> bool:
    """Return whether items of this type are calls of a tool."""
    return kind.endswith("_call") or kind == "program"


def is_output(kind: str) -> bool:
    """Return whether items of this type are the results of calls."""
    return kind.endswith("_output")


def added_tools(items: Iterable[tuple[str, Item]]) -> list[tuple[str, object]]:
    """Return the lists of tools that items add to the tools of the request, each with its place. items: with their places."""
    kinds = ("additional_tools", "tool_search_output")
    return [(f"{place}.tools", item.get("tools")) for place, item in items if item["type"] in kinds]


def parse_items(
    value: object,
    earlier: Sequence[Item] = (),
    find: Callable[[str], Item | None] = lambda _: None,
    warnings: InputWarnings | None = None,
) -> list[Item]:
    """Check the input of a response and return its items, each whole: with type, id and status.

    Items of types that are not known here are kept. An id that an item before has already is replaced by a new one: lists of
    items are paged through by their ids.

    Args:
        value: A text, which is the user's, or a list of items.
        earlier: The items that come before.
        find: Returns the item that an `item_reference` names.
        warnings: Collects the items and members that are left out.

    Raises:
        InvalidParams: An item is malformed; the message names the place, for example input[2].content[0].text.
        Unsupported: A part is known but not supported: files by id.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    value = checked_list("input", value, "a text or a list of items")
    if not value and not earlier:
        raise InvalidParams("input must have at least one item")
    if len(value) + len(earlier) > MAX_MESSAGES:
        raise InvalidParams(f"input must have at most {MAX_MESSAGES} items, not {len(value) + len(earlier)}")
    reader = _ItemReader(find, InputWarnings() if warnings is None else warnings)
    ids = {item["id"] for item in earlier}
    items = []
    for index, given in enumerate(value):
        item = reader.read(f"input[{index}]", given)
        if item["id"] in ids:
            item = {**item, "id": new_item_id(item["type"])}
        ids.add(item["id"])
        items.append(item)
    return items


class _ItemReader:
    """Reads the items of one input."""

    def __init__(self, find: Callable[[str], Item | None], warnings: InputWarnings) -> None:
        self._find, self._warnings = find, warnings
        self._readers: Mapping[str, Callable[[str, Mapping[Any, Any]], Item]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._call_output,
            "custom_tool_call": self._call,
            "custom_tool_call_output": self._call_output,
            "reasoning": self._reasoning,
        }

    def read(self, place: str, item: object) -> Item:
        """Return an item, checked and whole."""
        item = checked_object(place, item, "an object")
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference"
        if kind == "item_reference":
            return self._referenced(place, item)
        kind = validation.text(f"{place}.type", kind)
        if kind not in self._readers and not is_call(kind) and not is_output(kind) and "content" in item:
            self._warnings.add(place, f"the type {kind[:80]!r} is not known, and is read as a message")
            kind, item = "message", {"role": "user", **item}
        if kind in _MEMBERS:
            self._note_members(place, item, _MEMBERS[kind], f"an item of the type {kind}")
        read, status = self._readers.get(kind, self._other), item.get("status")
        return {
            "id": _optional_text(place, item, "id") or new_item_id(kind),
            "type": kind,
            "status": "completed" if status is None else validation.choice(f"{place}.status", status, STATUSES),
            **read(place, item),
        }

    def _referenced(self, place: str, item: Mapping[Any, Any]) -> Item:
        wanted = _optional_text(place, item, "id")
        if not wanted:
            raise InvalidParams(f"{place} must be an item with a type, or a message with a role")
        found = self._find(wanted)
        if found is None:
            raise InvalidParams(f"{place}.id: there is no stored item {wanted[:80]!r}; send the item itself")
        return found

    def _message(self, place: str, item: Mapping[Any, Any]) -> Item:
        role = validation.choice(f"{place}.role", item.get("role"), INPUT_ROLES)
        kind, place = "output_text" if role == "assistant" else "input_text", f"{place}.content"
        content = [] if item.get("content") is None else item["content"]
        if isinstance(content, str):
            parts = [_text_part(kind, validation.text(place, content))]
        elif not isinstance(content, list):
            raise InvalidType(f"{place} must be a text or a list of parts, not {type(content).__name__}")
        else:
            parts = [self._part(f"{place}[{index}]", part, kind) for index, part in enumerate(content)]
        if role == "assistant" and any(part["type"] in MEDIA_PARTS for part in parts):
            self._warnings.add(place, "images and audio of the assistant are left out; a text stands in their place")
        return {"role": role, "content": parts}

    def _part(self, place: str, part: object, text_kind: str) -> Item:
        """Return a part of a content or output. text_kind: the type of its texts."""
        part = checked_object(place, part, "an object with type and text")
        kind = part.get("type")
        if kind == "computer_screenshot":
            kind = "input_image"
        if not isinstance(kind, str) or not isinstance(part.get("text"), str):  # a text is one, whatever its type
            kind = validation.choice(f"{place}.type", kind, (*_TEXT_PARTS, *MEDIA_PARTS))
        if kind in MEDIA_PARTS:
            return self._media(place, kind, part)
        name = "refusal" if kind == "refusal" else "text"
        self._note_members(place, part, (name, *_PART_MEMBERS), "a part")
        text = part.get(name)
        text = "" if text is None and name in part else validation.text(f"{place}.{name}", text)
        return {"type": "refusal", "refusal": text} if kind == "refusal" else _text_part(text_kind, text)

    def _note_members(self, place: str, given: Mapping[Any, Any], known: Collection[str], kind: str) -> None:
        for name, value in given.items():
            if name not in known and name not in _SILENT_MEMBERS and value is not None:
                self._warnings.add_unknown(
                    place, name, f"the member {str(name)[:80]!r} of {kind} has no effect here and was ignored"
                )

    def _media(self, place: str, kind: str, part: Mapping[Any, Any]) -> Item:
        """Check the shape of an image or audio, which is read when the messages are made."""
        known = MEDIA_PARTS[kind]
        given = {name: value for name, value in part.items() if name != "type" and value is not None}
        self._note_members(place, part, (*known, *_PART_MEMBERS), "a part")
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
        texts = {name: validation.text(f"{place}.{name}", given[name]) for name in known if name in given}
        return {"type": kind} | texts

    def _call(self, place: str, item: Mapping[Any, Any]) -> Item:
        call: Item = {}
        for name in ("call_id", "name"):
            call[name] = validation.text(f"{place}.{name}", item.get(name))
            if not call[name]:
                raise InvalidParams(f"{place}.{name} must not be empty")
        if namespace := _optional_text(place, item, "namespace"):
            call["namespace"] = namespace
        given = "input" if item["type"] == "custom_tool_call" else "arguments"
        return {**call, given: _optional_text(place, item, given)}

    def _call_output(self, place: str, item: Mapping[Any, Any]) -> Item:
        output = item.get("output")
        if isinstance(output, list):
            parts = [self._part(f"{place}.output[{index}]", part, "input_text") for index, part in enumerate(output)]
            output = parts or ""
        elif output is None and "output" in item:
            output = ""
        elif not isinstance(output, str):
            kind = "null" if output is None else type(output).__name__
            raise InvalidType(f"{place}.output must be a text or a list of text parts, not {kind}")
        else:
            output = validation.text(f"{place}.output", output)
        names = {
            name: validation.text(f"{place}.{name}", item[name])
            for name in ("call_id", "name", "namespace")
            if item.get(name)
        }
        return {**names, "output": output}

    def _reasoning(self, place: str, item: Mapping[Any, Any]) -> Item:
        _optional_text(place, item, "encrypted_content")
        return {
            "summary": _reasoning_parts(f"{place}.summary", item.get("summary"), "summary_text"),
            "content": _reasoning_parts(f"{place}.content", item.get("content"), "reasoning_text"),
        }

    def _other(self, place: str, item: Mapping[Any, Any]) -> Item:
        """Return the members of an item of another type: a call of a tool that OpenAI runs, a result, or an unknown item."""
        members = {name: value for name, value in item.items() if name not in ("type", "id", "status")}
        members = checked_json(place, members, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        for name in ("call_id", "name", "namespace", "server_label"):
            if members.get(name) is not None:
                validation.text(f"{place}.{name}", members[name])
        kind = str(item["type"])
        if kind == "image_generation_call" and members.get("result") is not None:
            validation.text(f"{place}.result", members["result"])
        if is_output(kind):
            members.setdefault("call_id", item.get("id"))
        elif not is_call(kind) and kind != "additional_tools":
            self._warnings.add(place, f"the item {kind[:80]!r} is left out: it has nothing that this model can read")
        return dict(members)


def _checked_audio(place: str, value: object) -> Item:
    """Return the members of an audio as texts, so that the item can be kept. The file is checked when it is read."""
    if not isinstance(value, Mapping):
        kind = "null" if value is None else type(value).__name__
        raise InvalidType(f"{place} must be an object with data and format, not {kind}")
    return {str(name): validation.text(f"{place}.{str(name)[:80]}", text) for name, text in value.items()}


def _text_part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def _reasoning_parts(place: str, parts: object, kind: str) -> list[Item]:
    if parts is None:
        return []
    parts = checked_list(place, parts, "a list of parts")
    checked = []
    for index, given in enumerate(parts):
        part = checked_object(f"{place}[{index}]", given, "an object with type and text")
        checked.append({"type": kind, "text": validation.text(f"{place}[{index}].text", part.get("text"))})
    return checked


def _optional_text(place: str, item: Mapping[Any, Any], name: str) -> str:
    return "" if item.get(name) is None else validation.text(f"{place}.{name}", item[name])


# Members of calls that are neither arguments nor results.
_NO_ARGUMENTS = frozenset(
    {
        "id", "type", "status", "call_id", "name", "namespace", "caller", "created_by", "execution", "server_label",
        "approval_request_id", "fingerprint", "pending_safety_checks", "environment", "container_id",
    }
)  # fmt: skip
_RESULTS = ("output", "outputs", "results", "result", "error")
_NOT_KEPT = "(the result is not part of this conversation)"
# Calls whose results are items of their own.
_CLIENT_CALLS = frozenset(
    {
        "function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call", "computer_call",
        "tool_search_call", "program",
    }
)  # fmt: skip


def messages_of(
    items: Iterable[Item], earlier: Sequence[Item], media: RequestMedia, names: ToolNames | None = None
) -> list[dict[str, Any]]:
    """Return the messages of a conversation. The thinking, text and calls of one turn of the assistant are one message.

    Args:
        items: The input.
        earlier: The items before it.
        media: Reads images and audio.
        names: The functions that stand for tools of the request.

    Raises:
        RequestError: As `RequestMedia.of_url`; places are in the input.
    """
    writer = _MessageWriter(media, ToolNames() if names is None else names)
    for index, item in enumerate(earlier):
        writer.add(f"the earlier item {index}", item)
    for index, item in enumerate(items):
        writer.add(f"input[{index}]", item)
    return writer.messages


class _MessageWriter:
    """Writes messages item by item."""

    def __init__(self, media: RequestMedia, names: ToolNames) -> None:
        self.messages: list[dict[str, Any]] = []
        self._media, self._names = media, names
        self._call_ids: dict[str, str] = {}  # by the ids of items, which some results name

    def add(self, place: str, item: Item) -> None:
        """Add an item. An item that is no message, thinking, call or result is left out."""
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            content = self._content(f"{place}.content", item["content"])
            self.messages.append({"role": item["role"], "content": content})
        elif kind == "message":
            last = self._turn(begins=lambda last: bool(last["content"]) and "tool_calls" not in last)
            last["content"] += _texts(item["content"])
        elif kind == "reasoning":
            last = self._turn(begins=lambda last: bool(last["content"]) or "tool_calls" in last)
            known = [last["reasoning_content"]] if "reasoning_content" in last else []
            parts = item["content"] or item["summary"]
            last["reasoning_content"] = "\n\n".join([*known, *(part["text"] for part in parts)])
        elif is_call(kind):
            self._add_call(place, item)
        elif is_output(kind):
            self._add_result(item, item.get("call_id"), self._output(place, item))

    def _turn(self, begins: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the assistant's message to add to. begins: returns whether the item begins a message after the last one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or begins(self.messages[-1]):
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]

    def _add_call(self, place: str, item: Item) -> None:
        call_id: str = item.get("call_id") or item["id"]
        self._call_ids[item["id"]] = call_id
        function = {"name": self._function_of(item), "arguments": _arguments_of(item)}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn(begins=lambda _: False).setdefault("tool_calls", []).append(call)
        if item["type"] in _CLIENT_CALLS:
            return
        results = [name for name in _RESULTS if item.get(name) is not None]
        if item["type"] == "image_generation_call" and "result" in results:
            self._add_result(item, call_id, [self._media.of_url(f"{place}.result", item["result"])])
            return
        found = [self._result(f"{place}.{name}", item[name]) for name in results]
        self._add_result(item, call_id, found[0] if len(found) == 1 else _joined(found) or _NOT_KEPT)

    def _function_of(self, item: Item) -> str:
        name = item.get("name")
        if name:
            return self._names.function_of(name, item.get("namespace") or item.get("server_label") or "")
        kind: str = item["type"]
        return kind.removesuffix("_call")

    def _add_result(self, item: Item, call_id: str | None, content: str | list[Any]) -> None:
        """Add the result of a call, or of a function that was never called."""
        source = {"tool_call_id": self._call_ids.get(call_id, call_id)} if call_id else {}
        if not source and item.get("name"):
            source["name"] = self._function_of(item)
        self.messages.append({"role": "tool", **source, "content": content})

    def _output(self, place: str, item: Item) -> str | list[Any]:
        if item["type"] in ("function_call_output", "custom_tool_call_output"):
            return self._content(f"{place}.output", item["output"])
        if item["type"] == "tool_search_output":
            return _json([tool.get("name") for tool in item.get("tools") or () if isinstance(tool, Mapping)])
        name = next((name for name in _RESULTS if item.get(name) is not None), None)
        return "" if name is None else self._result(f"{place}.{name}", item[name])

    def _result(self, place: str, value: Any) -> str | list[Any]:
        """Return the content of a result of any shape: its texts and images, everything else as JSON."""
        if isinstance(value, str):
            return value
        found: list[Any] = []
        for index, part in enumerate(value if isinstance(value, list) else [value]):
            inner = f"{place}[{index}]" if isinstance(value, list) else place
            url = part.get("image_url") if isinstance(part, Mapping) else None
            text = part.get("text") if isinstance(part, Mapping) and "type" in part else None
            if isinstance(url, str):
                found.append(self._media.of_url(f"{inner}.image_url", url))
            else:
                found.append(_text(text if isinstance(text, str) else _json(part)))
        return found

    def _content(self, place: str, value: str | Sequence[Mapping[str, str]]) -> str | list[Any]:
        if isinstance(value, str):
            return value
        parts: list[Any] = []
        for index, part in enumerate(value):
            if part["type"] in MEDIA_PARTS:
                parts.append(self._attachment(f"{place}[{index}]", part))
            else:
                parts += _texts([part])
        return parts

    def _attachment(self, place: str, part: Mapping[str, Any]) -> Attachment | OmittedAttachment:
        if part["type"] == "input_audio":
            return self._media.of_audio(f"{place}.input_audio", part["input_audio"])
        name = next(name for name in ("image_url", "file_data", "file_url") if name in part)
        return self._media.of_url(f"{place}.{name}", part[name])


def _arguments_of(item: Item) -> str:
    if item["type"] == "custom_tool_call":
        return _json({CUSTOM_INPUT: item["input"]})
    given = item.get("arguments")
    if given is not None:
        return given if isinstance(given, str) else _json(given)
    members = {name: value for name, value in item.items() if name not in _NO_ARGUMENTS and name not in _RESULTS}
    members = {name: value for name, value in members.items() if value is not None}
    values = list(members.values())
    return _json(values[0] if len(values) == 1 and isinstance(values[0], Mapping) else members)


def _texts(parts: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    return [_text(_text_of(part)) for part in parts]


def _text_of(part: Mapping[str, str]) -> str:
    if part["type"] in MEDIA_PARTS:
        return "[audio omitted]" if part["type"] == "input_audio" else "[image omitted]"
    return part["refusal" if part["type"] == "refusal" else "text"]


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _joined(contents: Sequence[str | list[Any]]) -> list[Any]:
    parts = ([_text(content)] if isinstance(content, str) else content for content in contents)
    return [part for content in parts for part in content]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
