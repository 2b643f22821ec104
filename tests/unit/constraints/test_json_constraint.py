"""Blanks and digits in generated JSON, for tokens of any length: blanks after `{ [ , :` and before `} ]`, at most 16 digits."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import numpy as np
import pytest
from tests.unit.constraints.byte_table import TABLE
from tests.unit.constraints.schema_suite import writes

from paceline.constraints import Constraint, ConstraintCompiler, TokenTable
from paceline.errors import InvalidParams
from paceline.params import SamplingParams

LONG = (
    *(b'"\n', b'" ', b'"}\n', b'"]\n', b"}\n", b"]\n", b" ,", b"\n,", b" :", b'":', b'": ', b'",', b'", ', b'",\n'),
    *(b"1 ", b"1\n", b"true\n", b" }", b"\n}", b" ]", b"\n  ", b"  ", b"}}\n", b'a"\n', b'", "', b' , "', b"}, "),
    *(
        b"00",
        b"000",
        b"12345678",
        b"0" * 17,
        b"3" * 40,
        b".5",
        b".000",
        b"e1",
        b"e+1234",
        b"0,",
        b'": 00000000000000000',
    ),
)
"""Tokens such as vocabularies have them."""
PIECES = (*(bytes([byte]) for byte in range(256)), *LONG, b"<eos>")
END = frozenset({len(PIECES) - 1})
WIDE = TokenTable(pieces=PIECES, control_ids=END, eog_ids=END, encode=lambda text: list(text.encode()))
COMPILERS = {"bytes": ConstraintCompiler(TABLE), "long tokens": ConstraintCompiler(WIDE)}
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string", "maxLength": 9}},
    "required": ["a", "s"],
}
NESTED = {
    "type": "object",
    "properties": {"o": PAIR, "l": {"type": "array", "items": {"enum": [1, True, "x"]}, "maxItems": 3}},
    "required": ["o", "l"],
}
OPEN = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "null"}, "c": {"type": "string", "maxLength": 3}},
}


def make(schema: Any, name: str = "bytes") -> Constraint:
    made = COMPILERS[name].compile(SamplingParams(json_schema=schema))
    assert made is not None
    return made


def allowed(constraint: Constraint) -> set[bytes]:
    words = np.zeros(WIDE.num_words, dtype=np.uint32)
    constraint.fill_mask(words)
    return {piece for token, piece in enumerate(PIECES) if words[token >> 5] >> (token & 31) & 1}


def after(schema: Any, text: str) -> Constraint:
    constraint = make(schema, "long tokens")
    for byte in text.encode():
        constraint.accept(byte)
    return constraint


@pytest.mark.parametrize(
    ("text", "is_written"),
    [
        ('{"a":1,"s":""}', True),
        ('{ "a": 1, "s": "" }', True),
        ('{\n  "a": 1,\n  "s": ""\n}', True),
        ('{"a" :1,"s":""}', False),
        ('{"a":1 ,"s":""}', False),
        ('{"a":1\n,"s":""}', False),
        ('{"a":1,"s":" , : "}', True),
        ('{"a":1,"s":"\\" , "}', True),
        ('{"a":1,"s":"\\\\" }', True),
        ('{"a":1,"s":"\\\\" ,', False),
    ],
)
def test_blanks_come_inside_of_brackets_and_after_separators(text: str, is_written: bool) -> None:
    """Characters of strings are no blanks of JSON."""
    assert writes(make(PAIR), text) is is_written


@pytest.mark.parametrize(
    ("schema", "text", "come", "do_not_come"),
    [
        (PAIR, '{"a":1', [b","], [b" ", b"\n", b" ,", b"\n,", b"1 ", b"1\n", b"}"]),
        (PAIR, '{"a":1,"s":"x', [b'"', b'"}', b'"\n', b'" ', b'a"\n'], [b'",', b'", ', b'"]\n']),
        (PAIR, '{"a":1,"s":"x"', [b"}", b" ", b"\n", b" }", b"\n}"], [b" ,", b",", b"  "]),
        (PAIR, '{"a":1,"s":"x"\n', [b"}", b" ", b"  "], [b",", b" ,", b"\n,"]),
        (NESTED, '{"o":{"a":1,"s":"x', [b'"', b'"\n'], [b'"}\n', b'",']),
        (NESTED, '{"o":{"a":1,"s":"x"', [b"}", b"\n}"], [b"}\n", b"}}\n"]),
        (NESTED, '{"o":{"a":1,"s":"x"}', [b","], [b" ", b"\n", b" ,"]),
        (NESTED, '{"o":{"a":1,"s":""},"l":[', [b"]", b"1\n", b"1 ", b"true\n", b"\n", b" ]"], [b" ,"]),
        (NESTED, '{"o":{"a":1,"s":""},"l":[1', [b",", b"]", b"\n", b"]\n", b" ]"], [b" ,", b" :"]),
        (OPEN, "{", [b"}", b" ", b"\n", b" }"], [b" :"]),
        (OPEN, '{"a":1', [b"}", b",", b"\n", b" "], [b" ,"]),
    ],
)
def test_masks_have_tokens_with_blanks_where_a_bracket_may_follow(
    schema: Any, text: str, come: list[bytes], do_not_come: list[bytes]
) -> None:
    """Also tokens that end with blanks, after which a comma would be refused."""
    found = allowed(after(schema, text))
    assert [piece for piece in come if piece in PIECES and piece not in found] == []
    assert [piece for piece in do_not_come if piece in found] == []


def test_a_token_that_does_not_come_is_refused_and_advances_nothing() -> None:
    """As the mask has it; a copy and a rollback keep the place."""
    constraint = after(PAIR, '{"a":1')
    for piece in (b" ,", b"\n"):
        with pytest.raises(InvalidParams, match="no blanks may come there"):
            constraint.accept(PIECES.index(piece))
    copied = constraint.copy()
    for byte in b',"s":"':
        constraint.accept(byte)
    assert b'"\n' in allowed(constraint)
    constraint.rollback(6)
    assert allowed(constraint) == allowed(copied)
    assert b" " not in allowed(constraint)


@pytest.mark.parametrize(
    "schema", [PAIR, NESTED, OPEN, {"type": "array", "items": OPEN, "maxItems": 2}, {"enum": [1, [1, "a"]]}]
)
def test_random_tokens_never_come_to_a_dead_end(schema: Any) -> None:
    """Whatever is drawn of the masks, blanks most of all: the text ends, is JSON, and has no blanks before separators."""
    for seed in range(30):
        rng, constraint, text = random.Random(seed), make(schema, "long tokens"), b""
        while not (constraint.is_complete or (constraint.may_end and rng.random() < 0.5)):
            found = sorted(piece for piece in allowed(constraint) if piece.isascii())
            assert found, text
            blank = [piece for piece in found if piece[-1:].isspace() and not (piece.isspace() and text[-1:].isspace())]
            piece = rng.choice(blank if blank and rng.random() < 0.6 else found)
            constraint.accept(PIECES.index(piece))
            text += piece
        json.loads(text)
        outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', text.decode())
        assert not re.search(r"\s[,:]", outside), text


def longest_runs(text: str) -> tuple[int, int]:
    """Return the length of the longest run of digits in numbers, and in their exponents."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', '""', text)
    exponents = re.findall(r"[eE][+-]?(\d+)", outside)
    others = re.findall(r"\d+", re.sub(r"[eE][+-]?\d+", "", outside))
    return max(map(len, others), default=0), max(map(len, exponents), default=0)


