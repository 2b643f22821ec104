"""The picture of the slots: a record of what is to be seen, and its lines for a terminal. Pure; knows no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli import terminal

_STYLES = {
    "prefill": "cyan",
    "decode": "green",
    "end": "dim green",
    "stop": "dim green",
    "length": "dim green",
    "paused": "yellow",
    "unread": "yellow",
    "cancelled": "red",
    "error": "red",
}
_NARROW = 80  # columns; below, bars and counts are short
_SLOT, _LABEL, _STATE, _GAPS = 2, 5, 9, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One slot. label: the request, and of several answers which. state: in a word. total: None where there is no limit."""

    slot: int
    label: str = ""
    state: str = "free"
    is_live: bool = False
    done: int = 0
    total: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Everything that is to be seen. title: what runs. hint: what keys do; empty where there is nothing to press."""

    title: str
    lines: Sequence[Line]
    num_slots: int
    num_running: int
    num_waiting: int
    num_ended: int
    num_requests: int
    tokens_per_s: float
    hint: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        room = max(1, options.size.height - 7)
        shown, hidden = self.lines[:room], len(self.lines) - room
        parts: list[Text | Table] = [_one_line(self.title, "bold", width), Text(""), _slots(shown, width)]
        if hidden > 0:
            parts.append(_one_line(f"    and {hidden} slots more", "dim", width))
        parts += [Text(""), _one_line(self._numbers(), "", width)]
        if self.hint:
            parts.append(_one_line(self.hint, "dim", width))
        yield Group(*parts)

    def _numbers(self) -> str:
        ended = f" {self.num_ended}/{self.num_requests} ended"
        if self.num_ended == self.num_requests:
            return ended
        share = self.num_running / self.num_slots
        return f"{ended} · queue {self.num_waiting} · {self.tokens_per_s:.0f} tok/s · occupancy {share:.0%}"


def tail(text: str, width: int) -> str:
    """The last words of a text that fit into so many cells, on one line; "…" where there is more before."""
    words = terminal.printable(" ".join(text.split())).replace("\t", " ")
    if cell_len(words) <= width:
        return words
    kept: list[str] = []
    room = width - 2
    for word in reversed(words.split(" ")):
        room -= cell_len(word) + 1
        if room < -1:
            break
        kept.append(word)
    if kept:
        return "… " + " ".join(reversed(kept))
    cut = words
    while cell_len(cut) > width - 1:
        cut = cut[1:]
    return "…" + cut if width else ""


def _slots(lines: Sequence[Line], width: int) -> Table:
    bar, count = (8, 4) if width < _NARROW else (18, 9)
    text = max(4, width - (_SLOT + _LABEL + _STATE + bar + count + 5 * _GAPS))
    table = Table(box=None, show_header=False, padding=(0, _GAPS, 0, 0), pad_edge=False)
    for cells in (_SLOT, _LABEL, _STATE, bar, count, text):
        table.add_column(width=cells, no_wrap=True, overflow="crop")
    for line in lines:
        table.add_row(*_row(line, bar=bar, count=count, text=text))
    return table


def _row(line: Line, *, bar: int, count: int, text: int) -> list[Text | ProgressBar]:
    style = _STYLES.get(line.state, "dim")
    faded = "" if line.is_live else "dim"
    return [
        Text(f"{line.slot:>{_SLOT}}", "bold" if line.is_live else "dim"),
        Text(line.label, faded),
        Text(line.state, style),
        _bar(line, bar) if line.label else Text(""),
        Text(f"{_count(line, count):>{count}}" if line.label else "", faded),
        Text(tail(line.text, text), faded),
    ]


def _bar(line: Line, width: int) -> ProgressBar | Text:
    if line.total is None:
        return Text("")
    style = _STYLES.get(line.state, "dim")
    total = max(1, line.total)
    return ProgressBar(total=total, completed=line.done, width=width, complete_style=style, finished_style=style)


def _count(line: Line, width: int) -> str:
    both = f"{line.done}/{line.total}"
    return str(line.done) if line.total is None or len(both) > width else both


def _one_line(text: str, style: str, width: int) -> Text:
    line = Text(text, style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line
