"""JSON schemas of types, by pydantic, narrow enough that nearly every value of a schema is an instance of its type.

Pydantic's own schemas are wider than its types: a Decimal is any text, an HttpUrl is any URI, a key of `dict[int, str]` is any
name. This module is imported with pydantic, when the first type is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

_MAX_PLACES: Final = 9  # of decimals that llguidance can count
_MAX_DIGITS: Final = 300  # before the point, of numbers that a float can have
_LABEL: Final = "[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST: Final = rf"(?:{_LABEL}\.)*[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?"
_PORT: Final = "(?::[1-9][0-9]{0,3})?"
_USER: Final = "(?:[A-Za-z0-9._~-]+(?::[A-Za-z0-9._~-]+)?@)?"
_PATH: Final = "[A-Za-z0-9._~!$&'()*+,;=:@%/-]*"
_AFTER_HOST: Final = rf"(?:/{_PATH})?(?:\?{_PATH})?(?:#{_PATH})?"

_LEAP_YEAR: Final = "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"
_DATE: Final = (
    "(?:[1-9][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
_ZONE: Final = "(?:Z|[+-](?:0[0-9]|1[0-4]):[0-5][0-9])"
_DAYS, _HOURS, _MINUTES, _SECONDS = (f"(?:[0-9]{{1,4}}{unit})" for unit in "DHMS")
_BYTE: Final = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_NETWORK: Final = (
    rf"^(?:{_BYTE}\.0\.0\.0/8|(?:{_BYTE}\.){{2}}0\.0/16|(?:{_BYTE}\.){{3}}0/24|(?:{_BYTE}\.){{3}}{_BYTE}/32)$"
)
_PATTERNS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}(?:{_ZONE})?$",
    "date-time": f"^{_DATE}T{_TIME}{_ZONE}$",
    "duration": f"^-?P(?:{_DAYS}|{_DAYS}?T(?:{_HOURS}{_MINUTES}?{_SECONDS}?|{_MINUTES}{_SECONDS}?|{_SECONDS}))$",
    "ipv4network": _NETWORK,
    "ipvanynetwork": _NETWORK,
    "email": rf"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@(?:{_LABEL}\.)+[a-z]{{2,}}$",
}
"""Patterns of texts that pydantic takes, by format."""
_INTEGER: Final = "^(?:0|-?[1-9][0-9]{0,15})$"
_KEYS: Final[dict[str, Any]] = {
    "int": {"pattern": _INTEGER},
    "float": {"pattern": r"^-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,16})?$"},
    "decimal": {"pattern": r"^-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,16})?$"},
    "bool": {"enum": ["true", "false"]},
}
"""Names of properties that are keys of a type."""


class TypeSchemas(GenerateJsonSchema):
    """Writes narrower schemas than pydantic for types whose schemas are too wide."""

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Write a number. Pydantic also allows a text, which has no bounds."""
        bounds = {
            keyword: float(schema[name])  # type: ignore[literal-required]
            for keyword, name in _BOUNDS.items()
            if schema.get(name) is not None and math.isfinite(float(schema[name]))  # type: ignore[literal-required]
        }
        places, digits, step = schema.get("decimal_places"), schema.get("max_digits"), schema.get("multiple_of")
        if step is not None:
            bounds["multipleOf"] = float(step)
        elif places is not None and places <= _MAX_PLACES:
            bounds["multipleOf"] = float(Decimal(1).scaleb(-places)) if places else 1
        if digits is not None and digits - (places or 0) <= _MAX_DIGITS:
            limit = float(10 ** max(0, digits - (places or 0)))
            if not {"minimum", "exclusiveMinimum"} & bounds.keys():
                bounds["exclusiveMinimum"] = -limit
            if not {"maximum", "exclusiveMaximum"} & bounds.keys():
                bounds["exclusiveMaximum"] = limit
        return {"type": "number", **bounds}

    def url_schema(self, schema: core_schema.UrlSchema) -> JsonSchemaValue:
        """Write a pattern with the schemes that are allowed."""
        schemes = schema.get("allowed_schemes") or ["https", "http"]
        if schemes == ["file"]:
            return _text(rf"^file:///{_PATH}$", schema)
        return _text(rf"^(?:{_alternatives(schemes)})://{_HOST}{_PORT}{_AFTER_HOST}$", schema)

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        """Write a pattern with the schemes that are allowed, for one host or several."""
        schemes = schema.get("allowed_schemes") or ["https", "http"]
        hosts = rf"{_HOST}{_PORT}(?:,{_HOST}{_PORT})*"
        return _text(rf"^(?:{_alternatives(schemes)})://{_USER}{hosts}{_AFTER_HOST}$", schema)

    def datetime_schema(self, schema: core_schema.DatetimeSchema) -> JsonSchemaValue:
        """Write a time without its zone if it may have none."""
        if schema.get("tz_constraint") == "naive":
            return {"type": "string", "pattern": f"^{_DATE}T{_TIME}$"}
        return super().datetime_schema(schema)

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        """Write a pattern, which pydantic's schema lacks."""
        part = r"(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,16})?"
        return {**super().complex_schema(schema), "pattern": rf"^-?{part}[+-]{part}j$"}

    def model_field_schema(self, schema: core_schema.ModelField) -> JsonSchemaValue:
        """Refuse a field that is read from within another value. Pydantic writes the field's own name, which it does not read."""
        self._refuse_path(schema.get("validation_alias"))
        return super().model_field_schema(schema)

    def dataclass_field_schema(self, schema: core_schema.DataclassField) -> JsonSchemaValue:
        """Refuse a field that is read from within another value."""
        self._refuse_path(schema.get("validation_alias"))
        return super().dataclass_field_schema(schema)

    def _refuse_path(self, alias: Any) -> None:
        if not isinstance(alias, list) or self._config.validate_by_name or self._config.populate_by_name:
            return
        paths = alias if all(isinstance(path, list) for path in alias) else [alias]
        if all(len(path) > 1 for path in paths):
            raise PydanticInvalidForJsonSchema(
                f"the alias AliasPath({', '.join(map(repr, paths[0]))}) of a field is not the name of a property; use "
                "AliasChoices with a name and the path"
            )

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Write the names that are keys of the type. Pydantic writes them for some types alone, and numbers for an IntEnum."""
        written = super().dict_schema(schema)
        if "patternProperties" in written:
            return {"additionalProperties": False, **written}
        keys: Mapping[str, Any] = schema.get("keys_schema", {})
        if keys.get("type") in ("enum", "literal"):
            listed = [getattr(one, "value", one) for one in keys.get("members", keys.get("expected", ()))]
            return {**written, "propertyNames": {"enum": [_name(one) for one in listed]}}
        names = _KEYS.get(str(keys.get("type")))
        return written if names is None else {**written, "propertyNames": names}


_BOUNDS: Final = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}


def narrowed(node: Any) -> Any:
    """Return a schema in which formats are patterns of texts that pydantic takes."""
    if isinstance(node, list):
        return [narrowed(child) for child in node]
    if not isinstance(node, dict):
        return node
    found = {name: _narrowed_member(name, value) for name, value in node.items()}
    if "pattern" not in found and str(found.get("format")) in _PATTERNS:
        found["pattern"] = _PATTERNS[found.pop("format")]
    return found


def _narrowed_member(name: str, value: Any) -> Any:
    if name in ("const", "enum", "default", "examples"):
        return value
    if name in ("properties", "patternProperties", "$defs") and isinstance(value, dict):
        return {key: narrowed(child) for key, child in value.items()}
    return narrowed(value)


def _text(pattern: str, schema: Mapping[str, Any]) -> JsonSchemaValue:
    most = schema.get("max_length")
    return {"type": "string", "pattern": pattern, **({} if most is None else {"maxLength": most})}


def _alternatives(texts: list[str]) -> str:
    return "|".join(re.escape(text) for text in texts)


def _name(key: Any) -> str:
    return {True: "true", False: "false"}[key] if isinstance(key, bool) else str(key)
