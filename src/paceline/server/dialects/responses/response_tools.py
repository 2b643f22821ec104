"""The tools of a response as functions of a chat: names, schemas, and the tool that a call is of. Pure; any thread.

Chat models call functions by a name. A function of a namespace gets a name made of both, and a custom tool, which takes a
text, becomes a function with one string. A call is returned in the shape of the tool it is of. Tools that OpenAI runs are left
out with a warning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline import validation
from paceline.chat import Tool
from paceline.chat.message_parts import checked_schema
from paceline.errors import InvalidParams, InvalidType
from paceline.server.api_errors import clean_message, invalid_request
from paceline.server.dialects.request_body import checked_list, checked_object


class InputWarnings:
    """Collects warnings. A sentence that holds for several places is reported once, with the first place and a count."""

    def __init__(self, *, strict: bool = False) -> None:
        """strict: whether unknown members are refused."""
        self._strict = strict
        self._places: dict[str, tuple[str, int]] = {}

    def add(self, place: str, sentence: str) -> None:
        """Add a warning about a place, for example input[3]."""
        first, count = self._places.get(sentence, (place, 0))
        self._places[sentence] = (first, count + 1)

    def add_unknown(self, place: str, name: object, sentence: str) -> None:
        """Add a warning about a member that is not known. Raises `ApiException` if strict."""
        if self._strict:
            field = clean_message(f"{place}.{str(name)[:80]}")
            message = f"{field} is not a field of this endpoint; leave it out"
            raise invalid_request(message, place.partition("[")[0], "unknown_parameter")
        self.add(place, sentence)

    def sentences(self) -> tuple[str, ...]:
        """Return the warnings in the order of their first places."""
        return tuple(
            f"{place}: {sentence}" if count == 1 else f"{place} and {count - 1} more: {sentence}"
            for sentence, (place, count) in self._places.items()
        )


CUSTOM_INPUT = "input"
"""The parameter of a function that stands for a custom tool."""

_MAX_NAME = 64
_MAX_GRAMMAR = 1 << 16  # characters of a custom tool's grammar, which the model reads
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")
_TOOL_MEMBERS = ("type", "name", "description", "parameters", "strict")
_CUSTOM_MEMBERS = ("type", "name", "description", "format")
# Members that ask for nothing by these values.
_EMPTY_MEMBERS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": ([], ["direct"]),
    "async": (False,),
    "defer_loading": (False,),
}
_IGNORED_MEMBERS = {
    "defer_loading": "the tool is offered at once, since this server searches for no tools",
    "output_schema": "it has no effect here and was ignored: results are taken as the client sends them",
}


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """A tool by the names that the client knows.

    Attributes:
        name: Its name.
        namespace: The namespace that it belongs to; empty for none.
        is_custom: Whether it is a custom tool, which takes a text as its input.
    """

    name: str
    namespace: str = ""
    is_custom: bool = False


class ToolNames:
    """Maps the tools of a response to the names of their functions, and back."""

    def __init__(self, origins: Iterable[ToolOrigin] = ()) -> None:
        self._functions: dict[tuple[str, str], str] = {}
        self._origins: dict[str, ToolOrigin] = {}
        for origin in sorted(origins, key=lambda origin: bool(origin.namespace)):  # names without a namespace stay
            function = _function_name(origin.namespace, origin.name)
            if function in self._origins:
                function = _shortened(origin.namespace, origin.name)
            self._functions[origin.namespace, origin.name] = function
            self._origins[function] = origin

    def function_of(self, name: str, namespace: str = "") -> str:
        """Return the name of a tool's function, also of a tool that is not offered."""
        return self._functions.get((namespace, name)) or _function_name(namespace, name)

    def origin_of(self, function: str) -> ToolOrigin:
        """Return the tool of a function that the model called."""
        return self._origins.get(function) or ToolOrigin(function)


def _function_name(namespace: str, name: str) -> str:
    """Return the name of a function. For a tool of a namespace it has both names, in characters and a length that models know."""
    if not namespace:
        return name
    joined = f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"
    if len(joined) > _MAX_NAME or _NOT_IN_NAMES.search(joined):
        return _shortened(namespace, name)
    return joined


