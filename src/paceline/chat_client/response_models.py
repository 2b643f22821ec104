"""Types as JSON schemas, and generated JSON as instances of them: pydantic models, dataclasses, TypedDicts and plain types."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar, get_args, get_origin, is_typeddict

from paceline.chat.message_rewrites import joined_text
from paceline.constraints.llguidance_schemas import relaxed_schema
from paceline.constraints.schema_walk import relaxed
from paceline.errors import InvalidParams, InvalidType
from paceline.runtime.sampler import grammar_of_schema

T = TypeVar("T")

_SCHEMAS = ("properties", "$defs", "patternProperties")
_SCHEMA = ("items", "additionalProperties", "not")
_SCHEMA_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
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
        """kind: a pydantic model, a dataclass, a TypedDict, or another type that pydantic knows, such as list[int].

        Raises `InvalidParams` where there is no JSON schema of it.
        """
        import pydantic

        from paceline.chat_client.type_schemas import TypeSchemas, narrowed

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
        elif key in ("const", "enum", "default", "examples"):
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
        """Write the sentence.

        Args:
            schema: The schema that the model reads.
            has_tools: Whether a reply may be calls of tools instead.
            response: The type of the schema; None: it is the caller's own.
        """
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
        """Return a conversation with the sentence at the end of its first message, if that is the system's, or as a new one.

        A conversation that has the schema in a message stays as it is.
        """
        found = [dict(message) for message in messages]
        texts = (_squeezed(joined_text(message["content"])) for message in found)
        if any(known in text for text in texts for known in self._known):
            return found
        if found[0]["role"] not in ("system", "developer"):
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
    """Return the type with `typing.TypedDict`s in it replaced by those that pydantic can read before Python 3.12."""
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
