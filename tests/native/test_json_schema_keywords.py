"""Keywords of JSON schemas: each is enforced if it is accepted, and refused by name and path if it is not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.native.grammars import OPEN, text_of

from paceline.constraints.gbnf_schemas import check_keywords
from paceline.errors import GrammarError, PacelineError, SamplingError
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}


def of(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"type": kind, **keywords}


REFUSED: list[tuple[Any, str]] = [
    ({"patternProperties": {"^(?=a)": {}}}, "#/patternProperties"),
    (of("object", properties={"a": of("object", patternProperties={"^x": {}})}), "#/properties/a/patternProperties"),
    (of("object", properties={"a/b~c": of("number", minimum=0)}), "#/properties/a~1b~0c/minimum"),
    *((of("number", **{name: 1}), f"#/{name}") for name in ("minimum", "maximum", "exclusiveMinimum", "multipleOf")),
    (of("integer", multipleOf=2), "#/multipleOf"),
    (of("integer", minimum=1, exclusiveMinimum=5), "#/exclusiveMinimum"),
    (of("integer", maximum=1e30), "#/maximum"),
    (of("integer", minimum=5, maximum=3), "#/minimum"),
    (of("integer", exclusiveMinimum=2.5, maximum=-1), "#/exclusiveMinimum"),
    (of("string", pattern="^a$", maxLength=3), "#/maxLength"),
    (of("string", format="uuid", minLength=3), "#/minLength"),
    (of("string", format="date", pattern="^2.*$"), "#/format"),
    (of("string", format="email"), "#/format"),
    (of("string", enum=["ab", "abc"], minLength=3), "#/minLength"),
    (of("number", enum=[1, 2], exclusiveMinimum=1), "#/exclusiveMinimum"),
    ({"const": "a", "pattern": "^b$"}, "#/pattern"),
    (of("object", properties={"a": {}}, required=["a", "a"], minProperties=2), "#/minProperties"),
    (of("string", minLength=2**33), "#/minLength"),
    (of("array", items={}, uniqueItems=True), "#/uniqueItems"),
    (of("array", contains={}), "#/contains"),
    (of("array", unevaluatedItems=False), "#/unevaluatedItems"),
    (of("array", prefixItems=[{}], minItems=2), "#/minItems"),
    (of("array", prefixItems=[{}], items=of("null")), "#/prefixItems"),
    (of("array", items=of("array", items=of("string", format="ipv4"))), "#/items/items/format"),
    (of("object", required=["a"]), "#/required/0"),
    (of("object", properties={"a": {}}, required=["a", "b"]), "#/required/1"),
    (of("object", properties={}, required="a"), "#/required"),
    *(
        (of("object", properties={"a": {}}, **{name: value}), f"#/{name}")
        for name, value in {
            "minProperties": 1,
            "maxProperties": 1,
            "propertyNames": {"maxLength": 3},
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"a": {}},
            "dependencies": {"a": ["b"]},
            "not": {},
            "allOf": [{}],
        }.items()
    ),
    (of("object", **{"if": {}, "then": {}}), "#/if"),
    (of("object", unevaluatedProperties=False), "#/unevaluatedProperties"),
    ({"minimum": 3}, "#/minimum"),
    ({"required": ["a"]}, "#/required"),
    ({"not": {}}, "#/not"),
    ({"$dynamicRef": "#x"}, "#/$dynamicRef"),
    (of("string", minLenght=3), "#/minLenght"),
    (of("string", enum=["a", None]), "#/type"),
    (of("string", const=1), "#/type"),
    (of("string", enum=["a"], minLength=3), "#/minLength"),
    ({"const": "a", "enum": ["b"]}, "#/enum"),
    ({"$ref": "#/$defs/a", "$defs": {"a": of("string")}, "minLength": 3}, "#/minLength"),
    ({"$ref": "#/$defs/a", "$defs": {"a": of("string", format="uri")}}, "#/$defs/a/format"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a~1b": {}, "a/b": of("null")}}, "#/$ref"),
    (of("array", prefixItems=[{"$ref": "#/x_y"}, {"$ref": "#/x:y"}]) | {"x_y": {}, "x:y": {}}, "#/x_y"),
    (
        {
            "anyOf": [{"$ref": "#/$defs/x_y"}, {"$ref": "#/$defs/x:y"}],
            "$defs": {"x_y": of("null"), "x:y": of("string")},
        },
        "/$ref",
    ),
    (of("object", properties={"a": {"$id": "http://x/y", "type": "null"}}), "#/properties/a/$id"),
    ({"anyOf": [of("string"), of("null")], "minLength": 3}, "#/minLength"),
    ({"anyOf": [of("string"), of("null")], "type": "string"}, "#/type"),
    ({"anyOf": [A], "oneOf": [B]}, "#/anyOf"),
    ({"anyOf": [of("null"), of("array", uniqueItems=True)]}, "#/anyOf/1/uniqueItems"),
    ({"oneOf": [of("number"), of("integer")]}, "#/oneOf"),
    ({"oneOf": [{"const": "a"}, of("string")]}, "#/oneOf"),
    ({"oneOf": [of("string"), {"properties": {}}]}, "#/oneOf"),
    ({"oneOf": [of("integer"), {"anyOf": [of("string"), {"items": of("null")}]}]}, "#/oneOf"),
    ({"oneOf": [of("boolean"), {"allOf": [{"properties": {"a": of("null")}}]}]}, "#/oneOf"),
    ({"oneOf": [A, {**B, "properties": {**A["properties"], **B["properties"]}}]}, "#/oneOf"),
    ({"oneOf": [{"enum": [1, 2]}, {"enum": [2.0, 3]}]}, "#/oneOf"),
    ({"allOf": [of("string")]}, "#/allOf/0/type"),
    ({"allOf": [of("string", minLength=1, maxLength=5)]}, "#/allOf/0/minLength"),
    ({"allOf": [of("string", maxLength=5, minLength=1)]}, "#/allOf/0/maxLength"),
    ({"allOf": [{"anyOf": [A, B]}]}, "#/allOf/0/anyOf"),
    ({"allOf": [{"enum": [1]}, {"enum": [2]}]}, "#/allOf"),
    ({"allOf": [{"enum": [1]}, A]}, "#/allOf"),
    ({"allOf": [A, A]}, "#/allOf/1/properties/a"),
    ({"allOf": [A, {**B, "additionalProperties": False}]}, "#/allOf/1/additionalProperties"),
    ({"allOf": [A, {"required": ["z"]}]}, "#/allOf/1/required/0"),
    ({"allOf": [A], "required": ["z"]}, "#/required/0"),
    ({"allOf": [A], "type": "array"}, "#/allOf"),
    ({"allOf": [of("object", properties={"a": of("number", maximum=1)})]}, "#/allOf/0/properties/a/maximum"),
]


@pytest.mark.parametrize(("schema", "where"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_a_keyword_that_is_not_enforced_is_refused_by_name_and_path(vocabulary: Model, schema: Any, where: str) -> None:
    """The error has the JSON pointer, and the same model makes the next sampler."""
    with pytest.raises(GrammarError) as refusal:
        Sampler(SamplingParams(json_schema=schema), vocabulary)
    assert str(refusal.value).startswith("json_schema: ")
    assert f"{where}: " in str(refusal.value)
    Sampler(SamplingParams(json_schema={"type": "null"}), vocabulary)


ENFORCED: list[tuple[Any, str, str]] = [  # a schema, a text that fits, one that does not
    (of("string", minLength=2), '"ab"', '"a"'),
    (of("string", maxLength=2), '"ab"', '"abc"'),
    (of("string", pattern="^a+$"), '"aa"', '"ab"'),
    (of("string", format="date"), '"2026-01-31"', '"2026-13-31"'),
    (of("string", format="time"), '"23:59:00Z"', '"24:00:00Z"'),
    (of("string", format="date-time"), '"2026-01-31T23:59:00Z"', '"2026-01-31"'),
    (of("string", format="uuid"), '"01234567-89ab-cdef-0123-456789abcdef"', '"01234567"'),
    (of("integer", minimum=3), "3", "2"),
    (of("integer", maximum=3), "3", "4"),
    (of("integer", exclusiveMinimum=3), "4", "3"),
    (of("integer", exclusiveMaximum=3), "2", "3"),
    (of("integer", minimum=2.5), "3", "2"),
    (of("integer"), "3", "3.5"),
    (of("array", items=of("null")), "[null]", "[1]"),
    (of("array", prefixItems=[of("null"), of("boolean")]), "[null,true]", "[null,1]"),
    (of("array", items=[of("null")], additionalItems=False), "[null]", "[null,null]"),
    (of("array", items=of("null"), minItems=1), "[null]", "[]"),
    (of("array", items=of("null"), maxItems=1), "[null]", "[null,null]"),
    (A, '{"a":1}', "{}"),
    (of("object", properties={"a": of("null")}), '{"a":null}', '{"a":1}'),
    (of("object", properties={"a": of("null")}, additionalProperties=of("null")), '{"b":null}', '{"b":1}'),
    (of("object", additionalProperties=False), "{}", '{"b":1}'),
    ({"enum": [1, "a"]}, '"a"', '"b"'),
    ({"const": {"a": 1}}, '{"a":1}', '{"a":2}'),
    ({"anyOf": [of("null"), of("boolean")]}, "true", "1"),
    ({"oneOf": [CAT, DOG]}, '{"kind":"wolf"}', '{"kind":"bird"}'),
    ({"allOf": [A, B]}, '{"a":1,"b":1}', '{"a":1}'),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, "2", "3"),
    ({"$ref": "#/$defs/a", "$defs": {"a": of("null")}}, "null", "1"),
    ({"type": ["string", "null"], "minLength": 1}, "null", '""'),
]


@pytest.mark.parametrize(("schema", "fits", "differs"), ENFORCED, ids=lambda value: json.dumps(value)[:60])
def test_a_keyword_that_is_accepted_is_enforced(vocabulary: Model, schema: Any, fits: str, differs: str) -> None:
    """The grammar takes a text that is valid by the schema, and not one that is invalid by this keyword."""
    validator = _validator(schema)
    assert validator.is_valid(json.loads(fits))
    assert not validator.is_valid(json.loads(differs))
    assert _takes(vocabulary, schema, fits)
    assert not _takes(vocabulary, schema, differs)


ACCEPTED: list[Any] = [
    {},
    of("string", title="t", description="d", default="x", examples=["x"], deprecated=True, readOnly=True),
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "http://x/y", "type": "null", "$comment": "c"},
    of("integer", format="int32"),
    of("string", format="password"),
    of("string", **{"x-order": 3, "contentMediaType": "text/plain"}),
    of("integer", minLength=3, uniqueItems=True),
    of("integer", multipleOf=1),
    of("string", enum=["ab", "abc"], minLength=2, maxLength=3),
    of("number", enum=[1, 2.5], minimum=1, exclusiveMaximum=3),
    {"const": [1, 2], "minItems": 2, "maxItems": 2},
    of("object", properties={"a": {}, "b": {}}, required=["a", "a", "b"], minProperties=2),
    of("array", items=of("null"), uniqueItems=True, maxItems=1),
    of("array", prefixItems=[of("null")], minItems=1, maxItems=1, additionalItems=False),
    of("object", additionalProperties=of("string"), propertyNames=of("string")),
    of("object", properties={"a": of("null")}, unevaluatedProperties=False, minProperties=0, patternProperties={}),
    of("string", oneOf=[{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]),
    of("string", const="a", enum=["a"]),
    {"oneOf": [A, B]},
    {"oneOf": [of("string"), {"allOf": [of("object", properties={"a": of("null")})]}, {"anyOf": [of("null"), of("boolean")]}]},
    {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "$defs": {"cat": CAT, "dog": DOG},
     "discriminator": {"propertyName": "kind"}, "type": "object"},
    {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": A}, "description": "d"},
    {"allOf": [A, {"required": ["a"]}, {"$ref": "#/$defs/b"}], "$defs": {"b": B}, "unevaluatedProperties": False},
    of("object", properties={"next": {"$ref": "#/$defs/n"}}) | {
        "$defs": {"n": of("object", properties={"next": {"$ref": "#/$defs/n"}}), "unused": {"not": {}}}},
    of("object", properties={"minimum": of("null"), "not": of("null")}, required=["not"], default={"if": 1}),
]  # fmt: skip


@pytest.mark.parametrize("schema", ACCEPTED, ids=lambda value: json.dumps(value)[:60])
def test_annotations_and_what_restricts_nothing_are_accepted(vocabulary: Model, schema: Any) -> None:
    """A keyword that only describes, or that no generated value can violate, is no reason to refuse."""
    text = text_of(Sampler(SamplingParams(json_schema=schema, seed=1, **OPEN), vocabulary), vocabulary, 3)
    assert text


@pytest.mark.parametrize("schema", [True, [], 3, {"properties": 3}, {"items": 3}, {"anyOf": 3}, {"$ref": 3}, {"enum": 3},
                                    {"type": 3}, {"type": [[]]}, {"type": []}, {"allOf": [3]}, {"allOf": 3},
                                    {"type": "array", "minItems": "x"}, {"$ref": "#/a/b/0"},
                                    {"allOf": [{"type": []}]}, {"oneOf": [{"type": 3}, {"type": "null"}]}])  # fmt: skip
def test_invalid_schema_is_an_error_of_the_grammar(vocabulary: Model, schema: Any) -> None:
    """Whatever JSON is given, nothing but a `GrammarError` comes of it."""
    with pytest.raises(GrammarError, match="json_schema"):
        Sampler(SamplingParams(json_schema=json.dumps(schema)), vocabulary)


def test_an_alternative_that_is_no_object_is_named_by_the_translation(vocabulary: Model) -> None:
    """A single alternative is not compared, so the error says that it must be an object."""
    with pytest.raises(GrammarError, match="#/oneOf/0: schema must be an object"):
        Sampler(SamplingParams(json_schema={"oneOf": [True]}), vocabulary)


def test_many_alternatives_are_distinguished_in_bounded_time() -> None:
    """A schema of the largest size with alternatives that all have to be compared is refused and not computed for minutes."""
    alternatives = [of("object", properties={"a": of("integer")}) for _ in range(3000)]
    with pytest.raises(GrammarError, match="#/oneOf"):
        check_keywords({"oneOf": alternatives})
    ring = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + j) % 200}"} for j in range(9)]} for i in range(200)}
    check_keywords({"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": ring})


def test_alternatives_with_a_tag_are_distinguished_beside_many_other_properties() -> None:
    """The tag is found whatever its place among the names of the required properties."""
    names = [f"property_{i}" for i in range(300)]
    tags = [{"properties": dict.fromkeys(names, of("string")) | {"tag": {"const": i}}} for i in range(30)]
    check_keywords({"oneOf": [of("object", **tag, required=[*names, "tag"]) for tag in tags]})


# ---- any schema

_DRAFT = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema")
_LEAF = st.sampled_from(
    [of("string"), of("integer"), of("null"), of("boolean"), {"const": "a"}, {"enum": ["a", 1]}, {"$ref": "#/$defs/p"}]
)
_VALUE = st.sampled_from([None, True, 0, 1, 1.5, "a", "", [], {"a": 1}])
_NAMES = st.sampled_from("abc")
_COUNT = st.integers(0, 3)


def _objects(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any keywords together, more or less about one type."""
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(st.sampled_from(_TYPES), st.lists(st.sampled_from(_TYPES), min_size=1, unique=True)),
            "properties": st.dictionaries(_NAMES, child, max_size=2),
            "required": st.lists(_NAMES, max_size=2, unique=True),
            "additionalProperties": st.one_of(st.booleans(), child),
            "unevaluatedProperties": st.booleans(),
            "patternProperties": st.dictionaries(st.just("^a"), child, max_size=1),
            "minProperties": _COUNT,
            "items": st.one_of(child, st.lists(child, min_size=1, max_size=2)),
            "minItems": _COUNT,
            "maxItems": _COUNT,
            "uniqueItems": st.booleans(),
            "minLength": _COUNT,
            "maxLength": _COUNT,
            "pattern": st.sampled_from(["", "^a+$"]),
            "minimum": st.sampled_from([-5, 0, 2.5]),
            "exclusiveMaximum": st.sampled_from([3, 7.5]),
            "multipleOf": st.sampled_from([1, 2]),
            "enum": st.lists(_VALUE, min_size=1, max_size=3),
            "const": _VALUE,
            "anyOf": st.lists(child, min_size=1, max_size=2),
            "oneOf": st.lists(child, min_size=1, max_size=2),
            "allOf": st.lists(child, min_size=1, max_size=2),
            "not": child,
        },
    )


