"""The few shapes of SVG that pictures here are made of. Text is escaped, and what XML cannot carry is replaced."""

from __future__ import annotations

import re
from typing import Final
from xml.etree import ElementTree as ET

_UNFIT: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 has no place for


class Shape:
    """An element of a picture, to which others can be added. Lengths are in pixels, rounded to a hundredth."""

    def __init__(self, element: ET.Element) -> None:
        self._element = element

    def group(self, look: str) -> Shape:
        """A group; its class is `look`."""
        return self._add("g", look)

    def rect(self, look: str, x: float, y: float, width: float, height: float) -> Shape:
        """A rectangle from its upper left corner."""
        lengths = {"x": x, "y": y, "width": width, "height": height}
        return self._add("rect", look, **{name: number(length) for name, length in lengths.items()})

    def path(self, look: str, way: str) -> Shape:
        """A path; `way` as the attribute "d" has it."""
        return self._add("path", look, d=way)

    def text(self, look: str, x: float, y: float, content: str) -> Shape:
        """A line of text, from the left end of its baseline unless its class says otherwise."""
        element = ET.SubElement(self._element, "text", {"class": look, "x": number(x), "y": number(y)})
        element.text = fit(content)
        return Shape(element)

    def tell(self, content: str) -> None:
        """What a viewer shows of this shape when it is pointed at."""
        ET.SubElement(self._element, "title").text = fit(content)

    def _add(self, tag: str, look: str, **attributes: str) -> Shape:
        return Shape(ET.SubElement(self._element, tag, {"class": look} | attributes))


class Picture(Shape):
    """An SVG document of one size, with a style sheet and a description for those who cannot see it."""

    def __init__(self, width: float, height: float, style: str, description: str) -> None:
        size = {"width": number(width), "height": number(height), "viewBox": f"0 0 {number(width)} {number(height)}"}
        root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "role": "img"} | size)
        super().__init__(root)
        self.tell(description)
        ET.SubElement(root, "style").text = style
        self._root = root

    def xml(self) -> str:
        """The document."""
        ET.indent(self._root, " ")
        return ET.tostring(self._root, encoding="unicode") + "\n"


def number(value: float) -> str:
    """As short as a hundredth of a pixel allows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def fit(content: str) -> str:
    """The text with a replacement character for whatever XML cannot carry."""
    return _UNFIT.sub("\ufffd", content)
