"""Checks of values that have to be JSON: variables of templates, tools and their schemas."""

from __future__ import annotations

from collections.abc import Mapping

from paceline import validation
from paceline.errors import InvalidParams


def check_json(place: str, value: object, depth: int) -> None:
    """Raise `InvalidParams` unless a value is JSON, its integers have 64 bits, and it nests at most `depth` levels."""
    _check(place, value, depth, f"{place.partition('[')[0]} is nested more than {depth} deep")


def _check(place: str, value: object, depth: int, too_deep: str) -> None:
    if depth == 0:
        raise InvalidParams(too_deep)
    if isinstance(value, Mapping):
        for key, content in value.items():
            _check(f"{place}.{validation.text(f'a name in {place}', key)[:80]}", content, depth - 1, too_deep)
    elif isinstance(value, (list, tuple)):
        for index, content in enumerate(value):
            _check(f"{place}[{index}]", content, depth - 1, too_deep)
    elif isinstance(value, str):
        validation.text(place, value)
    elif isinstance(value, int) and not isinstance(value, bool):
        validation.integer(place, value, -(2**63), 2**63 - 1)
    elif value is not None and not isinstance(value, bool):
        validation.number(place, value)