_TYPES = ("string", "integer", "number", "array", "object", "boolean", "null")
_SCHEMA = st.recursive(_LEAF, _objects, max_leaves=4)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=_objects(_SCHEMA), definition=_LEAF.filter(lambda leaf: "$ref" not in leaf), seed=st.integers(0, 99))
def test_what_an_accepted_schema_generates_is_valid(
    vocabulary: Model, schema: dict[str, Any], definition: Any, seed: int
) -> None:
    """For any combination of keywords: the schema is refused, or a validator accepts the text."""
    schema = {**schema, "$defs": {"p": definition}}
    try:
        sampler = Sampler(SamplingParams(json_schema=schema, seed=seed, **OPEN), vocabulary)
    except GrammarError:
        return
    text = _generated(sampler, vocabulary, seed)
    if text is None:
        return
    assert _validator(schema).is_valid(json.loads(text)), text


def _validator(schema: dict[str, Any]) -> Any:
    """Another implementation's opinion, by the draft in which a list of items is a tuple if there is one."""
    draft = _DRAFT['"items": [' in json.dumps(schema)]
    return jsonschema_rs.validator_for({"$schema": draft, **schema}, validate_formats=True)


def _generated(sampler: Sampler, model: Model, seed: int) -> str | None:
    """Return a text from random logits over few characters, most of which end something; None if it does not end."""
    tokens = _characters(model)
    ids, weights = np.array([tokens[c] for c in _ALPHABET]), np.array([_CLOSES * (c in '"}]') for c in _ALPHABET])
    rng, text = np.random.default_rng(seed), ""
    for _ in range(120):
        logits = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
        logits[ids] = rng.normal(size=len(ids)) * 2 + weights
        logits[next(iter(model.tokenizer.eog_ids))] = 2 * _CLOSES
        try:
            token = sampler.sample(logits)
        except SamplingError:  # a character that this alphabet does not have
            return None
        sampler.accept(token)
        if sampler.is_eog(token):
            return text
        text += model.tokenizer.pieces(True)[token].decode()
    return None


_ALPHABET = '"{}[],:0123456789-.eEabctrufalsn '
_CLOSES = 3.0


def _characters(model: Model) -> dict[str, int]:
    """Return the tokens that are one ASCII character."""
    found: dict[str, int] = {}
    for token, piece in enumerate(model.tokenizer.pieces(True)):
        if len(piece) == 1 and piece.isascii():
            found.setdefault(piece.decode(), token)
    return found


def _takes(model: Model, schema: Any, text: str) -> bool:
    """Whether the schema's grammar lets a whole text through."""
    tokens = _characters(model)
    sampler = Sampler(SamplingParams(json_schema=schema), model)
    try:
        for character in text:
            lone = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
            lone[tokens[character]] = 0.0
            sampler.accept(sampler.sample(lone))
        lone = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
        lone[next(iter(model.tokenizer.eog_ids))] = 0.0
        sampler.sample(lone)
    except PacelineError:
        return False
    return True
