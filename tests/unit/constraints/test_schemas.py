"""JSON schemas: enforced whole or refused by keyword and path; a sample of `schema_suite`'s checks of the whole suite."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.unit.constraints.byte_table import TABLE
from tests.unit.constraints.schema_suite import sort, writes

from paceline.constraints import Constraint, ConstraintCompiler, check_constraint
from paceline.errors import GrammarError
from paceline.params import SamplingParams

COMPILER = ConstraintCompiler(TABLE)
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def make(schema: Any) -> Constraint:
    made = COMPILER.compile(SamplingParams(json_schema=schema))
    assert made is not None
    return made


ENFORCED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 6}, [3, 5], [2, 6, "3", 3.5]),
    ({"type": "number", "multipleOf": 0.1}, [0.3], [0.35]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "😀😀"], ["a", "abcd"]),
    ({"type": "string", "pattern": "b+"}, ["abba"], ["aca"]),
    (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "0004-02-29", "0001-01-01", "9999-12-31", "2023-04-30"],
        ["2024-02-30", "2023-02-29", "1900-02-29", "0000-01-23", "0000-02-29", "2023-04-31", "2023-13-01", "x"],
    ),
    ({"type": "string", "format": "date", "pattern": "^2"}, ["2024-02-29"], ["1999-01-01", "2023-02-29"]),
    (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T23:59:59Z", "2024-02-28t00:00:00.5+01:00"],
        ["0000-01-01T00:00:00Z", "2023-02-29T00:00:00Z", "2024-01-01T23:59:60Z", "2024-01-01"],
    ),
    ({"type": "string", "format": "time"}, ["23:59:59Z", "00:00:00.25-12:00"], ["23:59:60Z", "24:00:00Z", "10:00:00"]),
    ({"enum": ["a", 1, None, {"b": [1]}]}, ["a", 1, None, {"b": [1]}], ["b", 2, {"b": [2]}]),
    ({"const": 5}, [5], [6]),
    ({"type": ["null", "boolean"]}, [None, True], [0, "x"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}, [[None]], [[], [1], [None] * 3]),
    ({"prefixItems": [{"type": "integer"}], "items": False, "type": "array"}, [[1]], [[1, 2], ["a"]]),
    ({**OBJECT, "required": ["a"]}, [{"a": 1}], [{}, {"a": "x"}]),
    ({"type": "object", "additionalProperties": {"type": "null"}}, [{}, {"x": None}], [{"x": 1}]),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}}, [{"x": None}, {"y": 1}], [{"x": 1}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    ({"oneOf": [{"const": 1}, {"enum": [2, "a"]}]}, [1, 2, "a"], [3]),
    ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, [3], [2]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": ["null", "array"], "items": {"$ref": "#/$defs/n"}}}},
        [[None]],
        [[1]],
    ),
    ({"type": "string", "format": "int-of-my-own", "x-order": 5, "title": "t", "uniqueItems": False}, ["a"], [1]),
    (True, [1, {"a": [None]}], []),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), ENFORCED)
def test_accepted_keywords_are_enforced(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    """Valid values can be written, invalid values cannot."""
    tests = [
        {"data": item, "valid": is_valid} for group, is_valid in ((valid, True), (invalid, False)) for item in group
    ]
    case = {"schema": schema, "tests": [{"description": str(test["data"]), **test} for test in tests]}
    assert sort(COMPILER, case) == ("enforced", [])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"type": "string"}}, "#/not"),
        ({"properties": {"a/b~c": {"if": {}, "then": {"type": "null"}}}}, "#/properties/a~1b~0c/if"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems"),
        ({"items": {"contains": {}}}, "#/items/contains"),
        ({"type": "string", "minLenght": 3}, "#/minLenght"),
        ({"anyOf": [{}, {"format": "regex"}]}, "#/anyOf/1/format"),
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
        ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
        ({"properties": {"a": {"type": "strng"}}}, "#/properties/a/type"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "#/oneOf"),
        ({"enum": []}, "#/enum"),
        ({"properties": {"a": {"$id": "http://x", "type": "null"}}}, r"#/properties/a/\$id"),
        ({"$ref": "http://example.com/x"}, r"#/\$ref"),
        ({"const": "a\u0001"}, "#/const"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "#/required"),
        ({"x-guidance": {"lenient": True}, "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ],
)
def test_what_is_not_enforced_is_refused_by_keyword_and_path(schema: Any, place: str) -> None:
    """With the model's vocabulary, and with only bytes known."""
    for refuse in (make, lambda schema: check_constraint(SamplingParams(json_schema=schema))):
        with pytest.raises(GrammarError, match=f"json_schema: {place}: "):
            refuse(schema)
    assert writes(make({"type": "null"}), "null")


