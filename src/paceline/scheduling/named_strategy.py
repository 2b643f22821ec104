"""Batch strategies by name, with options: `paced:patience=4` or a mapping, checked against the class that the name leads to.

A name is that of a shipped strategy, any `module:attr`, or an entry point of the group `paceline.batch_strategies`, under which
other packages announce theirs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from paceline import validation
from paceline.errors import InvalidParams, InvalidType
from paceline.scheduling.strategies import Balanced, DecodeMaximal, Paced, PrefillPriority
from paceline.scheduling.view import BatchStrategy

ENTRY_POINT_GROUP = "paceline.batch_strategies"

_SHIPPED: Mapping[str, type] = {
    "balanced": Balanced,
    "decode_maximal": DecodeMaximal,
    "paced": Paced,
    "prefill_priority": PrefillPriority,
}

_TEXT = re.compile(r"(?P<name>[^:=]*(?::[^:=]*)?):(?P<options>[^\W\d]\w*\s*=.*)", re.DOTALL)
_PAIR = re.compile(r"\s*(?P<key>[^\W\d]\w*)\s*=(?P<value>[^,]*)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_BOOLEANS = {"true": True, "on": True, "false": False, "off": False}


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
    return _checked(_made(named, _SHIPPED.get(named.name) or _found(named.name)), f"strategy {named.name!r}")


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


def _found(name: str) -> Any:
    load = partial(validation.import_named, name) if ":" in name else _announced(name)
    try:
        return load()
    except Exception as error:  # whatever an import may raise
        raise _not_loaded(name, error) from error


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


@dataclass(frozen=True, slots=True)
class NamedStrategy:
    """A strategy's name, `module:attr` or entry point, and its options. is_text: whether their values are still text."""

    name: str
    options: Mapping[str, Any]
    is_text: bool = False

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> NamedStrategy:
        """Read "name", "name:key=value,key=value" or a mapping with a "name" and options. Raises `InvalidParams`."""
        if isinstance(value, str):
            found = _TEXT.fullmatch(value)
            return (
                cls(value, {}) if found is None else cls(found["name"], _pairs(value, found["options"]), is_text=True)
            )
        options = {validation.text("strategy: the key", key): each for key, each in value.items()}
        if "name" not in options:
            raise InvalidParams(
                f"strategy is a mapping without the key 'name', which says whose options they are: {value!r:.80}"
            )
        return cls(validation.text("strategy['name']", options.pop("name")), options)

    def arguments(self, made_by: object) -> dict[str, Any]:
        """Return the options as keyword arguments of the class that the name leads to.

        Values have the types of its annotations; without one, text is read as an integer, a number, true or false where it
        looks like one. Raises `InvalidType` for an unknown option, with the nearest known one, and `InvalidParams` for a
        value of another type.
        """
        if not self.options:
            return {}
        if not isinstance(made_by, type):
            raise InvalidParams(
                f"strategy {self.name!r} leads to a {type(made_by).__name__} that is made already, and takes no options; "
                "name its class"
            )
        known = _hints(made_by)
        if None not in known:
            self._reject_unknown({name for name in known if name is not None})
        return {name: self._value(name, known.get(name, Any), each) for name, each in self.options.items()}

    def _reject_unknown(self, known: set[str]) -> None:
        if not known:
            raise InvalidType(f"strategy {self.name!r} takes no options, not {next(iter(self.options))!r:.80}")
        try:
            validation.reject_unknown(self.options, known)
        except InvalidType as error:
            raise InvalidType(f"strategy {self.name!r}: {error}") from None

    def _value(self, name: str, hint: Any, value: Any) -> Any:
        label = f"strategy {self.name!r}: {name}"
        return _of_text(label, hint, value) if self.is_text else _of_type(label, hint, value)


def _pairs(value: str, options: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in options.split(","):
        pair = _PAIR.fullmatch(part)
        if pair is None:
            raise InvalidParams(
                f"strategy must be NAME:KEY=VALUE with commas between options, not {value!r:.80}; a value with a comma "
                "needs the mapping form"
            )
        if pair["key"] in found:
            raise InvalidParams(f"strategy names the option {pair['key']!r} twice: {value!r:.80}")
        found[pair["key"]] = pair["value"].strip()
    return found


def _hints(made_by: type) -> dict[str | None, Any]:
    """Keywords of the constructor and their types; None among them where it takes any keyword."""
    try:
        parameters = inspect.signature(made_by, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 - annotations may name what is imported for type checkers alone
        parameters = inspect.signature(made_by).parameters.values()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found: dict[str | None, Any] = {one.name: _hint(one.annotation) for one in parameters if one.kind in named}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        found[None] = Any
    return found


def _hint(annotation: Any) -> Any:
    return Any if annotation is inspect.Parameter.empty or isinstance(annotation, str) else annotation


def _of_text(label: str, hint: Any, text: str) -> Any:
    kinds = list(_kinds(hint))
    if NoneType in kinds and text == "none":
        return None
    for kind in kinds:
        if (found := _literal(kind, text)) is not None:
            return found
    return _of_type(label, hint, text)


def _literal(kind: Any, text: str) -> Any:
    """Return the text as a value of this type; None where it is none."""
    if kind in (int, Any) and _INTEGER.fullmatch(text):
        return int(text)
    if kind in (float, Any) and _NUMBER.fullmatch(text):
        return float(text)
    if kind in (bool, Any) and text in _BOOLEANS:
        return _BOOLEANS[text]
    return text if kind in (str, Any) else None


def _of_type(label: str, hint: Any, value: Any) -> Any:
    """Return the value, checked where its type is a simple one; of others the constructor decides."""
    kinds = list(_kinds(hint))
    if get_origin(hint) is Literal:
        return validation.choice(label, value, get_args(hint))
    checks: dict[Any, Callable[[str, object], Any]] = {
        int: validation.integer,
        float: validation.number,
        bool: validation.boolean,
        str: validation.text,
    }
    if not all(kind in checks or kind is NoneType for kind in kinds):
        return value
    if value is None and NoneType in kinds:
        return None
    wanted = [kind for kind in kinds if kind is not NoneType]
    fitting = next((kind for kind in wanted if type(value) is kind), wanted[-1])
    return checks[fitting](label, value)


def _kinds(hint: Any) -> Iterator[Any]:
    """Return the members of a union, or the one type; integers before numbers, and texts last."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    order = [NoneType, bool, int, float]
    yield from sorted(members, key=lambda kind: order.index(kind) if kind in order else len(order))
