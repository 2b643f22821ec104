"""What two other runtimes' tests and reviews insist on, and where we hold it.

A test names in its docstring what it holds: "(edge 73, A, rule 9; lcx C3, beat 1, log 5, 1.13 generator)". `edge` are the
invariants of a C++ runtime's tests by number, the defects that reading it showed by letter, and the rules of its channel;
`lcx` are the findings of the reviews, changelogs and tests of an engine around llama.cpp in Elixir. Below is what concerns
no test of the engine, and why.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]

EDGE = ["1", *map(str, range(20, 94)), *"ABCDEFGH"]
LCX = [
    *("C1", "C2", "C3", "C4"),
    *(f"H{number}" for number in range(1, 8)),
    *(f"M{number}" for number in range(1, 8)),
    *("L1", "L2", "L4"),
    *(f"log {number}" for number in range(1, 20)),
    *(f"beat {number}" for number in range(1, 9)),
    *(f"1.13 {name}" for name in ("option_forwarding", "nif_guards", "server_smoke", "server", "thinking", "utf8", "generator")),
]  # fmt: skip

NOT_OURS = {
    "lcx C2": "speculation comes later",
    "lcx H6": "joining chunks is the backlog's: tests/unit/streaming",
    "lcx M1": "queries of the memory are the context's: tests/native/test_memory.py",
    "lcx M2": "the size of a context is the context's: tests/native/test_context.py",
    "lcx M6": "options are records of three kinds, which test_arguments.py sorts",
    "lcx M7": "the version has one source, which the build reads",
    "lcx L2": "Python raises, it answers no tuples",
    "lcx L4": "speculation comes later",
    "lcx log 3": "prefixes of other requests are not taken over yet",
    "lcx log 7": "lifetimes of native objects: tests/native/test_sampler.py, test_model.py",
    "lcx log 9": "saved states are the context's: tests/native/test_memory.py",
    "lcx log 13": "there are no exit signals between threads",
    "lcx log 14": "there are no sessions",
    "lcx log 15": "nothing is downloaded",
    "lcx log 16": "the width of a vector is the embedder's: tests/native/test_embedder.py",
    "lcx log 18": "speculation comes later",
    "lcx log 19": "backends' numerics are llama.cpp's",
    "lcx beat 2": "thinking is a matter of chats",
    "lcx beat 5": "idle prefixes are not kept yet",
    "lcx beat 8": "prefixes of other requests are not taken over yet",
    "lcx 1.13 server": "prefixes of other requests are not taken over yet",
    "lcx 1.13 thinking": "thinking is a matter of chats",
}

_GROUPS = re.compile(r"\(((?:edge|lcx) [^()]*)\)")
_RULE = re.compile(r"rule \d+|2\.5 [A-H]")


def docstrings() -> Iterator[tuple[str, str]]:
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield f"{path.relative_to(TESTS)}::{node.name}", ast.get_docstring(node) or ""


def named() -> dict[str, list[str]]:
    """Every item that a docstring names, with the tests that do."""
    found: dict[str, list[str]] = {}
    for test, text in docstrings():
        for match in _GROUPS.finditer(text):
            for group in " ".join(match[1].split()).split("; "):
                source, _, items = group.partition(" ")
                for item in items.split(", "):
                    found.setdefault(f"{source} {item}", []).append(test)
    return found


def test_every_item_has_a_test_or_a_reason() -> None:
    """What is listed is named by a test, or does not concern us; nothing is both."""
    listed, found = {f"edge {item}" for item in EDGE} | {f"lcx {item}" for item in LCX}, named()
    assert sorted(listed - found.keys() - NOT_OURS.keys()) == []
    assert sorted(found.keys() & NOT_OURS.keys()) == []
    assert NOT_OURS.keys() <= listed


def test_no_test_names_an_item_that_is_not_there() -> None:
    """A number mistyped is found."""
    listed = {f"edge {item}" for item in EDGE} | {f"lcx {item}" for item in LCX}
    unknown = {item: tests for item, tests in named().items() if item not in listed}
    assert {item: tests for item, tests in unknown.items() if not _RULE.fullmatch(item.removeprefix("edge "))} == {}
