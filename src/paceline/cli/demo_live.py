"""The demo on a terminal: a reader that draws what it reads, and keys that act on the streams.

Runs on the thread of the work; the engine's goes on beside it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from string import ascii_lowercase

from paceline.cli import terminal
from paceline.cli.demo_board import Board, Seat
from paceline.cli.demo_screen import Line, Picture
from paceline.cli.demo_streams import Running, Streams
from paceline.cli.keys import Keys

_FRAME_S = 1 / 15
_WINDOW = 15  # frames over which the speed is taken
_HINT = " 1-9 cancel · p pause a reader · q quit"
_HINT_PAUSE = " pause or go on: 1-9 a slot's reader · p all readers"
_HINT_NO_KEYS = " Ctrl-C quits"


@dataclass(slots=True)
class Speed:
    """Tokens a second over the last frames."""

    clock: Callable[[], float] = time.perf_counter
    _seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def at(self, num_tokens: int) -> float:
        """With so many tokens in all by now."""
        now_s = self.clock()
        self._seen.append((now_s, num_tokens))
        since_s, before = self._seen[0]
        return (num_tokens - before) / (now_s - since_s) if now_s > since_s else 0.0


class Live:
    """The picture, and what the keys do to the streams. keys: None where none can be read."""

    def __init__(self, streams: Streams, board: Board, num_slots: int, title: str, keys: Keys | None) -> None:
        self._streams, self._board, self._num_slots = streams, board, num_slots
        self._title, self._keys = title, keys
        self._speed = Speed()
        self._is_choosing = False

    def run(self) -> None:
        """Reads all streams to their end, and leaves the last picture on the terminal."""
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
        """What a key does: a digit cancels, "p" and a digit or another "p" stops and starts readers, "q" ends all."""
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

    def picture(self, hint: str | None = None) -> Picture:
        """As things are now. hint: in place of what the keys do."""
        seats = self._board.seats()
        accepted = self._streams.accepted
        return Picture(
            title=self._title,
            lines=[_line(slot, seats.get(slot), accepted) for slot in range(self._num_slots)],
            num_slots=self._num_slots,
            num_running=self._board.num_running,
            num_waiting=self._board.num_waiting,
            num_ended=sum(one.is_over for one in self._streams),
            num_requests=len(list(self._streams)),
            tokens_per_s=self._speed.at(self._board.num_generated),
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

    def _in_slot(self, digit: int) -> Running | None:
        """The request whose sequence is in the slot of this digit, from 1; 0 is the tenth."""
        seat = self._board.seats().get((digit - 1) % 10)
        if seat is None or seat.order >= len(self._streams.accepted):
            return None
        running = self._streams.accepted[seat.order]
        return None if running.is_over else running


def _line(slot: int, seat: Seat | None, accepted: list[Running]) -> Line:
    if seat is None or seat.order >= len(accepted):
        return Line(slot=slot + 1)
    running = accepted[seat.order]
    answer = running.answers[seat.choice]
    is_prefill = seat.state == "prefill"
    return Line(
        slot=slot + 1,
        label=f"#{running.request.number}" + (_letter(seat.choice) if running.request.num_choices > 1 else ""),
        state=_state(seat, running),
        is_live=seat.state != "left",
        done=seat.num_computed if is_prefill else seat.num_generated,
        total=seat.num_prompt if is_prefill else running.request.max_tokens,
        text=answer.text,
    )


def _state(seat: Seat, running: Running) -> str:
    """In the engine's words: prefill, decode, paused; of an answer that has ended, its finish reason.

    "unread" is what a reader has stopped taking while the engine still goes on, or has come to the end.
    """
    if seat.state != "left":
        return seat.state if running.is_read or seat.state == "paused" else "unread"
    reason = running.answers[seat.choice].reason
    return "unread" if reason is None else reason


def _letter(choice: int) -> str:
    return ascii_lowercase[choice] if choice < len(ascii_lowercase) else f".{choice + 1}"
