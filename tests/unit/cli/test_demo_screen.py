"""The picture of the demo, as lines of text."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from paceline.cli.screen import DemoPicture, StreamLine, TopState, tail

LINES = (
    StreamLine(label="#1", state="prefill", num_tokens=0, max_tokens=900, text="", is_live=True),
    StreamLine(label="#6.2", state="decode", num_tokens=64, max_tokens=256, text="there lived\na fox", is_live=True),
    StreamLine(label="#4", state="stop", num_tokens=14, max_tokens=60, text="[b]Yo[/b] \x1b[2J :smile:", is_live=False),
    StreamLine(label="#7", state="paused", num_tokens=8, max_tokens=None, text="x" * 90, is_live=True),
)


def shown(
    width: int, height: int = 30, lines: tuple[StreamLine, ...] = LINES, hint: str = " q quit", **members: object
) -> list[str]:
    state = TopState()
    if members:
        state.take("snapshot", members)
    console = Console(
        file=io.StringIO(), width=width, height=height, record=True, force_terminal=True, color_system="truecolor",
        no_color=False, legacy_windows=False,
    )  # fmt: skip
    console.print(DemoPicture(state, "tiny.gguf · 5 slots", lines, hint))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_wide_picture_is_this() -> None:
    """Request, state, bar, tokens and last words; below, how many have ended, and the keys."""
    assert shown(100) == [
        " tiny.gguf · 5 slots",
        "",
        " #1    prefill    ━━━━━━━━━━━━━━━━━━     0/900",
        " #6.2  decode     ━━━━╸━━━━━━━━━━━━━    64/256  there lived a fox",
        " #4    stop       ━━━━╺━━━━━━━━━━━━━     14/60  [b]Yo[/b] ␛[2J :smile:",
        " #7    paused                                8  …" + "x" * 50,
        "",
        " 1/4 ended",
        " q quit",
    ]


@pytest.mark.parametrize("width", [20, 36, 60, 79, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """Whatever the width, there are as many lines as things to say."""
    lines = shown(width)
    assert len(lines) == 9 and max(map(cell_len, lines)) <= width


def test_a_low_terminal_shows_some_streams_and_how_many_more_there_are() -> None:
    """The picture never scrolls: it is drawn over itself."""
    lines = shown(100, height=16)
    assert len(lines) <= 16 and lines[2].startswith(" #1") and lines[4] == "   and 2 more"


def test_the_engine_is_below_the_streams() -> None:
    """Its last ticks, the queue and the speed; at the end there is no speed any more."""
    members = {
        "config": {"itl_target_ms": 50.0}, "rates": {"generated_per_s": 181.3}, "queue": {"waiting": 2},
        "memory": {"cells": 1200}, "counts": {"draft_tokens": 80, "accepted_tokens": 20},
    }  # fmt: skip
    text = "\n".join(shown(100, **members))
    assert "ticks       none yet" in text
    assert " 1/4 ended · queue 2 · 181 tok/s · 1,200 cells · drafts 80, accepted 25%" in text
    over = tuple(dataclasses.replace(line, is_live=False) for line in LINES)
    assert shown(100, lines=over, hint="", **members)[-1] == " 4/4 ended"


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("", 5, ""),
        ("one two", 7, "one two"),
        ("one two\n three", 9, "… three"),
        ("one two three", 11, "… two three"),
        ("abcdefgh", 5, "…efgh"),
        ("谢谢 谢谢", 9, "谢谢 谢谢"),
        ("谢谢 谢谢", 8, "… 谢谢"),
        ("谢谢谢谢", 6, "…谢谢"),
        ("a\tb \x07", 9, "a b ␇"),
    ],
)
def test_the_tail_of_a_text_is_its_last_words(text: str, width: int, shown: str) -> None:
    """Whole words if one fits, cells and not characters counted, one line, no control characters."""
    assert tail(text, width) == shown
    assert cell_len(tail(text, width)) <= width
