"""Images and audio as parts of prompts: where they come from, and what their headers say. Decodes nothing."""

from paceline.media.attachment import MAX_ATTACHMENTS, Attachment, is_attachment, restored
from paceline.media.audio import MAX_AUDIO_BYTES, Audio, audio_format
from paceline.media.audio_header import MAX_SECONDS, MIN_SECONDS
from paceline.media.extent import AudioExtent, ImageExtent, MediaExtent
from paceline.media.image import MAX_IMAGE_BYTES, Image
from paceline.media.image_end import check_end
from paceline.media.image_header import MAX_PIXELS, MAX_SIDE, ImageHeader, read_image_header

__all__ = [
    "MAX_ATTACHMENTS",
    "MAX_AUDIO_BYTES",
    "MAX_IMAGE_BYTES",
    "MAX_PIXELS",
    "MAX_SECONDS",
    "MAX_SIDE",
    "MIN_SECONDS",
    "Attachment",
    "Audio",
    "AudioExtent",
    "Image",
    "ImageExtent",
    "ImageHeader",
    "MediaExtent",
    "audio_format",
    "check_end",
    "is_attachment",
    "read_image_header",
    "restored",
]