NUMBER, INTEGER = {"type": "number"}, {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "text", "is_written"),
    [
        (INTEGER, "9" * 16, True),
        (INTEGER, "-" + "9" * 16, True),
        (INTEGER, "1" + "0" * 16, False),
        (NUMBER, "1" * 16 + "." + "2" * 16 + "e-99", True),
        (NUMBER, "1" * 17 + ".5", False),
        (NUMBER, "0." + "3" * 17, False),
        (NUMBER, "9" * 16 + "e99", True),
        (NUMBER, "1e100", False),
        (NUMBER, "1e-000", False),
        ({"const": 1e150}, "1" + "0" * 150, True),
        ({"const": 1e-150}, "0." + "0" * 149 + "1", True),
        (NUMBER, "1E+1234", False),
        ({"type": "array"}, f'["{"7" * 40}",{{"{"7" * 40}":1}}]', True),
        ({"type": "array"}, f"[{'7' * 17}]", False),
        ({"type": "object"}, '{"a":{"b":[1.' + "5" * 17 + "]}}", False),
        ({**INTEGER, "maximum": 10**17}, "1" + "0" * 17, True),
        ({**INTEGER, "minimum": 0}, "1" + "0" * 16, False),
        ({"const": 10**20}, "1" + "0" * 20, True),
        ({**NUMBER, "minimum": 1e-20, "maximum": 1}, "0." + "0" * 19 + "1", True),
        ({**NUMBER, "minimum": 0, "maximum": 1}, "0." + "3" * 16, True),
        ({**NUMBER, "minimum": 0, "maximum": 1}, "0." + "3" * 17, False),
        ({**NUMBER, "exclusiveMinimum": 0}, "0.0000000000000001", True),
        ({**NUMBER, "exclusiveMinimum": 0}, "0.00000000000000001", True),
        ({**NUMBER, "exclusiveMinimum": 0}, "0.000000000000000011", False),
        ({**NUMBER, "exclusiveMinimum": 0}, "0.000000000000000001", False),
        ({**NUMBER, "exclusiveMinimum": 0}, "0.0", False),
        ({**NUMBER, "multipleOf": 0.01}, "1234567.25", True),
        ({**INTEGER, "multipleOf": 7}, "7" * 16, True),
        ({**INTEGER, "multipleOf": 7}, "7" * 17, False),
    ],
)
def test_numbers_have_at_most_16_digits_unless_the_schema_has_longer_numbers(
    schema: Any, text: str, is_written: bool
) -> None:
    """Before the point, and after it; an exponent has two. Digits in texts and names are no numbers."""
    for name in COMPILERS:
        assert writes(make(schema, name), text) is is_written
    compact = COMPILERS["bytes"].compile(SamplingParams(json_schema=schema, disable_any_whitespace=True))
    assert compact is not None
    assert writes(compact, text) is is_written


