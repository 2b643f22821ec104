"""A reply on a terminal and in a pipe: blocks of Markdown, redrawn until they are complete."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from paceline.cli import chat_command
from paceline.cli.chat_command import MarkdownView, PlainView, make_view, split_blocks, stats_line
from paceline.cli.endings import error_text
from paceline.cli.terminal import WordWrap
from paceline.errors import ModelFileNotFound
from paceline.streaming import Usage

TEXT = "# Title\n\nSome **bold** text\nof two lines.\n\n- one\n- two\n\n```python\na = 1\n\nb = 2\n```\n\nThe end."


class FakeTerminal(io.StringIO):
    """A stdout that is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    """Make stdout a terminal; in the test itself, since pytest sets stdout again after its fixtures."""
    made = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return made


def seen(written: str) -> list[str]:
    """Return the lines of a screen after this output: text, line breaks, cursor up and erasure."""
    lines, row = [""], 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.startswith("\x1b") and part.endswith("A"):
            row -= int(part[2:-1])
            assert row >= 0
        elif part == "\x1b[J":
            lines[row:] = [""]
        elif part[0] not in "\x1b\r":
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_blocks_are_complete_at_blank_lines_outside_of_code() -> None:
    """The rest may still grow."""
    blocks, rest = split_blocks(TEXT)
    assert [block.splitlines()[0] for block in blocks] == ["# Title", "Some **bold** text", "- one", "```python"]
    assert rest == "The end."
    assert split_blocks("```\na\n\nb") == ([], "```\na\n\nb")
    assert split_blocks("````\n```\n\nb")[0] == []
    assert split_blocks("a\n") == ([], "a\n")


@given(st.text(alphabet="a`~\n -#", max_size=60))
def test_no_text_is_lost(text: str) -> None:
    """Blocks and rest together are the text, but for blank lines between them."""
    blocks, rest = split_blocks(text)
    assert "".join("".join([*blocks, rest]).split()) == "".join(text.split())
    assert all(block.strip() for block in blocks)


