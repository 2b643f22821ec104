"""The picture of a trace as SVG: slots over time, ticks as columns, the length of the queue. Pure.

Text is escaped, and characters that XML does not allow are replaced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree as ET

from paceline import validation
from paceline.cli.trace_layout import Column, Ending, Layout, SlotStay, Sort, arrange
from paceline.cli.trace_summary import summarize, totals
from paceline.observability.trace_events import Trace

LEFT: Final = 64
RIGHT: Final = 20
TOP: Final = 84
QUEUE: Final = 34
"""Margins of the time axis's area in pixels, and the height of the queue's strip."""

COLUMN: Final = 2.0
"""Width in pixels below which neighbouring ticks are drawn as one."""

_BOTTOM: Final = 30
_GAP: Final = 5
_LABELLED: Final = 16  # with more slots, no names are drawn above the cells

_BURST: Final = 0.9  # of a lane's height: the bar of the most drafts
_LEVELS: Final = 4
_CHARACTER: Final = 5.6  # width of a small one, about
_NAMES: Final[dict[Sort, str]] = {"prefill": "prefill", "decode": "decode", "embed": "embedding"}

_STYLE: Final = """
text { font: 11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d2329 }
.paper { fill: #ffffff } .title { font-size: 15px; font-weight: 600 } .soft { fill: #5c6670 }
.small { font-size: 9px } .right { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: #dfe3e8; stroke-width: 1 } .stay { fill: #e9ecf0 } .lane { stroke: #eef0f3; stroke-width: 1 }
.prefill { fill: #d95f02 } .decode { fill: #1673b8 } .embed { fill: #12966f }
.won { fill: #7ad151 } .lost { fill: #c7cdd6 }
.l1 { fill-opacity: .4 } .l2 { fill-opacity: .6 } .l3 { fill-opacity: .8 }
.waiting { fill: #8a94a0; fill-opacity: .35; stroke: #6b7580; stroke-width: 1 }
.ended { fill: #1d2329 } .cancelled { stroke: #1d2329; stroke-width: 1.8; fill: none }
.failed { stroke: #d0103a; stroke-width: 2.4; fill: none } .preempted { fill: #b0309a }
@media (prefers-color-scheme: dark) {
 text { fill: #e4e8ec } .paper { fill: #14181d } .soft { fill: #98a2ad } .grid { stroke: #2b323a }
 .lane { stroke: #1f252b } .stay { fill: #262c34 } .prefill { fill: #f28c38 } .decode { fill: #4aa3e8 }
 .embed { fill: #35c196 } .ended { fill: #e4e8ec } .cancelled { stroke: #e4e8ec } .failed { stroke: #ff5470 }
 .preempted { fill: #e070cf }
}
"""


def draw(trace: Trace, *, width: int = 1200, title: str = "Trace") -> str:
    """Draw a trace as an SVG document with a light and a dark style.

    Ticks narrower than two pixels are merged with their neighbours, so any picture has at most `width` columns.

    Args:
        trace: any trace, also an empty one.
        width: in pixels, 400 to 20,000; the height follows from the number of slots.
        title: shown at the top.

    Returns:
        The text of the SVG file.

    Raises:
        InvalidParams: width is out of range.
    """
    width = validation.integer("width", width, 400, 20_000)
    title = validation.text("title", title)
    layout = arrange(trace, int((width - LEFT - RIGHT) / COLUMN))
    frame = Frame.of(layout, width)
    summary = summarize(trace)
    picture = SvgDocument(width, frame.height, _STYLE, f"{title}: {totals(summary)}")
    picture.rect("paper", 0, 0, width, frame.height)
    picture.text("title", 16, 26, title)
    picture.text("soft", 16, 44, totals(summary))
    _draw_legend(picture.group("legend"), layout)
    _draw_axis(picture.group("axis"), layout, frame)
    _draw_lanes(picture.group("lanes"), frame)
    _draw_stays(picture.group("stays"), layout, frame)
    _draw_cells(picture.group("cells"), layout, frame)
    if layout.most_drafts:
        _draw_bursts(picture.group("bursts"), layout, frame)
    _draw_marks(picture.group("marks"), layout, frame)
    _draw_queue(picture.group("queue"), layout, frame)
    return picture.xml()


def _draw_axis(group: SvgShape, layout: Layout, frame: Frame) -> None:
    for time_s, label in axis_ticks(layout.end_s - layout.start_s):
        x = frame.x(layout.start_s + time_s)
        group.path("grid", f"M{number(x)} {TOP}V{frame.bottom + 4}")
        group.text("soft middle", x, frame.bottom + 18, label)


def _draw_lanes(group: SvgShape, frame: Frame) -> None:
    for slot in frame.lanes:
        y = frame.y(slot) + frame.cell
        group.path("lane", f"M{LEFT} {number(y)}H{frame.width - RIGHT}")
        group.text("soft right", LEFT - 8, y - frame.cell / 2 + 4, "embed" if slot is None else f"slot {slot}")


def _draw_stays(group: SvgShape, layout: Layout, frame: Frame) -> None:
    for stay in layout.stays:
        x, y = frame.x(stay.start_s), frame.y(stay.slot)
        width = frame.x(layout.end_s if stay.end_s is None else stay.end_s) - x
        group.rect("stay", x, y, max(width, 0.5), frame.cell).tooltip(_describe(stay, layout))
        name = _shorten(_name(stay, layout), int((width - 3) / _CHARACTER))
        if frame.head and name:
            group.text("small soft", x, y - 3, name)


def _name(stay: SlotStay, layout: Layout) -> str:
    request = layout.requests.get(stay.key)
    choice = f".{stay.choice}" if request is not None and request.num_choices > 1 else ""
    named = request.request_id if request is not None and request.request_id is not None else ""
    return f"#{stay.key}{choice} {named}".rstrip()


def _shorten(name: str, num_characters: int) -> str:
    """Shorten a name to num_characters; empty if that leaves too little to recognise it."""
    line = " ".join(name.split())
    if len(line) <= num_characters:
        return line
    return line[: num_characters - 1] + "\N{HORIZONTAL ELLIPSIS}" if num_characters > 5 else ""


def _describe(stay: SlotStay, layout: Layout) -> str:
    request, end = layout.requests.get(stay.key), layout.ends.get(stay.key)
    words = [_name(stay, layout), f"from {stay.start_s:.3f} s"]
    if stay.end_s is not None:
        words.append(f"to {stay.end_s:.3f} s ({stay.ending})")
    if request is not None:
        words.append(f"{request.prompt_tokens} prompt tokens")
    if end is not None:
        words.append(f"{end.usage.completion_tokens} generated, {end.reason}")
    return ", ".join(words)


def _draw_cells(group: SvgShape, layout: Layout, frame: Frame) -> None:
    most = _most(layout)
    for column in layout.columns:
        x, width = frame.span(column)
        for cell in column.cells:
            top = frame.y(cell.slot) + cell.begin * frame.cell
            height = (cell.end - cell.begin) * frame.cell
            group.rect(_look(cell.sort, cell.num_tokens, most[cell.sort]), x, top, width, height)


def _draw_bursts(group: SvgShape, layout: Layout, frame: Frame) -> None:
    """Draw drafts as bars from the bottom of their lane: accepted ones, and above them those that were not."""
    unit = _BURST * frame.cell / layout.most_drafts
    for column in layout.columns:
        x, width = frame.span(column)
        for burst in column.bursts:
            bottom = frame.y(burst.slot) + frame.cell
            won, all_of_them = unit * burst.num_won, unit * burst.num_drafts
            group.rect("lost", x, bottom - all_of_them, width, all_of_them - won)
            bar = group.rect("won", x, bottom - won, width, won)
            bar.tooltip(f"{burst.num_won} of {burst.num_drafts} drafts accepted")


def _most(layout: Layout) -> dict[Sort, int]:
    """Return the most tokens of each sort in one cell of the trace."""
    most: dict[Sort, int] = {"prefill": 1, "decode": 1, "embed": 1}
    for column in layout.columns:
        for cell in column.cells:
            most[cell.sort] = max(most[cell.sort], cell.num_tokens)
    return most


def _look(sort: Sort, num_tokens: int, most: int) -> str:
    """Return the classes of a cell: four levels of opacity, even in the logarithm of its tokens."""
    level = math.ceil(_LEVELS * math.log1p(num_tokens) / math.log1p(most))
    return f"{sort} l{min(max(level, 1), _LEVELS)}"


def _draw_marks(group: SvgShape, layout: Layout, frame: Frame) -> None:
    for stay in layout.stays:
        if stay.ending is not None and stay.end_s is not None:
            _draw_mark(group, stay.ending, frame.x(stay.end_s), frame.y(stay.slot) + frame.cell / 2)
    for end in layout.outside:
        is_seen = end.is_embedding and layout.has_embedding
        y = frame.y(None) + frame.cell / 2 if is_seen else frame.queue_top + QUEUE / 2
        _draw_mark(group, end.ending, frame.x(end.now_s), y)


def _draw_mark(group: SvgShape, ending: Ending, x: float, y: float) -> None:
    shapes: dict[Ending, str] = {
        "ended": "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0z",
        "cancelled": "m-3.5 -3.5l7 7m0 -7l-7 7",
        "failed": "m-3.5 -3.5l7 7m0 -7l-7 7",
        "preempted": "m-4.5 -4h9l-4.5 8z",
    }
    group.path(ending, f"M{number(x)} {number(y)}{shapes[ending]}")


def _draw_queue(group: SvgShape, layout: Layout, frame: Frame) -> None:
    most = max((column.num_waiting for column in layout.columns), default=0)
    group.text("soft right", LEFT - 8, frame.bottom, "waiting")
    group.text("small soft right", LEFT - 8, frame.queue_top + 8, f"{most:,}" if most else "")
    if not most:
        return
    way = [f"M{number(frame.x(layout.start_s))} {frame.bottom}"]
    for column in layout.columns:
        y = frame.bottom - column.num_waiting / most * (QUEUE - 2)
        way.append(f"H{number(frame.x(column.start_s))}V{number(y)}")
    way.append(f"H{number(frame.x(layout.columns[-1].end_s))}V{frame.bottom}")
    group.path("waiting", "".join(way))


def _draw_legend(group: SvgShape, layout: Layout) -> None:
    x, y = 16.0, 60.0
    sorts: tuple[Sort, ...] = ("prefill", "decode", "embed") if layout.has_embedding else ("prefill", "decode")
    for sort in sorts:
        for level in range(1, _LEVELS + 1):
            group.rect(f"{sort} l{level}", x + (level - 1) * 9, y, 9, 10)
        group.text("soft", x + _LEVELS * 9 + 5, y + 9, _NAMES[sort])
        x += _LEVELS * 9 + 5 + len(_NAMES[sort]) * 7 + 16
    for look, name in (("won", "accepted drafts"), ("lost", "other drafts")) if layout.most_drafts else ():
        group.rect(look, x, y, 9, 10)
        group.text("soft", x + 14, y + 9, name)
        x += 14 + len(name) * 6 + 14
    for ending in ("ended", "cancelled", "failed", "preempted"):
        _draw_mark(group, ending, x, y + 5)
        group.text("soft", x + 9, y + 9, ending)
        x += 9 + len(ending) * 7 + 14


@dataclass(frozen=True, slots=True)
class Frame:
    """Map seconds and slots to pixels. head, cell: the heights of a lane's line of names and of its cells."""

    start_s: float
    scale: float
    width: int
    lanes: dict[int | None, int]
    head: int
    cell: int

    @classmethod
    def of(cls, layout: Layout, width: int) -> Frame:
        """Return the frame of a layout in a picture of this width."""
        names: list[int | None] = [*layout.slots, *([None] if layout.has_embedding else [])]
        head, cell = (12, 14) if len(names) <= _LABELLED else (0, 9)
        cell *= 2 if layout.most_drafts else 1  # room for bars
        return cls(
            start_s=layout.start_s,
            scale=(width - LEFT - RIGHT) / (layout.end_s - layout.start_s),
            width=width,
            lanes={name: place for place, name in enumerate(names)},
            head=head,
            cell=cell,
        )

    def x(self, time_s: float) -> float:
        """Return the position of a time."""
        return LEFT + (time_s - self.start_s) * self.scale

    def span(self, column: Column) -> tuple[float, float]:
        """Return where the cells of a column begin, and their width."""
        x = self.x(column.start_s)
        width = max(self.x(column.end_s) - x, 1.0)
        return x, width - (0.6 if width > 2.5 * COLUMN else 0)  # separates neighbouring ticks if they are wide enough

    def y(self, slot: int | None) -> float:
        """Return the top of a slot's cells."""
        return TOP + self.head + self.lanes[slot] * (self.head + self.cell + _GAP)

    @property
    def queue_top(self) -> int:
        """Return the top of the queue's strip."""
        return TOP + len(self.lanes) * (self.head + self.cell + _GAP) + 10

    @property
    def bottom(self) -> int:
        """Return the bottom of the queue's strip, which is that of the time axis's area."""
        return self.queue_top + QUEUE

    @property
    def height(self) -> int:
        """Return the height of the picture."""
        return self.bottom + _BOTTOM


def axis_ticks(span_s: float) -> Iterator[tuple[float, str]]:
    """Return at most thirteen round times within so many seconds, with their labels."""
    exponent = math.floor(math.log10(span_s / 10))
    step_s = next(step for step in (factor * 10.0**exponent for factor in (1, 2, 5, 10)) if span_s / step <= 12)
    digits = max(0, -math.floor(math.log10(step_s) + 1e-9))
    for index in range(int(span_s / step_s + 1e-9) + 1):
        yield index * step_s, f"{index * step_s:.{digits}f} s"


_UNFIT: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # not allowed in XML 1.0


class SvgShape:
    """An SVG element to which others can be added. Lengths are in pixels, rounded to a hundredth; look: its CSS classes."""

    def __init__(self, element: ET.Element) -> None:
        self._element = element

    def group(self, look: str) -> SvgShape:
        """Add a group."""
        return self._add("g", look)

    def rect(self, look: str, x: float, y: float, width: float, height: float) -> SvgShape:
        """Add a rectangle; x, y: its upper left corner."""
        lengths = {"x": x, "y": y, "width": width, "height": height}
        return self._add("rect", look, **{name: number(length) for name, length in lengths.items()})

    def path(self, look: str, way: str) -> SvgShape:
        """Add a path; way: its attribute "d"."""
        return self._add("path", look, d=way)

    def text(self, look: str, x: float, y: float, content: str) -> SvgShape:
        """Add a line of text; x, y: the left end of its baseline, unless a class sets another anchor."""
        element = ET.SubElement(self._element, "text", {"class": look, "x": number(x), "y": number(y)})
        element.text = fit(content)
        return SvgShape(element)

    def tooltip(self, content: str) -> None:
        """Set the tooltip."""
        ET.SubElement(self._element, "title").text = fit(content)

    def _add(self, tag: str, look: str, **attributes: str) -> SvgShape:
        return SvgShape(ET.SubElement(self._element, tag, {"class": look} | attributes))


class SvgDocument(SvgShape):
    """An SVG document with a style sheet and a description for screen readers. width, height: in pixels."""

    def __init__(self, width: float, height: float, style: str, description: str) -> None:
        size = {"width": number(width), "height": number(height), "viewBox": f"0 0 {number(width)} {number(height)}"}
        root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"} | size)
        super().__init__(root)
        self.tooltip(description)
        ET.SubElement(root, "style").text = style
        self._root = root

    def xml(self) -> str:
        """Return the document's text."""
        ET.indent(self._root, " ")
        return ET.tostring(self._root, encoding="unicode") + "\n"


def number(value: float) -> str:
    """Format a length, rounded to a hundredth of a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def fit(content: str) -> str:
    """Replace the characters that XML does not allow."""
    return _UNFIT.sub("\ufffd", content)
