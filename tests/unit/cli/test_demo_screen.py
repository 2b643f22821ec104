"""The picture of the slots, as lines of text."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from paceline.cli.demo_screen import SlotLine, SlotPicture, tail

LINES = (
    SlotLine(slot=1, label="#1", state="prefill", is_live=True, done=300, total=900),
    SlotLine(
        slot=2, label="#6b", state="decode", is_live=True, done=64, total=256, text="there lived\na fox called Wendy"
    ),
    SlotLine(slot=3, label="#4", state="stop", done=14, total=60, text="[b]Yo[/b] \x1b[2J :smile:"),
    SlotLine(slot=4, label="#7", state="paused", is_live=True, done=8, text="x" * 90),
    SlotLine(slot=5),
)


def shown(width: int, height: int = 30, **changes: object) -> list[str]:
    facts = {
        "title": " tiny.gguf · 5 slots", "lines": LINES, "num_slots": 5, "num_running": 3, "num_waiting": 2,
        "num_ended": 1, "num_requests": 6, "tokens_per_s": 181.3, "hint": " q quit",
    }  # fmt: skip
    console = Console(
        file=io.StringIO(), width=width, height=height, record=True, force_terminal=True, color_system="truecolor",
        no_color=False, legacy_windows=False,
    )  # fmt: skip
    console.print(SlotPicture(**(facts | changes)))  # type: ignore[arg-type]
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_a_wide_picture_is_this() -> None:
    """Slot, request, state, bar, tokens and last words; below, the queue, the speed and the keys."""
    assert shown(100) == [
        " tiny.gguf · 5 slots",
        "",
        " 1  #1     prefill    ━━━━━━╺━━━━━━━━━━━    300/900",
        " 2  #6b    decode     ━━━━╸━━━━━━━━━━━━━     64/256  there lived a fox called Wendy",
        " 3  #4     stop       ━━━━╺━━━━━━━━━━━━━      14/60  [b]Yo[/b] ␛[2J :smile:",
        " 4  #7     paused                                 8  …" + "x" * 46,
        " 5         free",
        "",
        " 1/6 ended · queue 2 · 181 tok/s · occupancy 60%",
        " q quit",
    ]


def test_a_narrow_picture_is_this() -> None:
    """Bars and counts are shorter, and no line is wrapped."""
    assert (
        shown(60)[2:7]
        == [
            " 1  #1     prefill    ━━╸━━━━━   300",
            " 2  #6b    decode     ━━╺━━━━━    64  … a fox called Wendy",
            " 3  #4     end        ━╸━━━━━━    14  … ␛[2J :smile:",
            " 4  #7     paused                  8  …" + "x" * 21,
            " 5         free",
        ]
        or shown(60)[2:7]
    )


@pytest.mark.parametrize("width", [20, 36, 60, 79, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """Whatever the width, there are as many lines as things to say."""
    lines = shown(width)
    assert len(lines) == 10 and max(map(cell_len, lines)) <= width


def test_a_low_terminal_shows_some_slots_and_how_many_more_there_are() -> None:
    """The picture never scrolls: it is drawn over itself."""
    lines = shown(100, height=9)
    assert len(lines) <= 9 and lines[2].startswith(" 1") and lines[4] == "    and 3 slots more"


def test_at_the_end_there_is_no_speed_any_more() -> None:
    """The last picture shows how many have ended."""
    assert shown(100, num_ended=6, hint="")[-1] == " 6/6 ended"


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
    """Whole words where one fits, cells and not characters counted, one line, no control characters."""
    assert tail(text, width) == shown
    assert cell_len(tail(text, width)) <= width


def test_drafts_are_in_the_line_of_figures() -> None:
    """With how many were accepted; not without any."""
    assert " 1/6 ended · queue 2 · 181 tok/s · occupancy 60% · drafts 80, accepted 25%" in shown(
        100, num_drafts=80, num_won=20
    )
