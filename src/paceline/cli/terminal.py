"""Results on stdout, everything else on stderr; colours only where a terminal shows them.

A stream that is no terminal gets plain text: no escapes, no boxes, nothing wrapped. NO_COLOR and TERM=dumb are
honoured.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

Rows = Iterable[tuple[str, str]]

# Control characters of a text could drive the terminal that shows it: they are shown as their pictures instead.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def printable(text: str) -> str:
    """Replace control characters by visible ones, except line breaks and tabs."""
    return text.translate(_PICTURES)


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


def note(text: str) -> None:
    """Write a line beside the result, to stderr."""
    _put(sys.stderr, text + "\n", "dim")


def report(text: str) -> None:
    """Write an error as one line to stderr."""
    _put(sys.stderr, "Error: ", "bold red")
    _put(sys.stderr, " ".join(text.split()) + "\n", None)


def write_section(title: str, rows: Rows) -> None:
    """Write a heading and under it names with values, in two columns; leave out empty values."""
    filled: Sequence[tuple[str, str]] = [(name, value) for name, value in rows if value]
    width = max((len(name) for name, _ in filled), default=0)
    write(f"{title}\n", style="bold")
    for name, value in filled:
        write(f"  {name:<{width}}  ", style="cyan")
        write(f"{value}\n")


def finish_words(reason: str, stop: str | int | None = None) -> str:
    """Return why generation ended, in words. reason: the value of a `FinishReason`."""
    match reason:
        case "end":
            return "ended by itself"
        case "length":
            return "cut at the limit"
        case "stop":
            return f"stopped at {stop!r}"
        case "cancelled":
            return "interrupted"
        case _:
            return reason.replace("_", " ")


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is 1."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def abandon_output() -> None:
    """Redirect stdout to the null device, so that what is left in its buffer raises no second error."""
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
    """Take back `undo_at_exit`."""
    _undoing.remove(undo)


def restore() -> None:
    """Undo changes to the terminal (modes, a hidden cursor), for an exit that leaves no time for it."""
    for undo in reversed(_undoing):
        undo()
    for stream in (sys.stdout, sys.stderr):
        if is_terminal(stream):
            console(stream).show_cursor(True)


def _put(stream: TextIO, text: str, style: str | None) -> None:
    if not is_terminal(stream):
        _write_encodable(stream, text)
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
