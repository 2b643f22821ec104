"""Text of content blocks that chat templates have no place for: documents, search results, calls and results of server tools.

Pure; any thread. A text has the block's type as a tag around it and every member that a reader understands. Ids, signatures,
encrypted contents and files in base64 that are no texts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline import validation
from paceline.chat.conversation import MAX_ARGUMENTS_BYTES, MAX_ARGUMENTS_DEPTH
from paceline.chat.json_values import checked_json
from paceline.errors import InvalidParams
from paceline.media.source_bytes import decoded_base64

_MAX_DEPTH = 32
_BODIES = frozenset(("text", "content", "thinking"))
_HIDDEN = frozenset(
    ("type", "id", "tool_use_id", "cache_control", "caller", "citations", "data", "file_id", "media_type", "signature")
)


def tagged(kind: str, text: str) -> str:
    """Return a text between tags of the type of its block."""
    return f"<{kind}>\n{text}\n</{kind}>" if text else f"<{kind} />"


def readable_text(place: str, block: Mapping[str, Any]) -> str:
    """Return the readable members of a block, one a line; empty if there are none.

    Raises `InvalidParams` for a block that is nested too deeply and for text that UTF-8 cannot carry. It names the member of
    the block: places of every text within would take quadratic time.
    """
    lines: list[str] = []
    for name, member in block.items():
        _add_member(lines, f"{place}.{name[:80]}", name, member, _MAX_DEPTH)
    return "\n".join(lines)


def plain_document(place: str, source: Mapping[str, Any]) -> str | None:
    """Return the text of a document's source; None for a source that has no text, such as a PDF or the id of a file.

    Raises `InvalidParams` for text that UTF-8 cannot carry.
    """
    kind, data = source.get("type"), source.get("data")
    if kind == "text":
        return validation.text(f"{place}.data", data)
    media_type = source.get("media_type")
    if kind != "base64" or not isinstance(media_type, str) or not media_type.startswith("text/"):
        return None
    try:
        return decoded_base64(f"{place}.data", validation.text(f"{place}.data", data)).decode()
    except UnicodeDecodeError as error:
        raise InvalidParams(f"{place}.data must be a text in UTF-8, encoded in base64: {error}") from None


def _add_lines(lines: list[str], place: str, value: object, depth: int) -> None:
    if depth == 0:
        raise InvalidParams(f"{place} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        if value:
            lines.append(validation.text(place, value))
    elif isinstance(value, list):
        for item in value:
            _add_lines(lines, place, item, depth - 1)
    elif isinstance(value, Mapping):
        for name, member in value.items():
            _add_member(lines, place, name, member, depth)


def _add_member(lines: list[str], place: str, name: str, member: object, depth: int) -> None:
    if name in _HIDDEN or name.startswith("encrypted_"):
        return
    if name == "source" and isinstance(member, Mapping) and isinstance(member.get("data"), str):
        if text := plain_document(place, member):
            lines.append(text)
    elif name == "input":
        plain = checked_json(place, member, MAX_ARGUMENTS_DEPTH, MAX_ARGUMENTS_BYTES)
        lines.append(f"{name}: {json.dumps(plain, ensure_ascii=False)}")
    elif name in _BODIES or isinstance(member, (list, Mapping)):
        _add_lines(lines, place, member, depth - 1)
    elif member not in (None, ""):
        shown = member if isinstance(member, str) else json.dumps(member)
        lines.append(validation.text(place, f"{name}: {shown}"))
