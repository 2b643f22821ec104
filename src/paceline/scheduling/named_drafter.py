"""Drafters by name: `ngram`, `ngram:size_n=6` or a mapping; `module:attr` for one of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.drafter import Drafter
from paceline.scheduling.named_object import NamedObject
from paceline.scheduling.ngram_drafter import NgramDrafter

_SHIPPED: Mapping[str, type] = {"ngram": NgramDrafter}
_METHODS = ("begin", "propose", "observe", "rollback", "end")


def resolve_drafter(value: str | Mapping[str, Any] | Drafter | None) -> Drafter | None:
    """Return the drafter of a name or of `module:attr`; a drafter itself is returned as is, and None for no speculation.

    A name may have options, as "ngram:size_n=6,size_m=16" or {"name": "ngram", "size_n": 6}. What `module:attr` leads to is
    an instance, or a class that is called with them. Raises `InvalidParams` for a name that is unknown or cannot be loaded
    and for a value that an option cannot have, `InvalidType` for an unknown option and for what is no drafter.
    """
    if value is None:
        return None
    if not isinstance(value, (str, Mapping)):
        return _checked(value, "speculation")
    named = _parsed(value)
    found = _SHIPPED.get(named.name) or named.loaded(partial(validation.import_named, named.name))
    return _checked(named.made(found), f"speculation {named.name!r}")


def check_drafter_name(value: object) -> None:
    """Raise what is wrong with a name and its options as far as that can be said without importing what is not shipped."""
    if isinstance(value, (str, Mapping)):
        if _parsed(value).name in _SHIPPED:
            resolve_drafter(value)
    elif value is not None:
        _checked(value, "speculation")


def _parsed(value: str | Mapping[str, Any]) -> NamedObject:
    named = NamedObject.parse("speculation", value)
    name, colon, rest = named.name.partition(":")
    if colon and name in _SHIPPED:
        raise InvalidParams(f"speculation {name!r} takes options as {name}:KEY=VALUE,KEY=VALUE, not {rest!r:.80}")
    if not colon:
        validation.choice("speculation", name, sorted(_SHIPPED))
    return named


def _checked(value: Any, name: str) -> Drafter:
    if isinstance(value, type):
        raise InvalidType(f"{name} must be a drafter, not the class itself; pass {value.__name__}()")
    missing = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if missing:
        raise InvalidType(
            f"{name} must be a name, or a drafter with the methods {', '.join(_METHODS)}; a {type(value).__name__} has no "
            f"{missing[0]}"
        )
    drafter: Drafter = value
    return drafter
