"""Batch strategies by name: the four that come along, any `module:attr`, and those that other packages announce.

A package announces one under the entry point group `paceline.batch_strategies`. Each is loaded when it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial, reduce
from importlib.metadata import entry_points
from typing import Any

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.view import BatchStrategy

ENTRY_POINT_GROUP = "paceline.batch_strategies"

_SHIPPED = {
    "balanced": "paceline.scheduling.strategies.balanced:Balanced",
    "decode_maximal": "paceline.scheduling.strategies.decode_maximal:DecodeMaximal",
    "paced": "paceline.scheduling.strategies.paced:Paced",
    "prefill_priority": "paceline.scheduling.strategies.prefill_priority:PrefillPriority",
}


def resolve_strategy(value: str | BatchStrategy) -> BatchStrategy:
    """The strategy of a name, of `module:attr` or of an entry point, in this order; a strategy itself is answered as it is.

    What a name leads to is an instance, or a class that is called without arguments. Raises `InvalidParams` for a name
    that is unknown or cannot be loaded, `InvalidType` for what has no method `plan`.
    """
    if not isinstance(value, str):
        return _checked(value, "strategy")
    path = _SHIPPED.get(value, value)
    load = partial(_load, path) if ":" in path else _announced(value)
    try:
        found = load()
        made = found() if isinstance(found, type) else found
    except Exception as error:  # whatever an import may raise
        raise InvalidParams(f"strategy {value!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return _checked(made, f"strategy {value!r}")


def _load(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return reduce(getattr, attribute.split("."), importlib.import_module(module))


def _announced(name: str) -> Callable[[], Any]:
    """What loads the entry point of this name."""
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
