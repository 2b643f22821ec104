"""Writes pixels as a PNG file (https://www.w3.org/TR/png-3/). Standard library only."""

from __future__ import annotations

import struct
import zlib
from typing import Final

_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
_RGB: Final = 2


def png_bytes(pixels: bytes, width: int, height: int) -> bytes:
    """Return the file of RGB pixels with 8 bits a channel, row by row."""
    row = 3 * width
    rows = b"".join(b"\0" + pixels[at : at + row] for at in range(0, row * height, row))  # 0: a row without a filter
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB, 0, 0, 0)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
