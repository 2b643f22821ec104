"""Texts from arguments, files and stdin."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from paceline.cli import options
from paceline.errors import InvalidParams


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"a\n", "a"), (b"a\r\n", "a"), (b"a\n\n", "a\n"), (b"", ""), ("é\nb".encode(), "é\nb")],
)
def test_stdin_loses_one_line_break_at_its_end(monkeypatch: pytest.MonkeyPatch, data: bytes, text: str) -> None:
    """`echo` adds a line break; everything else stays."""
    stdin(monkeypatch, data)
    assert options.argument_or_stdin("PROMPT", "-") == text


def test_bytes_that_are_no_text_are_refused_with_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the byte and where it is."""
    stdin(monkeypatch, b"ab\xff")
    with pytest.raises(InvalidParams, match="stdin is not UTF-8: byte 0xff at offset 2"):
        options.stdin_text()


def test_a_closed_stdin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without stdin gets an error that names it."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InvalidParams, match="closed"):
        options.stdin_text()


def test_an_argument_with_stray_bytes_is_refused() -> None:
    """Python hands them over as surrogates, which are no text."""
    assert options.text_argument("PROMPT", "é") == "é"
    with pytest.raises(InvalidParams, match="PROMPT is no valid text: character 1"):
        options.text_argument("PROMPT", "a\udcff")


def test_lines_of_stdin_take_the_place_of_the_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and lines mix, in order."""
    stdin(monkeypatch, b"one\ntwo\n")
    assert options.arguments_or_lines("TEXT", ["a", "-", "b"]) == ["a", "one", "two", "b"]


def test_lines_of_a_redirected_stdin_are_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without arguments; a stdin that has no text is missing text."""
    stdin(monkeypatch, b"one\ntwo\n")
    assert options.arguments_or_lines("TEXT", None) == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", None)
    for read in (options.arguments_or_lines, options.argument_or_stdin):
        with pytest.raises(InvalidParams, match="TEXT is missing"):
            read("TEXT", None)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """The message has the option, the path and the reason."""
    with pytest.raises(InvalidParams, match=r"--grammar-file: cannot read .*none: No such file"):
        options.text_file("--grammar-file", tmp_path / "none")
    (tmp_path / "some").write_bytes(b"\xff")
    with pytest.raises(InvalidParams, match=r"--grammar-file .*some is not UTF-8"):
        options.text_file("--grammar-file", tmp_path / "some")
