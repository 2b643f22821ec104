"""Types as JSON schemas, and generated JSON as instances of them: pydantic models, dataclasses, TypedDicts and plain types.

Nearly every value of a schema is an instance of its type. Pydantic's own schemas are wider than its types: a Decimal is any
text, an HttpUrl is any URI, a key of `dict[int, str]` is any name. Imported with pydantic, when the first type is read.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any, Final, Generic, TypeVar, get_args, get_origin, is_typeddict

import pydantic
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from paceline.chat.message_rewrites import SYSTEM_ROLES, joined_text
from paceline.constraints.llguidance_schemas import OCTET, relaxed_schema
from paceline.constraints.schema_walk import rebuilt, relaxed
from paceline.errors import InvalidParams, InvalidType
from paceline.runtime.sampler import grammar_of_schema

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
_NETWORK: Final = (
    rf"^(?:{OCTET}\.0\.0\.0/8|(?:{OCTET}\.){{2}}0\.0/16|(?:{OCTET}\.){{3}}0/24|(?:{OCTET}\.){{3}}{OCTET}/32)$"
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
    """Writes narrower schemas for types that have too wide schemas in pydantic."""

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
        return _text(rf"^(?:{'|'.join(map(re.escape, schemes))})://{_HOST}{_PORT}{_AFTER_HOST}$", schema)

    def multi_host_url_schema(self, schema: core_schema.MultiHostUrlSchema) -> JsonSchemaValue:
        """Write a pattern with the schemes that are allowed, for one host or several."""
        schemes = schema.get("allowed_schemes") or ["https", "http"]
        hosts = rf"{_HOST}{_PORT}(?:,{_HOST}{_PORT})*"
        return _text(rf"^(?:{'|'.join(map(re.escape, schemes))})://{_USER}{hosts}{_AFTER_HOST}$", schema)

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
            listed = (getattr(key, "value", key) for key in keys.get("members", keys.get("expected", ())))
            names = [str(key).lower() if isinstance(key, bool) else str(key) for key in listed]
            return {**written, "propertyNames": {"enum": names}}
        described = _KEYS.get(str(keys.get("type")))
        return written if described is None else {**written, "propertyNames": described}


_BOUNDS: Final = {"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"}


def narrowed(node: Any) -> Any:
    """Return a schema in which formats are patterns of texts that pydantic takes."""
    if isinstance(node, list):
        return [narrowed(child) for child in node]
    if not isinstance(node, dict):
        return node
    changed: dict[str, Any] = {}
    for name, value in node.items():
        if name in _SCHEMAS and isinstance(value, dict):
            changed[name] = {key: narrowed(child) for key, child in value.items()}
        else:
            changed[name] = value if name in _VALUES else narrowed(value)
    if "pattern" not in changed and str(changed.get("format")) in _PATTERNS:
        changed["pattern"] = _PATTERNS[str(changed.pop("format"))]
    return changed


def _text(pattern: str, schema: Mapping[str, Any]) -> JsonSchemaValue:
    most = schema.get("max_length")
    return {"type": "string", "pattern": pattern, **({} if most is None else {"maxLength": most})}


T = TypeVar("T")

_SCHEMAS = ("properties", "$defs", "patternProperties")
_VALUES = ("const", "enum", "default", "examples")
_FOR_READERS = ("title", "discriminator")  # oneOf says what a discriminator does
_MAX_NESTING = 64
_MAX_SHOWN_PATTERN = 80  # characters; longer patterns are of types such as HttpUrl


class ResponseModel(Generic[T]):
    """A type that content is parsed into.

    Attributes:
        name: The name of the type.
        json_schema: The schema that constrains the content, without the keywords that cannot be enforced.
    """

    def __init__(self, kind: type[T]) -> None:
        """Read a pydantic model, a dataclass, a TypedDict, or another type that pydantic knows, for example list[int].

        Raises `InvalidParams` if there is no JSON schema of the type.
        """
        if inspect.isroutine(kind):
            raise InvalidType(f"response_model must be a type, not the function {kind.__name__}")
        if isinstance(kind, (str, Mapping, pydantic.BaseModel)):
            raise InvalidType(
                f"response_model must be a type, not {kind!r:.80}; a JSON schema is passed as json_schema"
            )
        self.name = getattr(kind, "__name__", str(kind))
        try:
            self._adapter: pydantic.TypeAdapter[T] = pydantic.TypeAdapter(_readable(kind, 0))
            schema = self._adapter.json_schema(schema_generator=TypeSchemas)
        except Exception as error:  # noqa: BLE001 - pydantic has many, with no common base
            reason = str(error).partition("\n\nFor further")[0]
            reason, unknown, _ = reason.partition(". Set `arbitrary_types_allowed=True`")
            if unknown:  # which would not help
                reason += "; use pydantic models, dataclasses, TypedDicts and plain types"
            raise InvalidParams(f"response_model: there is no JSON schema of {self.name}: {reason}") from None
        enforceable, _ = relaxed_schema(narrowed(schema))
        self.json_schema = closed_schema(enforceable)
        self._described = schema

    @cached_property
    def shown_schema(self) -> dict[str, Any]:
        """The schema for a prompt: with descriptions, and without titles that repeat a name."""
        shown: dict[str, Any] = _shown(self._described, self.name)
        return shown

    @property
    def schema_of_pydantic(self) -> dict[str, Any]:
        """The schema as pydantic writes it, which callers put into prompts of their own."""
        return self._adapter.json_schema()

    @cached_property
    def schema_in_chat_grammars(self) -> dict[str, Any]:
        """The schema without the parts that grammars of chat formats, in which tools may be called, cannot enforce."""
        return relaxed(self.json_schema, lambda schema: grammar_of_schema(json.dumps(schema)))[0]

    def parse(self, text: str) -> T:
        """Return the instance. Raises `ValueError` if the text is not JSON of the type."""
        return self._adapter.validate_json(text)


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of pydantic with closed objects, and without keywords that are for readers."""
    kept = {key: value for key, value in schema.items() if key not in _FOR_READERS}
    closed = rebuilt(kept, lambda _, __, child: closed_schema(child) if isinstance(child, Mapping) else child)
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _shown(node: Any, name: str) -> Any:
    """Return a schema for a prompt. name: of the property or definition that it describes."""
    if isinstance(node, list):
        return [_shown(child, name) for child in node]
    if not isinstance(node, Mapping):
        return node
    shown: dict[str, Any] = {}
    for key, value in node.items():
        if key in _SCHEMAS and isinstance(value, Mapping):
            shown[key] = {child: _shown(described, child) for child, described in value.items()}
        elif key in _VALUES:
            shown[key] = value
        elif key == "title" and isinstance(value, str) and _letters(value) == _letters(name):
            continue
        elif not (key == "pattern" and len(str(value)) > _MAX_SHOWN_PATTERN):
            shown[key] = _shown(value, name)
    return shown


