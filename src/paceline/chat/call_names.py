"""Aliases of tools and properties for llama.cpp's chat layer. Pure; any thread.

The layer makes names of grammar rules from names of tools. Two names that differ only in punctuation would share a rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from paceline.chat.tool_schemas import escaped
from paceline.constraints.json_schema_rules import MAX_DIGITS, max_digits
from paceline.constraints.nesting import reference_resolver

ALIAS: Final = re.compile(r"pacelinetool(\d+)x(?:arg(\d+)x)?")
"""An alias of a tool, or of a tool's property."""

_MAX_PROPERTIES: Final = 400  # of a tool; llama.cpp's chat layer takes 500
_MAX_REFERENCES: Final = 100  # that lead from one to the next
_PARSER_TEXT: Final = re.compile(r'"literal":"(?:[^"\\]|\\.)*"|"delimiters":\[(?:"(?:[^"\\]|\\.)*",?)*\]', re.DOTALL)
_GBNF_TEXT: Final = re.compile(r'\[(?:\\.|[^\]\\])*\]|"(?:\\.|[^"\\])*"', re.DOTALL)
_LOOSE_RULES: Final[Mapping[str, str]] = {
    "object": '"{" blanks (string blanks ":" blanks value (blanks "," blanks string blanks ":" blanks value)* blanks)? "}"',
    "array": '"[" blanks (value (blanks "," blanks value)* blanks)? "]"',
    "integral-part": "[0-9]{1,%d}",
    "number": '("-"? integral-part) ("." decimal-part)? ([eE] [-+]? [0-9]{1,2})?',
    "decimal-part": "[0-9]{1,%d} [1-9]?",  # the last digit for numbers that cannot end with zeros
}
_JSON_RULE: Final = re.compile(rf"^({'|'.join(_LOOSE_RULES)}) ::= .*$", re.MULTILINE)
_TYPES: Final = ("null", "boolean", "number", "integer", "string", "array", "object")


Form = Literal["objects", "properties", "schemas"]
Types = frozenset[str] | None


@dataclass(frozen=True)
class CallTool:
    """A tool with the schema that its calls are held to.

    Attributes:
        name: Its name.
        schema: JSON schema of its arguments, an object. All of its keywords can be enforced.
    """

    name: str
    schema: Mapping[str, Any]

    @cached_property
    def properties(self) -> dict[str, Any]:
        """The properties that the arguments may have by name; none if there are too many for a form by properties."""
        return {} if self.has_too_many_properties else self._named

    @property
    def has_properties(self) -> bool:
        """Whether the schema names properties."""
        return bool(self._named)

    @property
    def has_too_many_properties(self) -> bool:
        """Whether llama.cpp's chat layer does not take the tool in a form by properties."""
        return len(self._named) > _MAX_PROPERTIES

    @cached_property
    def _named(self) -> dict[str, Any]:
        found = resolved(self.schema, self.schema).get("properties")
        return found if isinstance(found, dict) else {}


