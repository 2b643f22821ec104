"""Batch strategies by name, with options: the four that come along, any `module:attr`, and those that other packages announce.

A package announces one under the entry point group `paceline.batch_strategies`. Each is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial, reduce
from importlib.metadata import entry_points
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.strategies.options import NamedStrategy
from paceline.scheduling.view import BatchStrategy

ENTRY_POINT_GROUP = "paceline.batch_strategies"

_SHIPPED = {
    "balanced": "paceline.scheduling.strategies.balanced:Balanced",
    "decode_maximal": "paceline.scheduling.strategies.decode_maximal:DecodeMaximal",
    "paced": "paceline.scheduling.strategies.paced:Paced",
    "prefill_priority": "paceline.scheduling.strategies.prefill_priority:PrefillPriority",
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
    path = _SHIPPED.get(named.name, named.name)
    load = partial(_load, path) if ":" in path else _announced(named.name)
    try:
        found = load()
    except Exception as error:  # whatever an import may raise
        raise _not_loaded(named.name, error) from error
    return _checked(_made(named, found), f"strategy {named.name!r}")


def check_strategy_name(value: object) -> None:
    """Raise what is wrong with a name and its options as far as that can be said without importing what is not shipped."""
    if isinstance(value, (str, Mapping)) and _parsed(value).name in _SHIPPED:
        resolve_strategy(value)


def _parsed(value: str | Mapping[str, Any]) -> NamedStrategy:
    named = NamedStrategy.parse(value)
    name, colon, rest = named.name.partition(":")
    if colon and name in _SHIPPED:
        raise InvalidParams(f"strategy {name!r} takes options as {name}:KEY=VALUE,KEY=VALUE, not {rest!r:.80}")
    return named


def _made(named: NamedStrategy, found: Any) -> Any:
    arguments = named.arguments(found)
    if not isinstance(found, type):
        return found
    try:
        return found(**arguments)
    except InvalidParams as error:
        raise type(error)(f"strategy {named.name!r}: {error}") from error
    except Exception as error:  # whatever a constructor may raise
        raise _not_loaded(named.name, error) from error


def _not_loaded(name: str, error: Exception) -> InvalidParams:
    return InvalidParams(f"strategy {name!r} cannot be loaded: {type(error).__name__}: {error}")


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


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
