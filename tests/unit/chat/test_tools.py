"""Which tools a chat may offer, and how a choice among them is understood."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.chat import Tool, parse_tool_choice, parse_tools
from paceline.errors import InvalidParams, Unsupported

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": True},
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


def named(name: str) -> dict[str, Any]:
    """Return a tool of this name."""
    return {"type": "function", "function": {"name": name}}


def nested(depth: int) -> dict[str, Any]:
    """Return nested objects."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def test_tools_of_openai_and_our_own_become_the_same() -> None:
    """A tool without parameters takes no arguments."""
    assert parse_tools(None) == parse_tools([]) == ()
    (weather, clock) = parse_tools([WEATHER, CLOCK])
    assert weather == Tool("weather", "Now.", SCHEMA)
    assert clock.as_json()["function"]["parameters"] == {"type": "object", "properties": {}}
    assert parse_tools([weather]) == (weather,)
    assert [tool.name for tool in parse_tools([named("get-arg-x"), {**named("json-schema"), "type": None}])] == [
        "get-arg-x",
        "json-schema",
    ]
    assert weather.as_json() == {
        "type": "function",
        "function": {"name": "weather", "description": "Now.", "parameters": SCHEMA},
    }


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ("weather", "tools must be a list, not str"),
        ({"type": "function"}, "tools must be a list, not dict"),
        (["weather"], r"tools\[0\] must be an object with type and function, not str"),
        ([{"type": "function"}], r"tools\[0\]\.function must be an object with a name, not NoneType"),
        ([{"type": "function", "function": {}}], r"tools\[0\]\.function\.name must be a str"),
        ([{"type": "function", "function": {"name": ""}}], r"tools\[0\]\.function\.name must have 1 to 256 characters"),
        ([{"type": "function", "function": {"name": "f", "description": 5}}], r"function\.description must be a str"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}}],
            r"function\.parameters must be a JSON schema",
        ),
        ([{"type": "function", "function": {"name": "f", "parameters": nested(70)}}], "nested more than 64 deep"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"x": "y" * 2**20}}}], "may have 1048576"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": dict.fromkeys(map(str, range(4097)))}}],
            r"parameters has 4097 members, and may have 4096",
        ),
        ([WEATHER, CLOCK, WEATHER], r"tools\[2\] has the name 'weather' of an earlier one"),
        ([CLOCK] * 1025, "tools must be at most 1024, not 1025"),
    ],
)
def test_a_wrong_tool_is_refused_and_its_place_named(tools: object, words: str) -> None:
    """Every error names its place in the tools."""
    with pytest.raises(InvalidParams, match=words):
        parse_tools(tools)


def test_other_kinds_of_tools_are_unsupported() -> None:
    """The way out is named."""
    with pytest.raises(
        Unsupported, match=r"tools\[0\]\.type must be 'function', not 'web_search'; leave other tools out"
    ):
        parse_tools([{"type": "web_search"}])


@pytest.mark.parametrize(
    ("choice", "expected", "names"),
    [
        (None, "auto", ["weather", "clock"]),
        ("none", "none", ["weather", "clock"]),
        ("required", "required", ["weather", "clock"]),
        ("any", "required", ["weather", "clock"]),
        ({"type": "auto"}, "auto", ["weather", "clock"]),
        ({"type": "none"}, "none", ["weather", "clock"]),
        ({"type": "any"}, "required", ["weather", "clock"]),
        ({"type": "required"}, "required", ["weather", "clock"]),
        ({"type": "function", "function": {"name": "clock"}}, "required", ["clock"]),
        ({"function": {"name": "clock"}}, "required", ["clock"]),
        ({"type": "function", "name": "clock"}, "required", ["clock"]),
        ({"type": "tool", "name": "clock"}, "required", ["clock"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("clock")]}}, "auto", ["clock"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            "required",
            ["weather"],
        ),
    ],
)
def test_a_choice_is_understood_in_every_spelling(choice: object, expected: str, names: list[str]) -> None:
    """llama.cpp's chat layer knows auto, required and none; a named tool is offered alone and required."""
    word, offered = parse_tool_choice(choice, parse_tools([WEATHER, CLOCK]))
    assert (word, [tool.name for tool in offered]) == (expected, names)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("all", "tool_choice must be one of 'auto', 'none', 'required', 'any'"),
        (5, "tool_choice must be 'auto', 'none', 'required', 'any' or .*, not int"),
        ({"type": "function"}, "tool_choice must be 'auto'"),
        ({"type": "web_search", "name": "clock"}, "not an object of the type 'web_search'"),
        ({"function": {"name": 5}}, r"tool_choice\.function\.name must be a str"),
        ({"function": {"name": "time"}}, "tool_choice names the tool 'time', and tools has 'weather', 'clock'"),
        (
            {"type": "allowed_tools", "mode": "none", "tools": []},
            r"tool_choice\.mode must be one of 'auto', 'required'",
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": "clock"}, r"tool_choice\.tools must be a list"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "time"}]}},
            r"tool_choice\.allowed_tools\.tools\[0\] names the tool 'time'",
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": []}, "'required' needs tools"),
    ],
)
def test_a_wrong_choice_is_refused(choice: object, words: str) -> None:
    """With the choices."""
    with pytest.raises(InvalidParams, match=words):
        parse_tool_choice(choice, parse_tools([WEATHER, CLOCK]))


def test_required_needs_tools() -> None:
    """There is nothing to call otherwise."""
    with pytest.raises(InvalidParams, match="tool_choice 'required' needs tools"):
        parse_tool_choice("required", ())
