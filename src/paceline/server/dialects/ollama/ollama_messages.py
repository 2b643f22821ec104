"""Map Ollama's messages to the conversation that a chat template renders. Pure; any thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from paceline import validation
from paceline.chat.chat_media import OmittedAttachment
from paceline.chat.conversation import MAX_MESSAGES, MAX_TOOL_CALLS
from paceline.errors import InvalidParams, InvalidType
from paceline.media import Image
from paceline.server.media_input.request_media import RequestMedia

_RENAMED = ("role", "content", "images", "thinking", "tool_calls", "tool_name", "name", "tool_call_id")
"""Members that are converted; others go on to `parse_messages`, which knows or reports them."""


def ollama_conversation(messages: object, media: RequestMedia) -> list[dict[str, Any]]:
    """Return a conversation as `parse_messages` takes it, with images in front of the texts of their messages.

    Calls in Ollama's API need no ids: a result without one belongs to the next call that has none yet, by the tool's name if
    it is given. A result that belongs to no call is kept.

    Raises:
        InvalidParams: A message is malformed.
        ApiException: As `RequestMedia.of_base64`.
    """
    if not isinstance(messages, list):
        raise InvalidType(f"messages must be a list of messages, not {type(messages).__name__}")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"messages must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    converted, open_calls = [], _OpenCalls()
    for index, message in enumerate(messages):
        converted.append(_message(f"messages[{index}]", message, open_calls, media))
    return converted


class _OpenCalls:
    """The calls that have no result yet: their ids and names, in order."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, str] = OrderedDict()
        self._by_name: dict[str, OrderedDict[str, None]] = {}
        self._known: set[str] = set()

    def add(self, place: str, call_id: object, name: str) -> str:
        """Add a call and return its id; of one without, the place is it."""
        given = f"call_{len(self._known)}" if call_id in (None, "") else validation.text(f"{place}.id", call_id)
        self._close(given)
        self._calls[given] = name
        self._by_name.setdefault(name, OrderedDict())[given] = None
        self._known.add(given)
        return given

    def take(self, place: str, call_id: object, name: object) -> str | None:
        """Return the id of the call that a result is of, or the id that it has; None if there is neither."""
        if call_id not in (None, ""):
            wanted = validation.text(f"{place}.tool_call_id", call_id)
            self._close(wanted)
            return wanted
        first = next(iter(self._by_name.get(str(name), ()) if name else self._calls), None)
        if first is not None:
            self._close(first)
        return first

    def _close(self, call_id: str) -> None:
        name = self._calls.pop(call_id, None)
        if name is not None:
            del self._by_name[name][call_id]


def images_of(place: str, images: object, media: RequestMedia) -> list[Image | OmittedAttachment]:
    """Return images that are given as a list of base64. Raises as `RequestMedia.of_base64`."""
    if images is None:
        return []
    if not isinstance(images, list):
        raise InvalidType(f"{place} must be a list of images in base64, not {type(images).__name__}")
    return [media.of_base64(f"{place}[{index}]", one) for index, one in enumerate(images)]


def with_images(text: str, images: list[Image | OmittedAttachment]) -> str | list[Any]:
    """Return a content of images and the text behind them."""
    if not images:
        return text
    return [*images, *([{"type": "text", "text": text}] if text else [])]


def _message(place: str, message: object, open_calls: _OpenCalls, media: RequestMedia) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    text = "" if content is None else validation.text(f"{place}.content", content)
    images = images_of(f"{place}.images", message.get("images"), media)
    converted = {name: value for name, value in message.items() if name not in _RENAMED}
    converted |= {"role": role, "content": None if content is None and not images else with_images(text, images)}
    if role == "tool":
        name = message.get("tool_name") or message.get("name")
        if name is not None:
            converted["name"] = validation.text(f"{place}.tool_name", name)
        call_id = open_calls.take(place, message.get("tool_call_id"), name)
        if call_id is not None:
            converted["tool_call_id"] = call_id
    if message.get("thinking"):
        converted["reasoning_content"] = validation.text(f"{place}.thinking", message["thinking"])
    if calls:
        converted["tool_calls"] = _calls(f"{place}.tool_calls", role, calls, open_calls)
    return converted


def _calls(place: str, role: object, calls: object, open_calls: _OpenCalls) -> list[dict[str, Any]]:
    if role != "assistant":
        raise InvalidParams(f"{place} is for messages of the role assistant, not {role!r:.80}")
    if not isinstance(calls, list):
        raise InvalidType(f"{place} must be a list of calls, not {type(calls).__name__}")
    if len(calls) > MAX_TOOL_CALLS:
        raise InvalidParams(f"{place} must be at most {MAX_TOOL_CALLS} calls, not {len(calls)}")
    return [_call(f"{place}[{index}]", call, open_calls) for index, call in enumerate(calls)]


def _call(place: str, call: object, open_calls: _OpenCalls) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidType(f"{place} must be an object with function")
    function = call["function"]
    name = validation.text(f"{place}.function.name", function.get("name"))
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, (str, Mapping)):
        raise InvalidType(f"{place}.function.arguments must be an object, not {type(arguments).__name__}")
    return {**call, "id": open_calls.add(place, call.get("id"), name), "function": {**function, "arguments": arguments}}
