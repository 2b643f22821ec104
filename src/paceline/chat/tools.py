"""The `tools` and the `tool_choice` of a chat: which functions the model may call, and whether it has to. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline import validation
from paceline.chat.json_values import checked_schema
from paceline.errors import InvalidParams, InvalidType, Unsupported

MAX_TOOLS = 1024

ToolChoice = Literal["auto", "none", "required"]
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name, which the model writes.
        description: What it does, for the model.
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


def parse_tools(tools: object) -> tuple[Tool, ...]:
    """Check the tools of a request.

    Args:
        tools: A list of `Tool`, or of objects {"type": "function", "function": {"name", "description", "parameters"}} as
            OpenAI's API has them; None for none. `strict` is accepted: arguments always conform to their schema.

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
    parsed = tuple(_parse_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    _check_names(parsed)
    return parsed


def parse_tool_choice(choice: object, tools: Sequence[Tool]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return how far tools have to be called, and those that are offered.

    Args:
        choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}; None is "auto".
        tools: The request's tools.

    Raises:
        InvalidParams: The choice is malformed, or names a tool that there is not.
    """
    if choice is None:
        return "auto", tuple(tools)
    if isinstance(choice, str):
        word: ToolChoice = validation.choice("tool_choice", choice, ("auto", "none", "required"))  # type: ignore[assignment]
        if word == "required" and not tools:
            raise InvalidParams("tool_choice 'required' needs tools, and there are none")
        return word, tuple(tools)
    name = _chosen_name(choice)
    named = tuple(tool for tool in tools if tool.name == name)
    if not named:
        known = ", ".join(repr(tool.name) for tool in tools) or "none"
        raise InvalidParams(f"tool_choice names the tool {name!r}, and tools has {known}")
    return "required", named


def _parse_tool(place: str, tool: object) -> Tool:
    if isinstance(tool, Tool):
        function: Mapping[Any, Any] = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
        place_of = place
    elif isinstance(tool, Mapping):
        kind = tool.get("type") or "function"
        if kind != "function":
            raise Unsupported(f"{place}.type must be 'function', not {str(kind)[:80]!r}; leave other tools out")
        found = tool.get("function")
        if not isinstance(found, Mapping):
            raise InvalidType(f"{place}.function must be an object with a name, not {type(found).__name__}")
        function, place_of = found, f"{place}.function"
    else:
        raise InvalidType(f"{place} must be an object with type and function, not {type(tool).__name__}")
    name = validation.text(f"{place_of}.name", function.get("name"))
    if not name or len(name) > 256:
        raise InvalidParams(f"{place_of}.name must have 1 to 256 characters, not {len(name)}")
    description = function.get("description")
    return Tool(
        name,
        "" if description is None else validation.text(f"{place_of}.description", description),
        _parse_parameters(f"{place_of}.parameters", function.get("parameters")),
    )


def _parse_parameters(place: str, parameters: object) -> Mapping[str, Any]:
    return _NO_ARGUMENTS if parameters is None or parameters == {} else checked_schema(place, parameters)


def _check_names(tools: Sequence[Tool]) -> None:
    """Raise `InvalidParams` for a name that two tools have."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in names:
            raise InvalidParams(f"tools[{index}] has the name {tool.name!r} of an earlier one; names must differ")
        names.add(tool.name)


def _chosen_name(choice: object) -> str:
    if not isinstance(choice, Mapping) or not isinstance(choice.get("function"), Mapping):
        raise InvalidType(
            'tool_choice must be \'auto\', \'none\', \'required\' or {"type": "function", "function": {"name": ...}}, '
            f"not {type(choice).__name__}"
        )
    return validation.text("tool_choice.function.name", choice["function"].get("name"))
