"""Map Anthropic's messages, blocks and tools to the conversation that a chat template renders. Pure; any thread.

Every error names the place in Anthropic's body. What follows a tool's call directly is its result: results of a message come
before its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from paceline import validation
from paceline.chat import Tool
from paceline.chat.conversation import MAX_ARGUMENTS_BYTES, MAX_ARGUMENTS_DEPTH, MAX_MESSAGES
from paceline.chat.json_values import checked_json, checked_schema
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.media import Image
from paceline.server.media_input.request_media import RequestMedia

ROLES = ("user", "assistant", "system")
_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "cache_control", "citations"),
    "image": ("source", "cache_control"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "cache_control", "caller"),
    "tool_result": ("tool_use_id", "content", "is_error", "cache_control"),
}
"""Known members of each type of block, beside its type."""
_OF_ROLE = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool": ("text", "image"),
}
_SOURCES: Mapping[str, tuple[str, ...]] = {"base64": ("media_type", "data"), "url": ("url",)}
"""Known members of each type of an image's source, beside its type."""
_TOOL_FIELDS = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "defer_loading",
    "allowed_callers", "input_examples",
)  # fmt: skip
_MAX_SHOWN = 80
# A client's own stamp in its system prompt, which differs in every request and would keep prefixes from being shared.
_STAMP = re.compile(r"\A(x-anthropic-billing-header:[^\n]*?\bcch=)[0-9A-Za-z]+(?=;)")


