"""The images and audio of a chat's parts, as callers in this process give them: objects, paths, data URLs, base64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.chat import parse_messages
from paceline.chat.chat_media import ChatMedia
from paceline.errors import InvalidParams, PacelineError
from paceline.media import Attachment, Audio, Image, is_attachment

_KINDS: Final = ("image_url", "image", "input_audio", "audio")


def read_attachment(name: str, part: object) -> Attachment | None:
    """Return the image or audio that a part is, or has as the member of its type's name; None for other parts.

    Raises `InvalidParams` for one that is none, naming the part.
    """
    if is_attachment(part):
        return part
    if not isinstance(part, Mapping) or part.get("type") not in _KINDS:
        return None
    kind: str = part["type"]
    if kind not in part:
        raise InvalidParams(f"{name}.{kind} is missing")
    value = part[kind]
    read = _audio_of if kind in ("input_audio", "audio") else _image_of
    return value if is_attachment(value) else read(f"{name}.{kind}", kind, value)


def parsed_with_attachments(messages: object) -> list[dict[str, Any]]:
    """Check a conversation; return it as `parse_messages` does, with an `Image` or `Audio` in place of each part that is one."""
    media = ChatMedia(messages, read_attachment)
    return media.loaded(parse_messages(media.messages))


def saved_part(part: Any) -> Any:
    """Return a part as JSON can have it, which `read_attachment` reads again."""
    if isinstance(part, Image):
        return {"type": "image_url", "image_url": {"url": part.to_url()}}
    if isinstance(part, Audio):
        return {"type": "input_audio", "input_audio": {"data": part.to_base64(), "format": part.format}}
    return part


def _image_of(name: str, kind: str, value: Any) -> Image:
    try:
        if kind == "image":
            return Image(value)
        if isinstance(value, Mapping):
            name, value = f"{name}.url", value.get("url")
        return value if isinstance(value, Image) else Image.from_url(value)
    except PacelineError as error:
        raise type(error)(f"{name}: {error}") from error


def _audio_of(name: str, kind: str, value: Any) -> Audio:
    try:
        return Audio(value) if kind == "audio" else Audio.from_part(value)
    except PacelineError as error:
        raise type(error)(f"{name}: {error}") from error
