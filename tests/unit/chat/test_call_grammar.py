"""Schemas of arguments that are plain text in a call, as terminals."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import SamplingParams
from paceline.chat.call_grammar import CallNames, CallTool, text_terminal, types_of
from paceline.constraints.compiler import ConstraintCompiler
from paceline.constraints.constraint import TokenTable
from paceline.constraints.schema_walk import reference_resolver

ALL_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
END = frozenset({256})
BYTES = (*(bytes([i]) for i in range(256)), b"<eos>")
COMPILER = ConstraintCompiler(
    TokenTable(pieces=BYTES, control_ids=END, eog_ids=END, encode=lambda text: list(text.encode()))
)


def terminal_of(schema: Any, root: dict[str, Any] | None = None) -> tuple[str | None, list[str]]:
    reported: list[str] = []
    found = text_terminal(schema, reference_resolver(root or {}), lambda keyword, _: reported.append(keyword))
    return found, reported


def matches(terminal: str, text: str) -> bool:
    made = COMPILER.compile(SamplingParams(lark=f"start: T\nT: {terminal}\n"))
    assert made is not None
    try:
        for byte in text.encode():
            made.accept(byte)
    except ValueError:
        return False
    return made.may_end


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "pattern": "^[a-z]{2}$"}, ["ab"], ["abc", "a", "AB"]),
        ({"type": "string", "pattern": "b/c"}, ["b/c", "ab/cd\n"], ["b", ""]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", 'x"\n'], ["a", "abcd"]),
        ({"enum": ["a b", 'x"', 5, None]}, ["a b", 'x"', "5", "null"], ["a", "6"]),
        ({"const": "<x>"}, ["<x>"], ["<x"]),
        (
            {"type": "string", "format": "date"},
            ["2026-11-29", "2024-02-29"],
            ["2026-13-01", "2026-02-29", "0000-01-23", "today"],
        ),
        ({"type": "string", "format": "date-time"}, ["2026-11-29T10:00:00Z"], ["2026-11-29", "2026-02-30T10:00:00Z"]),
        ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a", "a@", "@b"]),
        ({"type": "string", "format": "uuid"}, ["12345678-1234-1234-1234-123456789abc"], ["1234"]),
        ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
        ({"type": "string", "format": "uri"}, ["https://a.b/c?d=e"], ["a b", "nothing"]),
        ({"anyOf": [{"const": "x"}, {"type": "string", "pattern": "^y+$"}]}, ["x", "yy"], ["xy"]),
        ({"allOf": [{"type": "string", "minLength": 2}, {"type": "string", "maxLength": 2}]}, ["ab"], ["a", "abc"]),
        ({"$ref": "#/$defs/a"}, ["q"], ["r"]),
    ],
    ids=str,
)
def test_a_schema_becomes_the_texts_that_it_allows(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    """Of constants, patterns, lengths, formats and references."""
    terminal, reported = terminal_of(schema, {"$defs": {"a": {"enum": ["q"]}}})
    assert terminal is not None and not reported
    assert [text for text in right if not matches(terminal, text)] == []
    assert [text for text in wrong if matches(terminal, text)] == []


@pytest.mark.parametrize(
    ("schema", "reported"),
    [
        ({"type": "string"}, []),
        ({}, []),
        ({"type": "string", "pattern": "a$|b"}, ["pattern"]),
        ({"type": "string", "pattern": "(?i)a"}, ["pattern"]),
        ({"type": "string", "format": "ipv6"}, ["format"]),
        ({"type": "string", "format": "color"}, []),
        ({"type": "string", "maxLength": 10_001}, ["maxLength"]),
        ({"type": ["string", "integer"], "minimum": 3, "maximum": 4}, ["maximum", "minimum"]),
        ({"anyOf": [{"type": "string"}, {"const": "x"}]}, []),
    ],
    ids=str,
)
def test_other_texts_are_free_and_what_is_not_enforced_is_reported(schema: dict[str, Any], reported: list[str]) -> None:
    """By its keyword."""
    assert terminal_of(schema) == (None, reported)


def test_schemas_with_countless_alternatives_end_soon() -> None:
    """Each level refers to the next one twice."""
    root: dict[str, Any] = {f"a{n}": {"anyOf": [{"$ref": f"#/a{n + 1}"}] * 2} for n in range(60)}
    root["a60"] = {"const": "x"}
    assert terminal_of({"$ref": "#/a0"}, root) == (None, [""])
    assert types_of(root, {"$ref": "#/a0"}) == frozenset(("string",))
    circle = {"a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}
    assert terminal_of({"$ref": "#/a"}, circle) == (None, [""])
    assert types_of(circle, {"$ref": "#/a"}) is None


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, None),
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": [1, "a", None, True, 1.5, [], {}]}, set(ALL_TYPES)),
        ({"anyOf": [{"type": "string"}, {"const": 5}]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, {"integer"}),
    ],
)
def test_types_are_those_that_a_schema_allows(schema: dict[str, Any], types: set[str] | None) -> None:
    """None: any."""
    assert types_of({}, schema) == types


def test_names_come_back_in_every_text() -> None:
    """In literals alone, spelt as these are; rules keep the names that stand for them."""
    names = CallNames([CallTool("größe", {"type": "object", "properties": {'a"b': {"type": "integer"}}})])
    (described,) = names.described("properties")
    function = described["function"]
    (alias,) = function["parameters"]["properties"]
    assert (function["name"], alias) == ("pacelinetool0x", "pacelinetool0xarg0x")
    assert names.in_text("<function=pacelinetool0x>") == "<function=größe>"
    assert names.in_parser(f'{{"name":"tool-{alias}","literal":"<{alias}>"}}') == (
        f'{{"name":"tool-{alias}","literal":"<a\\"b>"}}'
    )
    assert names.in_grammar(f'tool-{alias} ::= "<{alias}>"\n', is_loose=False) == f'tool-{alias} ::= "<a\\"b>"\n'