def _shortened(namespace: str, name: str) -> str:
    """Return a name of at most 64 characters that no other pair of namespace and name has."""
    digest = hashlib.sha256(json.dumps([namespace, name]).encode()).hexdigest()[:8]
    begin = _NOT_IN_NAMES.sub("_", f"{namespace}__{name}")[: _MAX_NAME - len(digest) - 1]
    return f"{begin}_{digest}"


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a request that the model may call.

    Attributes:
        functions: The functions that the chat offers.
        choice: The `tool_choice` of the chat.
        names: Which function stands for which tool.
        warnings: Sentences about tools and members that are left out.
    """

    functions: tuple[Tool, ...] = ()
    choice: object = None
    names: ToolNames = field(default_factory=ToolNames)
    warnings: tuple[str, ...] = ()


def parse_tool_fields(
    tools: object, choice: object, added: Iterable[tuple[str, object]] = (), *, strict: bool = False
) -> ResponseTools:
    """Parse `tools` and `tool_choice` of a body.

    Args:
        tools: A list of functions, namespaces, custom tools, and tools that are left out.
        choice: The word or object that says which tools may or have to be called.
        added: More lists of tools, which items of the conversation have, each with its place. A tool that comes again replaces
            the earlier one.
        strict: Whether unknown members of tools are refused.

    Raises:
        ApiException: A member is unknown, if strict.
        InvalidParams: A tool or the choice is malformed, the choice names a tool that there is not, or demands one that is
            left out.
    """
    reader = _ToolReader(strict=strict)
    reader.read("tools", [] if tools is None else tools)
    for place, more in added:
        reader.read(place, [] if more is None else more, replaces=True)
    names = ToolNames(found.origin for found in reader.found.values())
    word, chosen = _ChoiceReader(reader, names).read(choice)
    return ResponseTools(_functions(chosen, names), word, names, reader.warnings.sentences())


@dataclass(frozen=True, slots=True)
class _FoundTool:
    """A tool that the model may call. namespace_description: of the namespace that it belongs to."""

    origin: ToolOrigin
    description: str
    parameters: Mapping[str, Any] | None
    namespace_description: str = ""


def _functions(tools: Sequence[_FoundTool], names: ToolNames) -> tuple[Tool, ...]:
    """Return the functions of tools. A namespace's description comes before the description of its first function."""
    described: set[str] = set()
    functions = []
    for tool in tools:
        namespace, description = tool.origin.namespace, tool.description
        if tool.namespace_description and namespace not in described:
            description = "\n\n".join(filter(None, (tool.namespace_description, description)))
        described.add(namespace)
        functions.append(Tool(names.function_of(tool.origin.name, namespace), description, tool.parameters))
    return tuple(functions)


