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
    """The text with its control characters made visible, line breaks and tabs left."""
    return text.translate(_PICTURES)


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody looks at what is written there."""
    return stream.isatty()


def can_draw(stream: TextIO) -> bool:
    """Whether a picture can be drawn there, again and again: a terminal that can move its cursor."""
    return is_terminal(stream) and not console(stream).is_dumb_terminal


def console(stream: TextIO) -> Console:
    """A rich console that takes text as it is and adds nothing to it where the stream is no terminal."""
    from rich.console import Console

    return Console(
        file=stream, force_terminal=is_terminal(stream), highlight=False, markup=False, emoji=False, soft_wrap=True
    )


def write(text: str, *, style: str | None = None) -> None:
    """Puts a piece of the result on stdout at once, as it is; characters that stdout cannot encode become "?"."""
    _put(sys.stdout, text, style)


def note(text: str) -> None:
    """A line beside the result, on stderr."""
    _put(sys.stderr, text + "\n", "dim")


def report(text: str) -> None:
    """An error as one line on stderr."""
    _put(sys.stderr, "Error: ", "bold red")
    _put(sys.stderr, " ".join(text.split()) + "\n", None)


def write_section(title: str, rows: Rows) -> None:
    """A heading and under it names with values, in two columns."""
    filled: Sequence[tuple[str, str]] = [(name, value) for name, value in rows if value]
    width = max((len(name) for name, _ in filled), default=0)
    write(f"{title}\n", style="bold")
    for name, value in filled:
        write(f"  {name:<{width}}  ", style="cyan")
        write(f"{value}\n")


def abandon_output() -> None:
    """Sends what may still be in the buffer of stdout to nowhere: it cannot be written."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except OSError:  # a stdout without a file descriptor
        return


_undoing: list[Callable[[], object]] = []


def undo_at_exit(undo: Callable[[], object]) -> None:
    """`restore` calls this as well, until `forget_undo`."""
    _undoing.append(undo)


def forget_undo(undo: Callable[[], object]) -> None:
    """Takes back `undo_at_exit`."""
    _undoing.remove(undo)


def restore() -> None:
    """Undoes what was done to the terminal, for an exit that leaves no time for it: modes, and a hidden cursor."""
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
