"""A reply while it is generated: Markdown that is set as it comes, thinking dimmed; plain text where nothing can be redrawn.

Blocks that are complete are printed for good; the last one is redrawn until it is.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import Protocol

from paceline.cli import terminal

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
_REDRAW_S = 0.06
_FENCE = re.compile(r"`{3,}|~{3,}")


class ReplyView(Protocol):
    """Where the parts of a reply are shown."""

    def thinking(self, text: str) -> None:
        """Show a piece of thinking."""

    def content(self, text: str) -> None:
        """Show a piece of content."""

    def finish(self) -> None:
        """Show what is left; the cursor is at the beginning of a line then."""


def make_view(*, is_plain: bool, shows_thinking: bool) -> ReplyView:
    """Return the view that suits stdout."""
    can_set = terminal.can_draw(sys.stdout) and (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return MarkdownView(shows_thinking) if can_set and not is_plain else PlainView(shows_thinking)


class PlainView:
    """Text as it is, with thinking on a terminal alone: a program that reads the output wants the content."""

    def __init__(self, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking and terminal.is_terminal(sys.stdout)
        self._last, self._is_thinking = "", False
        self._wrap = terminal.WordWrap(sys.stdout)

    def thinking(self, text: str) -> None:
        """See `ReplyView`."""
        if self._shows_thinking:
            self._is_thinking, self._last = True, text
            self._wrap.write(text, style="dim")

    def content(self, text: str) -> None:
        """See `ReplyView`."""
        if self._is_thinking:
            self._wrap.write("\n" if self._last.endswith("\n") else "\n\n")
            self._is_thinking = False
        self._last = text
        self._wrap.write(text)

    def finish(self) -> None:
        """See `ReplyView`."""
        if self._last and not self._last.endswith("\n"):
            self._wrap.write("\n")
        self._wrap.finish()


class MarkdownView:
    """Markdown on a terminal that can move its cursor."""

    def __init__(self, shows_thinking: bool = True) -> None:
        from rich.console import Console

        self._console = Console(
            file=sys.stdout, force_terminal=True, highlight=False, emoji=False, markup=False, legacy_windows=False
        )
        self._shows_thinking = shows_thinking
        self._wrap = terminal.WordWrap(sys.stdout)  # of thinking
        self._thinking = self._rest = ""
        self._has_printed = False
        self._num_drawn = 0  # lines of the last block that are on the screen
        self._drawn_s = 0.0

    def thinking(self, text: str) -> None:
        """See `ReplyView`."""
        if not self._shows_thinking:
            return
        if not self._thinking:
            text = text.lstrip()
        self._thinking += text
        self._wrap.write(text, style="dim italic")

    def content(self, text: str) -> None:
        """See `ReplyView`."""
        self._end_thinking()
        self._rest += terminal.printable(text)
        done, self._rest = split_blocks(self._rest)
        for block in done:
            self._print(block)
        now = time.monotonic()
        if self._rest.strip() and (done or now - self._drawn_s >= _REDRAW_S):
            self._draw()
            self._drawn_s = now

    def finish(self) -> None:
        """See `ReplyView`."""
        self._end_thinking()
        if self._rest.strip():
            self._print(self._rest)
        self._rest = ""

    def _end_thinking(self) -> None:
        if self._thinking:
            self._wrap.write("\n" if self._thinking.endswith("\n") else "\n\n")
            self._thinking = ""

    def _print(self, block: str) -> None:
        """Print a block that is complete, with a blank line behind the one before."""
        self._put("".join(f"{line}\n" for line in self._lines(block)), 0)
        self._has_printed = True

    def _draw(self) -> None:
        """Show as much of the last block as the screen has room for, its end; the next output replaces it."""
        shown = self._lines(self._rest)[-max(1, self._console.height - 1) :]
        self._put("\n".join(shown), len(shown))

    def _put(self, text: str, num_drawn: int) -> None:
        above = f"\x1b[{self._num_drawn - 1}A" if self._num_drawn > 1 else ""
        erased = f"\r{above}\x1b[J" if self._num_drawn else ""
        sys.stdout.write(erased + text)
        sys.stdout.flush()
        self._num_drawn = num_drawn

    def _lines(self, block: str) -> list[str]:
        """Return the lines of a block, with their escapes, without blank ones around them but for the gap in front."""
        from rich.markdown import Markdown

        width = max(20, self._console.width - 1)  # a full line would move some cursors to the next
        with self._console.capture() as captured:
            self._console.print(Markdown(block, code_theme="ansi_dark", hyperlinks=False), width=width)
        lines = [line.rstrip(" ") for line in captured.get().split("\n")]
        while lines and not _ESCAPE.sub("", lines[-1]).strip():
            lines.pop()
        while lines and not _ESCAPE.sub("", lines[0]).strip():
            lines.pop(0)
        return ["", *lines] if self._has_printed else lines


def split_blocks(text: str) -> tuple[list[str], str]:
    """Split Markdown into the blocks that are complete, and the rest: at blank lines outside of fenced code."""
    blocks, begin, position, fence = [], 0, 0, ""
    for line in _whole_lines(text):
        stripped = line.strip()
        position += len(line)
        found = _FENCE.match(stripped)
        if fence:
            fence = "" if stripped.startswith(fence) and not stripped.strip(fence[0]) else fence
        elif found:
            fence = found.group()
        elif not stripped:
            if text[begin:position].strip():
                blocks.append(text[begin:position])
            begin = position
    return blocks, text[begin:]


def _whole_lines(text: str) -> Iterator[str]:
    return (line for line in text.splitlines(keepends=True) if line.endswith("\n"))
