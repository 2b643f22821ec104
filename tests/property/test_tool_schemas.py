"""Schemas of functions: a call binds the described arguments, for parameters of any kind."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.chat import parse_tools
from paceline.chat_client.function_tools import FunctionTool, parse_docstring

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name.isidentifier() and name != "self"
)
HINTS: dict[str, tuple[Any, st.SearchStrategy[Any]]] = {
    "int": (int, st.integers(-(2**53), 2**53)),
    "str": (str, st.text(alphabet=st.characters(codec="utf-8"), max_size=8)),
    "bool": (bool, st.booleans()),
    "list[int]": (list[int], st.lists(st.integers(-9, 9), max_size=3)),
    "dict[str, bool]": (dict[str, bool], st.dictionaries(st.text("ab", max_size=2), st.booleans(), max_size=2)),
    "int | None": (int | None, st.none() | st.integers(0, 9)),
    "Literal": (Literal["x", "y"], st.sampled_from(["x", "y"])),
}


@st.composite
def functions(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    """A function that returns its arguments, and arguments for it."""
    import keyword

    names = draw(st.lists(NAMES.filter(lambda name: not keyword.iskeyword(name)), unique=True, max_size=5))
    kinds = {name: draw(st.sampled_from(sorted(HINTS))) for name in names}
    optional = [name for name in names if draw(st.booleans())]
    ordered = [name for name in names if name not in optional] + optional
    first_by_name = draw(st.integers(0, len(ordered)))
    parts = [f"{name}: H_{index}" + (" = None" if name in optional else "") for index, name in enumerate(ordered)]
    parts.insert(first_by_name, "/") if first_by_name else None
    scope = {f"H_{index}": HINTS[kinds[name]][0] for index, name in enumerate(ordered)}
    exec(f"def made({', '.join(parts)}): return dict(locals())", scope)
    given_names = [name for name in ordered if name not in optional or draw(st.booleans())]
    return scope["made"], {name: draw(HINTS[kinds[name]][1]) for name in given_names}


@settings(deadline=None, max_examples=150)
@given(functions())
def test_arguments_that_fit_the_schema_reach_the_function(made: tuple[Any, dict[str, Any]]) -> None:
    """The schema accepts them, and the function gets them by their names; missing arguments have their default."""
    function, arguments = made
    tool = FunctionTool.of(function)
    (parsed,) = parse_tools([tool])  # a schema that a chat accepts
    assert parsed.parameters == tool.parameters
    jsonschema.validate(arguments, tool.parameters)
    positional, named = tool.bind(json.dumps(arguments))
    left_out = [name for name in tool.parameters["properties"] if name not in arguments]
    got = function(*positional, **named)
    assert got == arguments | dict.fromkeys(left_out)


@settings(deadline=None, max_examples=150)
@given(functions(), st.dictionaries(NAMES, st.none() | st.integers() | st.text(max_size=3), max_size=3))
def test_what_the_schema_refuses_is_refused(made: tuple[Any, dict[str, Any]], arguments: dict[str, Any]) -> None:
    """A call raises ValueError if the schema does not accept an unknown or missing name."""
    function, _ = made
    tool = FunctionTool.of(function)
    assert tool.parameters is not None
    known = set(tool.parameters["properties"])
    if set(arguments) - known or set(tool.parameters.get("required", ())) - set(arguments):
        with pytest.raises(ValueError, match="rguments"):
            tool.bind(json.dumps(arguments))


@given(st.text(max_size=200))
def test_any_text_is_a_docstring(text: str) -> None:
    """It describes the readable parts."""
    described, arguments = parse_docstring(text)
    assert isinstance(described, str)
    assert all(name.isidentifier() or name.isalnum() or "_" in name for name in arguments)
