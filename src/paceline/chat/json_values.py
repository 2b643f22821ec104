"""Checks of values that have to be JSON: variables of templates, tools and their schemas."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType

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
    """Return a copy of a JSON schema. Raises `InvalidParams` where it is no object, or too large."""
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
