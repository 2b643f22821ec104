"""The error tree: codes, branches, and that the native core names real classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline import errors
from paceline.errors import CapacityError, EngineError, ModelError, PacelineError, RequestError


def tree(base: type[PacelineError]) -> list[type[PacelineError]]:
    own = [child for child in base.__subclasses__() if child.__module__ == errors.__name__]
    return [base, *(each for child in own for each in tree(child))]


def test_every_class_has_a_code_of_its_own() -> None:
    """Programs distinguish errors by code, so no two share one."""
    codes = [each.code for each in tree(PacelineError)]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


def test_a_class_of_a_program_takes_the_arguments_of_its_bases() -> None:
    """It has the code of its base unless it sets one, and another base may have arguments for its subclasses."""

    class Tagged:
        def __init_subclass__(cls, tag: str) -> None:
            cls.tag = tag

    class Full(errors.QueueFull, Tagged, tag="full"):
        pass

    assert (Full.code, Full.tag) == ("queue_full", "full")


def test_every_error_belongs_to_one_branch() -> None:
    """The responsible side: the caller, the load, paceline or the file."""
    branches = (RequestError, CapacityError, EngineError, ModelError)
    for each in tree(PacelineError)[1:]:
        assert sum(issubclass(each, branch) for branch in branches) == 1


def test_python_programs_can_catch_what_they_expect() -> None:
    """A bad value is a ValueError, a bad type a TypeError as well."""
    assert issubclass(errors.InvalidParams, ValueError)
    assert issubclass(errors.InvalidType, TypeError)
    assert issubclass(errors.GrammarError, ValueError)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Every class is in the diagram."""
    for each in tree(PacelineError):
        assert re.search(rf"\b{each.__name__}\b", errors.__doc__ or ""), each


@pytest.mark.skipif(
    not (Path(__file__).parents[2] / "native").is_dir(), reason="the tests run without the sources beside them"
)
def test_every_error_that_the_core_names_exists() -> None:
    """Names in native/ are strings; each is a class here."""
    native = Path(__file__).parents[2] / "native"
    named = {
        name
        for path in native.rglob("*.cpp")
        for name in re.findall(r'fail\(\s*(?:[^";]*\? )?"([A-Z]\w+)"', path.read_text())
    }
    assert len(named) > 8
    assert [name for name in named if not hasattr(errors, name)] == []
