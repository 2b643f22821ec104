"""The terminal's view of a download."""

from __future__ import annotations

import io
import itertools
import re

import pytest

from paceline.hub.download import download_bar


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 100 columns that can draw."""
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def test_a_terminal_gets_a_bar_with_size_and_rest(terminal: Terminal) -> None:
    """And the notes beside it."""
    notes: list[str] = []
    with download_bar(terminal, notes.append) as observer:
        observer.note("this file because of that")
        observer.begin("folder/m-Q4_K_M.gguf", 2_000_000)
        observer.reached(0)
        observer.reached(1_000_000)
        observer.reached(2_000_000)
        observer.end()
    text = terminal.getvalue()
    assert "this file because of that" in text
    assert "m-Q4_K_M.gguf" in text
    assert "folder" not in text
    assert "2.0/2.0 MB" in text
    assert notes == []


def test_bytes_of_an_earlier_attempt_are_no_speed(terminal: Terminal) -> None:
    """A gigabyte that was there already did not come in a second."""
    with download_bar(terminal, lambda text: None) as observer:
        observer.begin("m.gguf", 2_000_000_000)
        observer.reached(1_000_000_000)
        observer.end()
    text = terminal.getvalue()
    assert "1.0/2.0 GB" in text
    assert "/s" not in text


@pytest.mark.parametrize("how", ["no terminal", "variable"])
def test_elsewhere_a_file_is_a_line(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """In a log, or with bars switched off."""
    stream = terminal if how == "variable" else io.StringIO()
    if how == "variable":
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    notes: list[str] = []
    with download_bar(stream, notes.append) as observer:
        observer.begin("m.gguf", None)
        observer.begin("m.gguf", 2_000_000)
        observer.reached(2_000_000)
        observer.end()
        observer.note("done")
    assert notes == ["downloading m.gguf", "done"]
    assert stream.getvalue() == ""


def test_names_cannot_drive_the_terminal(terminal: Terminal) -> None:
    """Control characters are shown as question marks."""
    with download_bar(terminal, lambda text: None) as observer:
        observer.begin("m\x1b[2J.gguf", 10)
        observer.note("n\x1b[2J.gguf was chosen")
        observer.end()
    assert "\x1b[2J" not in terminal.getvalue()
    assert "n?[2J.gguf" in terminal.getvalue()
    notes: list[str] = []
    with download_bar(io.StringIO(), notes.append) as observer:
        observer.begin("m\x1b[2J.gguf", 10)
        observer.note("n\r.gguf was chosen")
    assert notes == ["downloading m?[2J.gguf (10 bytes)", "n?.gguf was chosen"]


def test_a_bar_shows_rate_and_rest(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes now arriving."""
    seconds = itertools.count(1000.0, 0.5)
    monkeypatch.setattr("rich.console.monotonic", lambda: next(seconds))
    with download_bar(terminal, lambda text: None) as observer:
        observer.begin("m.gguf", 100_000_000)
        for count in range(0, 60_000_000, 5_000_000):
            observer.reached(count)
        observer.end()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "55.0/100.0 MB 10.0 MB/s 00:05" in text
