"""Objects by name with options, like `paced:patience=4`, for strategies and drafters.

The options are checked against the constructor of the class that the name leads to.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from paceline import validation
from paceline.errors import InvalidParams, InvalidType

_TEXT = re.compile(r"(?P<name>[^:=]*(?::[^:=]*)?):(?P<options>[^\W\d]\w*\s*=.*)", re.DOTALL)
_PAIR = re.compile(r"\s*(?P<key>[^\W\d]\w*)\s*=(?P<value>[^,]*)")
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_BOOLEANS = {"true": True, "on": True, "false": False, "off": False}


@dataclass(frozen=True, slots=True)
class NamedObject:
    """The name of a strategy or a drafter and its options.

    kind: "strategy" or "speculation", for errors. is_text: whether the values of the options are still text.
    """

    kind: str
    name: str
    options: Mapping[str, Any]
    is_text: bool = False

    @classmethod
    def parse(cls, kind: str, value: str | Mapping[str, Any], shipped: Container[str] = ()) -> NamedObject:
        """Read "name", "name:key=value,key=value" or a mapping with a "name" and options. Raises `InvalidParams`.

        shipped: names that take options only in this form; any other name may be `module:attr`.
        """
        if isinstance(value, str) and (found := _TEXT.fullmatch(value)) is not None:
            named = cls(kind, found["name"], _pairs(kind, value, found["options"]), is_text=True)
        elif isinstance(value, str):
            named = cls(kind, value, {})
        else:
            options = {validation.text(f"{kind}: the key", key): option for key, option in value.items()}
            if "name" not in options:
                raise InvalidParams(
                    f"{kind} is a mapping without the key 'name', which says whose options they are: {value!r:.80}"
                )
            named = cls(kind, validation.text(f"{kind}['name']", options.pop("name")), options)
        name, colon, rest = named.name.partition(":")
        if colon and name in shipped:
            raise InvalidParams(f"{kind} {name!r} takes options as {name}:KEY=VALUE,KEY=VALUE, not {rest!r:.80}")
        return named

    def make(self, load: Callable[[], Any]) -> Any:
        """Return the result of `load`; if that is a class, an instance made with the options.

        Raises `InvalidParams` if loading or the constructor fails or a value has another type, and `InvalidType` for an unknown
        option, with the nearest known one.
        """
        try:
            found = load()
        except Exception as error:  # whatever an import may raise
            raise self._not_loaded(error) from error
        arguments = self._arguments(found)
        if not isinstance(found, type):
            return found
        try:
            return found(**arguments)
        except InvalidParams as error:
            raise type(error)(f"{self.kind} {self.name!r}: {error}") from error
        except Exception as error:  # whatever a constructor may raise
            raise self._not_loaded(error) from error

    def _not_loaded(self, error: Exception) -> InvalidParams:
        return InvalidParams(f"{self.kind} {self.name!r} cannot be loaded: {type(error).__name__}: {error}")

    def _arguments(self, made_by: object) -> dict[str, Any]:
        """Return the options as keyword arguments of a class, with the types of its annotations.

        Text without an annotation is read as an integer, a number, true or false if it looks like one.
        """
        if not self.options:
            return {}
        if not isinstance(made_by, type):
            raise InvalidParams(
                f"{self.kind} {self.name!r} leads to a {type(made_by).__name__} that is made already, and takes no options; "
                "name its class"
            )
        known = _hints(made_by)
        if None not in known:
            names = {name for name in known if name is not None}
            if not names:
                raise InvalidType(f"{self.kind} {self.name!r} takes no options, not {next(iter(self.options))!r:.80}")
            try:
                validation.reject_unknown(self.options, names)
            except InvalidType as error:
                raise InvalidType(f"{self.kind} {self.name!r}: {error}") from None
        read = _of_text if self.is_text else _of_type
        return {
            name: read(f"{self.kind} {self.name!r}: {name}", known.get(name, Any), value)
            for name, value in self.options.items()
        }


def _pairs(kind: str, value: str, options: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in options.split(","):
        pair = _PAIR.fullmatch(part)
        if pair is None:
            raise InvalidParams(
                f"{kind} must be NAME:KEY=VALUE with commas between options, not {value!r:.80}; a value with a comma "
                "needs the mapping form"
            )
        if pair["key"] in found:
            raise InvalidParams(f"{kind} names the option {pair['key']!r} twice: {value!r:.80}")
        found[pair["key"]] = pair["value"].strip()
    return found


def _hints(made_by: type) -> dict[str | None, Any]:
    """Return the keywords of the constructor with their types; None is among them if it takes any keyword."""
    try:
        parameters = inspect.signature(made_by, eval_str=True).parameters.values()
    except Exception:  # noqa: BLE001 - annotations may name imports that only type checkers make
        parameters = inspect.signature(made_by).parameters.values()
    named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found: dict[str | None, Any] = {
        each.name: Any if each.annotation is each.empty or isinstance(each.annotation, str) else each.annotation
        for each in parameters
        if each.kind in named
    }
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        found[None] = Any
    return found


def _of_text(label: str, hint: Any, text: str) -> Any:
    kinds = list(_kinds(hint))
    if NoneType in kinds and text == "none":
        return None
    for kind in kinds:
        if (found := _literal(kind, text)) is not None:
            return found
    return _of_type(label, hint, text)


def _literal(kind: Any, text: str) -> Any:
    """Return the text as a value of this type; None if it is none."""
    if kind in (int, Any) and _INTEGER.fullmatch(text):
        return int(text)
    if kind in (float, Any) and _NUMBER.fullmatch(text):
        return float(text)
    if kind in (bool, Any) and text in _BOOLEANS:
        return _BOOLEANS[text]
    return text if kind in (str, Any) else None


def _of_type(label: str, hint: Any, value: Any) -> Any:
    """Return the value, checked if its type is a simple one; the constructor checks other types."""
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
    """Return the members of a union, or the single type; integers before numbers, and texts last."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    order = [NoneType, bool, int, float]
    yield from sorted(members, key=lambda kind: order.index(kind) if kind in order else len(order))
