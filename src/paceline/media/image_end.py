"""Whether image files go on to their end: decoders take what is missing of a cut JPEG, GIF or BMP for zeros."""

from __future__ import annotations

import re
import struct
from typing import Final

from paceline.errors import InvalidParams

_CUT: Final = "the image file is damaged: it ends in the middle of its data"
# in a scan; 0 stands for a byte of 0xFF, and D0 to D7 restart. No repetition: a search through fill bytes would be quadratic
_MARKER: Final = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_MAX_MARKERS: Final = 1 << 16
_MAX_BLOCKS: Final = 1 << 20  # of a GIF, of 255 bytes each but for the last, as encoders write them
_EOI, _TEM = 0xD9, 0x01


def check_end(kind: str, data: bytes) -> None:
    """Raise `InvalidParams` for a JPEG, GIF or BMP that was cut; of a GIF the first image counts. Its header was read before."""
    has_end = _CHECKS.get(kind)
    if has_end is None:
        return
    try:
        is_whole = has_end(data)
    except (struct.error, IndexError):
        is_whole = False
    if not is_whole:
        raise InvalidParams(_CUT)


def _has_bmp_rows(data: bytes) -> bool:
    """Rows are padded to 4 bytes; the last one's padding may be missing."""
    offset, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    else:
        width, height, _, bits = struct.unpack_from("<iiHH", data, 18)
    row = -(-width * bits // 8)
    stride = -(-row // 4) * 4
    return len(data) >= int(offset + stride * (abs(height) - 1) + row)


def _has_gif_image(data: bytes) -> bool:
    at = 13 + _palette_bytes(data[10])
    while data[at] == 0x21:  # an extension: its label, then blocks
        at = _behind_blocks(data, at + 2)
    if data[at] != 0x2C:
        raise InvalidParams("the image file is damaged: a GIF without an image")
    _behind_blocks(data, at + 11 + _palette_bytes(data[at + 9]))
    return True


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _behind_blocks(data: bytes, at: int) -> int:
    """Return where blocks end, of which each begins with its length, and the last one has none."""
    for _ in range(_MAX_BLOCKS):
        if not data[at]:
            return at + 1
        at += 1 + data[at]
    raise InvalidParams(f"the image file is damaged: a GIF with more than {_MAX_BLOCKS} blocks in a row")


def _has_jpeg_end(data: bytes) -> bool:
    """Go over segments, which may hold another JPEG, and scans up to the marker of the end."""
    at = 2
    for _ in range(_MAX_MARKERS):
        found = _MARKER.search(data, at)
        if found is None:
            return False
        at, marker = found.end(), found[1][0]
        if marker == _EOI:
            return True
        if marker not in (_TEM, 0xD8):
            (length,) = struct.unpack_from(">H", data, at)
            at += max(length, 2)
    raise InvalidParams(f"the image file is damaged: a JPEG with more than {_MAX_MARKERS} segments")


_CHECKS: Final = {"bmp": _has_bmp_rows, "gif": _has_gif_image, "jpeg": _has_jpeg_end}
