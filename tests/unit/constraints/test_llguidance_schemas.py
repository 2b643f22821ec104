"""Keywords that llguidance lacks and that are written with others, and schemas from which keywords are left out."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from tests.unit.constraints.byte_table import TABLE
from tests.unit.constraints.schema_suite import sort, writes

from paceline.constraints import ConstraintCompiler, check_constraint
from paceline.constraints.llguidance_schemas import prepared_schema, relaxed_schema
from paceline.constraints.schema_walk import pattern_problem
from paceline.errors import GrammarError
from paceline.params import SamplingParams

COMPILER = ConstraintCompiler(TABLE)
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
FOX = {"type": "object", "properties": {"kind": {"const": "fox", "default": "fox"}}}
BEAR = {"type": "object", "properties": {"kind": {"const": "bear", "default": "bear"}}}
DEFS = {"cat": CAT, "dog": DOG, "fox": FOX, "bear": BEAR, "names": {"enum": ["a", "b"], "type": "string"}}
TREE = {
    "leaf": {"type": "object", "properties": {"t": {"const": 0}, "v": {"type": "null"}}, "required": ["v"]},
    "branch": {
        "type": "object",
        "properties": {"t": {"const": 1}, "next": {"$ref": "#/$defs/tree"}},
        "required": ["next"],
    },
    "tree": {"oneOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/branch"}], "discriminator": {"propertyName": "t"}},
}


def refs(*names: str) -> list[dict[str, str]]:
    return [{"$ref": f"#/$defs/{name}"} for name in names]


REWRITTEN: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {"oneOf": refs("cat", "dog"), "$defs": DEFS},
        [{"kind": "cat", "n": 1}, {"kind": "wolf"}],
        [{"kind": "owl"}, {}, {"kind": "cat", "n": "x"}, 5],
    ),
    (
        {"oneOf": refs("fox", "bear"), "discriminator": {"propertyName": "kind"}, "$defs": DEFS},
        [{"kind": "fox"}, {"kind": "bear"}],
        [{"kind": "cat"}],
    ),
    ({"oneOf": [{"oneOf": refs("cat", "dog")}, {"type": "null"}], "$defs": DEFS}, [None, {"kind": "dog"}], [{}, 0]),
    (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in (1, 2)]},
        [{"k": 2}],
        [{"k": 3}],
    ),
    ({"oneOf": [{"type": "integer"}, {"type": ["string", "null"]}]}, [1, "a", None], [1.5]),
    ({"oneOf": [{"type": "boolean"}, {"const": 1}]}, [True, 1], [2]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
            ]
        },
        [{"a": 1}, {"b": 1}, {}],
        [{"a": 1, "b": 1}],
    ),
    (
        {"anyOf": [{"type": "integer"}, {"const": "a"}], "oneOf": [{"type": "integer"}, {"type": "null"}]},
        [1],
        ["a", None],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"c": 1}, {"a": "x"}],
    ),
    (
        {"type": "object", "propertyNames": refs("names")[0], "additionalProperties": {"type": "null"}, "$defs": DEFS},
        [{"b": None}],
        [{"x": None}, {"a": 1}],
    ),
    ({"type": "object", "propertyNames": {"const": "a"}}, [{"a": [1]}], [{"b": 1}]),
    (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "properties": {"a": {"type": "null"}, "b": {}}},
        [{"a": None}],
        [{"b": 1}, {"a": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": {"type": "null"}},
        [{"xy": None}],
        [{"y": None}, {"xy": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}},
        [{"ab": 1}, {"a\n": 1}],
        [{"": 1}, {"abc": 1}],
    ),
    (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": {"type": "integer"}},
        [{"2024-02-29": 1}],
        [{"2024-02-30": 1}, {"x": 1}],
    ),
    ({"type": "array", "uniqueItems": True, "maxItems": 1, "items": {"type": "null"}}, [[], [None]], [[None, None]]),
    (
        {"format": "uuid4", "type": "string"},
        ["01234567-89ab-4def-8123-456789abcdef"],
        ["01234567-89ab-1def-8123-456789abcdef", "x"],
    ),
    ({"format": "base64", "type": "string"}, ["", "aGk=", "aGlp"], ["a", "aGk"]),
    ({"format": "ipv4interface", "type": "string"}, ["10.0.0.1/8"], ["10.0.0.1", "10.0.0.1/33", "256.0.0.1/8"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, [0.5, 0.1, 0.0001], [0, 0.0, 0.6]),
    ({"minimum": -1.5, "exclusiveMaximum": -1, "type": "number"}, [-1.5, -1.25], [-1, -1.0, 0]),
    (
        {"$ref": "#/$defs/tree", "$defs": TREE},
        [{"t": 0, "v": None}, {"t": 1, "next": {"t": 1, "next": {"t": 0, "v": None}}}],
        [{"t": 2, "v": None}, {"t": 0, "next": None}],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), REWRITTEN, ids=lambda value: json.dumps(value)[:60])
def test_what_can_be_written_with_other_keywords_is_enforced(
    schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    """Valid values can be written, invalid values cannot."""
    case = {
        "schema": schema,
        "tests": [
            {"description": json.dumps(value), "data": value, "valid": is_valid}
            for values, is_valid in ((valid, True), (invalid, False))
            for value in values
        ],
    }
    assert sort(COMPILER, case) == ("enforced", [])


@pytest.mark.parametrize("value", [{}, {"v": None}])
def test_a_discriminator_is_required_although_it_has_a_default(value: Any) -> None:
    """Without it no alternative is chosen."""
    constraint = COMPILER.compile(SamplingParams(json_schema={"$ref": "#/$defs/tree", "$defs": TREE}))
    assert constraint is not None
    assert not writes(constraint, json.dumps(value))


@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["1", "-0.5", "+12.", ".5", "007"], ["", ".", "-", "1.2.3", "1e5"]),
        (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$", ["1", "12.25", "-0.100"], ["", "1.255", "-"]),
        (
            r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)",
            ["1", "999.99", "0999.9"],
            ["", "1000", "1.234", "."],
        ),
        (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)", ["1", "-123"], ["", "1234", "."]),
        (
            r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)",
            ["0", "0.25", "-00.1"],
            ["", "1", "0.255"],
        ),
    ],
)
def test_patterns_of_decimals_have_no_look_ahead(pattern: str, valid: list[str], invalid: list[str]) -> None:
    """Pydantic wrote these patterns until its version 2.13; written values match them."""
    constraint = COMPILER.compile(SamplingParams(json_schema={"type": "string", "pattern": pattern}))
    assert constraint is not None
    for text in valid:
        assert re.search(pattern, text)
        assert writes(constraint.copy(), f'"{text}"')
    for text in invalid:
        assert not writes(constraint.copy(), f'"{text}"')


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "#/oneOf"),
        ({"oneOf": refs("fox", "bear"), "$defs": DEFS}, "#/oneOf"),
        ({"oneOf": [{"properties": {"k": {"const": k}}, "required": ["k"]} for k in (1, 2)]}, "#/oneOf"),
        (  # {} is valid by all three
            {
                "oneOf": [*refs("fox", "bear"), {"type": "object", "additionalProperties": False}],
                "discriminator": {"propertyName": "kind"},
                "$defs": DEFS,
            },
            "#/oneOf",
        ),
        ({"properties": {"a": {"propertyNames": {"not": {}}}}}, "#/properties/a/propertyNames"),
        ({"propertyNames": {"enum": [1, 2]}}, "#/propertyNames"),
        ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, "#/propertyNames"),
        ({"type": "object", "properties": {"a": {"type": "strng"}}}, "#/properties/a/type"),
        ({"type": "object", "properties": {"a": {"type": ["null", 5]}}}, "#/properties/a/type"),
        ({"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]}, "#/required"),
        ({"properties": {"a": {"pattern": "x"}, "b": {"pattern": "(?=x)y"}}}, "#/properties/b/pattern"),
        ({"properties": {"a": {"pattern": "x"}, "b": {"pattern": r"(x)\1"}}}, "#/properties/b/pattern"),
        ({"properties": {"a": {"pattern": "x"}, "b": {"pattern": "x)"}}}, "#/properties/b/pattern"),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/b"}}, "$defs": {"a": {}}},
            "#/properties/b/$ref",
        ),
        (
            {
                "type": "object",
                "required": ["a"],
                "properties": {"a": {"type": "object", "required": ["b"], "properties": {"b": {"enum": []}}}},
            },
            "#/required",
        ),
        ({"items": {"properties": {"a": {"enum": [1]}}}, "anyOf": [{"enum": []}]}, "#/anyOf/0/enum"),
        (
            {
                "type": "object",
                "propertyNames": {"enum": ["x"]},
                "additionalProperties": {"type": "array", "contains": {}},
            },
            "#/additionalProperties/contains",
        ),
        (
            {
                "oneOf": refs("a", "b"),
                "discriminator": {"propertyName": "t"},
                "$defs": {
                    "a": {"type": "object", "properties": {"t": {"const": 1}, "u": {"not": {}}}},
                    "b": {"type": "object", "properties": {"t": {"const": 2}}},
                },
            },
            "#/$defs/a/properties/u/not",
        ),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}, "#/maxProperties"),
    ],
)
def test_errors_name_the_place_and_no_option_that_there_is_not(schema: Any, place: str) -> None:
    """At the keyword's own place, not at the first of its name."""
    with pytest.raises(GrammarError) as refusal:
        check_constraint(SamplingParams(json_schema=schema))
    assert str(refusal.value).startswith(f"json_schema: {place}: ")
    assert "coerce" not in str(refusal.value)
    assert "lenient" not in str(refusal.value)


