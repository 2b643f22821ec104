"""An image as a part of a prompt, from a file, its bytes, a data URL, PIL or NumPy."""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote_to_bytes

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.media.extent import ImageExtent
from paceline.media.image_header import check_size, read_image_header
from paceline.media.png_file import png_bytes
from paceline.media.source_bytes import check_bytes, decoded_base64, file_bytes, is_array

if TYPE_CHECKING:
    import numpy as np

MAX_IMAGE_BYTES: Final = 64 << 20


class Image:
    """An image, whose size is known and whose pixels are decoded when a model is to see them.

    Takes the path of a file, the bytes of one (PNG, JPEG, GIF or BMP; of a GIF the first frame), an image of PIL, or a NumPy
    array, uint8 of shape (height, width) or (height, width, 1, 3 or 4). Transparency is dropped. Immutable: a file is read
    and an array copied at once.

        llm.generate([Image("cat.jpg"), "What is this?"])

    Attributes:
        width: In pixels.
        height: In pixels.
        format: "png", "jpeg", "gif" or "bmp"; "rgb" of pixels.
        data: The bytes of the file, or of its pixels, row by row.
        name: How errors call it, such as its place in a request; empty: by its number.

    Raises:
        InvalidParams: No such file, no image, or one that is too large; the message says which.
        InvalidType: Something else than these.
    """

    __slots__ = ("__dict__", "data", "format", "height", "name", "width")

    def __init__(self, source: object, *, name: str = "") -> None:
        self.name = name
        if isinstance(source, (str, os.PathLike)):
            self._from_file(file_bytes("image", validation.path("image", source), MAX_IMAGE_BYTES))
        elif isinstance(source, (bytes, bytearray, memoryview)):
            self._from_file(bytes(source))
        elif is_array(source):
            self._from_pixels(source)
        elif hasattr(source, "convert") and hasattr(source, "size"):
            self._from_pil(source)
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

    @classmethod
    def restored(cls, kind: str, extent: ImageExtent, data: bytes, name: str) -> Image:
        """Return an image of these attributes, which another process has checked."""
        image = object.__new__(cls)
        image.format, image.width, image.height, image.data = kind, extent.width, extent.height, data
        image.name = name
        return image

    @property
    def extent(self) -> ImageExtent:
        """Its size, which decides how many tokens it takes."""
        return ImageExtent(self.width, self.height)

    @cached_property
    def content_hash(self) -> bytes:
        """Thirty-two bytes that are equal where the image is, by which it is found in caches."""
        size = b"" if self.format != "rgb" else self.width.to_bytes(4, "little")
        return hashlib.blake2b(size + self.data, digest_size=32, person=self.format.encode()).digest()

    def _from_file(self, data: bytes) -> None:
        check_bytes("image", len(data), MAX_IMAGE_BYTES)
        header = read_image_header(data)
        self.data = data
        self.format: str = header.format
        self.width, self.height = header.width, header.height

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

    def _from_pil(self, image: Any) -> None:
        self.width, self.height = image.size
        check_size(self.width, self.height)
        self.format = "rgb"
        try:
            self.data = image.convert("RGB").tobytes()
        except (OSError, ValueError, SyntaxError) as error:  # PIL reads its files late
            raise InvalidParams(f"image cannot be read by PIL: {error}") from error

    def __repr__(self) -> str:
        return f"Image({self.width} x {self.height}, {self.format})"