@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"type": "strng"}, "/type"),
        ({"type": ["string", "strng"]}, "/type"),
        ({"type": 3}, "/type"),
        ({"items": {"type": "strng"}}, "/items/type"),
        ({"anyOf": [{}, {"type": "strng"}]}, "/anyOf/1/type"),
        *(
            ({keyword: "x"}, f"/{keyword}")
            for keyword in ("minLength", "maxItems", "minProperties", "minimum", "multipleOf")
        ),
        *(({keyword: -1}, f"/{keyword}") for keyword in ("maxLength", "minItems", "multipleOf")),
        ({"maxLength": 1.5}, "/maxLength"),
        *(
            ({keyword: 3}, f"/{keyword}")
            for keyword in ("properties", "patternProperties", "additionalProperties", "items")
        ),
        *(({keyword: 3}, f"/{keyword}") for keyword in ("anyOf", "allOf", "oneOf", "prefixItems", "enum", "required")),
        *(({keyword: 3}, f"/{keyword}") for keyword in ("pattern", "format", "$ref")),
        ({"properties": {"b": 3}}, "/properties/b"),
        ({"anyOf": [{}, 3]}, "/anyOf/1"),
        ({"type": "number", "multipleOf": 0.07}, "/multipleOf"),
        ({"type": "number", "minimum": 1e15, "maximum": 1e20}, "/minimum"),
    ],
    ids=str,
)
def test_an_error_points_to_its_place(wrong: dict[str, Any], place: str) -> None:
    """Within a property, not to the schema as a whole."""
    with pytest.raises(GrammarError, match=re.escape(f"json_schema: #/properties/a{place}: ")):
        check_constraint(SamplingParams(json_schema={"properties": {"a": wrong}}))


@pytest.mark.parametrize("text", ['{"\\u0061":"x"}', '{"\\u0061":1}', '{"a":1,"a":2}', '{"b":1}'])
def test_names_have_one_spelling(text: str) -> None:
    """An escape would take the property's schema away; unnamed properties do not come."""
    assert not writes(make(OBJECT), text)
    assert writes(make(OBJECT), '{"a":1}')


@pytest.mark.parametrize("gap", ["", " ", "\n", "\n\n", "\n    ", "\n\t\t", "\n" + " " * 16])
def test_blanks_are_none_one_space_or_a_new_line_with_indentation(gap: str) -> None:
    """At most 16 blanks of indentation, whatever the schema says of guidance."""
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "x*"}}
    assert writes(make(schema), f"[{gap}]")


@pytest.mark.parametrize("gap", ["  ", "\t", "\r", "\n\n\n", " \n", "\n" + " " * 17, "\n \n", "xx"])
def test_other_blanks_do_not_come(gap: str) -> None:
    """Models would ramble in longer gaps."""
    assert not writes(make({"type": "array", "x-guidance": {"whitespace_pattern": "x*"}}), f"[{gap}]")


@pytest.mark.parametrize(
    ("text", "is_written"), [('{"a":1}', True), ('{"a": 1}', False), ('{\n"a":1}', False), ('{"a":1 }', False)]
)
def test_compact_json_has_no_blanks(text: str, is_written: bool) -> None:
    """Beside the same schema with blanks, which is another grammar."""
    compact = COMPILER.compile(SamplingParams(json_schema=OBJECT, disable_any_whitespace=True))
    assert compact is not None
    assert writes(compact, text) is is_written
    assert writes(make(OBJECT), '{"a": 1}')


