"""What the header of an audio file says, and the bounds that it has to keep. Standard library only."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from paceline.errors import InvalidParams

AudioFormat = Literal["wav", "mp3", "flac"]

MIN_SECONDS: Final = 0.1
MAX_SECONDS: Final = 1800
MIN_RATE: Final = 1000
MAX_RATE: Final = 384_000
MAX_CHANNELS: Final = 8
MAX_CHUNKS: Final = 4096
"""Most chunks or blocks of metadata of a file: each takes time, and may have no content."""


class AudioHeader(msgspec.Struct, frozen=True):
    """Format, samples a second and channel, channels, and samples a channel. data: the file without what is no sound."""

    format: AudioFormat
    rate: int
    channels: int
    num_frames: int
    data: bytes


def check_audio(rate: int, channels: int, num_frames: int) -> None:
    """Raise `InvalidParams` for audio whose rate, channels or duration no model takes."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidParams(f"audio must have {MIN_RATE} to {MAX_RATE} samples a second, and this one has {rate}")
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidParams(f"audio must have 1 to {MAX_CHANNELS} channels, and this one has {channels}")
    if num_frames < MIN_SECONDS * rate:
        raise InvalidParams(f"audio must last {MIN_SECONDS} s at least, and this one lasts {num_frames / rate:.3f} s")
    if num_frames > MAX_SECONDS * rate:
        raise InvalidParams(
            f"audio may last {MAX_SECONDS} s, and this one lasts {num_frames / rate:.0f} s; cut it into parts"
        )


def damaged(what: str) -> InvalidParams:
    """Return the error of a file that is not what its format says."""
    return InvalidParams(f"the audio file is damaged: {what}")
