"""The measures of a trace's picture: which second and which slot is at which pixel. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from paceline.engine.trace_layout import Layout

LEFT: Final = 64
RIGHT: Final = 20
TOP: Final = 84
QUEUE: Final = 34
"""Pixels beside and above the part that has a time, and the height of the strip that shows the queue."""

COLUMN: Final = 2.0
"""Pixels; ticks closer together than this are drawn as one."""

_BOTTOM: Final = 30
_GAP: Final = 5
_LABELLED: Final = 16  # with more slots than this there is no room for names over the cells


@dataclass(frozen=True, slots=True)
class Frame:
    """From seconds and slots to pixels. head, cell: the heights of a lane's line of names and of its cells."""

    start_s: float
    scale: float
    width: int
    lanes: dict[int | None, int]
    head: int
    cell: int

    @classmethod
    def of(cls, layout: Layout, width: int) -> Frame:
        """The measures of a layout in a picture of this width."""
        names: list[int | None] = [*layout.slots, *([None] if layout.has_embedding else [])]
        head, cell = (12, 14) if len(names) <= _LABELLED else (0, 9)
        return cls(
            start_s=layout.start_s,
            scale=(width - LEFT - RIGHT) / (layout.end_s - layout.start_s),
            width=width,
            lanes={name: place for place, name in enumerate(names)},
            head=head,
            cell=cell,
        )

    def x(self, moment_s: float) -> float:
        """Where a moment is."""
        return LEFT + (moment_s - self.start_s) * self.scale

    def y(self, slot: int | None) -> float:
        """Where the cells of a slot begin."""
        return TOP + self.head + self.lanes[slot] * (self.head + self.cell + _GAP)

    @property
    def queue_top(self) -> int:
        """Where the strip of the queue begins."""
        return TOP + len(self.lanes) * (self.head + self.cell + _GAP) + 10

    @property
    def bottom(self) -> int:
        """Where it ends, and with it all that has a time."""
        return self.queue_top + QUEUE

    @property
    def height(self) -> int:
        """Of the whole picture."""
        return self.bottom + _BOTTOM


def round_moments(span_s: float) -> Iterator[tuple[float, str]]:
    """At most thirteen round moments within so many seconds, and their names."""
    exponent = math.floor(math.log10(span_s / 10))
    step_s = next(step for step in (factor * 10.0**exponent for factor in (1, 2, 5, 10)) if span_s / step <= 12)
    digits = max(0, -math.floor(math.log10(step_s) + 1e-9))
    for index in range(int(span_s / step_s + 1e-9) + 1):
        yield index * step_s, f"{index * step_s:.{digits}f} s"
