"""What a prompt may have beside text: an `Image` or `Audio`."""

from __future__ import annotations

from typing import Final, TypeGuard

from paceline.media.audio import Audio
from paceline.media.extent import AudioExtent, MediaExtent
from paceline.media.image import Image

Attachment = Image | Audio
MAX_ATTACHMENTS: Final = 64
"""Most images and audio of a prompt, together."""


def is_attachment(value: object) -> TypeGuard[Attachment]:
    """Whether it is an image or audio, ready for a prompt."""
    return isinstance(value, (Image, Audio))


def restored(kind: str, extent: MediaExtent, data: bytes, name: str) -> Attachment:
    """Return an attachment of these attributes, which another process has checked."""
    if isinstance(extent, AudioExtent):
        return Audio.restored(kind, extent, data, name)
    return Image.restored(kind, extent, data, name)
