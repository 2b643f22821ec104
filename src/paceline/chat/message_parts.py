"""Parts of a message's content as texts, and warnings about members that have no effect here. Pure; any thread."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline import validation
from paceline.errors import InvalidParams, InvalidType, Unsupported

TEXT_MEMBERS: Mapping[str, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "reasoning": "text",
}
"""Types of parts that are texts, each with the member that has the text."""
THINKING_TYPES = ("thinking", "reasoning")
UNSUPPORTED_TYPES = ("image_url", "input_audio", "input_video", "file", "image", "audio", "video", "media_marker")

_MAX_KINDS = 16
_MAX_SHOWN = 80
# Members that SDKs and providers add to parts, and that say nothing to a model.
_SILENT = frozenset(
    (
        "annotations cache_control citations closed encrypted_content id index logprobs prompt_cache_breakpoint "
        "provider_metadata provider_options provider_specific_fields providerMetadata providerOptions signature state"
    ).split()
)
_ATTACHMENT_MEMBERS = ("url", "detail", "data", "format")


@dataclass(slots=True)
class IgnoredMembers:
    """Collects members of messages, parts, calls and tools that have no effect here; one warning for each kind, at most 17.

    Attributes:
        places: The first place of each kind, by owner ("message", "part", "call", "tool", "function") and name.
        num_more: Further members, after 16 kinds.
    """

    places: dict[tuple[str, str], str] = field(default_factory=dict)
    num_more: int = 0

    def check(self, place: str, owner: str, value: Mapping[Any, Any], known: Collection[str]) -> None:
        """Collect the members of a value that are not null and not known."""
        for name, member in value.items():
            if member is None or name in known:
                continue
            kind = (owner, str(name)[:_MAX_SHOWN])
            if kind in self.places:
                continue
            if len(self.places) < _MAX_KINDS:
                self.places[kind] = f"{place}.{kind[1]}"
            else:
                self.num_more += 1

    def warnings(self) -> list[str]:
        """Return a sentence for each kind of collected member, and the number of the others."""
        found = [f"{place} has no effect here and was ignored" for place in self.places.values()]
        if self.num_more:
            found.append(f"{self.num_more} more members have no effect here and were ignored")
        return found


def text_of_part(place: str, part: object, ignored: IgnoredMembers) -> tuple[str, str]:
    """Return the type of a text part and its text.

    Raises:
        InvalidParams: The part is malformed, or of an unknown type.
        Unsupported: The part is an image, audio or file.
    """
    if not isinstance(part, Mapping):
        raise InvalidType(f"{place} must be an object with type and text, not {type(part).__name__}")
    kind = part.get("type")
    if isinstance(kind, str) and kind in UNSUPPORTED_TYPES:
        refuse_unsupported(f"{place}.type", f"parts of the type {kind!r}")
    kind = validation.choice(f"{place}.type", kind, tuple(TEXT_MEMBERS))
    name = TEXT_MEMBERS[kind]
    if name not in part:
        raise InvalidParams(f"{place}.{name} is missing")
    ignored.check(place, "part", part, {"type", name} | _SILENT)
    value = part[name]
    if kind == "thinking" and isinstance(value, list):
        texts = []
        for index, inner in enumerate(value):
            if isinstance(inner, Mapping) and inner.get("type") == "thinking":
                raise InvalidParams(f"{place}.thinking[{index}].type must be 'text', not 'thinking'")
            texts.append(text_of_part(f"{place}.thinking[{index}]", inner, ignored)[1])
        return kind, "".join(texts)
    return kind, validation.text(f"{place}.{name}", value)


def check_attachment_part(place: str, part: Mapping[Any, Any], ignored: IgnoredMembers) -> None:
    """Collect the members without an effect of a part that is an image or audio."""
    kind = str(part.get("type"))
    ignored.check(place, "part", part, {"type", kind} | _SILENT)
    value = part.get(kind)
    if isinstance(value, Mapping):
        ignored.check(f"{place}.{kind}", kind, value, _ATTACHMENT_MEMBERS)


def refuse_unsupported(place: str, kind: str) -> NoReturn:
    """Raise `Unsupported` for a known value that is not supported."""
    raise Unsupported(f"{place}: {kind} are not supported yet; leave them out")


MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_BYTES = 1 << 20
MAX_MEMBERS = 4096
"""Of one object: llama.cpp's chat layer takes time with the square of their number."""


def checked_json(place: str, value: object, depth: int, max_bytes: int) -> Any:
    """Return a copy of a value as plain JSON: dict, list, str, int of 64 bits, float, bool and None.

    Raises `InvalidParams` if it is no JSON, nests more than `depth` levels, has an object of more than `MAX_MEMBERS`, or is more
    than max_bytes as JSON.
    """
    plain = _checked(place, value, depth, f"{place} is nested more than {depth} deep")
    size = len(json.dumps(plain, ensure_ascii=False).encode())
    if size > max_bytes:
        raise InvalidParams(f"{place} has {size} bytes as JSON, and may have {max_bytes}")
    return plain


def checked_schema(place: str, schema: object) -> dict[str, Any]:
    """Return a copy of a JSON schema. Raises `InvalidParams` if it is no object, or too large."""
    if not isinstance(schema, Mapping):
        raise InvalidType(f"{place} must be a JSON schema, an object, not {type(schema).__name__}")
    plain: dict[str, Any] = checked_json(place, schema, MAX_SCHEMA_DEPTH, MAX_SCHEMA_BYTES)
    return plain


def _checked(place: str, value: object, depth: int, too_deep: str) -> Any:
    if depth == 0:
        raise InvalidParams(too_deep)
    if isinstance(value, Mapping):
        if len(value) > MAX_MEMBERS:
            raise InvalidParams(f"{place} has {len(value)} members, and may have {MAX_MEMBERS}; divide them")
        return {
            validation.text(f"a name in {place}", key): _checked(f"{place}.{key:.80}", content, depth - 1, too_deep)
            for key, content in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_checked(f"{place}[{index}]", content, depth - 1, too_deep) for index, content in enumerate(value)]
    if isinstance(value, str):
        return validation.text(place, value)
    if value is None or isinstance(value, bool) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, int):
        return validation.integer(place, value, -(2**63), 2**63 - 1)
    return validation.number(place, value)  # raises, or converts NumPy's numbers
