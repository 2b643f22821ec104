"""The items of a conversation as messages of a chat. Pure; any thread.

    reasoning, message, calls   ─>  one message of the assistant
    the result of a call        ─>  a message of the role tool

Tools that OpenAI runs have items of their own, which the model reads as calls of a function of that name. Some have the result
in the item of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.chat.chat_media import OmittedAttachment
from paceline.media import Attachment
from paceline.server.dialects.responses.input_items import MEDIA_PARTS, Item, is_call, is_output
from paceline.server.dialects.responses.response_tools import CUSTOM_INPUT, ToolNames
from paceline.server.media_input.request_media import RequestMedia

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
    """Return the messages that the items of a conversation make.

    The thinking, text and calls of one turn of the assistant are one message.

    Args:
        items: The input.
        earlier: The items before it.
        media: Reads images and audio.
        names: The functions that stand for tools of the request.

    Raises:
        As `RequestMedia.of_url`; places are in the input.
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
        """Return the assistant's message to add to. begins: returns whether an item begins another message than the last."""
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
        """Add a result: of a call, or of a function that no call was made to."""
        source = {"tool_call_id": self._call_ids.get(call_id, call_id)} if call_id else {}
        if not source and item.get("name"):
            source["name"] = self._function_of(item)
        self.messages.append({"role": "tool", **source, "content": content})

    def _output(self, place: str, item: Item) -> str | list[Any]:
        """Return the content of a result that is an item of its own."""
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
        """Return a content with its images and audio read."""
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
    """Return the arguments of a call as JSON."""
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
