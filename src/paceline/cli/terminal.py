"""Results on stdout, everything else on stderr; colours only on a terminal that shows them. Single keys from stdin.

A stream that is no terminal gets plain text: no escapes, no boxes, nothing wrapped. NO_COLOR and TERM=dumb are
honoured.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console


Rows = Iterable[tuple[str, str]]

# Control characters of a text could drive the terminal that shows it: they are shown as their pictures instead.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
# Line separators, and embeddings that reverse text: a line would look like two, and a name like another one.
_PICTURES |= dict.fromkeys((0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)

_MAX_MARKER = 8  # characters of a line that say whether it is code
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def printable(text: str) -> str:
    """Replace control characters by visible ones, except line breaks and tabs."""
    return text.translate(_PICTURES)


def escaped(text: str) -> str:
    """Return a text for a line of a log. All that does not print is escaped as in JSON: control characters, line breaks, bidi."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in text)


class LogLines(logging.Formatter):
    """Format records for a log that people read in a terminal: messages have names that strangers chose.

    A record begins with a line. The further lines of its message, and those of a traceback, are indented, so that none of them
    looks like another record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines, without a line break at the end."""
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        lines = self.formatMessage(record).split("\n")
        if record.exc_info:
            lines += self.formatException(record.exc_info).split("\n")
        return "\n  ".join(map(escaped, lines))


def is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is a terminal."""
    return stream.isatty()


def can_draw(stream: TextIO) -> bool:
    """Return whether a picture can be redrawn there: a terminal that can move its cursor."""
    return is_terminal(stream) and not console(stream).is_dumb_terminal


def console(stream: TextIO) -> Console:
    """Return a rich console that writes text as it is, and adds nothing if the stream is no terminal."""
    from rich.console import Console

    return Console(
        file=stream, force_terminal=is_terminal(stream), highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def write(text: str, *, style: str | None = None) -> None:
    """Write a piece of the result to stdout and flush; characters that stdout cannot encode become "?"."""
    _put(sys.stdout, text, style)


def write_json(value: object, *, indent: int | None = None) -> None:
    """Write a value as JSON to stdout."""
    write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")


def note(text: str) -> None:
    """Write a line beside the result, to stderr; a terminal breaks it between words."""
    WordWrap(sys.stderr).write(text + "\n", style="dim")


def report(text: str) -> None:
    """Write an error to stderr: one line, which a terminal breaks between words."""
    wrap = WordWrap(sys.stderr)
    wrap.write("Error: ", style="bold red")
    wrap.write(" ".join(text.split()) + "\n")


class WordWrap:
    """Text that is written as it comes, with line breaks between words if the stream is a terminal.

    A word is written once the next one begins, or by `finish`. A word that is wider than the terminal starts on a line of its
    own, and the terminal breaks it. Indented lines and fenced code are left to the terminal, so that they can be copied. A
    line may break before each wide character, since Chinese and Japanese have no blanks between words.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ready: list[tuple[str, str | None]] = []  # to be written, with styles
        self._word: list[tuple[str, str | None]] = []
        self._width = self._column = 0  # of the word, and the column at which it or the blanks before it begin
        self._blanks = ""
        self._blanks_style: str | None = None
        self._line = ""  # the beginning of the line, as far as it says whether it is code
        self._fence = ""
        self._is_long = False  # the word is being written already

    def write(self, text: str, *, style: str | None = None, ends: bool = False) -> None:
        """Write a piece of the text; unless it ends there, hold back its last word, which may go on."""
        if not is_terminal(self._stream):
            _put(self._stream, text, style)
            return
        most = self._most
        for character in printable(text):
            self._add(character, style, most)
        if ends:
            self.finish()
        self._put_ready()

    def finish(self) -> None:
        """Write the rest."""
        if is_terminal(self._stream):
            self._end_word(self._most)
        self._take(self._blanks, self._blanks_style)
        self._blanks = ""
        self._put_ready()

    @property
    def _most(self) -> int:
        """The columns of a line, without the last one: a full line would move some cursors to the next."""
        return max(20, console(self._stream).width - 1)

    def _add(self, character: str, style: str | None, most: int) -> None:
        from rich.cells import cell_len

        width = cell_len(character)
        if character == "\n":
            self._end_word(most)
            self._take(self._blanks + character, style)
            marker = self._line.strip()[:3]
            if marker in ("```", "~~~") and self._fence in ("", marker):
                self._fence = "" if self._fence else marker
            self._line = self._blanks = ""
            self._column = 0
            return
        self._line += character if len(self._line) < _MAX_MARKER else ""
        if self._fence or self._line.startswith(("    ", "\t")):
            self._take(self._blanks + character, style)
            self._blanks = ""
        elif character in " \t":
            self._end_word(most)
            self._blanks, self._blanks_style = self._blanks + character, style
        elif width > 1:
            self._end_word(most)
            self._word, self._width = [(character, style)], width
            self._end_word(most)
        elif self._is_long or (width == 0 and not self._word):
            self._take(character, style)
        else:
            self._word.append((character, style))
            self._width += width
            if self._width > most:
                self._end_word(most)
                self._is_long = True

    def _end_word(self, most: int) -> None:
        """Write the blanks and the word after them, or the word on the next line if it does not fit."""
        self._is_long = False
        if not self._word:
            return
        if self._column and self._column + len(self._blanks.expandtabs()) + self._width > most:
            self._take("\n", None)
            self._column = 0
        else:
            self._take(self._blanks, self._blanks_style)
            self._column += len(self._blanks.expandtabs())
        for character, style in self._word:
            self._take(character, style)
        self._column = (self._column + self._width) % (most + 1)
        self._word, self._width, self._blanks = [], 0, ""

    def _take(self, text: str, style: str | None) -> None:
        if self._ready and self._ready[-1][1] == style:
            self._ready[-1] = (self._ready[-1][0] + text, style)
        elif text:
            self._ready.append((text, style))

    def _put_ready(self) -> None:
        for text, style in self._ready:
            _put(self._stream, text, style)
        self._ready = []


