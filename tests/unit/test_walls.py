"""Walls that the import contract in pyproject.toml cannot see, since the compiled core is no Python file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent


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


@pytest.mark.parametrize("name", ["fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client"])
def test_only_the_server_imports_the_web_framework(name: str) -> None:
    """So that nobody loads it who serves nothing."""
    found = importers(name)
    assert found
    assert {path for path in found if not path.startswith("server/")} == set()


WAITS = {"threading", "asyncio", "time", "logging"}


def test_scheduling_and_the_core_have_no_threads_clocks_or_logs() -> None:
    """What decides is pure: time comes in through a Clock, commands through a list, and it never loads the runtime."""
    pure = [*(PACKAGE / "scheduling").rglob("*.py"), PACKAGE / "engine" / "core.py"]
    assert len(pure) > 15
    found = {
        (path.name, name)
        for path in pure
        for name in imported_names(path)
        if WAITS & set(name.split(".")) or "paceline.runtime" in name
    }
    assert found == set()
