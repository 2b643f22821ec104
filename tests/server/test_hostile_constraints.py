"""Patterns, grammars and schemas that cannot be compiled or followed: the client's error, in every field that has them."""

from __future__ import annotations

import json
import os
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.native

MANY_WAYS = "(a?){500}a{500}"
DOUBLED = "start: T17\nT0: /a?/\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(17))
LONG_LITERAL = f'start: "{"a" * 900_000}"'


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    """A tool with a single argument of the schema."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def requests_with(kind: str, value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the path and the body of a request for each field in which a constraint of this kind can stand."""
    completion, chat = {"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}]}
    found: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {**completion, "max_tokens": 3, kind: value}),
        ("/completion", {**completion, "n_predict": 3, kind: value}),
        ("/v1/chat/completions", {**chat, "max_tokens": 3, kind: value}),
    ]
    if kind in ("regex", "grammar"):
        found.append(("/v1/completions", {**completion, "max_tokens": 3, "structured_outputs": {kind: value}}))
    if kind == "json_schema":
        described = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
        asked = {"tools": [tool(value)], "tool_choice": "required"}
        found += [
            ("/v1/chat/completions", {**chat, "max_tokens": 3, "response_format": described}),
            ("/v1/chat/completions", {**chat, "max_tokens": 3, **asked}),
            ("/api/generate", {**completion, "stream": False, "format": value, "options": {"num_predict": 3}}),
            (
                "/v1/responses",
                {
                    "input": "a",
                    "max_output_tokens": 16,
                    "text": {"format": {**described["json_schema"], "type": "json_schema"}},
                },
            ),
        ]
    return found


def statuses(client: httpx.Client, kind: str, value: Any) -> list[int]:
    """Send the constraint in every field; return the statuses, none of which may be the server's fault."""
    found = []
    for path, body in requests_with(kind, value):
        response = client.post(path, json=body)
        assert response.status_code in (200, 400, 501), (path, response.status_code, response.text[:500])
        found.append(response.status_code)
    return found


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("grammar", "root ::= [z-a]", "the range z-a in [z-a] matches nothing"),
        ("grammar", r"root ::= [\x7a-\u0061]", "matches nothing"),
        ("grammar", r"root ::= [^\x00-\U0010FFFF]", "no token is allowed here"),
        ("regex", "[z-a]", "invalid character class range"),
        ("regex", MANY_WAYS, "cannot be followed here"),
        ("regex", "a?" * 40_000, "more than 2000 groups and quantifiers"),
        ("regex", "(a|)" * 2_001, "more than 2000 groups and quantifiers"),
        ("lark", LONG_LITERAL, "lark has 900009 characters, and may have 262144"),
        ("lark", DOUBLED, "more than 2000 groups and quantifiers"),
        (
            "lark",
            "start: " + " | ".join(f'"a{i}"{{0,{i + 1}}}' for i in range(5000)),
            "larger than its compiler can take",
        ),
        ("json_schema", {"type": "string", "pattern": "[z-a]"}, "invalid character class range"),
        ("json_schema", {"type": "string", "pattern": f"^{MANY_WAYS}$"}, "cannot be followed here"),
        ("json_schema", {"type": "string", "pattern": "(a|bc)?" * 3_000}, "it repeats too much"),
    ],
)
def test_a_constraint_that_cannot_be_followed_is_the_clients_error(
    client: httpx.Client, kind: str, value: Any, words: str
) -> None:
    """With a message that says why; nothing of it ends the server or takes much time."""
    response = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, kind: value})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert words in response.json()["error"]["message"]
    statuses(client, kind, value)