def test_schemas_within_lark_are_no_way_around() -> None:
    """Their keywords are checked and their options set like other schemas'."""
    with pytest.raises(GrammarError, match="#/not"):
        COMPILER.compile(SamplingParams(lark='start: "a" %json {"x-guidance": {"lenient": true}, "not": {}}'))
    found = COMPILER.compile(SamplingParams(lark='start: "a" %json {"type": "null"} "b"'))
    assert found is not None
    assert writes(found, "anullb")


def test_large_schemas_are_bounded() -> None:
    """Hundreds of optional properties work; more text than the limit is refused."""
    many = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(500)}}
    assert writes(make(many), '{"p3":null,"p499":null}')
    with pytest.raises(GrammarError, match="choice has"):
        COMPILER.compile(SamplingParams(choice=tuple("é" * 4000 + str(n) for n in range(60))))


@pytest.mark.parametrize(
    "wrong",
    [{"required": [{}]}, {"required": [[]]}, {"minProperties": "a"}, {"minProperties": None}, {"minProperties": {}}],
    ids=repr,
)
def test_a_keyword_of_the_wrong_type_is_refused_by_its_name(wrong: dict[str, Any]) -> None:
    """Beside properties, which are looked up by them."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **wrong}
    with pytest.raises(GrammarError, match=f"json_schema: #/{next(iter(wrong))}"):
        check_constraint(SamplingParams(json_schema=schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"type": "number", "exclusiveMinimum": 0}}},
        {
            "allOf": [
                {"properties": {"a": {"type": "number", "minimum": 0.5}}},
                {"properties": {"a": {"exclusiveMaximum": 5}}},
            ]
        },
        {"allOf": [{"items": {"type": "number", "minimum": 0.5}}, {"items": {"exclusiveMaximum": 5}}]},
        {"exclusiveMaximum": 5, "anyOf": [{"type": "number", "minimum": 0.5}, {"type": "string"}]},
        {"allOf": [{"$ref": "#/$defs/a"}, {"anyOf": [{"minimum": 0.5}, {}]}], "$defs": {"a": {"exclusiveMaximum": 5}}},
        {"const": "a\x7fb"},
        {"enum": [9007199254740993]},
        {"const": {"a": [10**400]}},
        {"type": "integer", "minimum": 9007199254740993},
        {"oneOf": [{"const": [1]}, {"const": [1.0]}]},
        {"type": "string", "pattern": "[[:alpha:]]"},
        {"type": "string", "pattern": "[a--b]"},
        {"type": "string", "pattern": "x[a&&b]"},
        {"type": "object", "patternProperties": {"[a~~b]": {}}},
        {"type": "string", "pattern": "(?x)a b"},
        {"type": "string", "pattern": "a(?i)b"},
        {"type": "string", "pattern": "(?i:a)b"},
        {"type": "object", "patternProperties": {"(?-u)a": {}}},
        {"type": "array", "prefixItems": [{"const": 2}], "items": [{"const": 1}]},
    ],
)
def test_input_that_would_be_enforced_in_part_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError, match="json_schema"):
        make(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 5.5},
        {"properties": {"a": {"type": "number", "exclusiveMinimum": 0}, "b": {"type": "number", "maximum": 0.5}}},
        {
            "allOf": [{"type": "object"}, {"required": ["a"]}],
            "properties": {
                "a": {"type": "number", "minimum": 0.5},
                "b": {"type": "number", "exclusiveMaximum": 5},
                "c": {"type": "array", "prefixItems": [{"minimum": 0.5}, {"exclusiveMaximum": 5}]},
            },
        },
        {"allOf": [{"anyOf": [{"type": "number", "minimum": 0.5}, {"type": "number", "exclusiveMaximum": 5}]}]},
        {"properties": {"a": {"minimum": 0.5}}, "additionalProperties": {"exclusiveMaximum": 5}},
        {"properties": {"a": {"minimum": 0.5}}, "patternProperties": {"^b": {"exclusiveMaximum": 5}}},
        {"enum": [2**53, 0.1]},
        {"type": "string", "pattern": r"^[\[a\-\-]\p{L}{3,40}[^\]]$"},
    ],
)
def test_what_is_like_it_and_enforced_is_not_refused(schema: Any) -> None:
    make(schema)