class CallNames:
    """The aliases of tools and their properties."""

    def __init__(self, tools: Sequence[CallTool]) -> None:
        self.tools = tuple(tools)
        self._properties = [list(tool.properties) for tool in tools]

    def described(self, form: Form) -> list[dict[str, Any]]:
        """Return the tools for llama.cpp's chat layer, with parameters in one of three forms.

        Args:
            form: "objects": any object; "properties": named properties with types; "schemas": the whole schemas.
        """
        found = []
        for index, tool in enumerate(self.tools):
            parameters: Mapping[str, Any] = {"type": "object"}
            if form == "schemas":
                parameters = tool.schema
            elif form == "properties":
                parameters = self._properties_of(index)
            function = {"name": f"pacelinetool{index}x", "description": "", "parameters": parameters}
            found.append({"type": "function", "function": function})
        return found

    def _properties_of(self, index: int) -> dict[str, Any]:
        tool = self.tools[index]
        required = resolved(tool.schema, tool.schema).get("required", ())
        names = {name: f"pacelinetool{index}xarg{number}x" for number, name in enumerate(self._properties[index])}
        typed = {names[name]: _typed(types_of(tool.schema, schema)) for name, schema in tool.properties.items()}
        return {"type": "object", "properties": typed, "required": [names[name] for name in names if name in required]}

    def in_text(self, text: str) -> str:
        """Replace the aliases in a text by the real names."""
        return ALIAS.sub(self._name, text)

    def in_parser(self, parser: str) -> str:
        """Replace the aliases in a serialised parser by the real names."""

        def replaced(match: re.Match[str]) -> str:
            return ALIAS.sub(lambda alias: json.dumps(self._name(alias), ensure_ascii=False)[1:-1], match[0])

        return _PARSER_TEXT.sub(replaced, parser)

    def in_grammar(self, grammar: str, *, is_loose: bool) -> str:
        """Replace the aliases in a GBNF grammar by the real names.

        With `is_loose` the grammar allows every spelling of JSON's white space and numbers, but for too many digits. Two
        grammars with different spellings would come to texts that neither of them continues.
        """
        if is_loose:
            limit = str(max((max_digits(tool.schema) for tool in self.tools), default=MAX_DIGITS))
            loose = {name: rule.replace("%d", limit) for name, rule in _LOOSE_RULES.items()}
            grammar = _JSON_RULE.sub(lambda match: f"{match[1]} ::= {loose[match[1]]}", grammar)
            grammar = f"{grammar.rstrip()}\nblanks ::= [ \\t\\n\\r]*\n"

        def replaced(match: re.Match[str]) -> str:
            return ALIAS.sub(lambda alias: _gbnf_escaped(self._name(alias)), match[0])

        return _GBNF_TEXT.sub(replaced, grammar)

    def schema_of(self, text: str) -> tuple[Mapping[str, Any], Any, str] | None:
        """Return root schema, schema and JSON pointer of the last alias in a text. Aliases of properties come first."""
        found = list(ALIAS.finditer(text))
        if not found:
            return None
        match = next((alias for alias in reversed(found) if alias[2]), found[-1])
        tool = self.tools[int(match[1])]
        if not match[2]:
            return tool.schema, tool.schema, "#"
        name = self._properties[int(match[1])][int(match[2])]
        return tool.schema, tool.properties[name], f"#/properties/{escaped(name)}"

    def tool_index(self, text: str) -> int:
        """Return the number of the tool of the first alias in a text."""
        found = ALIAS.search(text)
        return int(found[1]) if found else 0

    def _name(self, match: re.Match[str]) -> str:
        index = int(match[1])
        return self._properties[index][int(match[2])] if match[2] else self.tools[index].name


def types_of(root: Any, schema: Any, seen: dict[int, Types] | None = None) -> Types:
    """Return the JSON types that a schema allows; None: any.

    Args:
        root: The schema that references are looked up in.
        schema: A part of it.
        seen: Types of the schema objects that were visited, by their id; None while an object is visited.
    """
    seen = {} if seen is None else seen
    node = resolved(root, schema)
    if id(node) in seen:
        return seen[id(node)]
    seen[id(node)] = found = None
    given = node.get("type")
    if isinstance(given, (str, list)):
        found = frozenset([given] if isinstance(given, str) else [name for name in given if isinstance(name, str)])
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list):
        found = _both(found, frozenset(map(_type_of, values)))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(node.get(keyword), list):
            each = [types_of(root, child, seen) for child in node[keyword]]
            found = _both(
                found, None if None in each else frozenset().union(*(part for part in each if part is not None))
            )
    for child in node["allOf"] if isinstance(node.get("allOf"), list) else ():
        found = _both(found, types_of(root, child, seen))
    seen[id(node)] = found
    return found


def _both(first: Types, other: Types) -> Types:
    if first is None or other is None:
        return other if first is None else first
    return (first & other) | ({"integer"} if {"integer", "number"} <= first | other else frozenset())


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    kinds = ((int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def _typed(types: Types) -> dict[str, Any]:
    known = [name for name in _TYPES if types is not None and name in types]
    return {"type": known[0] if len(known) == 1 else known} if known else {}


def with_plain_types(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema with one named type for each schema object, for templates that need it."""

    def plain(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        found = dict(node)
        for keyword, value in node.items():
            if keyword == "properties" and isinstance(value, dict):
                found[keyword] = {name: plain(child) for name, child in value.items()}
            elif keyword in ("items", "additionalProperties"):
                found[keyword] = plain(value)
        if not isinstance(node.get("type"), str):
            types = types_of(parameters, node) or frozenset(("string",))
            found["type"] = min(types, key=lambda name: (name == "null", name not in _TYPES, name))
        return found

    schema: dict[str, Any] = plain(dict(parameters))
    return schema


def resolved(root: Any, schema: Any) -> dict[str, Any]:
    """Return the schema object that a chain of references leads to."""
    node, resolve, num_left = schema, None, _MAX_REFERENCES
    while isinstance(node, dict) and isinstance(node.get("$ref"), str) and num_left:
        resolve = resolve or reference_resolver(dict(root))
        node, num_left = resolve(node["$ref"]), num_left - 1
    return node if isinstance(node, dict) else {}


def _gbnf_escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
