"""An image in a prompt, from a file, its bytes, a data URL, PIL or NumPy: its header, its size and its end are checked.

The formats: PNG (https://www.w3.org/TR/png-3/), JPEG (ITU T.81), GIF (GIF89a), BMP (Windows). Nothing is decoded.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import zlib
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote_to_bytes

import msgspec

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.media.source_bytes import check_bytes, decoded_base64, file_bytes, is_array, kind_of

if TYPE_CHECKING:
    import numpy as np


MAX_IMAGE_BYTES: Final = 64 << 20


class ImageExtent(msgspec.Struct, frozen=True, array_like=True, tag="image"):
    """The sides of an image in pixels, which decide how many tokens it takes."""

    width: int
    height: int


class Image:
    """An image with a known size; its pixels are decoded when a model needs them.

    Takes the path of a file, the bytes of a file (PNG, JPEG, BMP, or GIF with its first frame), an image of PIL, or a NumPy
    array, uint8 of shape (height, width) or (height, width, 1, 3 or 4). Transparency is dropped. Immutable: a file is read
    and an array copied at once.

        llm.generate([Image("cat.jpg"), "What is this?"])

    Attributes:
        width: In pixels.
        height: In pixels.
        format: "png", "jpeg", "gif" or "bmp"; "rgb" for pixels.
        data: The bytes of the file, or the pixels row by row.
        name: The name in errors, such as its place in a request; if empty, errors give its number.

    Raises:
        InvalidParams: The file is missing, no image, or too large.
        InvalidType: The source has another type.
    """

    __slots__ = ("__dict__", "data", "format", "height", "name", "width")

    def __init__(self, source: object, *, name: str = "") -> None:
        self.name = name
        self.width: int
        self.height: int
        if isinstance(source, (str, os.PathLike)):
            self._from_file(file_bytes("image", validation.path("image", source), MAX_IMAGE_BYTES))
        elif isinstance(source, (bytes, bytearray, memoryview)):
            self._from_file(bytes(source))
        elif is_array(source):
            self._from_pixels(source)
        elif hasattr(source, "convert") and hasattr(source, "size"):
            self.width, self.height = source.size
            check_size(self.width, self.height)
            self.format = "rgb"
            try:
                self.data = source.convert("RGB").tobytes()
            except (OSError, ValueError, SyntaxError) as error:  # PIL reads its files late
                raise InvalidParams(f"image cannot be read by PIL: {error}") from error
        else:
            raise InvalidType(
                f"image must be a path, bytes, an image of PIL or a NumPy array, not {type(source).__name__}"
            )

    @classmethod
    def from_url(cls, url: str, *, name: str = "") -> Image:
        """Return the image of a data URL, such as "data:image/png;base64,...". Raises `InvalidParams` for other URLs."""
        head, comma, body = validation.text("image_url", url).partition(",")
        if not head.startswith("data:") or not comma:
            raise InvalidParams(
                f"image_url must be a data URL, data:image/png;base64,..., not {url!r:.80}; nothing is fetched from the web"
            )
        if not head.lower().endswith(";base64"):
            return cls(unquote_to_bytes(body), name=name)
        return cls(decoded_base64("image_url", body), name=name)

    def to_url(self) -> str:
        """Return the image as a data URL: its file, or a PNG of its pixels."""
        is_file = self.format != "rgb"
        data = self.data if is_file else png_bytes(self.data, self.width, self.height)
        return f"data:image/{self.format if is_file else 'png'};base64,{base64.b64encode(data).decode()}"

    @property
    def extent(self) -> ImageExtent:
        """The size."""
        return ImageExtent(self.width, self.height)

    @cached_property
    def content_hash(self) -> bytes:
        """A hash of 32 bytes, the key of this image in caches."""
        size = b"" if self.format != "rgb" else self.width.to_bytes(4, "little")
        return hashlib.blake2b(size + self.data, digest_size=32, person=self.format.encode()).digest()

    def _from_file(self, data: bytes) -> None:
        check_bytes("image", len(data), MAX_IMAGE_BYTES)
        header = read_image_header(data)
        self.data, self.format, self.width, self.height = data, str(header.format), header.width, header.height

    def _from_pixels(self, array: np.ndarray[Any, Any]) -> None:
        import numpy as np

        if array.dtype != np.uint8:
            raise InvalidType(f"image must be an array of uint8, 0 to 255, not {array.dtype}")
        if array.ndim == 2:
            array = array[:, :, None]
        if array.ndim != 3 or array.shape[2] not in (1, 3, 4):
            raise InvalidParams(
                f"image must have the shape (height, width) or (height, width, 1, 3 or 4), not {array.shape}"
            )
        self.height, self.width = array.shape[:2]
        check_size(self.width, self.height)
        self.format = "rgb"
        self.data = np.ascontiguousarray(np.broadcast_to(array[:, :, :3], (self.height, self.width, 3))).tobytes()

    def __repr__(self) -> str:
        return f"Image({self.width} x {self.height}, {self.format})"


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


class ImageHeader(msgspec.Struct, frozen=True):
    """The format and the sides in pixels, from the header of a file."""

    format: ImageFormat
    width: int
    height: int


def read_image_header(data: bytes) -> ImageHeader:
    """Return format and size. Raises `InvalidParams` if the format is unknown, the header damaged or the image too large."""
    known = next((kind for signature, kind in _SIGNATURES if data.startswith(signature)), None)
    if known is None:
        raise InvalidParams(f"an image must be a PNG, JPEG, GIF or BMP file, not {kind_of(data, _OTHERS)}; convert it")
    try:
        width, height = _size(known, data)
    except (struct.error, IndexError):
        raise InvalidParams(
            f"the image file ends in the middle of its header: {len(data)} bytes of a {known.upper()}"
        ) from None
    check_size(width, height)
    return ImageHeader(known, width, height)


def check_size(width: int, height: int) -> None:
    """Raise `InvalidParams` if an image has no pixels, or too many to decode."""
    if width < 1 or height < 1:
        raise InvalidParams(f"an image must have pixels, and this one is {width} x {height}")
    if width > MAX_SIDE or height > MAX_SIDE or width * height > MAX_PIXELS:
        raise InvalidParams(
            f"an image may be {MAX_SIDE} pixels wide and high and have {MAX_PIXELS} in all, and this one is {width} x {height}; "
            "make it smaller"
        )


def _size(kind: ImageFormat, data: bytes) -> tuple[int, int]:
    """Return the width and the height. Raises `struct.error` or `IndexError` if the header is cut off."""
    match kind:
        case "png":
            length, name, width, height, *_ = struct.unpack_from(">I4sII5BI", data, 8)  # the chunk with its checksum
            if name != b"IHDR" or length != 13:
                raise InvalidParams("the image file is damaged: a PNG must begin with the chunk IHDR")
        case "gif":
            width, height = struct.unpack_from("<HH", data, 6)
        case "bmp":
            (header_bytes,) = struct.unpack_from("<I", data, 14)
            width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
            height = abs(height)  # negative if the rows go from top to bottom
        case _:
            width, height = _jpeg_size(data)
    return width, height


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Walk over the segments to the frame header. Fill bytes of 0xFF may precede a marker."""
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
        if marker != 0x01 and not 0xD0 <= marker <= 0xD8:  # these markers have no length
            (length,) = struct.unpack_from(">H", data, at)
            at += max(length, 2)
    raise InvalidParams(
        f"the image file is damaged: a JPEG with more than {_MAX_SEGMENTS} segments in front of its size"
    )


