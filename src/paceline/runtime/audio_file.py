"""Decodes audio of prompts. Headers were checked; here it is what follows that must be as long as they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.errors import InvalidParams
from paceline.media import Audio

Samples = npt.NDArray[np.float32]

MAX_AMPLITUDE: Final = 65_536
"""Largest sample: far beyond, the encoder computes infinities, and the model no text."""

_PIECE: Final = 1 << 16  # samples at a time
_MOST_MISSING_S: Final = (
    0.25  # of a file whose first frames refer to others, or whose resampled end is a fraction short
)


def num_samples(num_frames: int, file_rate: int, rate: int) -> int:
    """Return how many samples at `rate` become of as many at `file_rate`, as miniaudio resamples."""
    return int(_native.resampled_length(num_frames, file_rate, rate))


def decoded_samples(audio: Audio, rate: int, check: Callable[[], None] = lambda: None) -> Samples:
    """Return mono samples at `rate`, float32 of shape (num_samples,). May take long; any thread. check: called often, may raise.

    Where the file has more than it promised, that is left out; a fraction of a second that is missing is silence. Raises
    `InvalidParams` for a file that is damaged.
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
        piece = decoder.read(min(_PIECE, len(samples) - end))
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
