"""Grammars that cost more than they may: refused, in a process of their own where a crash would end it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.constraints.byte_table import TABLE

from paceline.constraints import ConstraintCompiler, check_constraint
from paceline.constraints.nesting import lark_nesting, longest_chain, schema_nesting
from paceline.errors import GrammarError
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
    assert longest_chain({"a": (2, frozenset("b")), "b": (3, frozenset("a")), "c": (1, frozenset())}) == 5
    circles = {"a": (1, frozenset("bc")), "b": (2, frozenset("ac")), "c": (4, frozenset("d")), "d": (8, frozenset("c"))}
    assert longest_chain({"x": (16, frozenset("a")), **circles, "y": (20, frozenset("y"))}) == 31
    assert schema_nesting({"$ref": "#n", "$defs": {"n": {"$anchor": "n", "items": {"$ref": "#/$defs/a~1%25"}}}}) == 3
    assert lark_nesting('start: (a | "b" a)\na: ("(" B) // ((\nB: /[(]/\n') == 5


REFUSED: list[dict[str, Any]] = [
    {"regex": "a{1000}{1000}"},
    {"regex": "(a{200}b){200}"},
    {"json_schema": {"type": "string", "pattern": "(a{1000}){1000}"}},
    {"json_schema": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b"} for i in range(60)]}},
    {"json_schema": {"properties": {f"p{i}": {} for i in range(3000)}, "additionalProperties": True}},
]


@pytest.mark.parametrize("options", REFUSED, ids=[str(one)[:40] for one in REFUSED])
def test_what_would_compile_for_long_is_refused_at_once(options: dict[str, Any]) -> None:
    begin = time.monotonic()
    with pytest.raises(GrammarError):
        check_constraint(SamplingParams(**options))
    assert time.monotonic() - begin < 2


def test_a_compile_delays_no_cached_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal grammars are compiled once, and others do not wait for them."""
    compiler = ConstraintCompiler(TABLE)
    compiler.matcher(("regex", "a", False))
    compiled, begun, go = compiler._compiled, threading.Event(), threading.Event()
    calls: list[Any] = []

    def slow(spec: Any) -> Any:
        calls.append(spec)
        begun.set()
        go.wait(20)
        return compiled(spec)

    monkeypatch.setattr(compiler, "_compiled", slow)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(compiler.matcher, ("regex", "b", False)) for _ in range(2)]
        assert begun.wait(5)
        cached = pool.submit(compiler.matcher, ("regex", "a", False))
        try:
            assert cached.result(timeout=5) is not None
        finally:
            go.set()
        assert all(one.result(timeout=5) for one in waiting)
    assert calls == [("regex", "b", False)]


def test_mutual_recursion_is_bounded_by_its_circles_alone() -> None:
    """Many small circles, as of the syntax of a language, nest no deeper than the deepest of them."""
    names = [f"node{number}" for number in range(200)]

    def node(name: str) -> dict[str, Any]:
        children = {"type": "array", "items": {"$ref": f"#/$defs/{name}_list"}}
        return {"type": "object", "properties": {"kind": {"const": name}, "children": children}, "required": ["kind"]}

    defs = {name: node(name) for name in names}
    lists = {f"{name}_list": {"type": "array", "items": {"$ref": f"#/$defs/{name}"}} for name in names}
    schema = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names], "$defs": {**defs, **lists}}
    assert schema_nesting(schema) < 10
    check_constraint(SamplingParams(json_schema=schema))


def test_circles_are_found_in_linear_time() -> None:
    """A chain of many definitions, and one circle of all of them."""
    size = 50_000
    started = time.thread_time()
    chain = {str(number): (1, frozenset({str(number + 1)})) for number in range(size)}
    assert longest_chain(chain) == size
    assert longest_chain({**chain, str(size - 1): (1, frozenset({"0"}))}) == size
    assert time.thread_time() - started < 5