@pytest.mark.parametrize("size", [1, 3, 7, len(TEXT)])
def test_streamed_markdown_ends_as_if_it_had_come_at_once(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However it was cut, and redrawn at every piece; the screen is lower than the text is long."""
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr("paceline.cli.chat_command._REDRAW_S", 0)
    view = MarkdownView()
    view.thinking("\nI think.\n")
    for start in range(0, len(TEXT), size):
        view.content(TEXT[start : start + size])
    view.finish()
    shown = "\n".join(seen(screen.getvalue()))
    assert shown.startswith("I think.\n\n")
    assert re.sub(r"\s+", " ", shown) == "I think. Title Some bold text of two lines. • one • two a = 1 b = 2 The end. "
    assert "\n\n\n" not in shown
    assert "\x1b[1m" in screen.getvalue()


def test_a_block_longer_than_the_screen_shows_its_end_and_is_whole_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cursor never leaves the screen upwards."""
    screen = on_terminal(monkeypatch)
    monkeypatch.setattr("paceline.cli.chat_command._REDRAW_S", 0)
    view = MarkdownView()
    for number in range(40):
        view.content(f"- item {number}\n")
        ups = [int(item) for item in re.findall(r"\x1b\[(\d+)A", screen.getvalue())]
        assert max(ups, default=0) < 12
    view.finish()
    shown = seen(screen.getvalue())
    assert [line for line in shown if line] == [f" • item {number}" for number in range(40)]


def test_control_characters_of_a_model_are_not_sent_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's text cannot move the cursor or set a title."""
    screen = on_terminal(monkeypatch)
    view = MarkdownView()
    view.thinking("a\x1b]0;title\x07")
    view.content("b\x1b[2J\n\nc")
    view.finish()
    assert "\x1b]" not in screen.getvalue()
    assert "\x1b[2J" not in screen.getvalue()


def test_plain_text_is_written_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thinking in front on a terminal, without it elsewhere; a line break ends it."""
    screen = on_terminal(monkeypatch)
    view = make_view(is_plain=True, shows_thinking=True)
    assert isinstance(view, PlainView)
    view.thinking("hm")
    view.content("**a**")
    view.finish()
    assert re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()) == "hm\n\n**a**\n"
    hidden = make_view(is_plain=False, shows_thinking=False)
    assert isinstance(hidden, MarkdownView)
    hidden.thinking("secret")
    hidden.content("a")
    hidden.finish()
    assert "secret" not in screen.getvalue()


def test_a_pipe_gets_the_content_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """No escapes, no thinking."""
    view = make_view(is_plain=False, shows_thinking=True)
    view.thinking("hm")
    view.content("**a**\n")
    view.finish()
    assert capsys.readouterr().out == "**a**\n"


URL = "https://example.org/" + "path/" * 20
WORDS = (
    f"The internationalization of a terminal, {URL} and then 日本語のテキストは単語の間に空白がありません。 "
    "Done, e\u0301t\u0301e\u0301!"
)


def wrapped(monkeypatch: pytest.MonkeyPatch, text: str, size: int, columns: int = 24) -> str:
    """Return the lines that a terminal gets of a text in pieces."""
    screen = on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    wrap = WordWrap(screen)
    for start in range(0, len(text), size):
        wrap.write(text[start : start + size])
    wrap.finish()
    return screen.getvalue()


@pytest.mark.parametrize("size", [1, 2, 7, 400])
def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """No line is wider than the terminal but for a word that is; it begins a line. Wide characters count as two."""
    written = wrapped(monkeypatch, WORDS, size)
    assert written == wrapped(monkeypatch, WORDS, len(WORDS))
    assert "".join(written.split()) == "".join(WORDS.split())
    lines = written.split("\n")
    assert [line for line in lines if cell_len(line) > 23] == [next(line for line in lines if line.startswith(URL))]
    assert lines[:3] == ["The", "internationalization of", "a terminal,"]
    assert len([line for line in lines if "日" in line or "の" in line]) > 1


@pytest.mark.parametrize("size", [1, 5, 400])
def test_code_is_left_to_the_terminal(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Fenced and indented lines can be copied as they are."""
    text = "Look:\n\n```python\nprint('a line that is wider than it')\n```\n\n    value = 1 + 2 + 3 + 4 + 5 + 6\n\ttab\nend"
    assert wrapped(monkeypatch, text, size) == text


def test_blanks_stay_where_the_text_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A break takes the place of the blanks between two words; others are written."""
    assert wrapped(monkeypatch, "a  b \n\n  c ", 1) == "a  b \n\n  c "
    assert wrapped(monkeypatch, "word " * 5, 3) == "word word word word\nword "


@given(st.text(alphabet="ab \n`日\u0301-", max_size=200), st.integers(1, 9))
def test_wrapping_loses_nothing(text: str, size: int) -> None:
    """Whatever the pieces are, all characters but blanks are written, in order."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        written = wrapped(monkeypatch, text, size)
        assert written == wrapped(monkeypatch, text, 1000)
    assert "".join(written.split()) == "".join(text.split())


@pytest.mark.parametrize("view", [MarkdownView, PlainView])
def test_thinking_breaks_between_words(monkeypatch: pytest.MonkeyPatch, view: type[MarkdownView | PlainView]) -> None:
    """In both views, on a terminal of 60 columns."""
    screen = on_terminal(monkeypatch)
    made = view()
    for word in WORDS.split():
        made.thinking(f" {word}")
    made.content("Yes.")
    made.finish()
    shown = seen(screen.getvalue())
    assert max(cell_len(line) for line in shown if URL not in line) < 60
    assert shown[-2:] == ["Yes.", ""] and sum(bool(line) for line in shown) == 4


def test_statistics_leave_out_a_first_token_that_never_came() -> None:
    """A reply of no tokens has no time to its first token."""
    assert stats_line(Usage(prompt_tokens=30)) == "0 tokens | prompt 30 tokens, 0 cached"
    assert stats_line(Usage(prompt_tokens=30, completion_tokens=1, ttft_s=0.5)).endswith("| first token after 500.0 ms")


def test_an_error_of_a_file_has_no_number() -> None:
    """The file and the reason; an error of paceline keeps its words."""
    assert error_text(FileNotFoundError(2, "No such file or directory", "x")) == "x: No such file or directory"
    assert error_text(OSError(28, "No space left on device")) == "No space left on device"
    assert error_text(InterruptedError("stopped")) == "stopped"
    assert error_text(ModelFileNotFound("there is no file x; name another", "x")) == "there is no file x; name another"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two"], "one\ntwo"),
        (['"""one"""'], '"""one"""'),
        (['"""one', "two\\", '"""'], '"""one\ntwo\\\n"""'),
        (['"""', "one", 'two"""  '], '"""\none\ntwo"""  '),
        (['"""one\ntwo"""'], '"""one\ntwo"""'),
        (['""""""'], '""""""'),
    ],
)
def test_a_message_goes_on_to_its_closing_quotes(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], message: str
) -> None:
    """Or to the first line without a backslash at its end; no line more is read."""
    left = iter(lines)
    monkeypatch.setattr("builtins.input", lambda _: next(left))
    assert chat_command._read() == message
    assert list(left) == []
