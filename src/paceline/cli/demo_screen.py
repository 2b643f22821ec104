"""The demo on a terminal: a picture of the slots, drawn again and again, and keys that act on the streams.

Runs on the thread that reads the streams; the engine's goes on beside it. `SlotPicture` is pure and knows no engine.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from string import ascii_lowercase

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.cli import terminal
from paceline.cli.demo_instruments import SlotBoard, SlotOccupant
from paceline.cli.demo_streams import DemoStream, DemoStreams
from paceline.cli.terminal import Keys

_STYLES = {
    "prefill": "cyan",
    "decode": "green",
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
class SlotLine:
    """One slot. label: request and choice. state: in a word. total: None without a limit."""

    slot: int
    label: str = ""
    state: str = "free"
    is_live: bool = False
    done: int = 0
    total: int | None = None
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPicture:
    """Everything the screen shows. title: what runs. hint: what keys do; empty if none do anything. num_won: accepted drafts."""

    title: str
    lines: Sequence[SlotLine]
    num_slots: int
    num_running: int
    num_waiting: int
    num_ended: int
    num_requests: int
    tokens_per_s: float
    num_drafts: int = 0
    num_won: int = 0
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
        drafts = (
            f" · drafts {self.num_drafts}, accepted {self.num_won / self.num_drafts:.0%}" if self.num_drafts else ""
        )
        return f"{ended} · queue {self.num_waiting} · {self.tokens_per_s:.0f} tok/s · occupancy {share:.0%}{drafts}"


def tail(text: str, width: int) -> str:
    """Return the last words of a text that fit into so many columns, on one line; "…" stands for what is left out."""
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


def _slots(lines: Sequence[SlotLine], width: int) -> Table:
    bar, count = (8, 4) if width < _NARROW else (18, 9)
    text = max(4, width - (_SLOT + _LABEL + _STATE + bar + count + 5 * _GAPS))
    table = Table(box=None, show_header=False, padding=(0, _GAPS, 0, 0), pad_edge=False)
    for cells in (_SLOT, _LABEL, _STATE, bar, count, text):
        table.add_column(width=cells, no_wrap=True, overflow="crop")
    for line in lines:
        table.add_row(*_row(line, bar=bar, count=count, text=text))
    return table


def _row(line: SlotLine, *, bar: int, count: int, text: int) -> list[Text | ProgressBar]:
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


def _bar(line: SlotLine, width: int) -> ProgressBar | Text:
    if line.total is None:
        return Text("")
    style = _STYLES.get(line.state, "dim")
    total = max(1, line.total)
    return ProgressBar(total=total, completed=line.done, width=width, complete_style=style, finished_style=style)


def _count(line: SlotLine, width: int) -> str:
    both = f"{line.done}/{line.total}"
    return str(line.done) if line.total is None or len(both) > width else both


def _one_line(text: str, style: str, width: int) -> Text:
    line = Text(text, style, no_wrap=True)
    line.truncate(width, overflow="ellipsis")
    return line


_FRAME_S = 1 / 15
_WINDOW = 15  # frames over which the speed is taken
_HINT = " 1-9 cancel · p pause a reader · q quit"
_HINT_PAUSE = " pause or go on: 1-9 a slot's reader · p all readers"
_HINT_NO_KEYS = " Ctrl-C quits"


@dataclass(slots=True)
class TokenRate:
    """Tokens a second, over the last frames."""

    clock: Callable[[], float] = time.perf_counter
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def at(self, num_tokens: int) -> float:
        """Return the rate, given the number of all tokens so far."""
        now_s = self.clock()
        self._seen.append((now_s, num_tokens))
        since_s, before = self._seen[0]
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0


class LiveScreen:
    """Draws the picture and applies keys to the streams. keys: None if the terminal gives none."""

    def __init__(self, streams: DemoStreams, board: SlotBoard, num_slots: int, title: str, keys: Keys | None) -> None:
        self._streams, self._board, self._num_slots = streams, board, num_slots
        self._title, self._keys = title, keys
        self._speed = TokenRate()
        self._is_choosing = False

    def run(self) -> None:
        """Read all streams to their end, and leave the last picture on the terminal."""
        from rich.live import Live as RichLive

        console = terminal.console(sys.stdout)
        with RichLive(
            console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, vertical_overflow="crop"
        ) as live:
            while not self._streams.are_over:
                live.update(self.picture(), refresh=True)
                self._wait()
                self._streams.take()
            self._keys, self._is_choosing = None, False
            live.update(self.picture(hint=""), refresh=True)

    def press(self, key: str) -> None:
        """Apply a key: a digit cancels, "p" and a digit or another "p" stops or starts readers, "q" ends all."""
        running = self._in_slot(int(key)) if key.isdecimal() else None
        if self._is_choosing:
            self._is_choosing = False
            if key == "p":
                self._streams.switch_readers()
            elif running is not None:
                running.is_read = not running.is_read
        elif key == "p":
            self._is_choosing = True
        elif key == "q":
            self._streams.cancel_all()
        elif running is not None:
            running.cancel()

    def picture(self, hint: str | None = None) -> SlotPicture:
        """Build the present picture. hint: replaces the line about the keys."""
        occupants = self._board.occupants()
        accepted = self._streams.accepted
        return SlotPicture(
            title=self._title,
            lines=[_line(slot, occupants.get(slot), accepted) for slot in range(self._num_slots)],
            num_slots=self._num_slots,
            num_running=self._board.num_running,
            num_waiting=self._board.num_waiting,
            num_ended=sum(one.is_over for one in self._streams),
            num_requests=len(list(self._streams)),
            tokens_per_s=self._speed.at(self._board.num_generated),
            num_drafts=self._board.num_drafts,
            num_won=self._board.num_won,
            hint=self._hint() if hint is None else hint,
        )

    def _hint(self) -> str:
        if self._keys is None:
            return _HINT_NO_KEYS
        return _HINT_PAUSE if self._is_choosing else _HINT

    def _wait(self) -> None:
        if self._keys is None:
            time.sleep(_FRAME_S)
            return
        self._keys.wait(_FRAME_S)
        for key in self._keys.read():
            self.press(key)

    def _in_slot(self, digit: int) -> DemoStream | None:
        """Return the stream whose sequence is in the slot of this digit, from 1; 0 is the tenth."""
        occupant = self._board.occupants().get((digit - 1) % 10)
        if occupant is None or occupant.order >= len(self._streams.accepted):
            return None
        running = self._streams.accepted[occupant.order]
        return None if running.is_over else running


def _line(slot: int, occupant: SlotOccupant | None, accepted: list[DemoStream]) -> SlotLine:
    if occupant is None or occupant.order >= len(accepted):
        return SlotLine(slot=slot + 1)
    running = accepted[occupant.order]
    choice = running.choices[occupant.choice]
    is_prefill = occupant.state == "prefill"
    return SlotLine(
        slot=slot + 1,
        label=f"#{running.request.number}" + (_letter(occupant.choice) if running.request.num_choices > 1 else ""),
        state=_state_word(occupant, running),
        is_live=occupant.state != "left",
        done=occupant.num_computed_tokens if is_prefill else occupant.num_generated,
        total=occupant.num_prompt if is_prefill else running.request.max_tokens,
        text=choice.text,
    )


def _state_word(occupant: SlotOccupant, running: DemoStream) -> str:
    """Return prefill, decode or paused; of a choice that has ended, its finish reason.

    "unread": the reader has stopped, and the engine still generates or has come to the end.
    """
    if occupant.state != "left":
        return occupant.state if running.is_read or occupant.state == "paused" else "unread"
    reason = running.choices[occupant.choice].reason
    return "unread" if reason is None else reason


def _letter(choice: int) -> str:
    return ascii_lowercase[choice] if choice < len(ascii_lowercase) else f".{choice + 1}"
