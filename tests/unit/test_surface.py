"""The package's exports, and the cost of importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tools.write_keywords import TARGET, with_types

import paceline
from paceline import errors


def test_every_export_exists_and_the_list_is_sorted() -> None:
    """__all__ is complete, in order, and each name can be had."""
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    assert set(paceline.__all__) <= set(dir(paceline))


def test_every_error_is_exported() -> None:
    """An `except paceline.QueueFull` needs no second import."""
    classes = [
        var for var in vars(errors).values() if isinstance(var, type) and issubclass(var, paceline.PacelineError)
    ]
    assert len(classes) > 40
    for item in classes:
        assert getattr(paceline, item.__name__) is item
        assert item.__name__ in paceline.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The error is that of any module."""
    with pytest.raises(AttributeError, match="Modle"):
        _ = paceline.Modle


def test_chats_load_no_pydantic() -> None:
    """Modules that only tools and typed replies need are loaded by them."""
    code = "import sys, paceline.llm, paceline.async_llm; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_importing_loads_neither_the_core_nor_numpy() -> None:
    """`import paceline` is light: nothing compiled, no arrays, no event loop, no terminal library, no package metadata."""
    heavy = ("paceline._native", "numpy", "msgspec", "asyncio", "typer", "rich", "gguf", "paceline.engine.client")
    code = (
        "import sys; before = set(sys.modules); import paceline; new = sys.modules.keys() - before; "
        f"print(sorted(new & {{*{heavy!r}, 'importlib.metadata'}}), paceline.__version__ != '')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[] True"


def test_the_types_are_up_to_date() -> None:
    """An option that was added or changed is in the TypedDicts."""
    module = TARGET.read_text(encoding="utf-8")
    assert module == with_types(module), "keywords.py is out of date: run `python tools/write_keywords.py`"
