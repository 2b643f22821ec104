"""Images of prompts: facts from headers, and refusals before anything is decoded."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tests.pictures import bmp, gif_header, jpeg_header, picture, png

from paceline.errors import InvalidParams, InvalidType
from paceline.media import MAX_IMAGE_BYTES, MAX_PIXELS, MAX_SIDE, Image, check_end, read_image_header

PIXELS = picture(1, 50, 30)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (png(PIXELS), "png"),
        (bmp(PIXELS), "bmp"),
        (gif_header(50, 30), "gif"),
        (jpeg_header(50, 30), "jpeg"),
        (jpeg_header(50, 30, frame=0xC2), "jpeg"),
    ],
)
def test_format_and_size_come_from_the_header(data: bytes, kind: str) -> None:
    """Of each format."""
    header = read_image_header(data)
    assert (header.format, header.width, header.height) == (kind, 50, 30)


def test_a_bmp_from_top_to_bottom_has_a_negative_height() -> None:
    """And an old one has 16-bit sides."""
    flipped = bytearray(bmp(PIXELS))
    struct.pack_into("<i", flipped, 22, -30)
    assert read_image_header(bytes(flipped)).height == 30
    old = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 50, 30, 1, 24)
    assert (read_image_header(old).width, read_image_header(old).height) == (50, 30)


def test_what_stands_in_front_of_the_size_of_a_jpeg_is_bounded() -> None:
    """Fill bytes are passed over at once; segments are counted, and cameras write some dozens."""
    plain = jpeg_header(50, 30)
    assert read_image_header(plain[:2] + b"\xff" * (1 << 20) + plain[3:]).width == 50
    assert read_image_header(plain[:2] + b"\xff\xfe\0\2" * 4000 + plain[2:]).height == 30
    with pytest.raises(InvalidParams, match="more than 4096 segments"):
        read_image_header(plain[:2] + b"\xff\xfe\0\2" * 4096 + plain[2:])


def test_the_end_of_a_jpeg_is_found_in_time_that_is_linear() -> None:
    """Behind fill bytes and restarts, and in front of none; segments are counted."""
    plain = jpeg_header(50, 30) + b"\xff\xd0" + b"\xff" * (4 << 20)
    check_end("jpeg", plain + b"\xd9")
    with pytest.raises(InvalidParams, match="ends in the middle of its data"):
        check_end("jpeg", plain + bytes(4))
    with pytest.raises(InvalidParams, match="more than 65536 segments"):
        check_end("jpeg", plain + b"\xff\xfe\0\2" * (1 << 16) + b"\xff\xd9")


@pytest.mark.parametrize("whole", [png(PIXELS)[:33], bmp(PIXELS)[:26], gif_header(5, 5)[:10], jpeg_header(5, 5)[:-10]])
def test_a_header_that_is_cut_is_refused(whole: bytes) -> None:
    """Wherever it is cut, and never with another error."""
    read_image_header(whole)
    for end in range(len(whole)):
        with pytest.raises(InvalidParams, match="image"):
            read_image_header(whole[:end])


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "an empty file"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "WebP"),
        (b"\0\0\0\x20ftypavif", "AVIF"),
        (b"II*\0\x08\0\0\0", "TIFF"),
        (b"<svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"hello world", "begins with b'hello wo'"),
    ],
)
def test_other_files_are_named(data: bytes, word: str) -> None:
    """So that the caller knows the format to convert."""
    with pytest.raises(InvalidParams, match=word):
        Image(data)


@pytest.mark.parametrize(
    ("width", "height"), [(0, 10), (10, 0), (50000, 10), (10, MAX_SIDE + 1), (MAX_SIDE, MAX_PIXELS // MAX_SIDE + 1)]
)
def test_sizes_out_of_bounds_are_refused(width: int, height: int) -> None:
    """Zero pixels, 50,000 wide, or too many in all; the message has the size."""
    data = bytearray(png(PIXELS))
    struct.pack_into(">II", data, 16, width, height)
    with pytest.raises(InvalidParams, match=f"{width} x {height}"):
        Image(bytes(data))


def test_damaged_headers_are_refused() -> None:
    """Of files with the right signature."""
    for data in (
        png(PIXELS).replace(b"IHDR", b"IDAT", 1),
        b"\xff\xd8\xff\xda" + bytes(20),
        b"\xff\xd8\xff\xe0\0\x04ab" + b"nomarker",
    ):
        with pytest.raises(InvalidParams, match="damaged"):
            Image(data)


def test_sources_are_equal_where_the_image_is(tmp_path: Path) -> None:
    """A file by its path and by its bytes has one hash; pixels have another, and so has each image."""
    path = tmp_path / "one.png"
    path.write_bytes(png(PIXELS))
    url = "data:image/png;base64," + base64.b64encode(png(PIXELS)).decode()
    hashes = {Image(path).content_hash, Image(str(path)).content_hash, Image(png(PIXELS)).content_hash}
    assert hashes == {Image.from_url(url).content_hash}
    assert Image(PIXELS).content_hash == Image(PIXELS.copy()).content_hash
    others = [Image(PIXELS), Image(PIXELS.reshape(50, 30, 3)), Image(picture(2, 50, 30)), Image(path)]
    assert len({other.content_hash for other in others}) == 4


def test_an_image_becomes_a_url_again(tmp_path: Path) -> None:
    """A file as it is, pixels as a PNG of them."""
    file = Image(png(PIXELS))
    again = Image.from_url(file.to_url())
    assert (again.data, again.format) == (file.data, "png")
    written = Image.from_url(Image(PIXELS).to_url())
    assert (written.format, written.width, written.height) == ("png", 50, 30)
    found = PIL.Image.open(io.BytesIO(written.data))
    assert (found.mode, found.tobytes()) == ("RGB", PIXELS.tobytes())


def test_arrays_become_rgb() -> None:
    """Gray and transparent images too; the array may change afterwards."""
    gray = PIXELS[:, :, 0].copy()
    image = Image(gray)
    before = gray.copy()
    gray[:] = 0
    assert (image.width, image.height, image.format) == (50, 30, "rgb")
    assert image.data == np.repeat(before[:, :, None], 3, axis=2).tobytes()
    assert Image(before[:, :, None]).data == image.data
    alpha = np.dstack([PIXELS, np.zeros((30, 50), np.uint8)])
    assert Image(alpha).data == Image(PIXELS).data
    assert Image(PIXELS[:, ::2]).width == 25


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (PIXELS.astype(np.float32), InvalidType, "uint8.*not float32"),
        (np.zeros((2, 3, 2), np.uint8), InvalidParams, "shape"),
        (np.zeros((2, 2, 3, 3), np.uint8), InvalidParams, "shape"),
        (np.zeros((0, 4, 3), np.uint8), InvalidParams, "4 x 0"),
        (17, InvalidType, "not int"),
        (None, InvalidType, "not NoneType"),
        ("/no/such/file.png", InvalidParams, "/no/such/file.png"),
    ],
)
def test_invalid_image_is_refused(source: Any, error: type[Exception], words: str) -> None:
    """With its kind."""
    with pytest.raises(error, match=words):
        Image(source)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/cat.png", "data URL.*https://example.com"),
        ("data:image/png;base64", "data URL"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:image/png;base64,aGVsbG8=", "PNG, JPEG"),
        ("data:,hello", "PNG, JPEG"),
    ],
)
def test_urls_that_are_no_images_are_refused(url: str, words: str) -> None:
    """Nothing is fetched."""
    with pytest.raises(InvalidParams, match=words):
        Image.from_url(url)


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """Before it is read."""
    path = tmp_path / "long.png"
    with path.open("wb") as file:
        file.truncate(MAX_IMAGE_BYTES + 1)
    with pytest.raises(InvalidParams, match=str(MAX_IMAGE_BYTES)):
        Image(path)


class _Pil:
    """The members of PIL's image, which is not needed to test this."""

    size = (50, 30)

    def __init__(self, failure: Exception | None = None) -> None:
        self._failure = failure

    def convert(self, mode: str) -> Any:
        assert mode == "RGB"
        if self._failure is not None:
            raise self._failure
        return PIXELS


def test_images_of_pil_become_rgb() -> None:
    """A late failure of PIL is the caller's error."""
    assert Image(_Pil()).content_hash == Image(PIXELS).content_hash
    with pytest.raises(InvalidParams, match="truncated"):
        Image(_Pil(OSError("image file is truncated")))
