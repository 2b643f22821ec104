"""Tools of a response as functions: names there and back, custom tools, omitted tools, and every spelling of a choice."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidParams, InvalidType
from paceline.server.dialects.responses.response_tools import ResponseTools, ToolNames, ToolOrigin, parse_tool_fields

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA}
OTHER = {**TOOL, "name": "other"}
SPAWN = {"type": "function", "name": "spawn", "description": "Starts an agent.", "parameters": SCHEMA}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "About agents.",
    "tools": [SPAWN, {**SPAWN, "name": "wait"}],
}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
SEARCH = {"type": "web_search", "external_web_access": True}


def names_of(tools: ResponseTools) -> list[str]:
    return [function.name for function in tools.functions]


def test_functions_stand_flat_or_as_in_chat_completions() -> None:
    """With the members that OpenAI's package adds, without a warning."""
    flat = {**TOOL, "strict": True, "description": None, "defer_loading": False, "allowed_callers": ["direct"]}
    nested = {"type": "function", "function": {**OTHER, "description": "Others."}}
    tools = parse_tool_fields([flat, nested], None)
    assert [(function.name, function.description, function.parameters) for function in tools.functions] == [
        ("weather", "", SCHEMA),
        ("other", "Others.", SCHEMA),
    ]
    assert (tools.choice, tools.warnings) == (None, ())
    none = parse_tool_fields(None, "none")
    assert (none.functions, none.choice) == ((), "none")


def test_functions_of_a_namespace_have_both_names_and_are_called_by_their_own() -> None:
    """The description of the namespace comes once."""
    tools = parse_tool_fields([TOOL, AGENTS], None)
    assert [(function.name, function.description) for function in tools.functions] == [
        ("weather", ""),
        ("agents__spawn", "About agents.\n\nStarts an agent."),
        ("agents__wait", "Starts an agent."),
    ]
    assert tools.names.origin_of("agents__spawn") == ToolOrigin("spawn", "agents")
    assert tools.names.function_of("spawn", "agents") == "agents__spawn"
    assert tools.names.origin_of("weather") == ToolOrigin("weather")
    assert tools.names.origin_of("made_up") == ToolOrigin("made_up")


def test_a_namespace_that_ends_with_its_separator_gets_no_second() -> None:
    """Like names of MCP servers."""
    assert ToolNames().function_of("ask", "mcp__wiki__") == "mcp__wiki__ask"


@given(st.text(min_size=1, max_size=90), st.text(min_size=1, max_size=90))
def test_names_are_short_plain_and_always_the_same(namespace: str, name: str) -> None:
    """Whether the tool is offered or not, so that the calls of a conversation keep theirs."""
    names = ToolNames([ToolOrigin(name, namespace)])
    function = names.function_of(name, namespace)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", function)
    assert names.origin_of(function) == ToolOrigin(name, namespace)
    assert ToolNames().function_of(name, namespace) == function


def test_names_that_would_be_equal_are_kept_apart() -> None:
    """A function without a namespace keeps its own."""
    origins = [ToolOrigin("c", "a__b"), ToolOrigin("b__c", "a"), ToolOrigin("a__b__c")]
    names = ToolNames(origins)
    functions = [names.function_of(origin.name, origin.namespace) for origin in origins]
    assert len(set(functions)) == 3
    assert functions[2] == "a__b__c"
    assert [names.origin_of(function) for function in functions] == origins


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    """Also in a namespace, and as chat completions spell it."""
    nested = {"type": "custom", "custom": {"name": "nested", "format": {"type": "text"}}}
    tools = parse_tool_fields([PATCH, nested, {**AGENTS, "tools": [{**PATCH, "name": "plan"}]}], None)
    assert names_of(tools) == ["patch", "nested", "agents__plan"]
    for function in tools.functions:
        parameters = function.parameters
        assert parameters is not None
        assert (parameters["properties"], parameters["required"]) == ({"input": {"type": "string"}}, ["input"])
    assert tools.names.origin_of("patch") == ToolOrigin("patch", is_custom=True)
    assert tools.names.origin_of("agents__plan") == ToolOrigin("plan", "agents", is_custom=True)
    assert tools.warnings == ()


