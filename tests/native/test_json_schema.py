"""Schemas that become grammars, and schemas that would end the process, take minutes or be followed in part."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tests.native.apart import run_apart

from paceline import _native
from paceline.errors import GrammarError, PacelineError
from paceline.params import SamplingParams
from paceline.runtime import Model, Sampler
from paceline.runtime.sampler import spaced_grammar


def grammar_of(schema: Any) -> str:
    return str(_native.grammar_of_json_schema(json.dumps(schema)))


def properties(count: int) -> dict[str, Any]:
    return {f"p{i}": {"type": "null"} for i in range(count)}


def chain(length: int) -> dict[str, Any]:
    """Return references in objects, each to the next."""
    steps = {f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{length}": {"type": "null"}}}


ASK = """
import json
from paceline import _native
def work():
    for line in sys.stdin if len(sys.argv) < 2 else [open(sys.argv[1]).read()]:
        print(told(lambda: len(_native.grammar_of_json_schema(line)))[:200])
threading.stack_size(512 * 1024)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("plain", [False, True])
def test_long_chains_of_references_need_no_stack_of_the_caller(tmp_path: Any, plain: bool) -> None:
    """Thousands of references in a chain are translated or refused on a stack of 512 KiB."""
    path = tmp_path / "schema.json"
    schema = chain(3000)
    if plain:
        schema["$defs"] |= {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    path.write_text(json.dumps(schema))
    (line,) = run_apart(ASK, path)
    assert line.isdigit() if not plain else line.startswith("GrammarError: json_schema: the $ref")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_references_in_a_ring_are_refused(tmp_path: Any, schema: dict[str, Any]) -> None:
    """A reference that only ever leads to references is an error, whatever it stands in."""
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(schema))
    (line,) = run_apart(ASK, path)
    assert line.startswith("GrammarError: json_schema: the $ref")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "properties": properties(501)}, "501 optional properties"),
        (
            {"allOf": [{"anyOf": [{"$ref": "#/$defs/a"}] * 6}], "$defs": {"a": {"properties": properties(100)}}},
            "600 optional properties",
        ),
        ({"properties": properties(5001), "required": list(properties(5001))}, "more than 5000 properties"),
        ({"type": ["array", "array"], "items": {"type": "null"}}, "names 'array' twice"),
        ({"type": ["object", "string"], "allOf": [{"type": "null"}]}, "allOf"),
    ],
)
def test_input_that_would_take_minutes_is_refused(schema: dict[str, Any], message: str) -> None:
    """Limits on properties and on types that multiply are named."""
    with pytest.raises(GrammarError, match=message):
        grammar_of(schema)


def test_schemas_at_the_limits_are_translated() -> None:
    """The highest number of optional properties works, with additional properties."""
    schema = {"type": "object", "properties": properties(500), "additionalProperties": {"type": "null"}}
    assert 'p499-kv ::= "\\"p499\\""' in grammar_of(schema)


@pytest.mark.parametrize(
    "pattern", ["^(?=a)b$", "a", "^a", "^\\d$", "^a^b$", "^[\\d]$", "^a{1,2,3}$", "^(a$", "^*$", "^" + "(" * 2000 + "$"]
)
@pytest.mark.parametrize("place", ["{}", '{{"items": {}}}', '{{"anyOf": [{{"$ref": "#/x"}}], "x": {}}}'])
def test_a_pattern_that_cannot_be_followed_is_refused(
    capfd: pytest.CaptureFixture[str], pattern: str, place: str
) -> None:
    """No pattern is dropped: one that has no grammar is an error wherever it stands, and nothing goes to the terminal."""
    schema = place.format(json.dumps({"type": "string", "pattern": pattern}))
    with pytest.raises(GrammarError, match="json_schema: the pattern"):
        _native.grammar_of_json_schema(schema)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("pattern", ["^a+(b|c)?$", "^[a-z]{2,3}$", "^.*$", "^\\\\$", "^string$"])
def test_a_pattern_that_can_be_followed_is_kept(pattern: str) -> None:
    """A usual pattern becomes a rule."""
    assert "(" in grammar_of({"type": "string", "pattern": pattern}).split("root ::= ")[1].split("\n")[0]


def test_a_property_that_is_called_pattern_is_none() -> None:
    """Names and values are not mistaken for patterns."""
    grammar = grammar_of({"properties": {"pattern": {"type": "string"}}, "default": {"pattern": "\\d"}})
    assert '"\\"pattern\\""' in grammar
    assert "\\d" not in grammar


def test_a_grammar_has_few_blanks_or_none(vocabulary: Model) -> None:
    """The rule of blanks that llama.cpp writes is replaced, by a rule with 16 blanks of indentation or with none."""
    schema = {"type": "array", "items": {"enum": ["a"]}, "maxItems": 2}
    plain = grammar_of(schema)
    assert "space ::= " in plain
    assert len({plain, *(spaced_grammar(plain, is_compact=is_compact) for is_compact in (False, True))}) == 3
    params = SamplingParams(json_schema=schema, disable_any_whitespace=True, seed=1)
    for text, is_taken in (('["a","a"]', True), ('["a", "a"]', False), ('[ "a"]', False)):
        assert takes(vocabulary, params, text) is is_taken
        assert takes(vocabulary, params.replace(disable_any_whitespace=False), text)
    for num_blanks, is_taken in ((16, True), (17, False)):
        indented = '["a",\n' + " " * num_blanks + '"a"]'
        assert takes(vocabulary, params.replace(disable_any_whitespace=False), indented) is is_taken


def test_exponents_have_two_digits(vocabulary: Model) -> None:
    """With which a number is finite as a float; llama.cpp's own grammar has 16."""
    params = SamplingParams(json_schema={"type": "array", "items": {"type": "number"}}, seed=1)
    for text, is_taken in (("[1e99]", True), ("[-2.5E-07]", True), ("[1e100]", False), ("[1e+000]", False)):
        assert takes(vocabulary, params, text) is is_taken


def takes(model: Model, params: SamplingParams, text: str) -> bool:
    tokens = {
        piece: token for token, piece in reversed(list(enumerate(model.tokenizer.pieces(True)))) if len(piece) == 1
    }
    sampler = Sampler(params, model)
    try:
        for byte in text.encode():
            lone = np.full(sampler.n_vocab, -np.inf, dtype=np.float32)
            lone[tokens[bytes([byte])]] = 0.0
            sampler.accept(sampler.sample(lone))
    except PacelineError:
        return False
    return True
