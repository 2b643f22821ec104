"""Plain text for pipes, colours for terminals, no control of the terminal for a model's text."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from paceline.cli import terminal


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_control_characters_become_pictures() -> None:
    """An escape sequence is shown, not obeyed; line breaks and tabs stay."""
    assert terminal.printable("a\x1b[2Jb\r\x07\x7f\x9b\n\té🙂") == "a␛[2Jb␍␇␡\ufffd\n\té🙂"


def test_text_that_is_turned_around_is_shown_as_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings, overrides and line separators are replaced; marks of direction, which languages need, stay."""
    assert terminal.printable("m\u202egpj.exe\u2066\u2028 שלום\u200e") == "m\ufffdgpj.exe\ufffd\ufffd שלום\u200e"


def test_messages_are_printable_in_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target of stderr may be shown in a terminal later."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    terminal.note("m\x1b[2J.gguf")
    terminal.report("no file m\x1b[2J.gguf")
    assert sys.stderr.getvalue() == "m␛[2J.gguf\nError: no file m␛[2J.gguf\n"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """No style and no replacement without a terminal, for any choice of colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    terminal.write("a\x1b[2J", style="bold")
    terminal.write(" " + "long " * 50)
    assert sys.stdout.getvalue() == "a\x1b[2J " + "long " * 50


def test_a_terminal_gets_colours_and_no_foreign_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Styles are ours, escapes in the text are made visible, nothing is wrapped."""
    monkeypatch.setattr(sys, "stdout", Screen())
    terminal.write("[b]a\x1b:smile:" + "x" * 200, style="bold")
    terminal.write("b\x1b[2J")
    assert sys.stdout.getvalue() == "\x1b[1m[b]a␛:smile:" + "x" * 200 + "\x1b[0m" + "b␛[2J"


def test_a_dumb_terminal_gets_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """TERM=dumb is honoured."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", Screen())
    terminal.write("a", style="bold")
    assert sys.stdout.getvalue() == "a"


def test_no_color_leaves_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR takes the red of an error away."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Screen())
    terminal.report("x")
    assert "31m" not in sys.stderr.getvalue() and "Error:" in sys.stderr.getvalue()


def test_characters_that_stdout_cannot_show_become_question_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output in ASCII loses characters, not the run."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    terminal.write("é🙂!")
    assert raw.getvalue() == b"??!"


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Line breaks in a message do not make it several."""
    terminal.report("first\n  second")
    assert capsys.readouterr() == ("", "Error: first second\n")


def test_a_section_is_aligned_and_leaves_empty_values_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Names of different length have their values in one column."""
    terminal.write_section("title", [("a", "1"), ("long name", "2"), ("not said", "")])
    assert capsys.readouterr().out == "title\n  a          1\n  long name  2\n"


def test_further_lines_of_a_record_are_indented() -> None:
    """As of the last words of a worker that crashed; none of them can look like another record."""
    record = logging.LogRecord("a", logging.ERROR, "", 0, "it died:\n%s", ("Segmentation fault\n  File \x1b\r",), None)
    assert terminal.LogLines().format(record) == "it died:\n  Segmentation fault\n    File \\u001b\\r"
