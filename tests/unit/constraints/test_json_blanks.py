"""Blanks in generated JSON: after `{ [ , :` and before `} ]` alone, for tokens of any length."""

from __future__ import annotations

import json
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
    """Also tokens whose last characters are blanks, after which a comma would be refused."""
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
