"""Batch strategies by name, with options: `paced:patience=4` or a mapping, checked against the class that the name leads to.

A name is that of a shipped strategy, any `module:attr`, or an entry point of the group `paceline.batch_strategies`, under which
other packages announce theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.named_object import NamedObject
from paceline.scheduling.strategies import Balanced, DecodeMaximal, Paced, PrefillPriority
from paceline.scheduling.view import BatchStrategy

ENTRY_POINT_GROUP = "paceline.batch_strategies"

_SHIPPED: Mapping[str, type] = {
    "balanced": Balanced,
    "decode_maximal": DecodeMaximal,
    "paced": Paced,
    "prefill_priority": PrefillPriority,
}


def resolve_strategy(value: str | Mapping[str, Any] | BatchStrategy) -> BatchStrategy:
    """Return the strategy of a name, of `module:attr` or of an entry point, in this order; a strategy itself is returned as is.

    A name may have options, as "paced:patience=4,stretch=1.5" or {"name": "paced", "patience": 4, "stretch": 1.5}. What a name
    leads to is an instance, or a class that is called with them. Raises `InvalidParams` for a name that is unknown or cannot
    be loaded and for a value that an option cannot have, `InvalidType` for an unknown option and for what has no method
    `plan`.
    """
    if not isinstance(value, (str, Mapping)):
        return _checked(value, "strategy")
    named = _parsed(value)
    return _checked(named.made(_SHIPPED.get(named.name) or _found(named)), f"strategy {named.name!r}")


def check_strategy_name(value: object) -> None:
    """Raise what is wrong with a name and its options as far as that can be said without importing what is not shipped."""
    if isinstance(value, (str, Mapping)) and _parsed(value).name in _SHIPPED:
        resolve_strategy(value)


def _parsed(value: str | Mapping[str, Any]) -> NamedObject:
    named = NamedObject.parse("strategy", value)
    name, colon, rest = named.name.partition(":")
    if colon and name in _SHIPPED:
        raise InvalidParams(f"strategy {name!r} takes options as {name}:KEY=VALUE,KEY=VALUE, not {rest!r:.80}")
    return named


def _found(named: NamedObject) -> Any:
    name = named.name
    return named.loaded(partial(validation.import_named, name) if ":" in name else _announced(name))


def _announced(name: str) -> Callable[[], Any]:
    """Return the loader of the entry point of this name."""
    points = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    try:
        return points[validation.choice("strategy", name, sorted({*_SHIPPED, *points}))].load
    except InvalidParams as error:
        raise InvalidParams(f"{error}; one of your own is given as 'module:attr' or as an object") from None


def _checked(value: Any, name: str) -> BatchStrategy:
    if isinstance(value, type):
        raise InvalidType(f"{name} must be an object with a method plan, not the class itself; pass {value.__name__}()")
    if not callable(getattr(value, "plan", None)):
        raise InvalidType(
            f"{name} must be an object with a method plan, or name one; a {type(value).__name__} has none"
        )
    strategy: BatchStrategy = value
    return strategy
