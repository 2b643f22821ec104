"""Pictures for tests: random pixels, and files of them, written with the standard library."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]


def picture(seed: int, width: int = 60, height: int = 40) -> Pixels:
    """Random pixels, uint8 (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(pixels: Pixels) -> bytes:
    """A PNG file, RGB with 8 bits."""
    height, width = pixels.shape[:2]
    return png_of(b"".join(b"\0" + row.tobytes() for row in pixels), width, height)


def png_of(rows: bytes, width: int, height: int) -> bytes:
    """A PNG file with these rows as its data, for any header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [png_chunk(b"IHDR", header), png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bmp(pixels: Pixels) -> bytes:
    """A BMP file of 24 bits, with rows from bottom to top."""
    height, width = pixels.shape[:2]
    rows = b"".join(row[:, ::-1].tobytes().ljust(-(-3 * width // 4) * 4, b"\0") for row in pixels[::-1])
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, len(rows), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54 + len(rows), 0, 0, 54) + info + rows


def gif_header(width: int, height: int) -> bytes:
    """The beginning of a GIF file."""
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0)


def jpeg_header(width: int, height: int, frame: int = 0xC0) -> bytes:
    """The beginning of a JPEG file: an application's segment, then the frame's."""
    segment = b"\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0".ljust(14, b"\0")
    return (
        b"\xff\xd8" + segment + bytes([0xFF, 0xFF, frame]) + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    )