class _ToolReader:
    """Reads lists of tools. left_out: the type of each tool that is left out, in the order that they come."""

    def __init__(self, *, strict: bool) -> None:
        self.found: dict[tuple[str, str], _FoundTool] = {}
        self.left_out: list[Mapping[Any, Any]] = []
        self.warnings = InputWarnings(strict=strict)

    def read(self, place: str, tools: object, *, replaces: bool = False) -> None:
        """Add the tools of a list. replaces: whether one may come again."""
        tools = checked_list(place, tools, "a list")
        for index, tool in enumerate(tools):
            self._read_tool(f"{place}[{index}]", tool, replaces=replaces)

    def _read_tool(self, place: str, tool: object, *, replaces: bool) -> None:
        tool = checked_object(place, tool, "an object with type and name")
        kind = validation.text(f"{place}.type", tool.get("type"))
        if kind == "namespace":
            self._read_namespace(place, tool, replaces=replaces)
        elif kind in ("function", "custom"):
            self._add(place, self._callable(place, kind, tool), replaces=replaces)
        else:
            self._leave_out(place, kind, tool)

    def _leave_out(self, place: str, kind: str, tool: Mapping[Any, Any]) -> None:
        self.left_out.append(tool)
        self.warnings.add(
            place, f"the tool {kind[:80]!r} is left out: this server runs no tools, and clients run functions alone"
        )

    def _read_namespace(self, place: str, tool: Mapping[Any, Any], *, replaces: bool) -> None:
        namespace = _name(f"{place}.name", tool.get("name"))
        description = _description(place, tool)
        members = tool.get("tools")
        members = checked_list(f"{place}.tools", members, "a list")
        self._note_members(place, tool, ("type", "name", "description", "tools"))
        for index, given in enumerate(members):
            inner = f"{place}.tools[{index}]"
            member = checked_object(inner, given, "an object with type and name")
            kind = validation.text(f"{inner}.type", member.get("type"))
            if kind not in ("function", "custom"):
                self._leave_out(inner, kind, member)
                continue
            found = self._callable(inner, kind, member)
            origin = replace(found.origin, namespace=namespace)
            self._add(inner, replace(found, origin=origin, namespace_description=description), replaces=replaces)

    def _add(self, place: str, found: _FoundTool, *, replaces: bool) -> None:
        key = (found.origin.namespace, found.origin.name)
        if key in self.found and not replaces:
            raise InvalidParams(f"{place} has the name {found.origin.name!r:.80} of an earlier one; names must differ")
        self.found[key] = found

    def _callable(self, place: str, kind: str, tool: Mapping[Any, Any]) -> _FoundTool:
        """Return a function or custom tool. In the shape of chat completions its members are one level deeper."""
        nested = tool.get(kind)
        if isinstance(nested, Mapping):
            place, tool = f"{place}.{kind}", {"type": kind, **nested}
        name, description = _name(f"{place}.name", tool.get("name")), _description(place, tool)
        if kind == "custom":
            self._note_members(place, tool, _CUSTOM_MEMBERS)
            hint, schema = self._read_format(place, tool.get("format"))
            description = "\n\n".join(filter(None, (description, hint)))
            return _FoundTool(ToolOrigin(name, is_custom=True), description, _custom_parameters(schema))
        self._note_members(place, tool, _TOOL_MEMBERS)
        for flag in ("strict", "defer_loading"):
            if tool.get(flag) is not None:
                validation.boolean(f"{place}.{flag}", tool[flag])
        parameters = tool.get("parameters")
        checked = None if parameters is None else checked_schema(f"{place}.parameters", parameters)
        return _FoundTool(ToolOrigin(name), description, checked)

    def _note_members(self, place: str, tool: Mapping[Any, Any], known: Sequence[str]) -> None:
        for name, value in tool.items():
            if name in known or value is None or value in _EMPTY_MEMBERS.get(name, ()):
                continue
            shown = str(name)[:80]
            if name in _EMPTY_MEMBERS or name in _IGNORED_MEMBERS:
                self.warnings.add(
                    place, f"{shown}: {_IGNORED_MEMBERS.get(shown, 'it has no effect here and was ignored')}"
                )
            else:
                self.warnings.add_unknown(
                    place, name, f"the member {shown!r} of a tool has no effect here and was ignored"
                )

    def _read_format(self, place: str, given: object) -> tuple[str, Mapping[str, Any]]:
        """Return the sentence that tells the model a custom tool's format, and the JSON schema that enforces it."""
        plain: Mapping[str, Any] = {"type": "string"}
        if given is None:
            return "", plain
        given = checked_object(f"{place}.format", given, "an object with a type")
        kind = validation.choice(f"{place}.format.type", given.get("type"), ("text", "grammar"))
        if kind == "text":
            return "", plain
        nested = given.get("grammar")  # as chat completions spell it
        grammar = nested if isinstance(nested, Mapping) else given
        syntax = validation.choice(f"{place}.format.syntax", grammar.get("syntax"), ("lark", "regex"))
        definition = validation.text(f"{place}.format.definition", grammar.get("definition"))
        if len(definition) > _MAX_GRAMMAR:
            raise InvalidParams(
                f"{place}.format.definition has {len(definition)} characters, and may have {_MAX_GRAMMAR}"
            )
        if syntax == "regex":
            return f"The input matches this regular expression: {definition}", {
                **plain,
                "pattern": f"^(?:{definition})$",
            }
        self.warnings.add(
            f"{place}.format", "the Lark grammar of a custom tool is shown to the model, and not enforced"
        )
        return f"The input conforms to this Lark grammar:\n{definition}", plain


def _custom_parameters(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {CUSTOM_INPUT: schema},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }


def _name(place: str, value: object) -> str:
    name = validation.text(place, value)
    if not name or len(name) > 256:
        raise InvalidParams(f"{place} must have 1 to 256 characters, not {len(name)}")
    return name


def _description(place: str, tool: Mapping[Any, Any]) -> str:
    given = tool.get("description")
    return "" if given is None else validation.text(f"{place}.description", given)


