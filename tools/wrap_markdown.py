"""Wrap the prose of Markdown pages at 100 columns: paragraphs, list items, definitions.

python tools/wrap_markdown.py README.md docs/guide/*.md

Code, tables, headings and API directives (`:::` and the lines indented below) are not changed. Words never change.
"""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 100

_ITEM = re.compile(r"(\s*(?:[-*+]|\d+[.)]|:)\s+)(?=\S)")
_MARKER = re.compile(r"(?:[-+*>#|:]|\d+[.)])(?:\s|$)")  # what may not begin a wrapped line
_ALONE = ("#", "|", "<", ":::", "!!!")


@dataclass
class _Block:
    """Prose that is wrapped together: the indent of its first line, of the others, and its words."""

    first: str
    rest: str
    words: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        for width in range(WIDTH, WIDTH // 2, -1):
            lines = textwrap.wrap(
                " ".join(self.words),
                width,
                initial_indent=self.first,
                subsequent_indent=self.rest,
                break_long_words=False,
                break_on_hyphens=False,
            )
            if not any(_MARKER.match(line.strip()) for line in lines[1:]):
                return lines
        raise SystemExit(f"cannot wrap without a line that begins like a list: {' '.join(self.words)[:80]}")


def wrapped(text: str) -> str:
    """Return the page with its prose wrapped."""
    out: list[str] = []
    block: _Block | None = None
    fence, is_verbatim, after_blank, item_indent = "", False, True, 0
    for line in text.split("\n"):
        stripped, indent = line.strip(), len(line) - len(line.lstrip())
        item = _ITEM.match(line)
        is_fence = stripped.startswith(("```", "~~~"))
        is_code = after_blank and not item and indent >= item_indent + 4
        if fence:
            out.append(line)
            fence = "" if stripped.startswith(fence) else fence
            continue
        if is_verbatim and indent:
            out.append(line)
            continue
        is_verbatim = stripped.startswith(":::")
        if block and (not stripped or is_fence or item or stripped.startswith(_ALONE)):
            out += block.lines()
            block = None
        if not stripped or is_fence or is_code or (stripped.startswith(_ALONE) and not item):
            out.append(line)
            fence = stripped[:3] if is_fence else ""
            item_indent = 0 if stripped.startswith("#") else item_indent
        elif item:
            item_indent = len(item[1])
            block = _Block(item[1], " " * item_indent, line[item_indent:].split())
        elif block:
            block.words += stripped.split()
        else:
            item_indent = item_indent if indent else 0
            block = _Block(" " * indent, " " * indent, stripped.split())
        after_blank = not stripped or is_code
    if block:
        out += block.lines()
    return "\n".join(out)


def main(names: list[str]) -> None:
    """Wrap the files and print the names of changed files."""
    for path in map(Path, names):
        before = path.read_text(encoding="utf-8")
        after = wrapped(before)
        if after.split() != before.split():
            raise SystemExit(f"{path}: the words would change; this is a mistake in {Path(__file__).name}")
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