def test_masks_have_no_token_with_too_many_digits() -> None:
    """Neither a token that is too long by itself, nor one that is too long after the digits before it."""
    assert not {b"0" * 17, b"3" * 40} & allowed(after(NUMBER, ""))
    assert {b"00", b"000", b"12345678"} <= allowed(after(NUMBER, "1"))
    assert b'": 00000000000000000' not in allowed(after({"type": "object"}, '{"a'))
    found = allowed(after({"type": "array", "items": NUMBER}, "[" + "1" * 14))
    assert {b"00", b"0,", b".5", b"e1", b",", b"]"} <= found
    assert not {b"000", b"12345678", b"e+1234", b"e123"} & found
    assert not {bytes([digit]) for digit in b"0123456789"} & allowed(after(INTEGER, "1" * 16))


@pytest.mark.parametrize(
    "number",
    [
        *(NUMBER, INTEGER, {**NUMBER, "exclusiveMinimum": 0}, {**NUMBER, "exclusiveMaximum": 5}),
        *({**NUMBER, "exclusiveMinimum": 0.1, "maximum": 3}, {**NUMBER, "exclusiveMinimum": -1e12}),
        *({**NUMBER, "multipleOf": 0.25}, {**NUMBER, "multipleOf": 0.5, "exclusiveMinimum": 0}),
        *(
            {**INTEGER, "multipleOf": 7},
            {**INTEGER, "multipleOf": 13, "minimum": 10**16},
            {**INTEGER, "multipleOf": 1000},
        ),
        *(
            {"allOf": [{"exclusiveMinimum": 3}, INTEGER]},
            {**NUMBER, "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            {"anyOf": [{**INTEGER, "multipleOf": 3}, NUMBER]},
        ),
        *({"type": "number", "minimum": 1e15, "maximum": 1e17}, {"type": ["integer", "null"], "exclusiveMinimum": 5}),
    ],
    ids=json.dumps,
)
def test_numbers_never_come_to_a_dead_end(number: Any) -> None:
    """A model that writes digits as long as it may: the number ends, and satisfies its bounds."""
    for seed in range(20):
        rng, constraint, text = (
            random.Random(seed),
            make({"type": "array", "items": number, "maxItems": 3}, "long tokens"),
            "",
        )
        zeros = rng.random() < 0.5
        while not constraint.is_complete:
            found = sorted(piece.decode() for piece in allowed(constraint) if piece.isascii())
            assert found, text
            digits = [piece for piece in found if piece[-1:].isdigit()]
            zero = [piece for piece in digits if piece.strip("0") in ("", ".")]
            piece = rng.choice(zero if zeros and zero else digits or found)
            constraint.accept(PIECES.index(piece.encode()))
            text += piece
            assert len(text) < 300, text
        values = [value for value in json.loads(text) if value is not None]
        assert all(value > number["exclusiveMinimum"] for value in values if "exclusiveMinimum" in number)
        assert all(value < number["exclusiveMaximum"] for value in values if "exclusiveMaximum" in number)
        longest, exponent = longest_runs(text)
        assert longest <= (17 if "0000" not in json.dumps(number) and "1e+17" not in json.dumps(number) else 19)
        assert exponent <= 2
        assert all(map(math.isfinite, values))
