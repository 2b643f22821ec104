"""The cost of a change stays low: no new import cycle, no second record of the same fields, and sizes that only fall.

`house.toml` beside this has today's figures and exceptions. A change that raises a figure says so there.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent
LIMITS: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("house.toml").read_text(encoding="utf-8"))
RECORD_BASES = {"Struct", "NamedTuple", "BaseModel"}
CALLBACK = {"__call__"}

Graph = Mapping[str, Iterable[str]]


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules by their dotted names."""
    return {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text(encoding="utf-8")
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }


# ---- the graph of imports


@cache
def imports() -> dict[str, set[str]]:
    """Return the modules that each module names in its import statements, in functions and for type checking as well.

    `from paceline.chat import Turn` counts as an import of `paceline.chat`, also in a module of that package: the
    package's `__init__` then stands between two modules. `from paceline.chat import turns`, if that is a module, counts
    as an import of this module alone. Python runs the `__init__` first then, but if this counted, each package with an
    `__init__` that names its modules would be a cycle. Cycles that this hides are found between packages. The compiled core
    is no module here.
    """
    found: dict[str, set[str]] = {}
    for name, tree in sources().items():
        named = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names if alias.name != "_native"}
                named |= {whole if whole in sources() else node.module for whole in inner.values()}
        found[name] = named & sources().keys() - {name}
    return found


def package_imports() -> dict[str, set[str]]:
    """Return the packages and modules below `paceline` that each of them imports."""
    found: dict[str, set[str]] = {}
    for name, named in imports().items():
        found.setdefault(_top(name), set()).update({_top(other) for other in named} - {_top(name)})
    return found


def _top(name: str) -> str:
    return ".".join(name.split(".")[:2])


def cycles(graph: Graph) -> list[set[str]]:
    """Return the largest groups of nodes in which each node reaches all others."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        reached = reach[start] = set()
        todo = [start]
        while todo:
            new = set(graph[todo.pop()]) - reached
            reached |= new
            todo += new
    groups = {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}
    return sorted(map(set, groups), key=sorted)


@pytest.mark.parametrize("graph", [imports, package_imports])
def test_no_import_cycle_is_new(graph: Any) -> None:
    """All cycles of modules and of packages are in `house.toml`, whole or as parts of larger cycles."""
    known = [{*cycle.split()} for cycle in LIMITS["cycles"]]
    found = [{name.removeprefix("paceline.") for name in cycle} for cycle in cycles(graph())]
    assert [" ".join(sorted(cycle)) for cycle in found if not any(cycle <= larger for larger in known)] == []


def test_a_cycle_is_found() -> None:
    """Modules that only lead to a cycle are not part of it."""
    graph = {"a": ["b"], "b": ["c"], "c": ["b"], "d": ["d", "a"], "e": []}
    assert cycles(graph) == [{"b", "c"}, {"d"}]


# ---- classes


@cache
def classes() -> dict[str, ast.ClassDef]:
    """Return the classes by "module.Class"."""
    return {
        f"{module}.{node.name}": node
        for module, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


@cache
def bases(node: ast.ClassDef) -> tuple[str, ...]:
    """Return the names of a class's bases, without modules and type arguments."""
    parts = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return tuple(part.attr if isinstance(part, ast.Attribute) else part.id for part in parts if not _is_call(part))


def _is_call(part: ast.AST) -> bool:
    return not isinstance(part, (ast.Attribute, ast.Name))


@cache
def ancestors(node: ast.ClassDef) -> tuple[ast.ClassDef, ...]:
    """Return a class and the classes of the package that it inherits from."""
    named = [kin for base in bases(node) for kin in _by_name().get(base, ()) if kin is not node]
    return (node, *(older for kin in named for older in ancestors(kin)))


@cache
def _by_name() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for node in classes().values():
        found.setdefault(node.name, []).append(node)
    return found


@cache
def members(node: ast.ClassDef) -> frozenset[str]:
    """Return the methods and attributes of a class."""
    found = {name for kin in ancestors(node)[1:] for name in members(kin)}
    for item in ast.walk(node):
        if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(item.name)
        elif isinstance(item, (ast.Attribute, ast.Name)) and isinstance(item.ctx, ast.Store):
            found.add(item.attr if isinstance(item, ast.Attribute) else item.id)
    return frozenset(found)


