"""Objects by name, with options: `paced:patience=4` or a mapping, checked against the class that the name leads to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
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
    """The name of a strategy or a drafter, `module:attr` or entry point, and its options.

    kind: what it names, as errors say it. is_text: whether the options' values are still text.
    """

    kind: str
    name: str
    options: Mapping[str, Any]
    is_text: bool = False

    @classmethod
    def parse(cls, kind: str, value: str | Mapping[str, Any]) -> NamedObject:
        """Read "name", "name:key=value,key=value" or a mapping with a "name" and options. Raises `InvalidParams`."""
        if isinstance(value, str):
            found = _TEXT.fullmatch(value)
            if found is None:
                return cls(kind, value, {})
            return cls(kind, found["name"], _pairs(kind, value, found["options"]), is_text=True)
        options = {validation.text(f"{kind}: the key", key): each for key, each in value.items()}
        if "name" not in options:
            raise InvalidParams(
                f"{kind} is a mapping without the key 'name', which says whose options they are: {value!r:.80}"
            )
        return cls(kind, validation.text(f"{kind}['name']", options.pop("name")), options)

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
                f"{self.kind} {self.name!r} leads to a {type(made_by).__name__} that is made already, and takes no options; "
                "name its class"
            )
        known = _hints(made_by)
        if None not in known:
            self._reject_unknown({name for name in known if name is not None})
        return {name: self._value(name, known.get(name, Any), each) for name, each in self.options.items()}

    def made(self, found: Any) -> Any:
        """Return what the name leads to; of a class an instance, with the options. Raises `InvalidParams`, `InvalidType`."""
        arguments = self.arguments(found)
        if not isinstance(found, type):
            return found
        try:
            return found(**arguments)
        except InvalidParams as error:
            raise type(error)(f"{self.kind} {self.name!r}: {error}") from error
        except Exception as error:  # whatever a constructor may raise
            raise self.not_loaded(error) from error

    def loaded(self, load: Callable[[], Any]) -> Any:
        """Return what a loader returns. Raises `InvalidParams` where it fails."""
        try:
            return load()
        except Exception as error:  # whatever an import may raise
            raise self.not_loaded(error) from error

    def not_loaded(self, error: Exception) -> InvalidParams:
        """Return the error of a name that leads to nothing."""
        return InvalidParams(f"{self.kind} {self.name!r} cannot be loaded: {type(error).__name__}: {error}")

    def _reject_unknown(self, known: set[str]) -> None:
        if not known:
            raise InvalidType(f"{self.kind} {self.name!r} takes no options, not {next(iter(self.options))!r:.80}")
        try:
            validation.reject_unknown(self.options, known)
        except InvalidType as error:
            raise InvalidType(f"{self.kind} {self.name!r}: {error}") from None

    def _value(self, name: str, hint: Any, value: Any) -> Any:
        label = f"{self.kind} {self.name!r}: {name}"
        return _of_text(label, hint, value) if self.is_text else _of_type(label, hint, value)


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
