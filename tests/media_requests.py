"""Images of HTTP requests, for tests: readers of them, and the parts and files that requests have."""

from __future__ import annotations

import base64
from collections.abc import Collection
from typing import Any

from tests.pictures import Pixels, picture, png

from paceline.server.request_media import Fetched, RequestMedia

FILE = png(picture(7))
DATA = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{DATA}"


def request_media(
    *,
    modalities: Collection[str] = ("text", "image"),
    max_images: int = 64,
    fetched: Fetched | None = None,
    in_chat: bool = False,
) -> RequestMedia:
    """A reader as a server has it for one request."""
    return RequestMedia(lambda: modalities, max_images=max_images, fetched=fetched, in_chat=in_chat)


def data_url(pixels: Pixels) -> str:
    """The data URL of a picture."""
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def image_part(url: str = URL, **members: Any) -> dict[str, Any]:
    """A part of OpenAI's chats."""
    return {"type": "image_url", "image_url": {"url": url, **members}}


def text_part(text: str) -> dict[str, Any]:
    """A part of OpenAI's chats."""
    return {"type": "text", "text": text}
