"""A multimodal projector (mmproj): decodes images and audio of prompts, and encodes them for a model in place of tokens.

Headers of media files were checked before. Here the data after the header are checked: they must not be more, nor much less,
than the header promises.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from paceline import _native, validation
from paceline.errors import Closed, InvalidParams, InvalidType, ModelFileNotFound, ModelLoadError
from paceline.media import Audio, Image, check_end
from paceline.runtime.context_options import FLASH_ATTNS
from paceline.runtime.device import physical_cores
from paceline.runtime.gguf_file import file_fingerprint
from paceline.runtime.model import Model
from paceline.runtime.native_core import Closeable
from paceline.runtime.projector_file import check_projector

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

_MAX_TOKENS = 1 << 20
_MAX_SAMPLES = 2**31 - 1
_SMALL_SIDE, _LARGE_SIDE = 32, 4096  # of images that need fewer and more tokens than any limit that is useful


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """A part of an image or audio in a prompt: tokens that mark or divide it, or an item of embeddings.

    Attributes:
        tokens: The tokens; empty for an item.
        num_cells: KV cells of an item; 0 for tokens.
        num_positions: Positions of an item; 0 for tokens.
        is_causal: Whether attention among the cells is causal, so that the item may be computed in parts.
        places: int32 (num_cells, 3), the offsets of the cells in time, height and width from the item's position (M-RoPE); None
            means consecutive positions.
        embeddings: float32 (num_cells, n_embd); None if the item was only measured.
    """

    tokens: tuple[int, ...]
    num_cells: int
    num_positions: int
    is_causal: bool
    places: IntArray | None
    embeddings: FloatArray | None


class MediaProjector(Closeable):
    """The encoders of a projector's file, for one model. Keeps the model alive; free the encoders with `close()`.

    Safe to use from any thread; one item is encoded at a time, and measuring does not wait for it. Calls release the GIL; `abort`
    ends the running call.
    """

    def __init__(self, native: _native.MediaProjector, path: Path, least: int = -1, most: int = -1) -> None:
        self._native: _native.MediaProjector | None = native
        self.path = path
        limits = (
            [] if (least, most) == (-1, -1) else [f"image tokens {least}, {most}"]
        )  # they cut an image into other parts
        self.fingerprint = file_fingerprint([path], *limits)
        self.written_ns = path.stat().st_mtime_ns

    @classmethod
    def load(  # noqa: PLR0913 - options of loading
        cls,
        path: str | os.PathLike[str],
        model: Model,
        *,
        use_gpu: bool = True,
        n_threads: int | None = None,
        image_min_tokens: int | None = None,
        image_max_tokens: int | None = None,
        flash_attn: str = "auto",
    ) -> Self:
        """Load a file for a model.

        Args:
            path: The file.
            model: The model.
            use_gpu: Whether to compute on a GPU if llama.cpp finds one.
            n_threads: Threads; None takes the physical cores.
            image_min_tokens: Least tokens of an image, for projectors that take images of any size; None as in the file.
            image_max_tokens: Most tokens of an image, likewise.
            flash_attn: "auto", "on" or "off", for the encoders.

        Raises `ModelLoadError` (the file is missing, no projector, damaged, or of another model), and `InvalidParams`, also for
        limits without an effect on this projector.
        """
        found = validation.path("mmproj", path)
        if not found.is_file():
            raise ModelFileNotFound(f"there is no projector file {found}{validation.similar_files(found)}", str(found))
        least, most = (
            -1 if value is None else validation.integer(name, value, 1, _MAX_TOKENS)
            for name, value in (("image_min_tokens", image_min_tokens), ("image_max_tokens", image_max_tokens))
        )
        check_projector(found, None if most < 0 else most)
        if -1 < most < least:
            raise InvalidParams(f"image_min_tokens must be at most image_max_tokens, {most}, not {least}")
        threads = physical_cores() if n_threads is None else validation.integer("n_threads", n_threads, 1, 512)
        use_gpu = validation.boolean("use_gpu", use_gpu)
        flash = FLASH_ATTNS[validation.choice("flash_attn", flash_attn, FLASH_ATTNS)]
        try:
            projector = cls(
                _native.MediaProjector.load(model.native, str(found), use_gpu, threads, least, most, flash),
                found,
                least,
                most,
            )
        except ModelLoadError as error:
            raise ModelLoadError(f"{error} (model {model.paths[0]})") from None
        try:
            projector._check_limits(least, most)
        except BaseException:
            projector.close()
            raise
        return projector

    @property
    def native(self) -> _native.MediaProjector:
        """The native object. Raises `Closed` after `close()`."""
        if self._native is None:
            raise Closed(f"the projector {self.path.name} was closed")
        return self._native

    @property
    def modalities(self) -> frozenset[str]:
        """The media it accepts: "image", "audio" or both."""
        native = self.native
        return frozenset(name for name, takes in (("image", native.sees), ("audio", native.hears)) if takes)

    @property
    def sample_rate(self) -> int | None:
        """Hz of the audio it accepts; None if it accepts none."""
        return self.native.sample_rate if self.native.hears else None

    def measure_image(self, width: int, height: int) -> list[MediaPart]:
        """Return the parts of an image of this size, without embeddings. Raises `InvalidParams`, `Unsupported`."""
        width, height = validation.integer("width", width, 1), validation.integer("height", height, 1)
        return _parts(self.native.measure_image(width, height))

    def encode_image(self, pixels: Pixels) -> list[MediaPart]:
        """Return the parts of an image, uint8 (height, width, 3). May take long.

        Raises `InvalidParams`, `Unsupported`, `Aborted`, and `DecodeError` if llama.cpp cannot compute it.
        """
        return self.encode_images([pixels])[0]

    def encode_images(self, images: Sequence[Pixels]) -> list[list[MediaPart]]:
        """Return the parts of each image. Images of one size are computed together if libmtmd can (Gemma 4, InternVL).

        Raises as `encode_image`, for all of them.
        """
        for pixels in images:
            _check_array("pixels", pixels, np.uint8, 3)
            if pixels.shape[2] != 3:
                raise InvalidType(f"pixels must have the shape (height, width, 3), not {pixels.shape}")
        found = self.native.images([np.ascontiguousarray(pixels) for pixels in images])
        return [_parts(parts) for parts in found]

    def measure_audio(self, num_samples: int) -> list[MediaPart]:
        """Return the parts of `num_samples` samples at `sample_rate`, without embeddings. Raises as `measure_image`."""
        return _parts(self.native.measure_audio(validation.integer("num_samples", num_samples, 1, _MAX_SAMPLES)))

    def encode_audio(self, samples: FloatArray) -> list[MediaPart]:
        """Return the parts of mono audio, float32 (num_samples,) at `sample_rate`. Raises as `encode_image`."""
        _check_array("samples", samples, np.float32, 1)
        if not np.isfinite(samples).all():
            raise InvalidParams("samples must be finite, and some are not")
        return _parts(self.native.audio(np.ascontiguousarray(samples)))

    def _check_limits(self, least: int, most: int) -> None:
        """Raise `InvalidParams` if a small or a large image does not keep the limits, apart from rounding to rows."""
        if least > 2 * (found := self._num_cells(_SMALL_SIDE)):
            raise InvalidParams(_no_effect("image_min_tokens", least, self.path, _SMALL_SIDE, found))
        if most > 0 and 2 * most + 2 < (found := self._num_cells(_LARGE_SIDE)):
            raise InvalidParams(_no_effect("image_max_tokens", most, self.path, _LARGE_SIDE, found))

    def _num_cells(self, side: int) -> int:
        return sum(part.num_cells for part in self.measure_image(side, side)) if self.native.sees else 0

    def abort(self) -> None:
        """End the running call, or else the next one: it raises `Aborted`. Any thread."""
        native = self._native
        if native is not None:
            native.abort()

    def close(self) -> None:
        """Free the memory; idempotent. A call that runs ends first."""
        self._native = None

    def __repr__(self) -> str:
        return f"MediaProjector({self.path.name!r}{', closed' if self._native is None else ''})"


def _no_effect(name: str, limit: int, path: Path, side: int, found: int) -> str:
    return (
        f"{name}={limit} has no effect with the projector {path.name}, by which an image of {side} x {side} pixels takes "
        f"{found} tokens; leave it out"
    )


def _check_array(name: str, value: object, kind: type[np.generic], num_axes: int) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != kind or value.ndim != num_axes:
        raise InvalidType(f"{name} must be an array of {kind.__name__} with {num_axes} axes, not {value!r:.80}")


def _parts(found: Sequence[Any]) -> list[MediaPart]:
    return [MediaPart(tuple(tokens), *facts) for tokens, *facts in found]


Pixels = npt.NDArray[np.uint8]

_MAX_CHUNKS: Final = 100_000  # of a PNG; encoders put 8 KiB and more into each
_MAX_SCANS: Final = 64  # of a JPEG, each of which goes over all of its pixels; encoders write 10
_PNG_PIECE: Final = 1 << 20
_PNG_FED: Final = 1 << 16  # bytes at a time: the rest of them is copied for each piece
_SAMPLES: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a pixel, by a PNG's type of colour


def decoded_pixels(image: Image, check: Callable[[], None] = lambda: None) -> Pixels:
    """Return the pixels, uint8 (height, width, 3). May take long; any thread. check: called often, may raise.

    Raises `InvalidParams` if a file is damaged or its data unfold to more than its image.
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
    """Unfold the data in pieces, and drop them: they may exceed the bytes of the image by less than a row."""
    inflater, size, most = zlib.decompressobj(), 0, _png_bytes(image)
    try:
        for part in _png_data(image.data, check):
            for at in range(0, len(part), _PNG_FED):
                pending: bytes | memoryview = part[at : at + _PNG_FED]
                while pending and not inflater.eof:
                    check()
                    size += len(inflater.decompress(pending, _PNG_PIECE))
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
    """Return the most bytes of the rows, each with a filter byte. Interlaced rows belong to seven images."""
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


