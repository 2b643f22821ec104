"""What the `messages` of a chat may be. Pure; any thread. Knows no template and no model."""

from __future__ import annotations

from typing import Any


def checked_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """The messages as plain mappings of `role`, `content` and `name`, for `ChatFormat.render`.

    A content is a text or a list of text parts {"type": "text", "text": ...}; null counts as an empty text where the
    role is assistant. Raises `InvalidParams` naming the place, such as messages[2].content[0].text; `Unsupported` for what
    is known but not served yet: images, audio, files, tools.
    """
    raise NotImplementedError
