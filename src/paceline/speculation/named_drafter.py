"""Drafters by name: `ngram`, `ngram:size_n=6` or a mapping; `module:attr` for a drafter of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.named_object import NamedObject
from paceline.speculation.drafter import Drafter, Drafters
from paceline.speculation.drafters.heads import DFlashDrafter, Eagle3Drafter, HeadsDrafter, MtpDrafter
from paceline.speculation.drafters.ngram import NgramDrafter

_SHIPPED: Mapping[str, type] = {
    "dflash": DFlashDrafter,
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
    "ngram": NgramDrafter,
}
DRAFT_MODEL = "draft-model"
"""The name of a draft model among drafters; it is loaded with the engine."""
_HEADS = frozenset({"dflash", "eagle3", "mtp"})
_OPTION = re.compile(r"\s*[^\W\d]\w*\s*=[^,]*")
_METHODS = ("begin", "propose", "observe", "rollback", "end")


def resolve_drafter(
    value: str | Mapping[str, Any] | Drafter | Iterable[Any] | None, draft_model: Drafter | None = None
) -> Drafter | Drafters | None:
    """Return the drafter of a name or of `module:attr`; a drafter itself is returned as is, and None for no speculation.

    A name may have options, as "ngram:size_n=6,size_m=16" or {"name": "ngram", "size_n": 6}. `module:attr` leads to a drafter or
    to a class, which is called with the options. Several, as "ngram,draft-model" or in a list, become a tuple. draft_model: the
    drafter named "draft-model". Raises `InvalidParams` for a name that is unknown or cannot be loaded, for a wrong value of an
    option and for an empty list, `InvalidType` for an unknown option and for an object that is no drafter.
    """
    if value is None:
        return None
    drafters = tuple(_resolved(part, draft_model) for part in drafter_parts(value))
    if len(set(map(id, drafters))) < len(drafters):
        raise InvalidParams("speculation has the same drafter twice; leave one out, or make two")
    return drafters if len(drafters) > 1 else drafters[0]


def check_drafter_name(value: object) -> None:
    """Raise the errors of a name and its options that can be found without importing code that is not shipped."""
    for part in () if value is None else drafter_parts(value):
        if not isinstance(part, (str, Mapping)):
            _checked(part, "speculation")
        elif _parsed(part).name in _SHIPPED:
            _resolved(part)


def drafter_parts(value: Any) -> list[Any]:
    """Return the value of each drafter: the parts of a text, the members of a list. Raises `InvalidParams` for an empty list."""
    if isinstance(value, str):
        return _texts(value)
    if not isinstance(value, (list, tuple)):
        return [value]
    if not value:
        raise InvalidParams("speculation is an empty list; name a drafter in it, or leave speculation out")
    return [part for member in value for part in (_texts(member) if isinstance(member, str) else [member])]


def _texts(text: str) -> list[str]:
    """Return the parts of "ngram:size_n=6,size_m=16,draft-model": a part KEY=VALUE belongs to the options before it."""
    found: list[str] = []
    for part in text.split(","):
        if found and _OPTION.fullmatch(part):
            found[-1] += f",{part}"
        else:
            found.append(part.strip())
    return found


def _resolved(value: Any, draft_model: Drafter | None = None) -> Drafter:
    if not isinstance(value, (str, Mapping)):
        return _checked(value, "speculation")
    named = _parsed(value)
    if named.name == DRAFT_MODEL:
        if draft_model is None:
            raise InvalidParams(f"speculation {DRAFT_MODEL!r} needs a model: give draft_model=PATH")
        return draft_model
    found = _SHIPPED.get(named.name, named.name)
    made = named.make(partial(validation.import_named, found) if isinstance(found, str) else lambda: found)
    return made if named.name in _HEADS else _checked(made, f"speculation {named.name!r}")


def draft_heads_of(value: Any) -> HeadsDrafter | None:
    """Return the draft heads among the named drafters, which a model is loaded with. Raises `InvalidParams` for several."""
    parts = () if value is None else drafter_parts(value)
    found = [_resolved(part) for part in parts if isinstance(part, (str, Mapping)) and _parsed(part).name in _HEADS]
    if len(found) > 1:
        raise InvalidParams("speculation names draft heads twice, and one kind of them follows a model; leave one out")
    return found[0] if found and isinstance(found[0], HeadsDrafter) else None


def _parsed(value: str | Mapping[str, Any]) -> NamedObject:
    named = NamedObject.parse("speculation", value, _SHIPPED)
    name, colon, _ = named.name.partition(":")
    if name in ("ngram-cache", "ngram-mod"):
        raise InvalidParams(
            f"speculation {name!r} is no drafter any more, since 'ngram', which looks up a request's own tokens, saves more "
            "passes; give 'ngram'"
        )
    if name == DRAFT_MODEL:
        if colon or named.options:
            raise InvalidParams(
                f"speculation {DRAFT_MODEL!r} takes its options as draft_options, not here: {value!r:.80}"
            )
    elif not colon:
        validation.choice("speculation", name, sorted((*_SHIPPED, DRAFT_MODEL)))
    return named


def _checked(value: Any, name: str) -> Drafter:
    if isinstance(value, type):
        raise InvalidType(f"{name} must be a drafter, not the class itself; pass {value.__name__}()")
    missing = [method for method in _METHODS if not callable(getattr(value, method, None))]
    if missing:
        raise InvalidType(
            f"{name} must be a name, a list of such, or a drafter with the methods {', '.join(_METHODS)}; a "
            f"{type(value).__name__} has no {missing[0]}"
        )
    if isinstance(value, HeadsDrafter):
        raise InvalidParams(
            f"{name} must name draft heads, as 'mtp', 'eagle3:model=FILE' or 'dflash:model=FILE': the model is loaded with them"
        )
    drafter: Drafter = value
    return drafter