Samples = npt.NDArray[np.float32]

MAX_AMPLITUDE: Final = 65_536
"""Largest sample: far beyond, the encoder computes infinities, and the model no text."""

_AUDIO_PIECE: Final = 1 << 16  # samples at a time
# First frames may refer to missing frames, and a resampled end may be a fraction short.
_MOST_MISSING_S: Final = 0.25


def num_samples(num_frames: int, file_rate: int, rate: int) -> int:
    """Return the number of samples at `rate` after miniaudio resamples `num_frames` at `file_rate`."""
    return int(_native.resampled_length(num_frames, file_rate, rate))


def decoded_samples(audio: Audio, rate: int, check: Callable[[], None] = lambda: None) -> Samples:
    """Return mono samples at `rate`, float32 of shape (num_samples,). May take long; any thread. check: called often, may raise.

    Samples beyond the promised length are left out; a missing fraction of a second becomes silence. Raises `InvalidParams` if
    the file is damaged.
    """
    decoder: Any = _native.open_audio(audio.data, audio.format, rate)
    if decoder.file_rate != audio.rate:
        raise InvalidParams(
            f"the audio file is damaged: it has {audio.rate} Hz by its header, and {decoder.file_rate} by what follows"
        )
    samples = np.zeros(num_samples(audio.num_frames, audio.rate, rate), np.float32)
    end = 0
    while end < len(samples):
        check()
        piece = decoder.read(min(_AUDIO_PIECE, len(samples) - end))
        if not len(piece):
            break
        samples[end : end + len(piece)] = piece
        end += len(piece)
    if len(samples) - end > _MOST_MISSING_S * rate:
        raise InvalidParams(
            f"the audio file is damaged: it lasts {audio.seconds:.2f} s by its header, and {end / rate:.2f} s can be decoded"
        )
    if not np.isfinite(samples).all():
        raise InvalidParams("the audio file is damaged: some of its samples are not finite")
    if len(samples) and max(samples.max(), -samples.min()) > MAX_AMPLITUDE:
        raise InvalidParams(
            f"the audio file is damaged: some of its samples are beyond {MAX_AMPLITUDE:,}, and sound lies between -1 and 1"
        )
    return samples
