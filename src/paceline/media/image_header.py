"""Headers of image files: format and size, read from a few bytes before anything is decoded. Standard library only.

The formats: PNG (https://www.w3.org/TR/png-3/), JPEG (ITU T.81), GIF (GIF89a), BMP (Windows).
"""

from __future__ import annotations

import re
import struct
from typing import Final, Literal

import msgspec

from paceline.errors import InvalidParams

ImageFormat = Literal["png", "jpeg", "gif", "bmp"]

MAX_SIDE: Final = 16384
MAX_PIXELS: Final = 1 << 26

_SIGNATURES: Final[tuple[tuple[bytes, ImageFormat], ...]] = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"BM", "bmp"),
)
_OTHERS: Final = (
    (0, b"RIFF", "WebP or another RIFF file"),
    (4, b"ftyp", "AVIF, HEIC or a video"),
    (0, b"II*\0", "TIFF"),
    (0, b"MM\0*", "TIFF"),
    (0, b"\0\0\1\0", "an icon"),
    (0, b"%PDF", "PDF"),
    (0, b"<", "SVG or another text"),
)
_MAX_SEGMENTS: Final = 4096
_FILL: Final = re.compile(rb"\xff*")
_CUT = "the image file ends in the middle of its header"


class ImageHeader(msgspec.Struct, frozen=True):
    """What the beginning of a file says of its image. Sides in pixels."""

    format: ImageFormat
    width: int
    height: int


def read_image_header(data: bytes) -> ImageHeader:
    """Return format and size. Raises `InvalidParams` for an unknown format, a damaged header, or an image that is too large."""
    known = next((kind for signature, kind in _SIGNATURES if data.startswith(signature)), None)
    if known is None:
        raise InvalidParams(f"an image must be a PNG, JPEG, GIF or BMP file, not {_guess(data)}; convert it")
    try:
        width, height = _SIZES[known](data)
    except (struct.error, IndexError):
        raise InvalidParams(f"{_CUT}: {len(data)} bytes of a {known.upper()}") from None
    check_size(width, height)
    return ImageHeader(known, width, height)


def check_size(width: int, height: int) -> None:
    """Raise `InvalidParams` for an image of no pixels, or of too many to decode."""
    if width < 1 or height < 1:
        raise InvalidParams(f"an image must have pixels, and this one is {width} x {height}")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise InvalidParams(
            f"an image may be {MAX_SIDE} pixels wide and high and have {MAX_PIXELS} in all, and this one is {width} x {height}; "
            "make it smaller"
        )


def _guess(data: bytes) -> str:
    if not data:
        return "an empty file"
    found = next((name for at, signature, name in _OTHERS if data.startswith(signature, at)), None)
    return found or f"a file that begins with {data[:8]!r}"


def _png_size(data: bytes) -> tuple[int, int]:
    length, kind, width, height, *_ = struct.unpack_from(">I4sII5BI", data, 8)  # the chunk with its checksum
    if kind != b"IHDR" or length != 13:
        raise InvalidParams("the image file is damaged: a PNG must begin with the chunk IHDR")
    return width, height


def _gif_size(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return width, height


def _bmp_size(data: bytes) -> tuple[int, int]:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        return width, height
    width, height = struct.unpack_from("<ii", data, 18)
    return width, abs(height)  # negative where the rows go from top to bottom


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Go from segment to segment up to the frame's; fill bytes of 0xFF may stand before a marker."""
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise InvalidParams(f"the image file is damaged: no marker of a JPEG at byte {at}")
        fill = _FILL.match(data, at)
        at = at if fill is None else fill.end()
        marker = data[at]
        at += 1
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
        if marker in (0xD9, 0xDA):
            raise InvalidParams("the image file is damaged: a JPEG whose data begin before its size is known")
        if marker != 0x01 and not 0xD0 <= marker <= 0xD8:  # those have no length
            (length,) = struct.unpack_from(">H", data, at)
            at += max(length, 2)
    raise InvalidParams(
        f"the image file is damaged: a JPEG with more than {_MAX_SEGMENTS} segments in front of its size"
    )


_SIZES: Final = {"png": _png_size, "jpeg": _jpeg_size, "gif": _gif_size, "bmp": _bmp_size}