# in a scan; 0 stands for a byte of 0xFF, and D0 to D7 restart. No repetition: a search through fill bytes would be quadratic
_MARKER: Final = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_MAX_MARKERS: Final = 1 << 16
_MAX_BLOCKS: Final = 1 << 20  # of a GIF; encoders write blocks of 255 bytes
_EOI, _TEM = 0xD9, 0x01


def check_end(kind: str, data: bytes) -> None:
    """Raise `InvalidParams` if a JPEG, BMP or the first image of a GIF is cut off. Its header has been checked.

    A decoder would take the missing pixels for zeros.
    """
    try:
        match kind:
            case "jpeg":
                is_whole = _has_jpeg_end(data)
            case "bmp":
                is_whole = _has_bmp_rows(data)
            case "gif":
                at = 13 + _palette_bytes(data[10])
                while data[at] == 0x21:  # an extension: its label, then blocks
                    at = _end_of_blocks(data, at + 2)
                if data[at] != 0x2C:
                    raise InvalidParams("the image file is damaged: a GIF without an image")
                _end_of_blocks(data, at + 11 + _palette_bytes(data[at + 9]))
                return
            case _:
                return
    except (struct.error, IndexError):
        is_whole = False
    if not is_whole:
        raise InvalidParams("the image file is damaged: it ends in the middle of its data")


def _has_bmp_rows(data: bytes) -> bool:
    """Check that all rows are there. Rows are padded to 4 bytes; the padding of the last row may be missing."""
    offset, header_bytes = struct.unpack_from("<II", data, 10)
    if header_bytes == 12:
        width, height, _, bits = struct.unpack_from("<HHHH", data, 18)
    else:
        width, height, _, bits = struct.unpack_from("<iiHH", data, 18)
    row = -(-width * bits // 8)
    stride = -(-row // 4) * 4
    return len(data) >= int(offset + stride * (abs(height) - 1) + row)


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _end_of_blocks(data: bytes, at: int) -> int:
    """Return the end of a series of blocks. Each begins with its length; an empty block is the last."""
    for _ in range(_MAX_BLOCKS):
        if not data[at]:
            return at + 1
        at += 1 + data[at]
    raise InvalidParams(f"the image file is damaged: a GIF with more than {_MAX_BLOCKS} blocks in a row")


def _has_jpeg_end(data: bytes) -> bool:
    """Walk over the segments, which may contain another JPEG, and the scans to the end marker."""
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


def png_bytes(pixels: bytes, width: int, height: int) -> bytes:
    """Return a PNG file of RGB pixels with 8 bits a channel, row by row."""
    row = 3 * width
    rows = b"".join(b"\0" + pixels[at : at + row] for at in range(0, row * height, row))  # 0: a row without a filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 2: RGB
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
