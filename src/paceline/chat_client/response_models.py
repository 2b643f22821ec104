"""Types as JSON schemas, and generated JSON as instances of them: pydantic models, dataclasses, TypedDicts and plain types."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar, get_args, get_origin, is_typeddict

from paceline.chat.tool_schemas import relaxed
from paceline.constraints.json_schema_rules import relaxed_schema
from paceline.errors import InvalidParams, InvalidType
from paceline.runtime.sampler import grammar_of_schema

T = TypeVar("T")

_SCHEMAS = ("properties", "$defs", "patternProperties")
_SCHEMA = ("items", "additionalProperties", "not")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
_FOR_READERS = ("title", "discriminator")  # oneOf says what a discriminator does
_MAX_NESTING = 64


class ResponseModel(Generic[T]):
    """A type that content is parsed into.

    Attributes:
        name: The name of the type.
        json_schema: The schema that constrains the content, without the keywords that cannot be enforced.
    """

    def __init__(self, kind: type[T]) -> None:
        """kind: a pydantic model, a dataclass, a TypedDict, or another type that pydantic knows, such as list[int].

        Raises `InvalidParams` where there is no JSON schema of it.
        """
        import pydantic

        from paceline.chat_client.type_schemas import TypeSchemas, narrowed

        if inspect.isroutine(kind):
            raise InvalidType(f"response_model must be a type, not the function {kind.__name__}")
        self.name = getattr(kind, "__name__", str(kind))
        try:
            self._adapter: pydantic.TypeAdapter[T] = pydantic.TypeAdapter(_readable(kind, 0))
            schema = self._adapter.json_schema(schema_generator=TypeSchemas)
        except Exception as error:  # noqa: BLE001 - pydantic has many, with no common base
            reason = str(error).partition("\n\nFor further")[0]
            raise InvalidParams(f"response_model: there is no JSON schema of {self.name}: {reason}") from None
        enforceable, _ = relaxed_schema(narrowed(schema))
        self.json_schema = closed_schema(enforceable)

    @cached_property
    def schema_in_chat_grammars(self) -> dict[str, Any]:
        """The schema without the parts that grammars of chat formats, in which tools may be called, cannot enforce."""
        return relaxed(self.json_schema, _check_grammar)[0]

    @classmethod
    def of(cls, kind: Any) -> ResponseModel[Any] | None:
        """Return the model of a type; None for None."""
        return None if kind is None else cls(kind)

    def parse(self, text: str) -> T:
        """Return the instance. Raises `ValueError` where the text is not JSON of the type."""
        return self._adapter.validate_json(text)


def _check_grammar(schema: Mapping[str, Any]) -> None:
    grammar_of_schema(json.dumps(schema))


def closed_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema by pydantic without what only readers use, and with objects that have no further properties."""
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _FOR_READERS:
            continue
        if key in _SCHEMAS and isinstance(value, Mapping):
            closed[key] = {name: closed_schema(one) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif key in _SCHEMA and isinstance(value, Mapping):
            closed[key] = closed_schema(value)
        elif key in _SCHEMA_LISTS and isinstance(value, list):
            closed[key] = [closed_schema(one) if isinstance(one, Mapping) else one for one in value]
        else:
            closed[key] = value
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


def _readable(kind: Any, depth: int) -> Any:
    """Return the type with `typing.TypedDict`s in it replaced by those that pydantic can read before Python 3.12."""
    if sys.version_info >= (3, 12) or depth > _MAX_NESTING:
        return kind
    if is_typeddict(kind) and type(kind).__module__ == "typing":
        import typing_extensions

        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        fields = {name: _key(kind, name, hint, depth + 1) for name, hint in hints.items()}
        return typing_extensions.TypedDict(kind.__name__, fields)  # type: ignore[operator]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (list, dict, tuple, set, frozenset) and arguments:
        return origin[tuple(_readable(one, depth + 1) for one in arguments)]
    return kind


def _key(kind: Any, name: str, hint: Any, depth: int) -> Any:
    """Return the hint of a key with a mark whether it is required: its own, or else what the class says."""
    import typing_extensions

    is_required, marks = name in kind.__required_keys__, (typing_extensions.Required, typing_extensions.NotRequired)
    while get_origin(hint) in marks:  # which the class does not see where annotations are strings
        is_required = get_origin(hint) is typing_extensions.Required
        (hint,) = get_args(hint)
    return marks[0 if is_required else 1][_readable(hint, depth)]