def records() -> dict[str, set[str]]:
    """Return the fields that dataclasses, msgspec Structs, NamedTuples and pydantic models declare, by "module.Class"."""
    found = {}
    for name, node in classes().items():
        is_dataclass = any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)
        if is_dataclass or any(base in RECORD_BASES for kin in ancestors(node) for base in bases(kin)):
            fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
            found[name] = {
                field.target.id
                for field in fields
                if isinstance(field.target, ast.Name) and "ClassVar" not in ast.dump(field.annotation)
            }
    return found


def twins() -> list[str]:
    """Return pairs of records that share four fifths of the smaller record's fields, of at least five.

    Inherited fields do not count: they are written once.
    """
    found = []
    for (name, fields), (other, others) in combinations(records().items(), 2):
        least = min(len(fields), len(others))
        if least >= 5 and len(fields & others) >= 0.8 * least:
            found.append(" ".join(sorted(record.rpartition(".")[2] for record in (name, other))))
    return sorted(found)


def test_no_record_repeats_another() -> None:
    """A pair of records with mostly the same fields is in `house.toml`, with the reason."""
    assert [pair for pair in twins() if pair not in LIMITS["twins"]] == []


# ---- sizes


@cache
def figures() -> dict[str, int]:
    """Return the figures that a ratchet holds.

    A module with one importer is not an `__init__` or `__main__`. A wire message is a msgspec Struct with a
    tag. An implementation of a Protocol is a class of the package, fakes for tests included, with all of its members; Protocols
    of functions, with `__call__` alone, do not count.
    """
    importers = Counter(other for named in imports().values() for other in named)
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    folders = {name.rpartition(".")[0] for name in sources()}
    protocols = [members(node) for node in classes().values() if "Protocol" in bases(node)]
    others = [members(node) for node in classes().values() if "Protocol" not in bases(node)]
    return {
        "modules": len(files),
        "lines": sum(files.values()),
        "modules with one importer": sum(count == 1 for name, count in importers.items() if name not in folders),
        "wire messages": sum(any(word.arg == "tag" for word in node.keywords) for node in classes().values()),
        "Protocols with one implementation": sum(
            names != CALLBACK and sum(names <= known for known in others) == 1 for names in protocols
        ),
    }


@pytest.mark.parametrize("name", LIMITS["figures"])
def test_a_figure_does_not_rise(name: str) -> None:
    """Nor does its limit stay far above it."""
    limit, found = LIMITS["figures"][name], figures()[name]
    assert found <= limit, f"{name}: {found}, and the limit is {limit}; find a smaller way, or raise it in house.toml"
    assert found >= limit - LIMITS["slack"][name], f"lower {name} to {found} in house.toml"


# ---- routes


def compared_paths(tree: ast.Module) -> Iterator[str]:
    """Yield the paths that a module compares something with: by ==, in, or startswith."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            found = [*node.args]
        for part in found:
            for item in part.elts if isinstance(part, (ast.Tuple, ast.Set, ast.List)) else [part]:
                if isinstance(item, ast.Constant) and isinstance(item.value, str) and item.value.startswith("/"):
                    yield item.value


def test_only_the_table_of_routes_compares_paths() -> None:
    """A fact about a route is stated at the route's definition, not in a comparison of its path elsewhere."""
    found = {
        name.removeprefix("paceline.")
        for name, tree in sources().items()
        if name.startswith(("paceline.server", "paceline.ray_serve")) and list(compared_paths(tree))
    }
    assert found - {*LIMITS["compares_paths"]} == set()


# ---- the core


def test_the_bindings_use_the_limited_api_of_python() -> None:
    """The wheel for 3.12 serves later versions. `PyBytes_AS_STRING` and other macros are not in it."""
    native = Path(__file__).parents[2] / "native"
    files = [path for path in native.rglob("*.[ch]pp") if path.is_file()]
    assert len(files) > 50
    found = {
        (str(path.relative_to(native)), name)
        for path in files
        for name in re.findall(r"\bPy[A-Z]\w*_[A-Z_]{3,}(?=\()", path.read_text(encoding="utf-8"))
    }
    assert found == set()
