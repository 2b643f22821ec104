"""Map Anthropic's messages, blocks and tools to the conversation that a chat template renders. Pure; any thread.

Every error names the place in Anthropic's body. Results of tools follow their calls directly: the results of a message come
before its text. Blocks without a place in chat templates become text: with the block's type as a tag around it and every member
that a reader understands. Ids, signatures, encrypted contents and files in base64 that are no texts are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import validation
from paceline.chat import Tool
from paceline.chat.conversation import MAX_ARGUMENTS_BYTES, MAX_ARGUMENTS_DEPTH, MAX_MESSAGES
from paceline.chat.message_parts import checked_json, checked_schema
from paceline.errors import InvalidParams, InvalidType, Unsupported
from paceline.media.source_bytes import decoded_base64
from paceline.server.dialects.request_body import check_fields, checked_list, checked_object
from paceline.server.request_media import RequestMedia

_MAX_DEPTH = 32
_BODIES = frozenset(("text", "content", "thinking"))
_HIDDEN = frozenset(
    ("type", "id", "tool_use_id", "cache_control", "caller", "citations", "data", "file_id", "media_type", "signature")
)


def tagged(kind: str, text: str) -> str:
    """Return a text between tags of the type of its block."""
    return f"<{kind}>\n{text}\n</{kind}>" if text else f"<{kind} />"


def readable_text(place: str, block: Mapping[str, Any]) -> str:
    """Return the readable members of a block, one a line; empty if there are none.

    Raises `InvalidParams` for a block that is nested too deeply and for text that UTF-8 cannot carry. It names the member of
    the block: places of every text within would take quadratic time.
    """
    lines: list[str] = []
    for name, member in block.items():
        _add_member(lines, f"{place}.{name[:80]}", name, member, _MAX_DEPTH)
    return "\n".join(lines)


def plain_document(place: str, source: Mapping[str, Any]) -> str | None:
    """Return the text of a document's source; None for a source that has no text, such as a PDF or the id of a file.

    Raises `InvalidParams` for text that UTF-8 cannot carry.
    """
    kind, data = source.get("type"), source.get("data")
    if kind == "text":
        return validation.text(f"{place}.data", data)
    media_type = source.get("media_type")
    if kind != "base64" or not isinstance(media_type, str) or not media_type.startswith("text/"):
        return None
    try:
        return decoded_base64(f"{place}.data", validation.text(f"{place}.data", data)).decode()
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{place}.data must be a text in UTF-8, encoded in base64: {error}") from None


def _add_lines(lines: list[str], place: str, value: object, depth: int) -> None:
    if depth == 0:
        raise InvalidParams(f"{place} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        if value:
            lines.append(validation.text(place, value))
    elif isinstance(value, list):
        for item in value:
            _add_lines(lines, place, item, depth - 1)
    elif isinstance(value, Mapping):
        for name, member in value.items():
            _add_member(lines, place, name, member, depth)


def _add_member(lines: list[str], place: str, name: str, member: object, depth: int) -> None:
    if name in _HIDDEN or name.startswith("encrypted_"):
        return
    if name == "source" and isinstance(member, Mapping) and isinstance(member.get("data"), str):
        if text := plain_document(place, member):
            lines.append(text)
    elif name == "input":
        plain = checked_json(place, member, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        lines.append(f"{name}: {json.dumps(plain, ensure_ascii=False)}")
    elif name in _BODIES or isinstance(member, (list, Mapping)):
        _add_lines(lines, place, member, depth - 1)
    elif member not in (None, ""):
        shown = member if isinstance(member, str) else json.dumps(member)
        lines.append(validation.text(place, f"{name}: {shown}"))


ROLES = ("user", "assistant", "system")
# Members of messages: those of requests, and those of responses that clients send back.
_MEMBERS = frozenset(
    {
        "role", "content", "id", "type", "model", "stop_reason", "stop_sequence", "stop_details", "usage", "container",
        "context_management",
    }
)  # fmt: skip
_SYSTEM_MEMBERS: Mapping[str, Any] = {"clear_at": "never", "output_config": {}}
"""Members of system messages, with the values that change nothing."""
_SOURCES = ("base64", "url", "file")
# Blocks of Anthropic's servers that say nothing to another model.
_LEFT_OUT = frozenset(("redacted_thinking", "fallback", "mcp_tool_listing"))
_TOOL_CHANGES = ("tool_addition", "tool_removal")
# Blocks that the prompt shows as text without a warning: the text has all of their meaning.
_READABLE = frozenset(
    (
        "advisor_tool_result", "bash_code_execution_tool_result", "browser_state", "code_execution_tool_result", "compaction",
        "mcp_tool_result", "mcp_tool_use", "search_result", "server_tool_use", "text_editor_code_execution_tool_result",
        "thinking", "tool_reference", "tool_result", "tool_search_tool_result", "tool_use", "web_fetch_tool_result",
        "web_search_tool_result",
    )
)  # fmt: skip
_TOOL_FIELDS = (
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "defer_loading",
    "allowed_callers", "input_examples",
)  # fmt: skip
_MAX_SHOWN = 80
_MAX_HINTS = 64  # the search for the nearest known name takes long, and responses show fewer warnings
# The line that Claude Code puts first into its system prompt: a stamp for Anthropic's accounts, such as
# "x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=cli; cch=00000;". Its values differ between sessions, and
# would keep prefixes from being shared.
_STAMP = re.compile(r"\Ax-anthropic-billing-header:(?:[ \t]*\w+=[^;\n]*;)+[ \t]*\n?")

Block = tuple[str, str, Mapping[str, Any]]
"""A content block with its place and its type."""


@dataclass(frozen=True, slots=True)
class ToolChange:
    """A block that changes the tools from its message on.

    Attributes:
        place: The place of the tool in the body.
        name: The tool's name.
        definition: The tool; None if the block only names it.
        is_removal: Whether the block removes the tool.
    """

    place: str
    name: str
    definition: Mapping[str, Any] | None
    is_removal: bool


@dataclass(frozen=True, slots=True)
class AnthropicConversation:
    """The messages of a body as `parse_messages` takes them, with attachments among the parts of their contents.

    Attributes:
        messages: The conversation.
        tool_changes: Changes of the tools, in order.
        warnings: Sentences about blocks that were left out or altered.
    """

    messages: list[dict[str, Any]]
    tool_changes: tuple[ToolChange, ...]
    warnings: tuple[str, ...]


def conversation_of(messages: object, system: object, media: RequestMedia) -> AnthropicConversation:
    """Return the conversation of a body. Consecutive messages of the user, and of the assistant, become one.

    Raises `InvalidParams` for a malformed message or block, and `ApiException` as `RequestMedia.of_url`.
    """
    messages = checked_list("messages", messages, "a list of messages")
    if not messages:
        raise InvalidParams("messages must have at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidParams(f"messages must have at most {MAX_MESSAGES} messages, not {len(messages)}; leave some out")
    reader = _MessageReader(media)
    converted: list[dict[str, Any]] = []
    if system is not None:
        converted.append({"role": "system", "content": reader.system_content("system", system)})
    for index, given in enumerate(messages):
        for message in reader.messages_of(f"messages[{index}]", given):
            _append(converted, message)
    if not converted or all(message.get("content") is None for message in messages):
        raise InvalidParams("messages[0].content is missing; it is a text or a list of blocks")
    for message in converted:
        if "reasoning_content" in message:
            message["reasoning_content"] = "".join(message["reasoning_content"])
    return AnthropicConversation(converted, tuple(reader.tool_changes), reader.warnings())


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


class _MessageReader:
    """Reads the messages of one body, and collects the changes of tools and the warnings."""

    def __init__(self, media: RequestMedia) -> None:
        self.tool_changes: list[ToolChange] = []
        self._media = media
        self._altered: dict[str, list[str]] = {}  # places, by the sentence about them

    def warnings(self) -> tuple[str, ...]:
        """Return a warning for each kind of block that was left out or altered."""
        return tuple(
            f"{places[0]}: {sentence}{f' (and {len(places) - 1} more)' if len(places) > 1 else ''}"
            for sentence, places in self._altered.items()
        )

    def messages_of(self, place: str, message: object) -> Iterator[dict[str, Any]]:
        """Yield the messages that a message of Anthropic's becomes."""
        message = checked_object(place, message, "an object with role and content")
        role = validation.choice(f"{place}.role", message.get("role"), ROLES)
        self._note_members(place, message, _SYSTEM_MEMBERS if role == "system" else {})
        content = message.get("content")
        if role == "system":
            found = self.system_content(f"{place}.content", content)
            if found or isinstance(content, str):
                yield {"role": role, "content": found}
        elif content is None or isinstance(content, str):
            yield {"role": role, "content": validation.text(f"{place}.content", content or "")}
        elif role == "assistant":
            yield from self._assistant(_blocks(f"{place}.content", content))
        else:
            yield from self._user(_blocks(f"{place}.content", content))

    def system_content(self, place: str, content: object) -> str | list[Any]:
        """Return the content of a system message."""
        if content is None or isinstance(content, str):
            return _STAMP.sub("", validation.text(place, content or ""))
        parts: list[Any] = []
        for block in _blocks(place, content):
            found = self._parts_of(block, "system")
            if block[1] == "text":
                found = [_text_part(text) for text in (_STAMP.sub("", found[0]["text"]),) if text]
            parts += found
        return parts or ""

    def _note_members(self, place: str, message: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
        """Warn about members that have no effect. A member with its usual value needs no warning."""
        for name, value in message.items():
            if name not in _MEMBERS and value is not None and (name not in usual or value != usual[name]):
                self._warn(
                    place, f"the member {str(name)[:_MAX_SHOWN]!r} of a message has no effect here and was ignored"
                )

    def _user(self, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
        for block in blocks:
            if block[1] == "tool_result":
                yield self._result(block)
        parts = [part for block in blocks if block[1] != "tool_result" for part in self._parts_of(block, "user")]
        if parts or not blocks:
            yield {"role": "user", "content": parts or ""}

    def _assistant(self, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
        """Yield the assistant's message, with its thinking as a list of texts, and the results among its blocks."""
        parts: list[Any] = []
        thinking: list[str] = []
        calls: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for block in blocks:
            place, kind, members = block
            if kind == "thinking":
                thinking.append(_text(place, "thinking", members))
            elif kind == "tool_use":
                calls.append(_call(place, members))
            elif kind == "tool_result":
                results.append(self._result(block))
            else:
                parts += self._parts_of(block, "assistant")
        message: dict[str, Any] = {"role": "assistant", "content": parts or ""}
        if any(thinking):
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls
        yield message
        yield from results

    def _result(self, block: Block) -> dict[str, Any]:
        """Return a tool's message. A chat template has no place for errors: the text begins with "Error"."""
        place, _, members = block
        content, parts = members.get("content"), []
        if isinstance(content, str):
            parts = [_text_part(validation.text(f"{place}.content", content))]
        elif content is not None:
            for inner in _blocks(f"{place}.content", content):
                parts += self._parts_of(inner, "tool")
        is_error = members.get("is_error")
        fails = is_error is not None and validation.boolean(f"{place}.is_error", is_error)
        message = {"role": "tool", "content": _result_content(parts, fails=fails)}
        call = _text(place, "tool_use_id", members)
        return {**message, "tool_call_id": call} if call else message

    def _parts_of(self, block: Block, role: str) -> list[Any]:
        place, kind, members = block
        if kind == "text":
            return [_text_part(_text(place, "text", members))]
        if kind == "image":
            return [self._image(place, members, role)]
        if kind == "document":
            return self._document(place, members, role)
        if kind in _TOOL_CHANGES:
            self._note_change(place, members, is_removal=kind == "tool_removal")
            return []
        if kind in _LEFT_OUT:
            self._warn(place, f"blocks of the type {kind} are left out, which no model here can read")
            return []
        return [self._other(place, kind, members)]

    def _other(self, place: str, kind: str, block: Mapping[str, Any]) -> dict[str, str]:
        if kind == "container_upload":
            return self._omitted(place, kind, "this server keeps no files; the model only reads that there was one")
        if kind not in _READABLE:
            self._warn(place, f"blocks of the type {kind[:_MAX_SHOWN]!r} are not known; the model reads their texts")
        return _text_part(tagged(kind[:_MAX_SHOWN], readable_text(place, block)))

    def _image(self, place: str, block: Mapping[str, Any], role: str) -> Any:
        """Return an image, or the part that replaces it."""
        if role == "assistant":
            return self._omitted(place, "image", "images in messages of the assistant are not shown to the model")
        place, source = f"{place}.source", block.get("source")
        source = checked_object(place, source, "an object with a type")
        kind = validation.choice(f"{place}.type", source.get("type"), _SOURCES)
        if kind == "file":
            raise Unsupported(f"{place}.type: this server keeps no files; send the data themselves, as base64")
        if kind == "url":
            return self._media.of_url(f"{place}.url", source.get("url"))
        return self._media.of_base64(f"{place}.data", source.get("data"), _text(place, "media_type", source))

    def _document(self, place: str, block: Mapping[str, Any], role: str) -> list[Any]:
        """Return a document's title, context and text, with its images. A document within it becomes text."""
        source = block.get("source")
        source = checked_object(f"{place}.source", source, "an object with a type")
        about = readable_text(place, {name: block.get(name) for name in ("title", "context")})
        place, kind, inner = f"{place}.source", source.get("type"), source.get("content")
        if kind == "content" and isinstance(inner, list):
            parts = []
            for found in _blocks(f"{place}.content", inner):
                if found[1] == "document":  # no recursion: a body may nest documents as deep as its sender likes
                    parts.append(_text_part(tagged("document", readable_text(found[0], found[2]))))
                else:
                    parts += self._parts_of(found, role)
        elif kind == "content":
            parts = [_text_part(validation.text(f"{place}.content", inner))]
        elif (text := plain_document(place, source)) is not None:
            parts = [_text_part(text)]
        else:
            url = readable_text(place, {"url": source.get("url")})
            sentence = "this server reads no PDFs and no files by URL or id; send the text of the document"
            parts = [*([_text_part(url)] if url else []), self._omitted(place, "document", sentence)]
        if all(isinstance(part, Mapping) for part in parts):
            texts = [about, *(part["text"] for part in parts)]
            return [_text_part(tagged("document", "\n".join(text for text in texts if text)))]
        return [_text_part(f"<document>\n{about}" if about else "<document>"), *parts, _text_part("</document>")]

    def _note_change(self, place: str, block: Mapping[str, Any], *, is_removal: bool) -> None:
        place, tool = f"{place}.tool", block.get("tool")
        tool = checked_object(place, tool, "an object with a type")
        if tool.get("type") == "tool_reference":
            self.tool_changes.append(ToolChange(place, _word(place, "name", tool), None, is_removal))
        elif tool.get("type") == "tool_definition" and not is_removal:
            definition = tool.get("definition")
            definition = checked_object(f"{place}.definition", definition, "a tool, an object")
            name = definition.get("name")
            self.tool_changes.append(
                ToolChange(f"{place}.definition", name if isinstance(name, str) else "", definition, is_removal)
            )
        else:
            self._warn(place, "tools of MCP servers are left out, which this server does not connect to")

    def _omitted(self, place: str, kind: str, sentence: str) -> dict[str, str]:
        self._warn(place, sentence)
        return _text_part(f"[{kind.replace('_', ' ')} omitted]")

    def _warn(self, place: str, sentence: str) -> None:
        self._altered.setdefault(sentence, []).append(place)


def _blocks(place: str, content: object) -> list[Block]:
    content = checked_list(place, content, "a text or a list of blocks")
    found = []
    for index, given in enumerate(content):
        where = f"{place}[{index}]"
        block = checked_object(where, given, "an object with a type")
        found.append((where, validation.text(f"{where}.type", block.get("type")), block))
    return found


def _call(place: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call. An input that is no object is kept as text: a client stores the text that a model wrote."""
    given = block.get("input")
    if isinstance(given, str):
        arguments = validation.text(f"{place}.input", given)
    else:
        plain = checked_json(f"{place}.input", {} if given is None else given, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        arguments = json.dumps(plain, ensure_ascii=False)
    call = {"type": "function", "function": {"name": _word(place, "name", block), "arguments": arguments}}
    return {"id": _word(place, "id", block), **call}


def _result_content(parts: list[Any], *, fails: bool) -> str | list[Any]:
    if not all(isinstance(part, Mapping) for part in parts):
        return [_text_part("Error:"), *parts] if fails else parts
    text = "\n".join(part["text"] for part in parts)
    if not fails:
        return text
    return f"Error: {text}" if text else "Error"


def _text(place: str, name: str, block: Mapping[str, Any]) -> str:
    """Return a member that is a text; null is an empty text."""
    if name not in block:
        raise InvalidParams(f"{place}.{name} is missing")
    value = block[name]
    return "" if value is None else validation.text(f"{place}.{name}", value)


def _word(place: str, name: str, block: Mapping[str, Any]) -> str:
    word = _text(place, name, block)
    if not word:
        raise InvalidParams(f"{place}.{name} must not be empty")
    return word


# ---- tools


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a body that the model may call.

    Attributes:
        tools: The functions. Functions with `defer_loading` come last: when a client loads more of them, the head of the
            prompt stays as it is.
        left_out: The types of the other tools, by name: Anthropic's servers run or define them.
        warnings: Sentences about tools that were left out and about their members that change nothing here.
    """

    tools: tuple[Tool, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def tools_of(tools: object, changes: Sequence[ToolChange] = (), *, strict: bool = False) -> OfferedTools:
    """Return the tools that a body offers at the end of its conversation.

    strict: whether unknown members are refused. Raises `InvalidParams` for a malformed tool.
    """
    if tools is not None and not isinstance(tools, list):
        raise InvalidType(f"tools must be a list, not {type(tools).__name__}")
    added: dict[str, ToolChange] = {}  # the last definitions
    removed: set[str] = set()
    for change in changes:
        if change.definition is not None:
            added[change.name] = change
        (removed.add if change.is_removal else removed.discard)(change.name)
    reader = _ToolReader(strict=strict)
    given = [reader.read(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())]
    found = [pair for pair in given if pair is not None and pair[0].name not in added]
    found += [pair for change in added.values() if (pair := reader.read(change.place, change.definition)) is not None]
    kept = [(tool, is_deferred) for tool, is_deferred in found if tool.name not in removed]
    ordered = [tool for last in (False, True) for tool, is_deferred in kept if is_deferred is last]
    return OfferedTools(tuple(ordered), reader.left_out, tuple(reader.warnings))


class _ToolReader:
    """Reads the tools of one body, and collects the tools that are left out and the warnings."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.left_out: dict[str, str] = {}
        self.warnings: list[str] = []

    def read(self, place: str, tool: object) -> tuple[Tool, bool] | None:
        """Return a tool, and whether its loading is deferred; None for a tool that is left out."""
        tool = checked_object(place, tool, "an object with name and input_schema")
        kind = "custom" if tool.get("type") is None else validation.text(f"{place}.type", tool["type"])
        if kind != "custom":
            self._leave_out(place, kind, tool)
            return None
        if self._strict or len(self.warnings) < _MAX_HINTS:
            self.warnings += check_fields(tool, _TOOL_FIELDS, strict=self._strict, place=f"{place}.")
        elif not tool.keys() <= set(_TOOL_FIELDS):
            self.warnings.append(f"{place}: unknown members were ignored")
        for name, usual in (("allowed_callers", ["direct"]), ("input_examples", [])):
            if tool.get(name) not in (None, usual):
                self.warnings.append(f"{place}.{name} has no effect here and was ignored")
        is_deferred = tool.get("defer_loading")
        if is_deferred is not None and validation.boolean(f"{place}.defer_loading", is_deferred):
            self.warnings.append(f"{place}.defer_loading: the tool is offered from the start, after the others")
        description = tool.get("description")
        if "input_schema" not in tool:
            raise InvalidParams(f"{place}.input_schema is missing; it is the JSON schema of the tool's input")
        read = Tool(
            _word(place, "name", tool),
            "" if description is None else validation.text(f"{place}.description", description),
            checked_schema(f"{place}.input_schema", tool["input_schema"]),
        )
        return read, is_deferred is True

    def _leave_out(self, place: str, kind: str, tool: Mapping[str, Any]) -> None:
        name = tool.get("name")
        self.left_out[name if isinstance(name, str) else kind] = kind
        self.warnings.append(
            f"{place}: tools of the type {kind[:_MAX_SHOWN]!r} are run or defined by Anthropic's servers; it was left out"
        )


def tool_choice_of(
    choice: object, offered: OfferedTools, *, strict: bool = False
) -> tuple[Any, bool | None, list[str]]:
    """Return the `tool_choice` and `parallel_tool_calls` of `ChatOptions`, and warnings.

    strict: whether unknown members are refused. Raises `InvalidParams` for a malformed choice, and for one that demands a tool
    that is not offered.
    """
    if choice is None:
        return None, None, []
    choice = checked_object("tool_choice", choice, "an object with a type")
    known = ("type", "name", "disable_parallel_tool_use")
    warnings = check_fields(choice, known, strict=strict, place="tool_choice.")
    kind = validation.choice("tool_choice.type", choice.get("type"), ("auto", "any", "tool", "none"))
    single = choice.get("disable_parallel_tool_use")
    parallel = (
        False if single is not None and validation.boolean("tool_choice.disable_parallel_tool_use", single) else None
    )
    if kind in ("auto", "none"):
        return kind, parallel, warnings
    name = _word("tool_choice", "name", choice) if kind == "tool" else None
    if name is not None and name in offered.left_out:
        raise Unsupported(
            f"tool_choice.name is {name[:_MAX_SHOWN]!r}, a tool of the type {offered.left_out[name][:_MAX_SHOWN]!r}, which this "
            "server cannot offer; choose a tool with an input_schema, or leave tool_choice out"
        )
    if not offered.tools:
        why = "all of tools were left out, see the types of tools" if offered.left_out else "there are none"
        raise InvalidParams(f"tool_choice.type {kind!r} needs tools, and {why}")
    if name is None:
        return "required", parallel, warnings
    if all(tool.name != name for tool in offered.tools):
        names = ", ".join(repr(tool.name) for tool in offered.tools)
        raise InvalidParams(f"tool_choice.name is {name[:_MAX_SHOWN]!r}, and tools has {names[:1000]}")
    return {"type": "function", "function": {"name": name}}, parallel, warnings