def test_keywords_are_left_out_where_that_is_allowed() -> None:
    """Each with its place; others are still refused."""
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string", "format": "regex"}, "uniqueItems": True},
            "kinds": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        },
    }
    relaxed, left_out = relaxed_schema(schema, ("uniqueItems", "format", "oneOf"))
    assert [sentence.partition(" is left out: ")[0] for sentence in left_out] == [
        "#/properties/tags/uniqueItems",
        "#/properties/tags/items/format",
        "#/properties/kinds/oneOf",
    ]
    assert relaxed["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert relaxed["properties"]["kinds"] == {"anyOf": [{"type": "number"}, {"type": "integer"}]}
    with pytest.raises(GrammarError, match="#/properties/kinds/oneOf"):
        prepared_schema(json.dumps(relaxed_schema(schema, ("uniqueItems", "format"))[0]))
    assert json.loads(prepared_schema(json.dumps(relaxed)))["properties"].keys() == {"tags", "kinds"}


def test_everything_that_is_not_enforced_can_be_left_out() -> None:
    """But a type that does not exist stays an error."""
    schema = {
        "type": "object",
        "not": {},
        "minProperties": 5,
        "properties": {"a": {"pattern": "(?=a)"}, "b": {"hint": 1}},
    }
    relaxed, left_out = relaxed_schema(schema)
    assert len(left_out) == 4
    check_constraint(SamplingParams(json_schema=relaxed))
    with pytest.raises(GrammarError, match="#/items/type"):
        relaxed_schema({"items": {"type": "strng"}})


@pytest.mark.parametrize("required", [None, 1, True, {"a": 1}, [1]])
def test_a_required_of_the_wrong_type_is_left_to_the_compiler(required: Any) -> None:
    schema = {"properties": {"a": {"format": "regex"}}, "required": required}
    relaxed, left_out = relaxed_schema(schema, ("format",))
    assert relaxed == {"properties": {"a": {}}, "required": required}
    assert len(left_out) == 1
    with pytest.raises(GrammarError):
        check_constraint(SamplingParams(json_schema=relaxed))


def test_definitions_that_are_shared_do_not_multiply() -> None:
    """Nested lists of names make a definition of each of their values, not a copy for each name."""
    schema: Any = {"type": "null"}
    names = [f"n{index}" for index in range(50)]
    for _ in range(12):
        schema = {"type": "object", "propertyNames": {"enum": names}, "additionalProperties": schema}
    assert len(prepared_schema(json.dumps(schema))) < 100_000
    check_constraint(SamplingParams(json_schema=schema))


def linked(name: str, num_properties: int) -> dict[str, Any]:
    """Return an object with required properties that refer to it."""
    names = [f"p{index}" for index in range(num_properties)]
    return {"type": "object", "properties": dict.fromkeys(names, *refs(name)), "required": names}


def test_comparing_alternatives_takes_limited_time() -> None:
    """Objects that refer to themselves by many properties, and many lists of alternatives with one object."""
    schema = {"oneOf": refs("a", "b"), "$defs": {"a": linked("a", 30), "b": linked("b", 30)}}
    started = time.thread_time()
    with pytest.raises(GrammarError, match="#/oneOf"):
        prepared_schema(json.dumps(schema))
    assert time.thread_time() - started < 60


def test_alternatives_with_a_constant_are_told_apart_in_linear_time() -> None:
    """Of 2,000 alternatives, no pairs are compared."""
    kinds = [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in range(2000)]
    assert len(json.loads(prepared_schema(json.dumps({"oneOf": kinds})))["anyOf"]) == 2000


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": 0.5},
        {"properties": {"a": {"format": {"a": 1}}}},
        {"properties": {"a": {"pattern": "a("}}, "$defs": {"unused": {"pattern": [1]}}},
        {"properties": {"a": {"pattern": "a("}}, "$defs": {"unused": {"pattern": 1}}},
    ],
)
def test_keywords_of_the_wrong_type_are_refused(schema: Any) -> None:
    """As errors of the schema, also beside another error."""
    with pytest.raises(GrammarError):
        check_constraint(SamplingParams(json_schema=schema))


@pytest.mark.parametrize("text", ["a", "[", r"\p{", "(?i"])
def test_long_patterns_are_read_in_linear_time(text: str) -> None:
    """A megabyte, also of brackets that are never closed."""
    started = time.thread_time()
    pattern_problem(text * (2**20 // len(text)))
    assert time.thread_time() - started < 60
