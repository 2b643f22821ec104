"""Images and audio in prompts: `Image` and `Audio` with their sources and checked headers. Decodes nothing."""

from __future__ import annotations

from typing import Final, TypeGuard

from paceline.media.audio import MAX_AUDIO_BYTES, Audio, AudioExtent, audio_format
from paceline.media.audio_formats import MAX_SECONDS
from paceline.media.image import (
    MAX_IMAGE_BYTES,
    MAX_PIXELS,
    MAX_SIDE,
    Image,
    ImageExtent,
    check_end,
    read_image_header,
)

__all__ = [
    "MAX_ATTACHMENTS",
    "MAX_AUDIO_BYTES",
    "MAX_IMAGE_BYTES",
    "MAX_PIXELS",
    "MAX_SECONDS",
    "MAX_SIDE",
    "Attachment",
    "Audio",
    "AudioExtent",
    "Image",
    "ImageExtent",
    "MediaExtent",
    "audio_format",
    "check_end",
    "is_attachment",
    "read_image_header",
    "restored",
]

Attachment = Image | Audio
MediaExtent = ImageExtent | AudioExtent
MAX_ATTACHMENTS: Final = 64
"""Most images and audio files of a prompt, counted together."""


def is_attachment(value: object) -> TypeGuard[Attachment]:
    """Return whether a value is an image or audio that a prompt may contain."""
    return isinstance(value, (Image, Audio))


def restored(kind: str, extent: MediaExtent, data: bytes, name: str) -> Attachment:
    """Return the attachment with these attributes, which another process has checked."""
    made = Audio.__new__(Audio) if isinstance(extent, AudioExtent) else Image.__new__(Image)
    made.format, made.data, made.name = kind, data, name
    for field in extent.__struct_fields__:
        setattr(made, field, getattr(extent, field))
    return made
