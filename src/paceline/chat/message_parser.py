"""Reads what a model generated after a rendered prompt: content, thinking and tool calls apart."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Container, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from paceline import validation
from paceline.chat.call_names import CallTool, resolved
from paceline.chat.chat_format import RenderedPrompt
from paceline.constraints import first_violation
from paceline.errors import GrammarError
from paceline.request import cached_in_scope
from paceline.runtime.chat_layer import ChatParser

MAX_KEPT_CHARS = 65536
"""Characters of the largest parser that is kept: those of chats with a dozen tools, which are the same at every turn."""

_BLANKS: Final = " \t\r\n"
_FENCE: Final = "```"
_INFO_CHARS: Final = string.ascii_letters + string.digits + "_+-"  # of the word after the beginning of a code fence
_SCALAR_CHARS: Final = string.ascii_letters + string.digits + "+-."
_NAME_MEMBERS: Final = ("name", "function")
_ARGUMENT_MEMBERS: Final = ("arguments", "parameters")
_MEMBERS: Final = ("id", "type", *_NAME_MEMBERS, *_ARGUMENT_MEMBERS)
_LIKE_A_CALL: Final = re.compile(r'"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:')
_DOUBLED: Final = re.compile(rf"\{{[{_BLANKS}]*\{{")
_MAX_SHOWN: Final = 30
_MAX_COMBINED: Final = 100  # schemas of allOf, anyOf and oneOf that are looked through for one value


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes.

    Attributes:
        name: The function's name.
        arguments: JSON of the arguments; while text is still to come, the beginning of it.
        id: As the model wrote it; empty in formats without.
    """

    name: str
    arguments: str
    id: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are JSON, and not the beginning of it."""
        try:
            json.loads(self.arguments)
        except (ValueError, RecursionError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A generated message.

    Attributes:
        content: The text for the user.
        reasoning_content: The thinking before it.
        tool_calls: In the order in which the model made them.
    """

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are tool calls, and each has all of its arguments, so that it can be carried out."""
        return bool(self.tool_calls) and all(call.is_whole for call in self.tool_calls)


@cached_in_scope(maxsize=32)
def _kept_parser(parser: str, name: str, generation_prompt: str) -> ChatParser:
    return ChatParser(parser, name, generation_prompt)


class MessageParser:
    """The parser of the format that a prompt was rendered in. Constant once made; any thread."""

    def __init__(self, prompt: RenderedPrompt) -> None:
        """Prepare the parser of one prompt; another prompt, with other tools, has another parser."""
        size = len(prompt.parser) + len(prompt.generation_prompt)
        make = _kept_parser if size <= MAX_KEPT_CHARS and not prompt.is_continued else ChatParser
        self._native = make(prompt.parser, prompt.format, prompt.generation_prompt)

    def parse(self, text: str, *, is_partial: bool = False) -> ParsedMessage:
        """Parse the whole text that was generated so far. Takes time in proportion to it; the GIL is released meanwhile.

        Args:
            text: With the control tokens among `RenderedPrompt.preserved_tokens`, and without the end of the turn.
            is_partial: Whether more is to come. What the end of the text leaves open is then left out or cut.

        Raises:
            ChatParseError: The text is not of the format.
        """
        content, reasoning, calls = self._native.parse(validation.text("text", text).encode(), is_partial)
        return ParsedMessage(
            content, reasoning, tuple(ToolCall(name, arguments, id_) for id_, name, arguments in calls)
        )


class UntaggedCalls:
    """Tool calls that a model writes as content, without the tags of its chat format.

    The content has to be a JSON object with the name of a tool and arguments that fit its schema, several such objects, or a
    list of them. Blanks and one code fence may stand around it, and nothing else. Read are {"name": ..., "arguments": {...}},
    "parameters" in place of "arguments", {"type": "function", "function": {...}}, and arguments as a text of JSON. The outer
    braces may be doubled, {{"name": ..., "arguments": {...}}}, as the template of Qwen2.5-Coder shows them; the last brace may
    be missing then.

    Pure; one thread at a time.
    """

    def __init__(self, tools: Sequence[CallTool]) -> None:
        """Begin a content. tools: the tools that may be called."""
        self._tools = {tool.name: tool for tool in tools}
        self._scanner = _scanned_content(self._tools)
        next(self._scanner)
        self._is_possible = True

    def feed(self, text: str) -> bool:
        """Take the next piece of the content and return whether the content may still become nothing but calls."""
        try:
            for char in text if self._is_possible else "":
                self._scanner.send(char)
        except _NoCallError:
            self._is_possible = False
        return self._is_possible

    def read(self, content: str, *, is_cut: bool = False) -> tuple[tuple[ToolCall, ...], str]:
        """Return the calls that the whole content is. If it only looks like a call, return the reason that it is none.

        Args:
            content: The text that was fed.
            is_cut: Whether the content was cut off. Then it is no call.
        """
        calls: list[ToolCall] = []
        found = _LIKE_A_CALL.search(content)
        name, violation = (found["name"] if found else ""), ""
        if name not in self._tools and not self._is_possible:
            violation = "there is no tool of this name"
        elif is_cut:
            violation = "the message was cut off"
        elif not self._is_possible:
            violation = "it has more than the JSON of calls"
        else:
            try:
                for value in _json_values(content):
                    call, violation = self._call_of(value)
                    if violation:
                        name = call.name
                        break
                    calls.append(call)
            except (ValueError, RecursionError):
                violation = "it is no valid JSON"
        if not violation:
            return tuple(calls), ""
        return (), name and f"the content looks like a call of the tool {name!r} and was not read as one: {violation}"

    def _call_of(self, value: Mapping[str, Any]) -> tuple[ToolCall, str]:
        """Read an object as a call; the reason is empty if it is one. Raises `ValueError` for an unknown name or bad JSON."""
        nested = value.get("function")
        function = nested if isinstance(nested, dict) else {"name": nested, **value}
        tool, call_id = self._tools.get(function.get("name", "")), value.get("id")
        if tool is None:
            raise ValueError("no name")
        call = ToolCall(tool.name, "", call_id if isinstance(call_id, str) else "")
        arguments = next((function[name] for name in _ARGUMENT_MEMBERS if name in function), None)
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            return call, "it has no object of arguments"
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return replace(call, arguments=text), _violation(tool, arguments)


class _NoCallError(Exception):
    """The content is no call, whatever follows."""


_Scanner = Generator[None, str, Any]
# Each scanner below gets characters by `send`. It is given the first one, and returns the first one that it does not take.


def _scanned_content(names: Container[str]) -> _Scanner:
    """Follow a content as long as it may become nothing but calls of these names. Raises `_NoCallError`."""
    char, has_fence = (yield from _after_blanks((yield))), False
    if char == "`":
        for expected in _FENCE:
            _expect(char, expected)
            char = yield
        while char in _INFO_CHARS:
            char = yield
        char, has_fence = (yield from _after_blanks(char)), True
    is_list = char == "["
    if is_list:
        char = yield from _after_blanks((yield))
    while True:
        char = yield from _after_blanks((yield from _scanned_object(char, names)))
        if is_list and char == "]":
            char = yield from _after_blanks((yield))
            break
        if is_list:
            _expect(char, ",")
            char = yield from _after_blanks((yield))
        elif char != "{":
            break
    for expected in _FENCE if has_fence else "":
        _expect(char, expected)
        char = yield
    yield from _after_blanks(char)
    raise _NoCallError


def _scanned_object(char: str, names: Container[str]) -> _Scanner:
    """Follow a call, whose outer braces may be doubled."""
    _expect(char, "{")
    char = yield from _after_blanks((yield))
    if char != "{":
        return (yield from _scanned_members(char, names))
    char = yield from _scanned_members((yield from _after_blanks((yield))), names)
    _expect((yield from _after_blanks(char)), "}")
    return (yield)


def _scanned_members(char: str, names: Container[str], *, is_nested: bool = False) -> _Scanner:
    """Follow a call from its first member on."""
    while True:
        key = yield from _scanned_text(char)
        if key not in _MEMBERS:
            raise _NoCallError
        _expect((yield from _after_blanks((yield))), ":")
        char = yield from _after_blanks((yield))
        if key == "function" and char == "{" and not is_nested:
            char = yield from _scanned_members((yield from _after_blanks((yield))), names, is_nested=True)
        elif key in ("type", *_NAME_MEMBERS):
            text = yield from _scanned_text(char)
            if text != "function" if key == "type" else text not in names:
                raise _NoCallError
            char = yield
        else:
            char = yield from _scanned_value(char)
        char = yield from _after_blanks(char)
        if char == "}":
            return (yield)
        _expect(char, ",")
        char = yield from _after_blanks((yield))


def _scanned_value(char: str) -> _Scanner:
    depth = 0
    while True:
        if char == '"':
            yield from _scanned_text(char)
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif depth == 0:
            if char not in _SCALAR_CHARS:
                raise _NoCallError
            while char in _SCALAR_CHARS:
                char = yield
            return char
        char = yield
        if depth == 0:
            return char


def _scanned_text(char: str) -> _Scanner:
    """Return a text up to its closing quotation mark."""
    _expect(char, '"')
    found = [char]
    while (char := (yield)) != '"':
        found.append(char)
        if char == "\\":
            found.append((yield))
    try:
        return json.loads("".join(found) + '"')
    except ValueError:
        raise _NoCallError from None


def _after_blanks(char: str) -> _Scanner:
    while char in _BLANKS:
        char = yield
    return char


def _expect(char: str, expected: str) -> None:
    if char != expected:
        raise _NoCallError


def _json_values(content: str) -> list[Any]:
    """Return the JSON values of a text that `_scanned_content` has followed. Raises `ValueError`."""
    text = content.strip(_BLANKS)
    if text.startswith(_FENCE):
        text = text.removeprefix(_FENCE).lstrip(_INFO_CHARS).removesuffix(_FENCE).strip(_BLANKS)
    if text.startswith("["):
        if not text.endswith("]"):
            raise ValueError("the list has no end")
        text = text[1:-1]
    found, at = [], 0
    while (at := at + len(text[at:]) - len(text[at:].lstrip(_BLANKS + ","))) < len(text):
        doubled = _DOUBLED.match(text, at)
        value, at = json.JSONDecoder().raw_decode(text, at if doubled is None else doubled.end() - 1)
        found.append(value)
        if doubled is not None and text[at:].strip(_BLANKS):  # small models forget the second brace at the end
            at = text.index("}", at) + 1
    return found


def _violation(tool: CallTool, arguments: Mapping[str, Any]) -> str:
    """Return why arguments do not fit the schema of a tool; empty if they do."""
    schema = resolved(tool.schema, tool.schema)
    missing = next((name for name in schema.get("required", ()) if name not in arguments), None)
    if missing is not None:
        return f"its arguments have no {missing!r}, which the tool requires"
    if schema.get("additionalProperties") is False and "patternProperties" not in schema:
        unknown = next((name for name in arguments if name not in tool.properties), None)
        if unknown is not None:
            return f"the tool has no argument {unknown!r}"
    text = json.dumps(_in_order(tool.schema, tool.schema, arguments), ensure_ascii=False, separators=(",", ":"))
    try:
        at = first_violation(tool.schema, text)
    except GrammarError as error:
        return f"the schema of the tool cannot be checked: {error}"
    if at is None:
        return ""
    return f"the schema of the tool does not allow {text[at : at + _MAX_SHOWN]!r} after {text[max(at - _MAX_SHOWN, 0) : at]!r}"


def _in_order(root: Mapping[str, Any], schema: Any, value: Any) -> Any:
    """Return a value with the properties of its objects in the order of their schemas, in which they are checked."""
    if not isinstance(value, (dict, list)):
        return int(value) if isinstance(value, float) and value.is_integer() else value
    nodes = _combined(root, schema)
    if isinstance(value, list):
        places = [node.get("prefixItems", ()) for node in nodes]
        others = next((node["items"] for node in nodes if isinstance(node.get("items"), dict)), None)
        each = (next((place[index] for place in places if index < len(place)), others) for index in range(len(value)))
        return [_in_order(root, child, item) for child, item in zip(each, value, strict=True)]
    known: dict[str, Any] = {}
    for node in nodes:
        for name, child in node.get("properties", {}).items():
            known.setdefault(name, child)
    others = next((node["additionalProperties"] for node in nodes if "additionalProperties" in node), None)
    names = [*(name for name in known if name in value), *(name for name in value if name not in known)]
    return {name: _in_order(root, known.get(name, others), value[name]) for name in names}


def _combined(root: Mapping[str, Any], schema: Any) -> list[dict[str, Any]]:
    """Return a schema object and the alternatives and parts that describe the same value."""
    found, todo = list[dict[str, Any]](), [schema]
    while todo and len(found) < _MAX_COMBINED:
        node = resolved(root, todo.pop(0))
        found.append(node)
        for keyword in ("allOf", "anyOf", "oneOf"):
            todo += node.get(keyword, ())
    return found
