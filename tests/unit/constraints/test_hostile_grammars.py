"""Grammars that cost more than they may: refused, in a process of their own if a crash would end it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.polling import LONG_S
from tests.unit.constraints.byte_table import TABLE

from paceline.constraints import ConstraintCompiler, check_constraint
from paceline.constraints import compiler as compiler_module
from paceline.constraints.compiler import has_large_terminal, lark_nesting
from paceline.constraints.schema_walk import longest_chain, schema_nesting
from paceline.errors import GrammarError
from paceline.params import SamplingParams
from paceline.request import cache_scope

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


@pytest.mark.parametrize("is_closed", [True, False])
def test_many_optional_properties_are_refused_before_they_are_compiled(is_closed: bool) -> None:
    """Compiling takes time with the square of their number; required properties take little."""
    names = [f"p{index}" for index in range(2000)]
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    schema["additionalProperties"] = not is_closed
    begin = time.monotonic()
    with pytest.raises(GrammarError, match="#/properties: at most 1000 can be"):
        check_constraint(SamplingParams(json_schema=schema))
    assert time.monotonic() - begin < 60
    if is_closed:
        check_constraint(SamplingParams(json_schema={**schema, "required": names[1000:]}))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", chain(1500, '{"type": "object", "properties": {"a": {"$ref": "NEXT"}}, "required": ["a"]}')),
        ("json_schema", chain(6000, '{"$ref": "NEXT"}')),
        ("json_schema", chain(3000, '{"allOf": [{"$ref": "NEXT"}, {"minLength": 1}]}')),
        ("lark", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(12000)) + 'r12000: "b"\n'),
        ("lark", "start: R0\n" + "".join(f'R{i}: "a" R{i + 1}\n' for i in range(12000)) + 'R12000: "b"\n'),
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


@pytest.mark.parametrize("options", REFUSED, ids=[str(item)[:40] for item in REFUSED])
def test_input_that_would_compile_for_long_is_refused_at_once(options: dict[str, Any]) -> None:
    begin = time.monotonic()
    with pytest.raises(GrammarError):
        check_constraint(SamplingParams(**options))
    assert time.monotonic() - begin < 60


def doubled(num_levels: int) -> str:
    """Return a Lark grammar of terminals with twice the optional parts of the terminals that they refer to."""
    return f"start: T{num_levels}\nT0: /a?/\n" + "\n".join(f"T{i + 1}: T{i} T{i}" for i in range(num_levels))


def test_parts_that_may_match_nothing_are_counted_through_terminals() -> None:
    """Their memory grows with their square: 32,768 of them took 3 GB and 17 s, of 185 characters."""
    assert (has_large_terminal(doubled(15)), has_large_terminal(doubled(9))) == (True, False)
    assert has_large_terminal("start: T\nT: " + '"a"? ' * 2001)
    assert has_large_terminal("start: /" + "a?" * 2001 + "/")
    assert not has_large_terminal("start: t\nt: " + '"a"? ' * 5000)  # rules cost in proportion to their length
    check_constraint(SamplingParams(lark=doubled(9)))
    check_constraint(SamplingParams(regex="a?" * 1999))
    for options in ({"lark": doubled(15)}, {"regex": "(a|)" * 2001}, {"regex": "a*" * 2001}):
        with pytest.raises(GrammarError, match="more than 2000 groups and quantifiers"):
            check_constraint(SamplingParams(**options))


SCHEMA: Any = ("json_schema", '{"type": "string", "pattern": "[a-z]{3}"}', False)


def test_another_tenant_or_salt_compiles_a_grammar_again() -> None:
    """The time of its request tells nothing about others; its own second request is faster."""
    compiler = ConstraintCompiler(TABLE)
    for scope in (("a", ""), ("b", ""), ("a", "salt")):
        num_before = compiler.num_compiled
        for _ in range(2):
            with cache_scope(*scope):
                compiler.matcher(SCHEMA)
        assert compiler.num_compiled == num_before + 1


def test_cached_grammars_are_bounded_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood evicts the grammars of its own tenant, and a grammar that is larger than the cache is not kept."""
    monkeypatch.setattr(compiler_module, "_CACHED_BYTES", 4 << 20)
    compiler = ConstraintCompiler(TABLE)
    with cache_scope("quiet"):
        compiler.matcher(SCHEMA)
    with cache_scope("flood"):
        for number in range(60):
            compiler.matcher(("lark", f'start: "{number}{"a" * 1000}"', False))
            assert compiler.num_cached_bytes <= 4 << 20
        num_kept = len(compiler._cached)
        assert 2 < num_kept < 50
        compiler.matcher(("lark", f'start: "{"a" * 100_000}"', False))  # takes 10 MB
        assert len(compiler._cached) == num_kept
    assert compiler.num_cached_bytes == sum(item.num_bytes for item in compiler._cached.values())
    num_compiled = compiler.num_compiled
    with cache_scope("quiet"):
        compiler.matcher(SCHEMA)
    assert compiler.num_compiled == num_compiled


def test_a_grammar_that_is_used_for_long_is_compiled_again() -> None:
    """Copies of a matcher share states that grow while they are followed, up to a number at which all of them fail."""
    compiler = ConstraintCompiler(TABLE)
    params = SamplingParams(regex="(.*a.{30}|.*b.{31})")
    constraint = compiler.compile(params)
    assert constraint is not None
    num_fresh, words = compiler.num_cached_bytes, np.zeros(TABLE.num_words, dtype=np.uint32)
    for number in range(1000):
        constraint.fill_mask(words)
        constraint.accept(ord("ab"[number * number % 7 % 2]))
    assert compiler.num_cached_bytes >= num_fresh + 1000 * 4096
    copy = constraint.copy()
    for _ in range(8000):
        copy.accept(ord("a"))
    assert compiler.compile(params) is not None
    assert compiler.num_compiled == 2
    assert compiler.num_cached_bytes < num_fresh + 100_000


def test_a_compile_delays_no_cached_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal grammars are compiled once, and others do not wait for them."""
    compiler = ConstraintCompiler(TABLE)
    compiler.matcher(("regex", "a", False))
    compiled, begun, go = compiler._compiled, threading.Event(), threading.Event()
    calls: list[Any] = []

    def slow(spec: Any) -> Any:
        calls.append(spec)
        begun.set()
        go.wait(LONG_S)
        return compiled(spec)

    monkeypatch.setattr(compiler, "_compiled", slow)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(compiler.matcher, ("regex", "b", False)) for _ in range(2)]
        assert begun.wait(LONG_S)
        cached = pool.submit(compiler.matcher, ("regex", "a", False))
        try:
            assert cached.result(timeout=LONG_S) is not None
        finally:
            go.set()
        assert all(item.result(timeout=LONG_S) for item in waiting)
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
    assert time.thread_time() - started < 60