def conversation_of(messages: object, system: object, media: RequestMedia) -> list[dict[str, Any]]:
    """Return a conversation as `parse_messages` takes it, with images among the parts of its contents.

    Consecutive messages of the user, and of the assistant, become one, as Anthropic has it.

    Args:
        messages: The body's.
        system: The body's.
        media: Reads the images.

    Raises:
        InvalidParams: A message or a block is malformed, or a result is of a tool call that no earlier message has.
        Unsupported: A block has what is known but not supported: documents, results of server tools.
        ApiException: As `RequestMedia.of_url`.
    """
    if not isinstance(messages, list):
        raise InvalidType(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidParams("messages must have at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"messages must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    converted: list[dict[str, Any]] = []
    if system is not None:
        converted.append({"role": "system", "content": _system("system", system)})
    calls: set[str] = set()
    for index, message in enumerate(messages):
        for one in _message(f"messages[{index}]", message, calls, media):
            _append(converted, one)
    for one in converted:
        if "reasoning_content" in one:
            one["reasoning_content"] = "".join(one["reasoning_content"])
    _check_end(f"messages[{len(messages) - 1}]", converted[-1])
    return converted


def _check_end(place: str, last: Mapping[str, Any]) -> None:
    """Raise `InvalidParams` where the last message is the assistant's and cannot be continued."""
    if last.get("tool_calls"):
        raise InvalidParams(f"{place} has a tool_use block, and no message with its tool_result follows")


def _append(converted: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = converted[-1] if converted else None
    if last is None or last["role"] != message["role"] or message["role"] not in ("user", "assistant"):
        converted.append(message)
        return
    last["content"] = _parts(last["content"])
    last["content"] += _parts(message["content"])  # in place: copies would take quadratic time
    for name in ("reasoning_content", "tool_calls"):
        if name in message:
            last.setdefault(name, []).extend(message[name])


def _parts(content: str | list[Any]) -> list[Any]:
    if isinstance(content, list):
        return content
    return [_text_part(content)] if content else []


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _system(place: str, system: object) -> str | list[dict[str, str]]:
    """Return the content of a system message."""
    if isinstance(system, str):
        return _STAMP.sub(r"\1", validation.text(place, system))
    blocks = [
        _text_part(_STAMP.sub(r"\1", _text(where, "text", block)))
        for where, _, block in _blocks(place, system, "system")
    ]
    return blocks or ""


def _message(place: str, message: object, calls: set[str], media: RequestMedia) -> list[dict[str, Any]]:
    """Return the messages that one of Anthropic's becomes. calls: ids of all calls so far, which this adds to."""
    if not isinstance(message, Mapping):
        raise InvalidType(f"{place} must be an object with role and content, not {type(message).__name__}")
    _check_members(place, message, ("role", "content"))
    role = validation.choice(f"{place}.role", message.get("role"), ROLES)
    content, place = message.get("content"), f"{place}.content"
    if role == "system":
        return [{"role": role, "content": _system(place, content)}]
    if isinstance(content, str):
        return [{"role": role, "content": validation.text(place, content)}]
    blocks = _blocks(place, content, role)
    if role == "assistant":
        return [_assistant(blocks, calls)]
    if not blocks:
        raise InvalidParams(f"{place} must have at least one block")
    results = [_result(where, block, calls, media) for where, kind, block in blocks if kind == "tool_result"]
    parts = _shown([one for one in blocks if one[1] != "tool_result"], media)
    return [*results, *([{"role": role, "content": parts}] if parts else [])]


def _shown(blocks: list[tuple[str, str, Mapping[str, Any]]], media: RequestMedia) -> list[Any]:
    """Return the parts of text and image blocks."""
    return [
        _image(where, block, media) if kind == "image" else _text_part(_text(where, "text", block))
        for where, kind, block in blocks
    ]


def _image(place: str, block: Mapping[str, Any], media: RequestMedia) -> Image:
    place, source = f"{place}.source", block.get("source")
    if not isinstance(source, Mapping):
        raise InvalidType(f"{place} must be an object with a type, not {type(source).__name__}")
    kind = source.get("type")
    if kind == "file":
        raise Unsupported(f"{place}.type: this server keeps no files; send the data themselves, as base64")
    kind = validation.choice(f"{place}.type", kind, tuple(_SOURCES))
    _check_members(place, source, ("type", *_SOURCES[kind]))
    if kind == "url":
        return media.of_url(f"{place}.url", source.get("url"))
    return media.of_base64(f"{place}.data", source.get("data"), _text(place, "media_type", source))


def _blocks(place: str, content: object, role: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return the blocks of a content, each with its place and its type."""
    if not isinstance(content, list):
        kind = "null" if content is None else type(content).__name__
        raise InvalidType(f"{place} must be a text or a list of blocks, not {kind}")
    found = []
    for index, block in enumerate(content):
        where = f"{place}[{index}]"
        if not isinstance(block, Mapping):
            raise InvalidType(f"{where} must be an object with a type, not {type(block).__name__}")
        kind = validation.text(f"{where}.type", block.get("type"))
        if kind not in _BLOCKS:
            _refuse_block(where, kind)
        if kind not in _OF_ROLE[role]:
            wanted = " or ".join(_OF_ROLE[role])
            raise InvalidParams(f"{where}.type must be {wanted} in a message of the role {role!r}, not {kind!r}")
        _check_members(where, block, ("type", *_BLOCKS[kind]))
        found.append((where, kind, block))
    return found


def _assistant(blocks: list[tuple[str, str, Mapping[str, Any]]], calls: set[str]) -> dict[str, Any]:
    """Return the assistant's message, with its thinking as a list of texts.

    Redacted thinking is left out, which no model here can read.
    """
    texts = [_text_part(_text(where, "text", block)) for where, kind, block in blocks if kind == "text"]
    message: dict[str, Any] = {"role": "assistant", "content": texts or ""}
    thinking = [_text(where, "thinking", block) for where, kind, block in blocks if kind == "thinking"]
    if any(thinking):
        message["reasoning_content"] = thinking
    tool_calls = [_call(where, block) for where, kind, block in blocks if kind == "tool_use"]
    if tool_calls:
        message["tool_calls"] = tool_calls
        calls.update(call["id"] for call in tool_calls)
    return message


def _call(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    given = block.get("input", {})
    if not isinstance(given, Mapping):
        raise InvalidType(f"{place}.input must be an object, not {type(given).__name__}")
    plain = checked_json(f"{place}.input", given, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
    function = {"name": _word(place, "name", block), "arguments": json.dumps(plain, ensure_ascii=False)}
    return {"id": _word(place, "id", block), "type": "function", "function": function}


def _result(place: str, block: Mapping[str, Any], calls: Collection[str], media: RequestMedia) -> dict[str, Any]:
    """Return a tool's message. A chat template has no place for errors, so the text says that it is one."""
    call = _word(place, "tool_use_id", block)
    if call not in calls:
        raise InvalidParams(
            f"{place}.tool_use_id is {call[:_MAX_SHOWN]!r}, and no earlier message has a tool_use block with that id"
        )
    content = block.get("content")
    parts: list[Any] = []
    if isinstance(content, str):
        parts = [_text_part(validation.text(f"{place}.content", content))]
    elif content is not None:
        parts = _shown(_blocks(f"{place}.content", content, "tool"), media)
    is_error = block.get("is_error")
    fails = is_error is not None and validation.boolean(f"{place}.is_error", is_error)
    return {"role": "tool", "tool_call_id": call, "content": _result_content(parts, fails=fails)}


def _result_content(parts: list[Any], *, fails: bool) -> str | list[Any]:
    """Return texts alone as one text."""
    if any(isinstance(one, Image) for one in parts):
        return [_text_part("Error:"), *parts] if fails else parts
    text = "\n".join(one["text"] for one in parts)
    if not fails:
        return text
    return f"Error: {text}" if text else "Error"


def _text(place: str, name: str, block: Mapping[str, Any]) -> str:
    if name not in block:
        raise InvalidParams(f"{place}.{name} is missing")
    return validation.text(f"{place}.{name}", block[name])


def _word(place: str, name: str, block: Mapping[str, Any]) -> str:
    word = _text(place, name, block)
    if not word:
        raise InvalidParams(f"{place}.{name} must not be empty")
    return word


def _check_members(place: str, value: Mapping[str, Any], known: Collection[str]) -> None:
    for name, member in value.items():
        if name not in known and member is not None:
            raise InvalidParams(f"{place}.{name[:_MAX_SHOWN]} is not known; there are {', '.join(known)}")


def _refuse_block(place: str, kind: str) -> NoReturn:
    raise Unsupported(
        f"{place}.type: blocks of the type {kind[:_MAX_SHOWN]!r} are not supported; there are {', '.join(_BLOCKS)}"
    )


# ---- tools


def tools_of(tools: object) -> tuple[tuple[Tool, ...], list[str]]:
    """Return the tools that a request offers, and a warning for each of their fields that is ignored.

    Raises:
        InvalidParams: A tool is malformed.
        Unsupported: A tool is one of Anthropic's own, which Anthropic's servers run or define.
    """
    if tools is None:
        return (), []
    if not isinstance(tools, list):
        raise InvalidType(f"tools must be a list, not {type(tools).__name__}")
    warnings: list[str] = []
    found = tuple(_tool(f"tools[{index}]", tool, warnings) for index, tool in enumerate(tools))
    return found, warnings


def _tool(place: str, tool: object, warnings: list[str]) -> Tool:
    if not isinstance(tool, Mapping):
        raise InvalidType(f"{place} must be an object with name and input_schema, not {type(tool).__name__}")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise Unsupported(
            f"{place}.type: tools of the type {str(kind)[:_MAX_SHOWN]!r} are Anthropic's own and not supported; give a tool "
            "with name, description and input_schema"
        )
    _check_members(place, tool, _TOOL_FIELDS)
    for name, usual in (("defer_loading", False), ("allowed_callers", ["direct"]), ("input_examples", [])):
        if tool.get(name) not in (None, usual):
            warnings.append(f"{place}.{name}: accepted, and without a meaning here")
    description = tool.get("description")
    if "input_schema" not in tool:
        raise InvalidParams(f"{place}.input_schema is missing; it is the JSON schema of the tool's input")
    return Tool(
        _word(place, "name", tool),
        "" if description is None else validation.text(f"{place}.description", description),
        checked_schema(f"{place}.input_schema", tool["input_schema"]),
    )


def tool_choice_of(choice: object, tools: Collection[Tool]) -> tuple[Any, bool | None]:
    """Return the `tool_choice` and `parallel_tool_calls` of `ChatOptions`."""
    if choice is None:
        return None, None
    if not isinstance(choice, Mapping):
        raise InvalidType(f"tool_choice must be an object with a type, not {type(choice).__name__}")
    _check_members("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    kind = validation.choice("tool_choice.type", choice.get("type"), ("auto", "any", "tool", "none"))
    single = choice.get("disable_parallel_tool_use")
    parallel = (
        False if single is not None and validation.boolean("tool_choice.disable_parallel_tool_use", single) else None
    )
    if kind in ("any", "tool") and not tools:
        raise InvalidParams(f"tool_choice.type {kind!r} needs tools, and there are none")
    if kind != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[kind], parallel
    name = _word("tool_choice", "name", choice)
    if all(tool.name != name for tool in tools):
        known = ", ".join(repr(tool.name) for tool in tools)
        raise InvalidParams(f"tool_choice.name is {name[:_MAX_SHOWN]!r}, and tools has {known[:1000]}")
    return {"type": "function", "function": {"name": name}}, parallel