def test_a_regular_expression_of_a_custom_tool_is_enforced_and_a_lark_grammar_is_shown() -> None:
    """The model reads both; of the second a warning says that it is not enforced, also if it is no grammar at all."""
    regex = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]+|c"}}
    lark = {
        **PATCH,
        "name": "plan",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: nothing here"},
    }
    tools = parse_tool_fields([regex, lark], None)
    first, second = tools.functions
    assert first.parameters is not None
    assert first.parameters["properties"]["input"] == {"type": "string", "pattern": "^(?:[ab]+|c)$"}
    assert first.description.endswith(": [ab]+|c")
    assert second.description.endswith("start: nothing here")
    assert [warning.partition(":")[0] for warning in tools.warnings] == ["tools[1].format"]


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_preview_2025_03_11", "tool_search", "image_generation", "local_shell", "shell", "mcp",
     "code_interpreter", "file_search", "computer_use_preview", "brand_new"],
)  # fmt: skip
def test_tools_that_openai_runs_are_left_out_with_a_warning(kind: str) -> None:
    """Also in a namespace, and future types."""
    tools = parse_tool_fields([TOOL, {"type": kind, "x": 1}, {**AGENTS, "tools": [SPAWN, {"type": kind}]}], None)
    assert names_of(tools) == ["weather", "agents__spawn"]
    (warning,) = tools.warnings
    assert warning.startswith(f"tools[1] and 1 more: the tool {kind!r} is left out")


def test_members_without_a_meaning_are_warnings() -> None:
    """One for all tools that have it."""
    extra = {"output_schema": {}, "defer_loading": True, "strict": False, "tags": [1]}
    tools = parse_tool_fields([{**TOOL, **extra}, {**OTHER, **extra}, {**PATCH, "tags": [2]}], None)
    assert names_of(tools) == ["weather", "other", "patch"]
    assert [warning.partition(": ")[0] for warning in tools.warnings] == [
        "tools[0] and 1 more",
        "tools[0] and 1 more",
        "tools[0] and 2 more",
    ]
    assert [warning.split(": ")[1] for warning in tools.warnings] == [
        "output_schema",
        "defer_loading",
        "the member 'tags' of a tool has no effect here and was ignored",
    ]


def test_a_tool_that_an_item_adds_replaces_an_earlier_one() -> None:
    """In its place; the body itself may have each name once."""
    tools = parse_tool_fields([TOOL, OTHER], None, [("input[0].tools", [{**TOOL, "description": "New."}, PATCH])])
    assert [(function.name, function.description) for function in tools.functions] == [
        ("weather", "New."),
        ("other", ""),
        ("patch", "Edits files."),
    ]
    with pytest.raises(InvalidParams, match=r"^tools\[1\] has the name 'weather'"):
        parse_tool_fields([TOOL, TOOL], None)
    with pytest.raises(InvalidParams, match=r"^input\[0\]\.tools\[0\] must"):
        parse_tool_fields([TOOL], None, [("input[0].tools", [5])])


ALL = [TOOL, OTHER, AGENTS, PATCH, SEARCH]


@pytest.mark.parametrize(
    ("choice", "function"),
    [
        ({"type": "function", "name": "other"}, "other"),
        ({"type": "function", "function": {"name": "other"}}, "other"),
        ({"type": "tool", "name": "other"}, "other"),
        ({"type": "function", "name": "other", "mode": "x"}, "other"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "custom", "custom": {"name": "patch"}}, "patch"),
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "function", "name": "spawn"}, "agents__spawn"),
        ({"type": "function", "name": "agents__spawn"}, "agents__spawn"),
    ],
)
def test_a_choice_names_a_tool(choice: Any, function: str) -> None:
    """In every spelling."""
    tools = parse_tool_fields(ALL, choice)
    assert tools.choice == {"type": "function", "function": {"name": function}}
    assert function in names_of(tools)


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ("required", "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "required"}, "required"),
    ],
)
def test_a_choice_is_a_word(choice: Any, word: str | None) -> None:
    """By itself or as a type; all tools are offered."""
    tools = parse_tool_fields(ALL, choice)
    assert (tools.choice, len(tools.functions)) == (word, 5)