def write_section(title: str, rows: Rows) -> None:
    """Write a heading and under it names with values, in two columns; leave out empty values."""
    filled: Sequence[tuple[str, str]] = [(name, value) for name, value in rows if value]
    width = max((len(name) for name, _ in filled), default=0)
    write(f"{title}\n", style="bold")
    for name, value in filled:
        write(f"  {name:<{width}}  ", style="cyan")
        write(f"{value}\n")


def write_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows in columns that are as wide as their longest cells, below a heading."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    for index, row in enumerate((heading, *rows)):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        write("  ".join(cells).rstrip() + "\n", style=None if index else "bold")


def finish_words(reason: str, stop: str | int | None = None) -> str:
    """Return why generation ended, in words. reason: a `FinishReason`. stop: an int is an end-of-generation token."""
    match reason:
        case "length":
            return "cut at the limit"
        case "repetition":
            return "cut as it repeats itself"
        case "stop" if isinstance(stop, str):
            return f"stopped at {stop!r}"
        case "stop":
            return "complete" if stop is None else "ended by itself"
        case "cancelled":
            return "interrupted"
        case _:
            return reason.replace("_", " ")


def duration(seconds: float | None) -> str:
    """Return a time, in milliseconds below one second; "-" for None."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def day(unix_s: float) -> str:
    """Return a time in Unix seconds to the minute, in this machine's time zone."""
    return f"{datetime.fromtimestamp(unix_s, UTC).astimezone():%Y-%m-%d %H:%M}"


def shortened(text: str, most: int) -> str:
    """Return a text on one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def abandon_output() -> None:
    """Redirect stdout to the null device, so that the rest of its buffer raises no second error."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except OSError:  # a stdout without a file descriptor
        return


_undoing: list[Callable[[], object]] = []


def undo_at_exit(undo: Callable[[], object]) -> None:
    """Have `restore` call this as well, until `forget_undo`."""
    _undoing.append(undo)


def forget_undo(undo: Callable[[], object]) -> None:
    """Remove a function that `undo_at_exit` added."""
    _undoing.remove(undo)


def restore() -> None:
    """Undo changes to the terminal (modes, a hidden cursor), for an exit that leaves no time for it."""
    for undo in reversed(_undoing):
        undo()
    for stream in (sys.stdout, sys.stderr):
        if is_terminal(stream):
            console(stream).show_cursor(True)


def _put(stream: TextIO, text: str, style: str | None) -> None:
    if not is_terminal(stream):  # results go on as they are; messages may be shown in a terminal later
        _write_encodable(stream, printable(text) if stream is sys.stderr else text)
    elif style is None:
        _write_encodable(stream, printable(text))
    else:
        console(stream).out(printable(text), style=style, highlight=False, end="")
    stream.flush()


def _write_encodable(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))


def can_read_keys() -> bool:
    """Return whether stdin and stdout are a terminal."""
    return sys.stdin is not None and is_terminal(sys.stdin) and is_terminal(sys.stdout)


class Keys:
    """A terminal in cbreak mode: keys are read one by one and not echoed; Ctrl-C stays a signal.

    file_descriptor: of the terminal. Inside of a `with` block the mode holds. It ends with the block, with
    `restore`, and with a signal that ends the process; after a stop (Ctrl-Z) it is set again.
    """

    def __init__(self, file_descriptor: int) -> None:
        self._terminal = file_descriptor
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = termios.tcgetattr(self._terminal)
        undo_at_exit(self.restore)
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._handlers[number] = signal.signal(number, self._end)
            self._handlers[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._go_on)
        tty.setcbreak(self._terminal, termios.TCSADRAIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
        forget_undo(self.restore)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def restore(self) -> None:
        """Restore the terminal's mode. Idempotent; safe in signal handlers."""
        if self._before is not None and self._has_terminal():
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)

    def read(self) -> str:
        """Return the keys pressed since the last call, in order; never wait. Leave out all but ASCII."""
        if not self._has_terminal() or not select.select([self._terminal], [], [], 0)[0]:
            return ""
        try:
            return os.read(self._terminal, 1024).decode("ascii", "ignore")
        except OSError:  # the terminal has gone
            return ""

    def wait(self, timeout_s: float) -> None:
        """Sleep until a key is pressed, or the time is over."""
        select.select([self._terminal] if self._has_terminal() else [], [], [], timeout_s)

    def _has_terminal(self) -> bool:
        """Return whether this process may use the terminal; in the background of a shell it would be stopped."""
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError as error:  # a terminal without job control, or one that has gone
            return error.errno == errno.ENOTTY and os.isatty(self._terminal)

    def _end(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        restore()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _go_on(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self._has_terminal():
            tty.setcbreak(self._terminal, termios.TCSANOW)
