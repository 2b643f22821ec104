"""Grammars that cost more than they may: refused, in a process of their own where a crash would end it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from paceline.constraints import check_constraint
from paceline.constraints.nesting import lark_nesting, longest_chain, schema_nesting
from paceline.params import SamplingParams

SCRIPT = """
import sys
from paceline.constraints import check_constraint
from paceline.errors import GrammarError
from paceline.params import SamplingParams
kind, text = sys.stdin.read().split(" ", 1)
try:
    check_constraint(SamplingParams(**{kind: text}))
except GrammarError as error:
    print(str(error)[:200])
"""


def chain(num_links: int, link: str) -> str:
    links = [f'"d{i}": {link.replace("NEXT", f"#/$defs/d{i + 1}")}' for i in range(num_links)]
    last = f'"d{num_links}": {{"type": "string"}}'
    return '{"$ref": "#/$defs/d0", "$defs": {' + ", ".join([*links, last]) + "}}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", chain(1500, '{"type": "object", "properties": {"a": {"$ref": "NEXT"}}, "required": ["a"]}')),
        ("json_schema", chain(6000, '{"$ref": "NEXT"}')),
        ("json_schema", chain(3000, '{"allOf": [{"$ref": "NEXT"}, {"minLength": 1}]}')),
        ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(20000)) + 'r20000: "b"\n'),
        ("lark", "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(20000)) + 'R20000: "b"\n'),
    ],
    ids=["properties", "references", "allOf", "rules", "terminals"],
)
def test_long_chains_of_references_end_no_process(kind: str, text: str) -> None:
    """The native stack would overflow."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=f"{kind} {text}", capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, " deep" in ran.stdout) == (0, True), (ran.returncode, ran.stdout, ran.stderr[-500:])


def test_schemas_that_refer_to_themselves_count_once() -> None:
    tree: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert schema_nesting(tree) == 2
    check_constraint(SamplingParams(json_schema=tree))


def test_many_definitions_beside_one_another_are_no_chain() -> None:
    many = {f"d{i}": {"type": "object", "properties": {"a": {"type": "null"}}} for i in range(300)}
    schema = {"type": "object", "properties": {name: {"$ref": f"#/$defs/{name}"} for name in many}, "$defs": many}
    assert schema_nesting(schema) == 4
    check_constraint(SamplingParams(json_schema=schema))


def test_nesting_of_references() -> None:
    assert longest_chain({"a": (2, frozenset("b")), "b": (3, frozenset("x")), "c": (1, frozenset("a"))}) == 6
    assert longest_chain({"a": (2, frozenset("b")), "b": (3, frozenset("a")), "c": (1, frozenset())}) == 6
    assert schema_nesting({"$ref": "#n", "$defs": {"n": {"$anchor": "n", "items": {"$ref": "#/$defs/a~1%25"}}}}) == 3
    assert lark_nesting('start: (a | "b" a)\na: ("(" B) // ((\nB: /[(]/\n') == 5
