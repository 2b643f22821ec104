"""An SVG document of a few shapes. Text is escaped, and characters that XML does not allow are replaced."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree as ET

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