@pytest.mark.parametrize(
    "lark",
    [
        "start: /a+/ /a+/",
        'start: /a+/ "a"',
        'start: "b" T T\nT: "a"+',
        f"start: /{MANY_WAYS}/",
        'start: %lark {\n%llguidance {"no_forcing": false}\nstart: /a+/ "a"\n}',
        'start: %json {"const": 1} /a+/ "a"\n%llguidance {"no_forcing": false}',
    ],
)
def test_a_terminal_that_leaves_nothing_to_the_next_one_stops_nothing(client: httpx.Client, lark: str) -> None:
    """It is followed token by token, and the completion ends with max_tokens."""
    body = {"prompt": "a", "max_tokens": 40, "lark": lark}
    response = client.post("/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == "length"
    text = response.json()["choices"][0]["text"]
    assert len(text) >= 40
    assert set(text) <= set("ab1")


# ---- whatever it is

CHARS = st.sampled_from("aZ09 .-_é\u4e00\U0001f600")
ATOMS = st.one_of(
    CHARS.map(lambda char: f"\\{char}" if char == "." else char),
    st.sampled_from(
        ["[a-z]", "[z-a]", "[^a]", "[]", "[^]", ".", r"\d", r"\w", r"\p{L}", r"\p{Nope}", r"\b", "^", "$", r"\1", "()", "", "(",
         ")", "[", "\\", "(?i)a", "(?=a)", r"\x41", r"\u0041", r"\u{110000}", "[[:alpha:]]", "[a&&b]", "{", "}", "{2}"]
    ),
)  # fmt: skip
QUANTIFIERS = st.sampled_from(["", "", "?", "*", "+", "{3}", "{0,500}", "{500}", "{2,1}", "{99999999}", "*?", "{,3}"])
PATTERNS = st.recursive(
    st.tuples(ATOMS, QUANTIFIERS).map("".join),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, max_size=3).map("|".join),
        st.tuples(inner, QUANTIFIERS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["start", "root", "a", "b", "T", "U"])
LITERALS = st.sampled_from(
    ['"a"', '""', '"\\n"', '"', '"' + "\u4e00" + '"', "[a-z]", "[z-a]", "[^\\x00-\\U0010FFFF]", ".", "<[5]>", "<think>",
     "%json {}", '%json {"type": "nope"}', "/[z-a]/", "/a?/", "~ 3", "<[99999999]>", "[]"]
)  # fmt: skip
COUNTS = st.sampled_from(["", "?", "+", "*", "{3}", "{0,500}", "{500}", "{2,1}", "{99999999}", "{,3}"])
BODIES = st.recursive(
    st.one_of(NAMES, LITERALS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(" ".join),
        st.lists(inner, max_size=3).map(" | ".join),
        st.tuples(inner, COUNTS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=10,
)
LARK = st.lists(st.tuples(NAMES, BODIES), max_size=5).map(
    lambda rules: "\n".join(f"{name}: {body}" for name, body in rules)
)
GBNF = st.lists(st.tuples(NAMES, BODIES), max_size=5).map(
    lambda rules: "\n".join(f"{name} ::= {body}" for name, body in rules)
)
NUMBERS = st.sampled_from([0, 1, -1, 0.1, 1e300, -1e-300, 10**40, 2**63, 3.7, True, None, "1"])
KEYWORDS: dict[str, st.SearchStrategy[Any]] = {
    "type": st.sampled_from(["string", "integer", "number", "object", "array", "null", "nope", ["string", "null"], []]),
    "pattern": PATTERNS,
    "format": st.sampled_from(["date", "email", "nope", "ipv4", 3]),
    "enum": st.lists(st.one_of(NUMBERS, CHARS), max_size=3),
    "const": st.one_of(NUMBERS, CHARS, st.just({"a": [1]})),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "multipleOf"), NUMBERS),
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        st.sampled_from([0, 1, 3, 10**9, -1, 0.5, "a"]),
    ),
    "required": st.lists(st.sampled_from(["a", "b", 3]), max_size=2),
    "$ref": st.sampled_from(["#", "#/properties/a", "#/nope", "http://a/b", "#a"]),
    "uniqueItems": st.booleans(),
}
SCHEMAS = st.recursive(
    st.fixed_dictionaries({}, optional=KEYWORDS),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            **KEYWORDS,
            "properties": st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
            "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "additionalProperties": st.one_of(st.booleans(), inner),
            **dict.fromkeys(("anyOf", "allOf", "oneOf"), st.lists(inner, max_size=2)),
            "not": inner,
        },
    ),
    max_leaves=4,
)
NUM_EXAMPLES = int(os.environ.get("PACELINE_HOSTILE_CONSTRAINTS", "25"))


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(pattern=PATTERNS)
def test_no_pattern_is_the_servers_fault(client: httpx.Client, pattern: str) -> None:
    """As a regular expression, within a Lark grammar and in a schema."""
    statuses(client, "regex", pattern)
    statuses(client, "lark", f"start: /{pattern}/ | A\nA: /{pattern}/")
    statuses(client, "json_schema", {"type": "string", "pattern": pattern})


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(lark=LARK, gbnf=GBNF)
def test_no_grammar_is_the_servers_fault(client: httpx.Client, lark: str, gbnf: str) -> None:
    """Of either kind."""
    statuses(client, "lark", lark)
    statuses(client, "grammar", gbnf)


@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS)
def test_no_schema_is_the_servers_fault(client: httpx.Client, schema: dict[str, Any]) -> None:
    """As a schema of a message, and of a tool's argument."""
    statuses(client, "json_schema", json.loads(json.dumps(schema)))