class _ChoiceReader:
    """Reads a `tool_choice` in every spelling."""

    def __init__(self, tools: _ToolReader, names: ToolNames) -> None:
        self._tools, self._names = tools, names
        self._all = list(tools.found.values())

    def read(self, choice: object) -> tuple[object, list[_FoundTool]]:
        """Return the choice as chats take it, and the tools that are offered."""
        if isinstance(choice, Mapping) and choice.get("type") in ("auto", "none", "any", "required"):
            choice = choice["type"]
        if choice is None or isinstance(choice, str):
            word = "required" if choice == "any" else choice
            return (self._required(self._all), self._all) if word == "required" else (word, self._all)
        choice = checked_object("tool_choice", choice, "a text or an object")
        kind = validation.text("tool_choice.type", choice.get("type"))
        if kind == "allowed_tools":
            return self._read_allowed(choice)
        named = self._named("tool_choice", kind, choice)
        if not named:
            raise InvalidParams(
                f"tool_choice demands the tool {kind[:80]!r}, and this server runs no tools; choose a function, or 'auto'"
            )
        if kind != "namespace":
            return {"type": "function", "function": {"name": self._function_of(named[0])}}, self._all
        return self._required(named), named

    def _function_of(self, tool: _FoundTool) -> str:
        return self._names.function_of(tool.origin.name, tool.origin.namespace)

    def _required(self, tools: Sequence[_FoundTool]) -> str:
        if not tools:
            kinds = ", ".join(sorted({repr(str(tool.get("type"))[:80]) for tool in self._tools.left_out}))
            left_out = f": {kinds} are left out, since this server runs no tools" if kinds else ", and there are none"
            raise InvalidParams(f"tool_choice 'required' needs tools{left_out}")
        return "required"

    def _read_allowed(self, choice: Mapping[Any, Any]) -> tuple[str, list[_FoundTool]]:
        place = "tool_choice"
        if isinstance(choice.get("allowed_tools"), Mapping):  # as chat completions spell it
            place, choice = f"{place}.allowed_tools", choice["allowed_tools"]
        mode = validation.choice(f"{place}.mode", choice.get("mode"), ("auto", "required"))
        allowed = choice.get("tools")
        if not isinstance(allowed, list):
            raise InvalidType(f"{place}.tools must be a list of objects with type and name")
        origins: set[ToolOrigin] = set()
        for index, given in enumerate(allowed):
            inner = f"{place}.tools[{index}]"
            tool = checked_object(inner, given, "an object with type and name")
            kind = validation.text(f"{inner}.type", tool.get("type"))
            named = self._named(inner, kind, tool)
            if not named:
                self._tools.warnings.add(inner, f"the tool {kind[:80]!r} is left out, as this server runs no tools")
            origins.update(found.origin for found in named)
        offered = [found for found in self._all if found.origin in origins]
        return (self._required(offered) if mode == "required" else mode), offered

    def _named(self, place: str, kind: str, choice: Mapping[Any, Any]) -> list[_FoundTool]:
        """Return the tools that an object names; an empty list for a tool that is left out."""
        if kind not in ("function", "custom", "namespace", "tool"):
            return []
        nested = choice.get(kind)
        if isinstance(nested, Mapping):  # as chat completions spell it
            place, choice = f"{place}.{kind}", nested
        name = validation.text(f"{place}.name", choice.get("name"))
        if kind == "namespace":
            found = [tool for tool in self._all if tool.origin.namespace == name]
        else:
            given = choice.get("namespace")
            namespace = None if given is None else validation.text(f"{place}.namespace", given)
            found = self._find(name, namespace)
        if not found:
            known = ", ".join(repr(self._function_of(tool)) for tool in self._all) or "none"
            raise InvalidParams(f"{place} names the {kind} {name[:80]!r}, and tools has {known[:400]}")
        return found

    def _find(self, name: str, namespace: str | None) -> list[_FoundTool]:
        """Return the tool of a name: by itself, else by its function's name, else of the only namespace that has it."""
        if namespace is not None:
            return [tool for tool in self._all if tool.origin.namespace == namespace and tool.origin.name == name]
        plain = [tool for tool in self._all if not tool.origin.namespace and tool.origin.name == name]
        if plain:
            return plain
        origin = self._names.origin_of(name)
        joined = [tool for tool in self._all if tool.origin == origin]
        inside = [tool for tool in self._all if tool.origin.name == name]
        return joined or (inside if len(inside) == 1 else [])


_BEGIN = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Half of a pair of surrogates if the text after it cannot be the other half.
_LONE_HIGH = rf"{_HIGH}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])"
# Whole characters of a JSON string. A pair of surrogates is one character.
_CHARACTERS = re.compile(rf'(?:[^"\\]|{_HIGH}{_LOW}|{_LONE_HIGH}|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|\\["\\/bfnrt])+')


class CustomInput:
    """The input of one call. text: the input as far as it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self._rest = ""
        self._is_open = False

    def feed(self, arguments: str) -> str:
        """Take the next piece of the arguments and return the next piece of the input."""
        self._rest += arguments
        if not self._is_open:
            found = _BEGIN.match(self._rest)
            if found is None:
                return ""
            self._is_open, self._rest = True, self._rest[found.end() :]
        characters = _CHARACTERS.match(self._rest)
        if characters is None:
            return ""
        self._rest = self._rest[characters.end() :]
        # A half of a pair of surrogates alone cannot be sent as UTF-8.
        piece = json.loads(f'"{characters[0]}"', strict=False).encode("utf-8", "replace").decode()
        self.text += piece
        return str(piece)

    def finish(self) -> str:
        """End the call and return the last piece: the arguments themselves if they do not have the shape of an input."""
        rest = "" if self._is_open else self._rest
        self.text += rest
        return rest


def custom_input_of(arguments: str) -> str:
    """Return the input in whole arguments."""
    reader = CustomInput()
    reader.feed(arguments)
    reader.finish()
    return reader.text