@pytest.mark.parametrize(
    ("allowed", "offered"),
    [
        ([{"type": "function", "name": "other"}], ["other"]),
        ([{"type": "function", "function": {"name": "other"}}], ["other"]),
        ([{"type": "custom", "name": "patch"}, {"type": "function", "name": "weather"}], ["weather", "patch"]),
        ([{"type": "namespace", "name": "agents"}], ["agents__spawn", "agents__wait"]),
        ([{"type": "function", "name": "wait", "namespace": "agents"}, SEARCH], ["agents__wait"]),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_choice_may_allow_some_tools(allowed: Any, offered: list[str], mode: str, is_nested: bool) -> None:
    """Others are not offered; omitted tools do not matter."""
    inner = {"mode": mode, "tools": allowed}
    choice = {"type": "allowed_tools", **({"allowed_tools": inner} if is_nested else inner)}
    tools = parse_tool_fields(ALL, choice)
    assert (tools.choice, names_of(tools)) == (mode, offered)
    assert tools.names.function_of("wait", "agents") == "agents__wait"


def test_a_namespace_can_be_demanded() -> None:
    """Then a call of any of its functions."""
    tools = parse_tool_fields(ALL, {"type": "namespace", "name": "agents"})
    assert (tools.choice, names_of(tools)) == ("required", ["agents__spawn", "agents__wait"])


@pytest.mark.parametrize(
    ("tools", "choice", "words"),
    [
        (ALL, {"type": "web_search_preview"}, "demands the tool 'web_search_preview'"),
        (ALL, {"type": "mcp", "server_label": "wiki"}, "demands the tool 'mcp'"),
        ([SEARCH], "required", "needs tools: 'web_search' are left out"),
        ([SEARCH], "any", "needs tools: 'web_search' are left out"),
        ([], "required", "needs tools, and there are none"),
        (
            ALL,
            {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]},
            "needs tools: 'web_search' are left out",
        ),
        (ALL, {"type": "function", "name": "fly"}, "names the function 'fly', and tools has 'weather', 'other'"),
        (ALL, {"type": "function", "name": "spawn", "namespace": "x"}, "names the function 'spawn'"),
        (ALL, {"type": "namespace", "name": "x"}, "names the namespace 'x'"),
    ],
)
def test_a_choice_that_cannot_be_met_is_refused(tools: Any, choice: Any, words: str) -> None:
    """With the demanded tool, and the offered tools."""
    with pytest.raises(InvalidParams, match="^tool_choice") as caught:
        parse_tool_fields(tools, choice)
    assert words in str(caught.value)


def test_only_tools_that_are_left_out_may_be_allowed() -> None:
    """Then none is offered, and a warning says so."""
    tools = parse_tool_fields(ALL, {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]})
    assert names_of(tools) == []
    assert any(warning.startswith("tool_choice.tools[0]") for warning in tools.warnings)


@pytest.mark.parametrize(
    ("tools", "choice", "place"),
    [
        ("x", None, "tools must"),
        ([5], None, "tools[0] must"),
        ([{"name": "x"}], None, "tools[0].type"),
        ([{"type": 5}], None, "tools[0].type"),
        ([{**TOOL, "name": 5}], None, "tools[0].name"),
        ([{**TOOL, "name": ""}], None, "tools[0].name"),
        ([{**TOOL, "name": "x" * 257}], None, "tools[0].name"),
        ([{**TOOL, "description": 5}], None, "tools[0].description"),
        ([{**TOOL, "parameters": 5}], None, "tools[0].parameters"),
        ([{**TOOL, "strict": 5}], None, "tools[0].strict"),
        ([{**AGENTS, "name": None}], None, "tools[0].name"),
        ([{**AGENTS, "tools": None}], None, "tools[0].tools"),
        ([{**AGENTS, "tools": [{**SPAWN, "name": 5}]}], None, "tools[0].tools[0].name"),
        ([{**AGENTS, "tools": [5]}], None, "tools[0].tools[0] must"),
        ([{**PATCH, "format": "text"}], None, "tools[0].format must"),
        ([{**PATCH, "format": {"type": "xml"}}], None, "tools[0].format.type"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}], None, "tools[0].format.syntax"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}], None, "tools[0].format.definition"),
        ([TOOL], 5, "tool_choice must"),
        ([TOOL], {}, "tool_choice.type"),
        ([TOOL], {"type": "function"}, "tool_choice.name"),
        ([TOOL], {"type": "function", "name": "weather", "namespace": 5}, "tool_choice.namespace"),
        ([TOOL], {"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
        ([TOOL], {"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ([TOOL], {"type": "allowed_tools", "mode": "auto", "tools": [5]}, "tool_choice.tools[0]"),
        ([TOOL], {"type": "allowed_tools", "mode": "auto", "tools": [{**TOOL, "name": "x"}]}, "tool_choice.tools[0] names"),
    ],
)  # fmt: skip
def test_malformed_tools_are_refused_by_their_place(tools: Any, choice: Any, place: str) -> None:
    """The message begins with it."""
    with pytest.raises(InvalidParams) as caught:
        parse_tool_fields(tools, choice)
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("name", ["strict", "defer_loading"])
def test_flags_of_tools_are_booleans(name: str) -> None:
    """Another type is an error that names the place."""
    with pytest.raises(InvalidType, match=rf"^tools\[1\]\.{name} must be True or False"):
        parse_tool_fields([TOOL, {**OTHER, name: "yes"}], None)
