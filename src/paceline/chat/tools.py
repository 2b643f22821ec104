"""The `tools` and the `tool_choice` of a chat: which functions the model may call, and whether it has to. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from paceline import validation
from paceline.chat.message_parts import IgnoredMembers, checked_schema
from paceline.constraints.schema_walk import resolved
from paceline.errors import InvalidParams, InvalidType, Unsupported

MAX_TOOLS = 1024

ToolChoice = Literal["auto", "none", "required"]
_WORDS = ("auto", "none", "required", "any")
_TOOL_MEMBERS = ("type", "function", "strict", "cache_control")
_FUNCTION_MEMBERS = ("name", "description", "parameters", "strict", "cache_control")
_MAX_PROPERTIES = 400  # of a tool; llama.cpp's chat layer takes 500
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name, which the model writes.
        description: Its effect, for the model.
        parameters: JSON Schema of its arguments, an object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the tool as OpenAI's API spells it, and as chat templates expect it."""
        parameters = dict(self.parameters or _NO_ARGUMENTS)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def parse_tools(tools: object, ignored: IgnoredMembers | None = None) -> tuple[Tool, ...]:
    """Check the tools of a request.

    Args:
        tools: A list of `Tool`, or of objects {"type": "function", "function": {"name", "description", "parameters"}} as
            OpenAI's API has them; None for none. `strict` is accepted: arguments always conform to their schema.
        ignored: Collects the members that have no effect here; None: they are not reported.

    Raises:
        InvalidParams: A tool is malformed, or two have one name; the message names the place.
        Unsupported: A tool is no function.
    """
    if tools is None:
        return ()
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidType(f"tools must be a list, not {type(tools).__name__}")
    if len(tools) > MAX_TOOLS:
        raise InvalidParams(f"tools must be at most {MAX_TOOLS}, not {len(tools)}; leave some out")
    ignored = IgnoredMembers() if ignored is None else ignored
    parsed = tuple(_parse_tool(f"tools[{index}]", tool, ignored) for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, tool in enumerate(parsed):
        if tool.name in names:
            raise InvalidParams(f"tools[{index}] has the name {tool.name!r} of an earlier one; names must differ")
        names.add(tool.name)
    return parsed


def parse_tool_choice(choice: object, tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return whether tools may or must be called, and the tools that are offered.

    Args:
        choice: "auto", "none", "required" or "any", which is the same; an object with this word as its type; a tool, as
            {"type": "function", "function": {"name": ...}} or {"type": "function", "name": ...} (or "tool" as the type); or
            some of the tools, as {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}; its inner
            object may also be spread. None is "auto".
        tools: The request's tools.

    Raises:
        InvalidParams: The choice is malformed, or names a tool that there is not.
    """
    if choice is None:
        return "auto", tuple(tools)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    word = choice if isinstance(choice, str) else kind if kind in _WORDS else None
    if word is not None:
        return _parse_word("tool_choice", word, tools)
    if isinstance(choice, Mapping) and kind == "allowed_tools":
        return _parse_allowed(choice, tools)
    return "required", (_named_tool("tool_choice", choice, tools),)


def _parse_word(place: str, word: str, tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    found = validation.choice(place, word, _WORDS)
    parsed: ToolChoice = "required" if found == "any" else found  # type: ignore[assignment]
    if parsed == "required" and not tools:
        raise InvalidParams(f"{place} {word!r} needs tools, and there are none")
    return parsed, tuple(tools)


def _parse_allowed(choice: Mapping[Any, Any], tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    place, inner = "tool_choice", choice.get("allowed_tools")
    if isinstance(inner, Mapping):
        place, choice = "tool_choice.allowed_tools", inner
    allowed, mode = choice.get("tools"), validation.choice(f"{place}.mode", choice.get("mode"), ("auto", "required"))
    if not isinstance(allowed, list):
        raise InvalidType(f"{place}.tools must be a list of tools with their names, not {type(allowed).__name__}")
    named = [_named_tool(f"{place}.tools[{index}]", tool, tools) for index, tool in enumerate(allowed)]
    return _parse_word(f"{place}.mode", mode, [tool for tool in tools if tool in named])


def _parse_tool(place: str, tool: object, ignored: IgnoredMembers) -> Tool:
    if isinstance(tool, Tool):
        function: Mapping[Any, Any] = {name: getattr(tool, name) for name in ("name", "description", "parameters")}
        place_of = place
    elif isinstance(tool, Mapping):
        kind = tool.get("type") or "function"
        if kind != "function":
            raise Unsupported(f"{place}.type must be 'function', not {str(kind)[:80]!r}; leave other tools out")
        found = tool.get("function")
        if not isinstance(found, Mapping):
            raise InvalidType(f"{place}.function must be an object with a name, not {type(found).__name__}")
        function, place_of = found, f"{place}.function"
        ignored.check(place, "tool", tool, _TOOL_MEMBERS)
        ignored.check(place_of, "function", function, _FUNCTION_MEMBERS)
    else:
        raise InvalidType(f"{place} must be an object with type and function, not {type(tool).__name__}")
    name = validation.text(f"{place_of}.name", function.get("name"))
    if not name or len(name) > 256:
        raise InvalidParams(f"{place_of}.name must have 1 to 256 characters, not {len(name)}")
    description, parameters = function.get("description"), function.get("parameters")
    return Tool(
        name,
        "" if description is None else validation.text(f"{place_of}.description", description),
        checked_schema(f"{place_of}.parameters", parameters) if parameters not in (None, {}) else _NO_ARGUMENTS,
    )


def _named_tool(place: str, choice: object, tools: Sequence[Tool]) -> Tool:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    named = function if isinstance(function, Mapping) else choice
    if not isinstance(named, Mapping) or "name" not in named or named.get("type") not in (None, "function", "tool"):
        words = ", ".join(map(repr, _WORDS))
        shown = f"an object of the type {str(named.get('type'))[:80]!r}" if isinstance(named, Mapping) else None
        raise InvalidType(
            f'{place} must be {words} or {{"type": "function", "function": {{"name": ...}}}}, '
            f"not {shown or type(choice).__name__}"
        )
    name = validation.text(f"{place}.name" if named is choice else f"{place}.function.name", named["name"])
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        known = ", ".join(repr(tool.name) for tool in tools) or "none"
        raise InvalidParams(f"{place} names the tool {name!r}, and tools has {known}")
    return found


@dataclass(frozen=True)
class CallTool:
    """A tool with the schema of an object that its calls are held to. All keywords of the schema can be enforced."""

    name: str
    schema: Mapping[str, Any]

    @cached_property
    def properties(self) -> dict[str, Any]:
        """The properties that the arguments may have by name; none if there are too many for a form by properties."""
        return {} if self.has_too_many_properties else self._named

    @property
    def has_properties(self) -> bool:
        """Whether the schema names properties."""
        return bool(self._named)

    @property
    def has_too_many_properties(self) -> bool:
        """Whether llama.cpp's chat layer does not take the tool in a form by properties."""
        return len(self._named) > _MAX_PROPERTIES

    @cached_property
    def _named(self) -> dict[str, Any]:
        found = resolved(self.schema, self.schema).get("properties")
        return found if isinstance(found, dict) else {}
