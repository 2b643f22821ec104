"""The progress of a list: the places that show its bar, and the calls of a function."""

from __future__ import annotations

import builtins
import re
import sys
from types import ModuleType
from typing import Any

import pytest

from paceline.engine import results as module
from paceline.engine.results import checked_progress, progress_bar
from paceline.errors import InvalidType

_COLOURS = re.compile("\x1b\\[[0-9;]*m")


class Picture:
    """An output of a notebook's cell: its texts, one for each change."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.html = ""

    def update(self, shown: Any) -> None:
        bundle = shown._repr_mimebundle_(include=(), exclude=())
        self.texts.append(_COLOURS.sub("", bundle["text/plain"]))
        self.html = bundle["text/html"]


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> list[Picture]:
    """A notebook: its kernel's shell, and the pictures that are displayed."""
    shown: list[Picture] = []

    def display(bar: Any, *, display_id: bool) -> Picture:
        assert display_id
        shown.append(Picture())
        shown[-1].update(bar)
        return shown[-1]

    package, part = ModuleType("IPython"), ModuleType("IPython.display")
    part.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", part)
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    return shown


def test_a_notebook_shows_a_bar_that_changes_in_place(
    pictures: list[Picture], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts from 0, needs no ipywidgets and writes nothing to stderr; its last picture stays."""
    monkeypatch.setattr(module, "_UPDATE_S", 0.0)
    with progress_bar(3, True) as advance:
        for _ in range(3):
            advance()
    (picture,) = pictures
    counts = [text.split()[1] for text in picture.texts]
    assert counts == ["0/3", "1/3", "2/3", "3/3", "3/3"]
    assert "<pre" in picture.html and "3/3" in picture.html
    assert capsys.readouterr() == ("", "")


def test_a_notebook_gets_few_pictures_of_many_prompts(pictures: list[Picture]) -> None:
    """Not one for each prompt; the last one is right, also if the list fails."""
    with pytest.raises(ZeroDivisionError), progress_bar(10_000, True) as advance:
        for _ in range(5_000):
            advance()
        raise ZeroDivisionError
    assert len(pictures[0].texts) < 50
    assert " 5000/10000 " in pictures[0].texts[-1]


def test_without_the_wish_or_a_place_nothing_is_shown(
    pictures: list[Picture], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a notebook, in IPython's shell without a terminal, and in a program with stderr in a file."""
    with progress_bar(3, False) as advance:
        advance()
    monkeypatch.setattr(builtins, "get_ipython", object)
    with progress_bar(3, True) as advance:
        advance()
    monkeypatch.delitem(sys.modules, "IPython")
    with progress_bar(3, True) as advance:
        advance()
    assert pictures == []
    assert capsys.readouterr() == ("", "")


def test_a_function_is_called_with_the_number_of_prompts_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """And with the total; no bar is shown."""
    calls: list[tuple[int, int]] = []
    with progress_bar(2, lambda *numbers: calls.append(numbers)) as advance:
        assert calls == []
        advance()
        assert calls == [(1, 2)]
        advance()
    assert calls == [(1, 2), (2, 2)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("wrong", [1, "yes", []])
def test_progress_is_a_bool_or_a_function(wrong: object) -> None:
    """None counts as False."""
    assert (checked_progress(None), checked_progress(True), checked_progress(print)) == (False, True, print)
    with pytest.raises(InvalidType, match=r"^progress must be True, False or a function progress\(done, total\), not "):
        checked_progress(wrong)
