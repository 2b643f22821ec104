"""The program gives the answers that are stored in this folder."""

from __future__ import annotations

from difflib import unified_diff

import pytest
from tests.frozen.answers import FOLDER, FROZEN

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", FROZEN)
def test_an_answer_is_as_it_was(name: str) -> None:
    """All lines are equal; `python -m tests.frozen --write` stores an intended change."""
    before, now = (FOLDER / name).read_text(encoding="utf-8"), FROZEN[name]()
    changed = unified_diff(before.splitlines(), now.splitlines(), f"tests/frozen/{name}", "now", lineterm="", n=4)
    if before != now:
        pytest.fail(
            "\n".join([*changed, f"if this change is intended: python -m tests.frozen --write {name}"]), pytrace=False
        )


def test_no_file_is_left_over() -> None:
    """A test compares each stored file."""
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".txt")} == set(FROZEN)
