"""Writes large JSON in parts, for threads: while one call of the encoder runs, no other thread does."""

from __future__ import annotations

from typing import Any

import msgspec

_PART = 256  # items of a list that are written together


def encoded_in_parts(content: Any) -> bytes:
    """The JSON of a value; a list, or the lists among an object's values, in parts."""
    if isinstance(content, dict):
        members = (msgspec.json.encode(name) + b":" + encoded_in_parts(value) for name, value in content.items())
        return b"{%b}" % b",".join(members)
    if isinstance(content, list) and len(content) > _PART:
        starts = range(0, len(content), _PART)
        return b"[%b]" % b",".join(msgspec.json.encode(content[start : start + _PART])[1:-1] for start in starts)
    return msgspec.json.encode(content)
