"""Ends of an answer that depend on its lines: `n_indent` and `t_max_predict_ms`, which editors' completions rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LineLimits:
    """min_indent: least blanks before the text of every line but the first; the answer ends before one that has fewer.

    max_predict_s: seconds since the first token after which a line break ends the answer; None: no limit.
    """

    min_indent: int = 0
    max_predict_s: float | None = None

    @property
    def has_any(self) -> bool:
        """Whether there is something to watch."""
        return self.min_indent > 0 or self.max_predict_s is not None


class LineWatch:
    """Reads one answer as it comes. clock: seconds from any point on."""

    def __init__(self, limits: LineLimits, clock: Callable[[], float]) -> None:
        self._limits, self._clock = limits, clock
        self._first_s: float | None = None
        self._indent: int | None = None  # blanks of the line that has begun; None within a line's text
        self.is_over = False

    def take(self, text: str) -> str:
        """The part of the next text that belongs to the answer; after `is_over` that is nothing."""
        if self.is_over:
            return ""
        now = self._clock()
        self._first_s = now if self._first_s is None else self._first_s
        kept = self._indented(text)
        limit = self._limits.max_predict_s
        if limit is not None and "\n" in kept and now - self._first_s > limit:
            self.is_over = True
        return kept

    def _indented(self, text: str) -> str:
        if self._limits.min_indent == 0:
            return text
        for position, letter in enumerate(text):
            if self._indent is not None:
                if letter in " \t":
                    self._indent += 1
                    continue
                if self._indent < self._limits.min_indent:
                    self.is_over = True
                    return text[:position]
            self._indent = 0 if letter == "\n" else None
        return text