def _letters(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


class SchemaNotice:
    """The sentence that shows a schema to the model."""

    def __init__(self, schema: Any, *, has_tools: bool, response: ResponseModel[Any] | None = None) -> None:
        """Write the sentence. With `has_tools` a reply may be calls of tools instead. `response` is the type of the schema."""
        begin = "When you call no tool, answer" if has_tools else "Answer"
        if schema is True or schema == {}:
            self._text = f"{begin} with JSON."
            self._known = {_squeezed(self._text)}
            return
        self._text = f"{begin} with JSON that fits this schema: {json.dumps(schema, ensure_ascii=False)}"
        schemas = [schema] if response is None else [schema, response.schema_of_pydantic]
        self._known = {
            _squeezed(json.dumps(known, ensure_ascii=is_ascii)) for known in schemas for is_ascii in (True, False)
        }

    def added_to(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation with the sentence at the end of its leading system message, or as a new system message.

        A conversation that has the schema in a message stays as it is.
        """
        found = [dict(message) for message in messages]
        texts = (_squeezed(joined_text(message["content"])) for message in found)
        if any(known in text for text in texts for known in self._known):
            return found
        if found[0]["role"] not in SYSTEM_ROLES:
            return [{"role": "system", "content": self._text}, *found]
        content = found[0]["content"]
        if isinstance(content, str):
            found[0]["content"] = f"{content}\n\n{self._text}" if content else self._text
        else:
            found[0]["content"] = [*content, {"type": "text", "text": self._text}]
        return found


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _readable(kind: Any, depth: int) -> Any:
    """Return the type with TypedDicts that pydantic can read before Python 3.12 in place of `typing.TypedDict`s."""
    if sys.version_info >= (3, 12) or depth > _MAX_NESTING:
        return kind
    if is_typeddict(kind) and type(kind).__module__ == "typing":
        import typing_extensions

        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        fields = {name: _key(kind, name, hint, depth + 1) for name, hint in hints.items()}
        made: Any = typing_extensions.TypedDict(kind.__name__, fields)  # type: ignore[misc]
        made.__doc__ = kind.__doc__
        return made
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, dict, tuple, set, frozenset) and arguments:
        return origin[tuple(_readable(argument, depth + 1) for argument in arguments)]
    return kind


def _key(kind: Any, name: str, hint: Any, depth: int) -> Any:
    """Return the hint of a key with a mark whether it is required: its own mark, or else the one of the class."""
    import typing_extensions

    is_required, marks = name in kind.__required_keys__, (typing_extensions.Required, typing_extensions.NotRequired)
    while get_origin(hint) in marks:  # which the class does not see where annotations are strings
        is_required = get_origin(hint) is typing_extensions.Required
        (hint,) = get_args(hint)
    return marks[0 if is_required else 1][_readable(hint, depth)]
