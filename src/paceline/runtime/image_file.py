"""Decodes images of prompts. Their headers were checked; here it is what follows that must not be more than they promise."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.errors import InvalidParams
from paceline.media import Image, check_end

Pixels = npt.NDArray[np.uint8]

_MAX_CHUNKS: Final = 100_000  # of a PNG; encoders put 8 KiB and more into each
_MAX_SCANS: Final = 64  # of a JPEG, each of which goes over all of its pixels; encoders write 10
_PIECE: Final = 1 << 20
_FED: Final = 1 << 16  # bytes at a time: what is left of them is copied for each piece
_SAMPLES: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a pixel, by a PNG's type of colour


def decoded_pixels(image: Image, check: Callable[[], None] = lambda: None) -> Pixels:
    """Return the pixels, uint8 (height, width, 3). May take long; any thread. check: called often, may raise.

    Raises `InvalidParams` for a file that is damaged, or whose data unfold to more than its image.
    """
    if image.format == "rgb":
        return np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
    if image.format == "png":
        _check_png(image, check)
    elif image.format == "jpeg" and (scans := image.data.count(b"\xff\xda")) > _MAX_SCANS:
        raise InvalidParams(f"a JPEG may have {_MAX_SCANS} scans, and this one has {scans}; save it as a plain one")
    check_end(image.format, image.data)
    pixels: Any = _native.decode_image(image.data, image.width, image.height)
    return np.asarray(pixels)


def _check_png(image: Image, check: Callable[[], None]) -> None:
    """Unfold the data in pieces, dropping them: there must be as many bytes as the image has, or fewer than a row more."""
    inflater, size, most = zlib.decompressobj(), 0, _png_bytes(image)
    try:
        for part in _png_data(image.data, check):
            for at in range(0, len(part), _FED):
                pending: bytes | memoryview = part[at : at + _FED]
                while pending and not inflater.eof:
                    check()
                    size += len(inflater.decompress(pending, _PIECE))
                    pending = inflater.unconsumed_tail
                    if size > most:
                        raise InvalidParams(
                            f"the image file is damaged: its data unfold to more than the {most} bytes of "
                            f"{image.width} x {image.height} pixels"
                        )
    except zlib.error as error:
        raise InvalidParams(f"the image file is damaged: {error}") from None
    except struct.error:
        raise InvalidParams("the image file is damaged: it ends in the middle of its data") from None


def _png_bytes(image: Image) -> int:
    """Return how many bytes its rows have at most, with a byte more a row; interlaced ones are rows of seven images."""
    depth: int
    depth, colour, _, _, interlaced = struct.unpack_from(">5B", image.data, 24)
    row = -(-image.width * _SAMPLES.get(colour, 4) * depth // 8) + 1
    return row * image.height + (16 * (image.width + image.height) if interlaced else 0) + 4096


def _png_data(data: bytes, check: Callable[[], None]) -> Iterator[memoryview]:
    view = memoryview(data)
    at = 8
    for _ in range(_MAX_CHUNKS):
        if at >= len(data):
            raise InvalidParams("the image file is damaged: it ends in the middle of its data")
        check()
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        if kind == b"IDAT":
            yield view[at + 8 : at + 8 + length]
        at += 12 + length
    raise InvalidParams(f"a PNG may have {_MAX_CHUNKS} chunks, and this one has more; save it as a plain one")
