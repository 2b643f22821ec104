"""The base of every JSON body, and the check of fields that are unknown, without effect or not supported.

All dialects use this one check. An unknown field is ignored with a warning, or refused if the server has
`--strict-fields`. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, field_validator

from paceline import validation
from paceline.errors import InvalidType, Unsupported
from paceline.server.api_errors import ApiException, clean_message, invalid_request

_MAX_WARNINGS = 32
_MAX_UNKNOWN = 16  # that are named, with a hint each
_MAX_NAME_CHARS = 80
_ASKS_FOR_NOTHING: tuple[Any, ...] = (None, 0, -1, False, {}, [], "")
_MAX_WHOLE = 2.0**64


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRules:
    """How fields are treated that the endpoint does not act on.

    Attributes:
        without_effect: Undeclared fields that clients send and that change nothing here; a warning.
        declared_without_effect: Declared fields of this kind.
        unsupported: Fields that would change the output, with the way out; an error.
        harmless: Values of these fields that ask for nothing, beside null, 0, -1, false and empty values.
        renamed: Undeclared fields that are another name of a declared one; no warning.
        hints: Sentences about unknown fields, in place of the nearest known name.
    """

    without_effect: Collection[str] = ()
    declared_without_effect: Collection[str] = ()
    unsupported: Mapping[str, str] = field(default_factory=dict)
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    renamed: Collection[str] = ()
    hints: Mapping[str, str] = field(default_factory=dict)


_NO_RULES = FieldRules()

T = TypeVar("T")
Unchecked = Annotated[T | None, SkipValidation]
"""The type of a field that may be large: it is checked in a thread when it is read."""


def optional(description: str, **rules: Any) -> Any:
    """Return a field of a body that may be absent. rules: keywords of pydantic's `Field`."""
    return Field(None, description=description, **rules)


class RequestBody(BaseModel):
    """A JSON object of a request. Undeclared fields are kept for `field_warnings`; null counts as absent.

    Strict: a bool is no number, a text is no number, and a number with a fraction is no integer. NaN and infinities are
    refused. A whole float such as 100.0 is an integer, as in JSON Schema.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    rules: ClassVar[FieldRules] = _NO_RULES

    @field_validator("*", mode="before")
    @classmethod
    def _without_fraction(cls, value: Any) -> Any:
        return without_fractions(value) if isinstance(value, float) else value  # lists may be long: see their readers

    def field_warnings(self, *, strict: bool = False, place: str = "") -> list[str]:
        """Return a warning for each field that is ignored, also for fields of nested objects.

        Args:
            strict: Whether unknown fields are refused.
            place: The path of this object within the body, with a dot at its end.

        Raises:
            ApiException: A field is not supported, or unknown if strict.
        """
        declared = type(self).model_fields
        given = {name: getattr(self, name) for name in declared if name in self.model_fields_set}
        warnings = check_fields({**given, **(self.model_extra or {})}, declared, self.rules, strict=strict, place=place)
        for name, value in given.items():
            if isinstance(value, RequestBody):
                warnings += value.field_warnings(strict=strict, place=f"{place}{name}.")
        return warnings


def without_fractions(value: Any) -> Any:
    """Return a whole float such as 100.0 as an integer, also in a list of numbers; any other value unchanged.

    Languages without integers write whole numbers as floats, and JSON has one kind of number.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MAX_WHOLE else value
    if isinstance(value, list) and float in set(map(type, value)):
        return [without_fractions(item) if isinstance(item, float) else item for item in value]
    return value


def check_fields(
    fields: Mapping[str, Any],
    known: Collection[str],
    rules: FieldRules = _NO_RULES,
    *,
    strict: bool = False,
    place: str = "",
) -> list[str]:
    """Return a warning for each field of an object that is ignored. A field that is null is absent.

    Args:
        fields: The object.
        known: The names that the endpoint acts on.
        rules: The treatment of other names.
        strict: Whether unknown fields are refused.
        place: The path of the object within the body, with a dot at its end.

    Raises:
        ApiException: A field is not supported, or unknown if strict.
    """
    warnings: list[str] = []
    unknown: list[str] = []
    for name, value in fields.items():
        if value is None:
            continue
        asks = value not in _ASKS_FOR_NOTHING and value not in rules.harmless.get(name, ())
        if name in rules.unsupported:
            if asks:
                raise _refusal(place, name, f"is not supported here; {rules.unsupported[name]}", Unsupported.code)
        elif name in rules.declared_without_effect or (name in rules.without_effect and name not in known):
            if asks:
                warnings.append(f"{place}{name} has no effect here and was ignored")
        elif name not in known and name not in rules.renamed:
            unknown.append(name)
    return warnings + _unknown_warnings(unknown, [*known, *rules.renamed], rules, strict=strict, place=place)


def _unknown_warnings(
    unknown: Sequence[str], known: Collection[str], rules: FieldRules, *, strict: bool, place: str
) -> list[str]:
    if unknown and strict:
        hint = _hint(unknown[0], known, rules) or "; /docs lists the fields"
        raise _refusal(place, unknown[0], f"is not a field of this endpoint{hint}", "unknown_parameter")
    warnings = [
        f"{place}{_shown(name)} is not a field of this endpoint and was ignored{_hint(name, known, rules)}"
        for name in unknown[:_MAX_UNKNOWN]
    ]
    if len(unknown) > _MAX_UNKNOWN:
        warnings.append(f"{len(unknown) - _MAX_UNKNOWN} more unknown fields were ignored")
    return warnings


def cap_warnings(warnings: Sequence[str]) -> tuple[str, ...]:
    """Return the first warnings and the number of the others, so that a response stays smaller than its request."""
    rest = len(warnings) - _MAX_WARNINGS
    if rest <= 0:
        return tuple(warnings)
    return (*warnings[:_MAX_WARNINGS], f"and {rest} more warning{'s' if rest > 1 else ''}")


def warned(warnings: Sequence[str]) -> dict[str, Any]:
    """Return the member of a response that has its warnings; no member without warnings."""
    return {"warnings": warnings} if warnings else {}


def _refusal(place: str, name: str, reason: str, code: str) -> ApiException:
    return invalid_request(f"{place}{_shown(name)} {reason}", clean_message(place + name[:_MAX_NAME_CHARS]), code)


def _hint(name: str, known: Collection[str], rules: FieldRules) -> str:
    if name in rules.hints:
        return f"; {rules.hints[name]}"
    near = validation.nearest_names(name[:_MAX_NAME_CHARS], known)
    return f"; did you mean {near[0]}?" if near else ""


def _shown(name: str) -> str:
    return name if name.isidentifier() and len(name) <= _MAX_NAME_CHARS else repr(name[:_MAX_NAME_CHARS])


def checked_object(place: str, value: object, shape: str = "an object") -> Mapping[str, Any]:
    """Return a value that is an object. Raises `InvalidType`, which names the place and the shape, for any other value."""
    if not isinstance(value, Mapping):
        raise InvalidType(f"{place} must be {shape}, not {type(value).__name__}")
    return value


def checked_list(place: str, value: object, shape: str = "a list") -> list[Any]:
    """Return a value that is a list. Raises `InvalidType`, which names the place and the shape, for any other value."""
    if not isinstance(value, list):
        raise InvalidType(f"{place} must be {shape}, not {type(value).__name__}")
    return value
