"""A multimodal projector (mmproj): makes of images and audio what a model takes in the place of tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paceline import _native, validation
from paceline.errors import Closed, InvalidParams, InvalidType, ModelFileNotFound, ModelLoadError
from paceline.runtime.context_options import FLASH_ATTNS
from paceline.runtime.device import physical_cores
from paceline.runtime.gguf_file import file_fingerprint
from paceline.runtime.image_file import Pixels
from paceline.runtime.model import Model
from paceline.runtime.native_core import Closeable
from paceline.runtime.projector_check import check_projector

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

_MAX_TOKENS = 1 << 20
_MAX_SAMPLES = 2**31 - 1
_SMALL_SIDE, _LARGE_SIDE = 32, 4096  # of images that need fewer and more tokens than any limit that is useful


@dataclass(frozen=True, slots=True, eq=False)
class MediaPart:
    """A piece of what an image or audio becomes in a prompt: tokens that mark or divide it, or an item of embeddings.

    tokens: empty for an item. num_cells, num_positions: of an item, 0 for tokens. is_causal: whether attention among its cells
    is, so that it may be computed in parts. places: int32 (num_cells, 3), where its cells lie in time, height and width from its
    position on (M-RoPE); None: one after another. embeddings: float32 (num_cells, n_embd); None where it was only measured.
    """

    tokens: tuple[int, ...]
    num_cells: int
    num_positions: int
    is_causal: bool
    places: IntArray | None
    embeddings: FloatArray | None


class MediaProjector(Closeable):
    """The encoders of a projector's file, for one model. Keeps it alive; free them with `close()`.

    Safe to use from any thread; one item is encoded at a time, and measuring does not wait for it. Calls release the GIL; `abort`
    ends what is being encoded.
    """

    def __init__(self, native: _native.MediaProjector, path: Path) -> None:
        self._native: _native.MediaProjector | None = native
        self.path = path
        self.fingerprint = file_fingerprint([path])

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

        use_gpu: computes on a GPU where llama.cpp finds one. n_threads: None takes the physical cores. image_min_tokens,
        image_max_tokens: of an image, for projectors that take images of any size; None as the file has it. flash_attn: of the
        encoders, as of a context.

        Raises `ModelLoadError` (no such file, no projector, damaged, or of another model), `InvalidParams`, also for limits that
        have no effect with this projector.
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
                _native.MediaProjector.load(model.native, str(found), use_gpu, threads, least, most, flash), found
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
        """What it takes: "image", "audio" or both."""
        native = self.native
        return frozenset(name for name, takes in (("image", native.sees), ("audio", native.hears)) if takes)

    @property
    def sample_rate(self) -> int | None:
        """Hz of the audio that it takes; None where it takes none."""
        return self.native.sample_rate if self.native.hears else None

    def measure_image(self, width: int, height: int) -> list[MediaPart]:
        """Return the parts of an image of this size, without embeddings. Raises `InvalidParams`, `Unsupported`."""
        width, height = validation.integer("width", width, 1), validation.integer("height", height, 1)
        return _parts(self.native.measure_image(width, height))

    def encode_image(self, pixels: Pixels) -> list[MediaPart]:
        """Return the parts of an image, uint8 (height, width, 3). May take long.

        Raises `InvalidParams`, `Unsupported`, `Aborted`, and `DecodeError` where llama.cpp cannot compute it.
        """
        return self.encode_images([pixels])[0]

    def encode_images(self, images: Sequence[Pixels]) -> list[list[MediaPart]]:
        """Return the parts of each image. Those of one size are computed together where libmtmd can (Gemma 4, InternVL).

        Raises as `encode_image`, for all of them.
        """
        for pixels in images:
            _check_array("pixels", pixels, np.uint8, 3)
            if pixels.shape[2] != 3:
                raise InvalidType(f"pixels must have the shape (height, width, 3), not {pixels.shape}")
        found = self.native.images([np.ascontiguousarray(pixels) for pixels in images])
        return [_parts(parts) for parts in found]

    def measure_audio(self, num_samples: int) -> list[MediaPart]:
        """Return the parts of as many samples at `sample_rate`, without embeddings. Raises `InvalidParams`, `Unsupported`."""
        return _parts(self.native.measure_audio(validation.integer("num_samples", num_samples, 1, _MAX_SAMPLES)))

    def encode_audio(self, samples: FloatArray) -> list[MediaPart]:
        """Return the parts of mono audio, float32 (num_samples,) at `sample_rate`. Raises as `encode_image`."""
        _check_array("samples", samples, np.float32, 1)
        if not np.isfinite(samples).all():
            raise InvalidParams("samples must be finite, and some are not")
        return _parts(self.native.audio(np.ascontiguousarray(samples)))

    def _check_limits(self, least: int, most: int) -> None:
        """Raise `InvalidParams` where a small or a large image has not the tokens that were set, but for rounding to rows."""
        if least > 2 * (found := self._num_cells(_SMALL_SIDE)):
            raise InvalidParams(_no_effect("image_min_tokens", least, self.path, _SMALL_SIDE, found))
        if most > 0 and 2 * most + 2 < (found := self._num_cells(_LARGE_SIDE)):
            raise InvalidParams(_no_effect("image_max_tokens", most, self.path, _LARGE_SIDE, found))

    def _num_cells(self, side: int) -> int:
        return sum(one.num_cells for one in self.measure_image(side, side)) if self.native.sees else 0

    def abort(self) -> None:
        """End what is being encoded, or else what is encoded next: that call raises `Aborted`. Any thread."""
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
