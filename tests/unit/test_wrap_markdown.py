"""The tool that wraps Markdown changes line breaks of prose and nothing else."""

from __future__ import annotations

import pytest
from tools.wrap_markdown import WIDTH, wrapped

LONG = "word " * 40

VERBATIM = [
    f"```text\n{LONG}\n\n- {LONG}\n```\n",
    f"    {LONG}\n",
    f"- item\n\n        {LONG}\n",
    f"| {LONG} |\n|---|\n",
    f"# {LONG}\n",
    f"::: paceline.LLM\n    options:\n      filters: [{LONG}]\n",
]


@pytest.mark.parametrize("text", VERBATIM)
def test_code_tables_headings_and_directives_stay(text: str) -> None:
    """Whatever their length."""
    assert wrapped(text) == text


@pytest.mark.parametrize("prefix", ["", "- ", "  - ", "12. ", ":   "])
def test_prose_is_wrapped_with_its_indent(prefix: str) -> None:
    """A paragraph, an item or a definition: words stay in order, later lines stand below the first word."""
    lines = wrapped(f"{prefix}{LONG}\n").splitlines()
    assert len(lines) > 1
    assert all(len(line) <= WIDTH for line in lines)
    assert lines[0].startswith(prefix + "word")
    assert all(line.startswith(" " * len(prefix) + "word") for line in lines[1:])
    assert " ".join(lines).split() == f"{prefix}{LONG}".split()


def test_short_lines_are_joined() -> None:
    """Up to the width, within a paragraph alone."""
    assert wrapped("one\ntwo\n\nthree\n") == "one two\n\nthree\n"


@pytest.mark.parametrize("marker", ["-", "+", "*", "#", ">", "|", "3."])
def test_no_line_begins_like_a_marker(marker: str) -> None:
    """A word that would begin a list, a heading or a table is kept off the beginning of a line."""
    text = "word " * (WIDTH // 5) + f"{marker} " + "word " * 30
    lines = wrapped(f"{text.strip()}\n").splitlines()
    assert len(lines) > 1
    assert not any(line.startswith(marker) for line in lines)


def test_wrapping_twice_changes_nothing() -> None:
    """Wrapped text does not change."""
    once = wrapped(f"{LONG}\n\n- {LONG}\n  {LONG}\n\n1. {LONG}\n\n    {LONG}\n")
    assert wrapped(once) == once
