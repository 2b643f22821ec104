"""What decides how many tokens an image or audio takes of a prompt: its size, without its content."""

from __future__ import annotations

import msgspec


class ImageExtent(msgspec.Struct, frozen=True, array_like=True, tag="image"):
    """Of an image: its sides in pixels."""

    width: int
    height: int


class AudioExtent(msgspec.Struct, frozen=True, array_like=True, tag="audio"):
    """Of audio: samples a second and channel, and how many samples each channel has."""

    rate: int
    num_frames: int


MediaExtent = ImageExtent | AudioExtent
