"""Reads the text that a model generated after a rendered prompt: content, thinking and tool calls apart.

llama.cpp's parser reads the whole text each time. A `MessageStream` therefore calls it only when the format may change: at the
beginning, after a text that ends content or thinking, and within tool calls as often as the work stays in proportion to the
text. Between, content and thinking go through as they come, without any part of a text that may end them. Content that may be
the JSON of untagged calls is held back until it cannot be, or until the end.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from paceline import validation
from paceline.chat.chat_format import RenderedPrompt
from paceline.chat.tools import CallTool
from paceline.constraints import first_violation
from paceline.constraints.schema_walk import resolved
from paceline.errors import ChatParseError, Closed, GrammarError
from paceline.request import cached_in_scope
from paceline.runtime.model import ChatParser

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
            is_partial: Whether more is to come. A part that the end of the text leaves open is then left out or cut.

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
    """Follow a call. Its outer braces may be doubled."""
    _expect(char, "{")
    char = yield from _after_blanks((yield))
    if char != "{":
        return (yield from _scanned_members(char, names))
    char = yield from _scanned_members((yield from _after_blanks((yield))), names)
    _expect((yield from _after_blanks(char)), "}")
    return (yield)


def _scanned_members(char: str, names: Container[str], *, is_nested: bool = False) -> _Scanner:
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
    found, todo = list[dict[str, Any]](), [schema]
    while todo and len(found) < _MAX_COMBINED:
        node = resolved(root, todo.pop(0))
        found.append(node)
        for keyword in ("allOf", "anyOf", "oneOf"):
            todo += node.get(keyword, ())
    return found


_FREE_CHARS = 1 << 18  # that may be parsed in all, beside ...
_CHARS_PER_CHAR = 64  # ... so many for each that was generated
_PROBE = "x"
_MAX_LOOKS_BACK = 4  # for a call that the whole text has lost
_MAX_HELD_BLANKS = 256  # that are looked through with every piece


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The new part of a tool call.

    Attributes:
        index: The number of the call in the message.
        name: The whole name, in the first delta of the call; otherwise empty.
        arguments: The next piece of the arguments' JSON.
        id: As the model wrote it, in the first delta, or in the last one if the format has it after the arguments.
    """

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The new part of a message: content, reasoning_content or tool_call."""

    content: str = ""
    reasoning_content: str = ""
    tool_call: ToolCallDelta | None = None


class MessageStream:
    """One message that is being generated after a rendered prompt."""

    def __init__(
        self, prompt: RenderedPrompt, *, is_whole: bool = False, make_call_id: Callable[[], str] = str
    ) -> None:
        """Begin a message.

        Args:
            prompt: The prompt before the message.
            make_call_id: Makes ids of tool calls in formats without ids, and of calls with ids after their arguments.
            is_whole: Whether the message was generated before, and only its end is of interest: `feed` returns nothing.
        """
        self._is_whole, self._make_call_id = is_whole, make_call_id
        self._is_one_call = prompt.is_one_call
        self._parser = MessageParser(prompt)
        ends_of_text = _ends_of_text if len(prompt.parser) <= MAX_KEPT_CHARS else _ends_of_text.__wrapped__
        self._ends, self._beginnings, self._first_characters = ends_of_text(prompt.parser)
        self._longest_end = max(map(len, self._ends), default=0)
        self._text = ""
        self._prefill = _message_so_far(self._parser) if prompt.is_continued else ParsedMessage()
        self._sent = self._prefill
        self._passing: Literal["content", "reasoning_content"] | None = None
        self._passed: list[str] = []  # sent texts of that kind which `_sent` does not have yet
        self._blanks: list[str] = []  # what has not been passed on: blanks, and ...
        self._held = ""  # ... the end of the text behind them
        self._num_passed = 0  # characters of the text up to there
        self._num_read = 0  # characters of the text that the parser had read when something was sent last
        self._num_parsed = 0
        self._untagged = UntaggedCalls(prompt.untagged_tools) if prompt.untagged_tools else None
        self._is_holding = self._untagged is not None and not self._prefill.content.strip()
        self._held_content: list[str] = []  # which may be untagged calls
        self.has_ended = False
        self.warning: ChatParseError | None = None

    @property
    def text(self) -> str:
        """The text so far, as the model generated it."""
        return self._text

    @property
    def is_holding_content(self) -> bool:
        """Whether the end decides if the content is untagged calls, which takes time."""
        return self._is_holding

    def needs_parser(self, text: str) -> bool:
        """Return whether feeding this text would call the parser, which takes time, instead of passing the text on."""
        if self._passing is None:
            return bool(text) and not self._is_whole
        recent = self._held[-self._longest_end :] + text if self._longest_end else text
        return any(end in recent for end in self._ends)

    def feed(self, text: str) -> list[MessageDelta]:
        """Take the next piece of generated text and return the new parts of the message.

        Raises:
            InvalidParams: The piece is no text, or has a lone surrogate; the message goes on without it.
            Closed: The message has ended.
        """
        if self.has_ended:
            raise Closed("the message has ended; make a new MessageStream")
        if not validation.text("text", text):
            return []
        self._text += text
        if self._is_whole:
            return []
        return self._with_content_held(self._parse_some() if self._passing is None else self._pass_on(text))

    def finish(self, *, is_cut: bool = False) -> tuple[list[MessageDelta], ParsedMessage]:
        """End the message and return its missing parts, and the whole message.

        If the text is not of the format, `warning` is the error that says so, and text that was not passed on is content,
        as it was generated: nothing is lost.

        Args:
            is_cut: Whether the message was cut off, by a limit on its length for example. A part that its end leaves open, for
                example a tool call's arguments, is then a beginning.

        Raises:
            Closed: The message has ended before.
        """
        if self.has_ended:
            raise Closed("the message has ended; make a new MessageStream")
        self.has_ended = True
        self._add_passed()
        deltas, whole = self._finished(is_cut=is_cut)
        deltas = self._with_content_held(deltas)
        if self._untagged is not None and not whole.tool_calls:
            calls, reason = self._untagged.read(whole.content, is_cut=is_cut)
            if calls and self._is_holding:
                self.warning = None
                whole = self._identified(self._limited(replace(whole, content="", tool_calls=calls)))
                named = enumerate(whole.tool_calls)
                return [*deltas, *(_delta_of(index, call) for index, call in named)], whole
            if reason and self.warning is None:
                self.warning = ChatParseError(reason)
        return [*deltas, *self._released()], whole

    def _with_content_held(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        """Return the deltas without content that may be untagged calls. Content held before comes first once it is none."""
        found: list[MessageDelta] = []
        for delta in deltas:
            if self._untagged is None or not self._is_holding:
                found.append(delta)
            elif delta.content:
                self._held_content.append(delta.content)
                found += [] if self._untagged.feed(delta.content) else self._released()
            else:
                found += [*(self._released() if self._held_content or delta.tool_call else ()), delta]
        return found

    def _released(self) -> list[MessageDelta]:
        held, self._held_content, self._is_holding = "".join(self._held_content), [], False
        return [MessageDelta(content=held)] if held else []

    def _finished(self, *, is_cut: bool) -> tuple[list[MessageDelta], ParsedMessage]:
        try:
            # Not as a part: the parser would leave out what is not of the format. It reads what is cut all the same.
            whole = self._limited(self._parser.parse(self._text))
        except ChatParseError as error:
            return self._with_the_rest(error)
        reason = ""
        if not _continues(self._sent, whole) or self._has_lost_calls(whole):
            reason = "a part of the text that began as one of the chat format did not go on as one"
        elif not is_cut and whole == ParsedMessage() and self._text.strip():
            reason = "the parser of the chat format found no message in the text"
        elif not is_cut and whole.tool_calls and not whole.has_whole_calls:
            reason = "the text ends within the arguments of a tool call"
        if reason:
            return self._with_the_rest(ChatParseError(reason))
        deltas = list(self._deltas(whole, is_final=True))
        return deltas, self._without_prefill(self._identified(whole))

    def _identified(self, whole: ParsedMessage) -> ParsedMessage:
        """Return the message with the ids that were sent, and an id for every other call."""
        ids = [call.id for call in self._sent.tool_calls]
        ids += [call.id or self._make_call_id() for call in whole.tool_calls[len(ids) :]]
        calls = zip(whole.tool_calls, ids, strict=False)
        return replace(whole, tool_calls=tuple(replace(call, id=call_id) for call, call_id in calls))

    def _has_lost_calls(self, whole: ParsedMessage) -> bool:
        """Return whether a beginning of the text has calls that the whole has not."""
        until = len(self._text)
        for _ in range(_MAX_LOOKS_BACK if self._ends else 0):
            until = max(self._text.rfind(end, 0, until) for end in self._ends)
            if until <= 0:
                break
            if len(self._begun(until).tool_calls) > len(whole.tool_calls):
                return True
        return False

    def _begun(self, length: int) -> ParsedMessage:
        try:
            return self._limited(self._parser.parse(self._text[:length], is_partial=True))
        except ChatParseError:
            return ParsedMessage()

    def _with_the_rest(self, warning: ChatParseError) -> tuple[list[MessageDelta], ParsedMessage]:
        self.warning = warning
        rest, sent = self._text[self._num_covered() :], self._sent
        self._sent = ParsedMessage(sent.content + rest, sent.reasoning_content, sent.tool_calls)
        return [MessageDelta(content=rest)] if rest else [], self._without_prefill(self._sent)

    def _num_covered(self) -> int:
        """Return the length of the text that the parser needs for all sent parts. A call that is not whole does not count."""
        sent = self._sent
        num_calls = next((n for n, call in enumerate(sent.tool_calls) if not call.is_whole), len(sent.tool_calls))
        wanted = replace(sent, tool_calls=sent.tool_calls[:num_calls])
        low, high = self._num_passed, self._num_read
        while low < high:
            middle = (low + high) // 2
            if _continues(wanted, self._begun(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _without_prefill(self, whole: ParsedMessage) -> ParsedMessage:
        content = _behind(self._prefill.content, whole.content)
        return replace(
            whole, content=content, reasoning_content=_behind(self._prefill.reasoning_content, whole.reasoning_content)
        )

    def _pass_on(self, text: str) -> list[MessageDelta]:
        """Pass content or thinking on, up to a possible end."""
        assert self._passing is not None  # noqa: S101 - our own invariant
        self._held += text
        recent = self._held[-(len(text) + self._longest_end) :]
        if any(end in recent for end in self._ends):
            self._add_passed()
            self._passing = None
            return self._parse_some()
        length = self._length_without_beginnings(self._held)
        if not length:
            num_aside = len(self._held) - self._longest_end  # only the last characters can be the beginning of an end
            if num_aside > _MAX_HELD_BLANKS:
                self._blanks.append(self._held[:num_aside])
                self._held = self._held[num_aside:]
            return []
        passed = "".join((*self._blanks, self._held[:length]))
        self._begin_holding(self._held[length:])
        self._passed.append(passed)
        return [MessageDelta(passed) if self._passing == "content" else MessageDelta("", passed)]

    def _add_passed(self) -> None:
        """Add the texts that were passed on to `_sent`; each by itself would copy the message."""
        if self._passing is not None and self._passed:
            sent = getattr(self._sent, self._passing) + "".join(self._passed)
            self._sent, self._passed = replace(self._sent, **{self._passing: sent}), []

    def _begin_holding(self, held: str) -> None:
        self._blanks, self._held = [], held
        self._num_passed = len(self._text) - len(held)

    def _length_without_beginnings(self, text: str) -> int:
        """Return the length of a text without a beginning of an end, and without blanks at its end."""
        first, beginnings = self._first_characters, self._beginnings
        for start in range(max(0, len(text) - self._longest_end), len(text)):
            if text[start] in first and text[start:] in beginnings:
                return len(text[:start].rstrip())
        return len(text.rstrip())

    def _parse_some(self) -> list[MessageDelta]:
        """Parse the text so far, unless that would be out of proportion, and find out whether text can go through."""
        if self._num_parsed + len(self._text) > _FREE_CHARS + _CHARS_PER_CHAR * len(self._text):
            return []
        try:
            now, after = (self._parsed(text) for text in (self._text, self._text + _PROBE))
        except ChatParseError:  # the end will tell
            return []
        deltas = list(self._deltas(now))
        if deltas:
            self._num_read = len(self._text)
        if after.tool_calls == now.tool_calls:
            if after.reasoning_content == now.reasoning_content:
                self._begin_passing("content", self._sent.content, after.content)
            elif after.content == now.content:
                self._begin_passing("reasoning_content", self._sent.reasoning_content, after.reasoning_content)
        return deltas

    def _begin_passing(self, field: Literal["content", "reasoning_content"], sent: str, probed: str) -> None:
        """Pass text on from here if nothing but blanks came between the sent text and the probe."""
        added = probed[len(sent) :]
        if sent and probed.startswith(sent) and added.endswith(_PROBE) and not added[:-1].strip():
            self._passing = field
            self._begin_holding(added[:-1])

    def _parsed(self, text: str) -> ParsedMessage:
        self._num_parsed += len(text)
        return self._limited(self._parser.parse(text, is_partial=True))

    def _limited(self, message: ParsedMessage) -> ParsedMessage:
        return replace(message, tool_calls=message.tool_calls[:1]) if self._is_one_call else message

    def _deltas(self, now: ParsedMessage, *, is_final: bool = False) -> Iterator[MessageDelta]:
        """Yield the parts of `now` that were not sent yet. Sent parts stay, even if the parser reads them otherwise now.

        A call is sent once it has arguments, since its name may be the beginning of a longer one before.
        """
        reasoning = _added(self._sent.reasoning_content, now.reasoning_content)
        content = _added(self._sent.content, now.content)
        calls = list(self._sent.tool_calls)
        if reasoning:
            yield MessageDelta(reasoning_content=reasoning)
        if content:
            yield MessageDelta(content=content)
        for index, call in enumerate(now.tool_calls):
            if index < len(calls):
                sent = calls[index]
                arguments = _added(sent.arguments, call.arguments)
                late_id = call.id if is_final and not sent.id else ""
                if arguments or late_id:
                    yield MessageDelta(tool_call=ToolCallDelta(index, arguments=arguments, id=late_id))
                calls[index] = ToolCall(sent.name, sent.arguments + arguments, sent.id or late_id)
            elif call.name and (call.arguments or is_final):
                calls.append(replace(call, id=call.id or self._make_call_id()))
                yield _delta_of(index, calls[-1])
            else:
                break
        self._sent = ParsedMessage(self._sent.content + content, self._sent.reasoning_content + reasoning, tuple(calls))


def _message_so_far(parser: MessageParser) -> ParsedMessage:
    """Return the beginning of the message that a prompt continues: the text before a probe, with blanks at its end."""
    try:
        probed = parser.parse(_PROBE, is_partial=True)
    except ChatParseError:  # the end will tell
        return ParsedMessage()
    if probed.content:
        return ParsedMessage(probed.content.removesuffix(_PROBE), probed.reasoning_content)
    return ParsedMessage("", probed.reasoning_content.removesuffix(_PROBE))


def _behind(prefix: str, text: str) -> str:
    """Return a text without the prefix; nothing if it is the prefix without the blanks at its end."""
    return "" if prefix.startswith(text) else text.removeprefix(prefix)


def _continues(sent: ParsedMessage, now: ParsedMessage) -> bool:
    return (
        now.content.startswith(sent.content)
        and now.reasoning_content.startswith(sent.reasoning_content)
        and len(now.tool_calls) >= len(sent.tool_calls)
        and all(
            after.name == before.name and after.arguments.startswith(before.arguments)
            for before, after in zip(sent.tool_calls, now.tool_calls, strict=False)
        )
    )


def _delta_of(index: int, call: ToolCall) -> MessageDelta:
    return MessageDelta(tool_call=ToolCallDelta(index, call.name, call.arguments, call.id))


def _added(sent: str, now: str) -> str:
    return now[len(sent) :] if now.startswith(sent) else ""


@cached_in_scope(maxsize=32)
def _ends_of_text(parser: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the texts that may end content or thinking by a serialised parser, their beginnings and first characters."""
    arena: dict[str, Any] = json.loads(parser) if parser else {}
    nodes: list[dict[str, Any]] = arena.get("parsers", [])
    untils = (node["delimiters"] for node in nodes if node["type"] == "until")
    ends = frozenset(delimiter for delimiters in untils for delimiter in delimiters if delimiter)
    beginnings = frozenset(end[:length] for end in ends for length in range(1, len(end) + 1))
    return ends, beginnings, frozenset(end[0] for end in ends)
