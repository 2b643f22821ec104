"""Walls that the import contract in pyproject.toml cannot see, since the compiled core is no Python file."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent
PROJECT = Path(__file__).parents[2]


def imported_names(path: Path) -> Iterator[str]:
    """Every dotted name that a file imports; a relative import counts by its last part."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)


def importers(name: str) -> set[str]:
    """The files of the package that import a module of that last name."""
    sources = PACKAGE.rglob("*.py")
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in sources
        if any(name in imported.split(".") for imported in imported_names(path))
    }


def test_only_the_runtime_imports_the_compiled_core() -> None:
    """The compiled core is imported in runtime/ and nowhere else."""
    found = importers("_native")
    assert found
    assert {path for path in found if not path.startswith("runtime/")} == set()


# Imported there in functions: a program without tools and typed replies does not load it.
PYDANTIC_OUTSIDE = {"chat_client/function_tools.py", "chat_client/response_models.py"}


@pytest.mark.parametrize("name", ["fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"])
def test_only_the_server_imports_the_web_framework(name: str) -> None:
    """A program without a server does not load it."""
    found = importers(name)
    assert found
    allowed = PYDANTIC_OUTSIDE if name == "pydantic" else set()
    assert {path for path in found if not path.startswith(("server/", "ray_serve/"))} == allowed


def test_only_the_deployments_import_ray() -> None:
    """A program without a cluster does not need it."""
    found = importers("ray")
    assert found
    assert {path for path in found if not path.startswith("ray_serve/")} == set()


def test_only_the_constraints_import_llguidance() -> None:
    """Whatever else follows a constraint knows its protocol alone."""
    found = importers("llguidance")
    assert found
    assert {path for path in found if not path.startswith("constraints/")} == set()


@pytest.mark.parametrize(("name", "module"), [("huggingface_hub", "network"), ("filelock", "download")])
def test_one_module_knows_each_library_of_downloads(name: str, module: str) -> None:
    """The hub's library and its locks have one place each."""
    assert importers(name) == {f"hub/{module}.py"}


def pure_modules_of_the_cluster() -> list[str]:
    """The modules that the import contract on routing names."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    return next(list(c["source_modules"]) for c in contracts if c["name"].startswith("Routing over replicas"))


WAITS = {"threading", "asyncio", "time", "logging", "MonotonicClock"}


def test_scheduling_routing_and_the_core_have_no_threads_clocks_or_logs() -> None:
    """Deciding code is pure: time comes in through a Clock, commands through a list, and it never loads the runtime."""
    pure = [
        *(
            path
            for room in ("kv_cache", "output", "scheduling", "speculation")
            for path in (PACKAGE / room).rglob("*.py")
        ),
        *(PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in pure_modules_of_the_cluster()),
        PACKAGE / "engine" / "core.py",
    ]
    assert len(pure) > 15
    found = {
        (path.name, name)
        for path in pure
        for name in imported_names(path)
        if WAITS & set(name.split(".")) or "paceline.runtime" in name
    }
    assert found == set()


# Called by name from outside: by the logging module, by Typer's classes, by uvicorn's, by Ray Serve, by pydantic.
HOOKS = {
    "check_health",
    "initialize_state",
    "record_autoscaling_stats",
    "emit",
    "formatTime",
    "format_commands",
    "format_usage",
    "parse_args",
    "timeout_keep_alive_handler",
    "shell_complete",
    "wait_closed",
    "capture_signals",
    "complex_schema",
    "datetime_schema",
    "decimal_schema",
    "dict_schema",
    "multi_host_url_schema",
    "url_schema",
}
# What users of the package call, and the package does not.
FOR_USERS = {
    "fake_worker_engine", "load_sequence_file", "num_processing", "sample_with_logprobs",
    "save_sequence_file", "suppressed_ids",
}  # fmt: skip


BUILT_NAME = re.compile(r"""getattr\(\w+, f['"](\w+_)\{""")  # such as `_visit_` of a visitor


def words(paths: Iterator[Path]) -> Counter[str]:
    """How often each name occurs in these files."""
    return Counter(word for path in paths for word in re.findall(r"\w+", path.read_text(encoding="utf-8")))


def defined() -> Counter[str]:
    """The functions and classes of the package, without those that a decorator registers under another name."""
    registered = re.compile(r"router\.|\w*ROUTES\.|commands\.|atexit|field_validator")
    return Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("__")
        and not any(registered.match(ast.unparse(item)) for item in node.decorator_list)
    )


def test_nothing_is_defined_for_tests_alone() -> None:
    """Every function and class of the package is mentioned in the package, in a benchmark, a tool or the documentation."""
    mentioned = words(PACKAGE.rglob("*.py"))
    for folder in ("benchmarks", "tools", "examples"):
        mentioned += words((PROJECT / folder).rglob("*.py"))
    mentioned += words((PROJECT / "docs").rglob("*.md")) + words(iter([PROJECT / "README.md"]))
    built = tuple({prefix for path in PACKAGE.rglob("*.py") for prefix in BUILT_NAME.findall(path.read_text("utf-8"))})
    unused = {name for name, count in defined().items() if mentioned[name] <= count and not name.startswith(built)}
    assert unused - HOOKS - FOR_USERS == set()


def test_no_two_public_classes_share_a_name() -> None:
    """A name means one class of the package."""
    found: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


# Names that several modules share: Python's own, and the command that runs the package of its name.
SHARED_NAMES = {"__init__", "__main__", "demo"}


def test_no_two_modules_share_a_name() -> None:
    """The last part of a module's or a package's name means one module."""
    names = [path.stem for path in PACKAGE.rglob("*.py")]
    names += [path.parent.name for path in PACKAGE.rglob("__init__.py")]
    assert {name for name, count in Counter(names).items() if count > 1} <= SHARED_NAMES


# Ours, put on the path by pytest's settings or by the run of a foreign suite.
LOCAL = {"agents", "benchmarks", "demo_model", "demo_vision", "paceline", "tests", "tools", "utils"}
BROUGHT = {"starlette": "fastapi"}  # is part of another package's interface


def needed_at_import(path: Path) -> Iterator[str]:
    """The packages that must exist for a file to be imported: imports in its functions may be optional."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module.partition(".")[0]


def test_the_tests_import_only_what_their_extra_installs() -> None:
    """CI has nothing beside it: a package that something else brought is gone on another machine."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["test"]
    declared = {re.split(r"[^\w-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    distributions = metadata.packages_distributions()
    scripts = set((PROJECT / "tests").rglob("check_*.py"))  # run by hand with packages of their own
    missing: dict[str, str] = {}
    for path in sorted(set((PROJECT / "tests").rglob("*.py")) - scripts):
        for name in set(needed_at_import(path)) - LOCAL - sys.stdlib_module_names:
            brought = distributions.get(BROUGHT.get(name, name), [name])
            if not declared & {distribution.lower().replace("_", "-") for distribution in brought}:
                missing[name] = path.relative_to(PROJECT).as_posix()
    assert missing == {}
