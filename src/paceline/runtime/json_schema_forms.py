"""The form in which llama.cpp reads a schema object, the types of the values that it generates, and whether two overlap.

The order of the choices is that of llama.cpp's `common_chat_schema_from_json`. Pure; any thread.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

Schema = dict[str, Any]
ENFORCED_FORMATS: Final = frozenset(("date", "time", "date-time", "uuid", *(f"uuid{i}" for i in range(1, 6))))
STANDARD_FORMATS: Final = frozenset(
    (
        *("duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri"),
        *("iri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Formats that JSON Schema defines and the grammar does not enforce; any other name has no meaning there, and describes."""

ALL_TYPES: Final = frozenset(("string", "integer", "number", "array", "object", "boolean", "null"))
_MOST_REFERENCES: Final = 100  # that lead from one to the next; the translation refuses more


@dataclass(frozen=True, slots=True)
class Form:
    """name: of the form. types: of the values that it generates, or all. reads: the keywords that it enforces."""

    name: str
    types: frozenset[str]
    reads: frozenset[str]
    why: str = ""


_REF: Final = Form("ref", ALL_TYPES, frozenset(("$ref",)), "beside $ref nothing else is enforced")
_ANY: Final = Form("any", ALL_TYPES, frozenset(), "no type says which values it is about; add type")
_ALL_OF: Final = Form("all_of", ALL_TYPES, frozenset(("allOf",)), "beside allOf nothing else is enforced")
_OBJECT: Final = Form(
    "object", frozenset(("object",)), frozenset(("type", "properties", "additionalProperties", "required"))
)
_ARRAY: Final = Form(
    "array", frozenset(("array",)), frozenset(("type", "items", "prefixItems", "minItems", "maxItems"))
)
_TUPLE: Final = Form("tuple", frozenset(("array",)), frozenset(("type", "items", "prefixItems")))
_INTEGER: Final = Form(
    "integer",
    frozenset(("integer",)),
    frozenset(("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
)


def forms_of(node: Schema) -> tuple[Form, ...]:
    """Return the forms in which a schema object is read: one, or one for each type that it lists."""
    if "$ref" in node:
        return (_REF,)
    if "oneOf" in node or "anyOf" in node:
        keyword = "oneOf" if "oneOf" in node else "anyOf"
        why = f"beside {keyword} nothing else is enforced; write it into each alternative"
        return (Form("alternatives", ALL_TYPES, frozenset((keyword,)), why),)
    if "const" in node or "enum" in node:
        keyword = "const" if "const" in node else "enum"
        types = frozenset(key_of(value)[0] for value in values_of(node) or ())
        return (Form("values", types, frozenset((keyword,)), f"beside {keyword} nothing else is enforced"),)
    types_given = node.get("type")
    return tuple(_form(node, name) for name in (types_given if isinstance(types_given, list) else [types_given]))


def _form(node: Schema, name: Any) -> Form:
    match name:
        case None:
            return _untyped(node)
        case "object":
            found = _ALL_OF if "allOf" in node and not _has_properties(node) else _OBJECT
        case "string":
            found = _ALL_OF if "allOf" in node else _string(node)
        case "array":
            found = _array(node)
        case "integer":
            found = _INTEGER
        case "number" | "boolean" | "null":
            found = Form(name, frozenset((name,)), frozenset(("type",)))
        case _:
            found = Form("unknown", frozenset(), frozenset(node))  # the translation refuses it
    return found


def _untyped(node: Schema) -> Form:
    """Return the form that the keywords imply where there is no type."""
    if _has_properties(node):
        return _OBJECT
    if "allOf" in node:
        return _ALL_OF
    if "items" in node or "prefixItems" in node:
        return _array(node)
    if {"pattern", "minLength", "maxLength"} & node.keys() or _has_format(node):
        return _string(node)
    return _ANY


def _has_properties(node: Schema) -> bool:
    return "properties" in node or node.get("additionalProperties", True) is not True


def _has_format(node: Schema) -> bool:
    found = node.get("format")
    return isinstance(found, str) and found in ENFORCED_FORMATS


def _array(node: Schema) -> Form:
    return _TUPLE if isinstance(node.get("items", node.get("prefixItems")), list) else _ARRAY


def _string(node: Schema) -> Form:
    """Return the form of a string. Only one property is enforced: its pattern, else its format, else its lengths."""
    reads = ("pattern",) if node.get("pattern") else ("format",) if _has_format(node) else ("minLength", "maxLength")
    why = f"beside {reads[0]} nothing else about a string is enforced" if len(reads) == 1 else ""
    return Form("string", frozenset(("string",)), frozenset(("type", *reads)), why)


def values_of(node: Any) -> list[Any] | None:
    """Return the values of a const or an enum; None for any other schema."""
    if not isinstance(node, dict) or {"$ref", "oneOf", "anyOf"} & node.keys():
        return None
    if "const" in node:
        return [node["const"]]
    found = node.get("enum")
    return found if isinstance(found, list) else None


def key_of(value: Any) -> tuple[str, Any]:
    """Return the type of a JSON value, and a key that only equal values share."""
    if isinstance(value, bool):
        return "boolean", value
    if value is None:
        return "null", None
    if isinstance(value, (int, float)):
        return ("integer", int(value)) if value == int(value) else ("number", value)
    if isinstance(value, str):
        return "string", value
    return "object" if isinstance(value, dict) else "array", json.dumps(value, sort_keys=True)


def is_within(types: frozenset[str], wanted: Any) -> bool:
    """Return whether values of these types all have the type, or one of the types, of a schema."""
    names = {wanted} if isinstance(wanted, str) else {name for name in wanted or () if isinstance(name, str)}
    return types <= names | ({"integer"} if "number" in names else set())


class Overlaps:
    """Properties of the schemas of one document, with references followed. May report an overlap where there is none."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}
        self._valid_types: dict[int, frozenset[str]] = {}

    def resolved(self, node: Any) -> Any:
        """Resolve a chain of references; None where its target does not exist."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
                return node
            node = self.target(node["$ref"])
        return None

    def target(self, reference: str) -> Any:
        """Resolve one reference as the translation does; None where its target does not exist."""
        node: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            if isinstance(node, dict):
                node = node.get(part)
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return node

    def types_of(self, node: Any) -> frozenset[str]:
        """Return the types of the values that a schema generates, or a superset."""
        node = self.resolved(node)
        if not isinstance(node, dict):
            return ALL_TYPES
        if id(node) not in self._types:
            self._types[id(node)] = ALL_TYPES  # for who comes back to it in a ring
            self._types[id(node)] = frozenset[str]().union(*(self._form_types(node, form) for form in forms_of(node)))
        return self._types[id(node)]

    def _form_types(self, node: Schema, form: Form) -> frozenset[str]:
        if form.name not in ("alternatives", "all_of"):
            return form.types
        children = node[next(iter(form.reads))]
        if not isinstance(children, list):
            return ALL_TYPES
        if form.name == "alternatives":
            return frozenset[str]().union(*map(self.types_of, children))
        found = [self.types_of(child) for child in children if values_of(self.resolved(child)) is not None]
        return frozenset.intersection(*found) if found else frozenset(("object",))

    def valid_types_of(self, node: Any) -> frozenset[str]:
        """Return the types of the values that are valid by a schema, or a superset; without a type they may be of any.

        A schema with properties and no type generates objects, and every string is valid by it.
        """
        node = self.resolved(node)
        if not isinstance(node, dict):
            return ALL_TYPES
        if id(node) not in self._valid_types:
            self._valid_types[id(node)] = ALL_TYPES  # for who comes back to it in a ring
            self._valid_types[id(node)] = self._find_valid_types(node)
        return self._valid_types[id(node)]

    def _find_valid_types(self, node: Schema) -> frozenset[str]:
        if values_of(node) is not None:
            return self.types_of(node)
        given = node.get("type")
        if isinstance(given, str | list):
            return _with_integers({given} if isinstance(given, str) else {one for one in given if isinstance(one, str)})
        for keyword in ("oneOf", "anyOf"):
            if isinstance(node.get(keyword), list):
                return frozenset[str]().union(*map(self.valid_types_of, node[keyword]))
        children = node.get("allOf")
        return ALL_TYPES.intersection(*map(self.valid_types_of, children if isinstance(children, list) else []))

    def are_disjoint(self, one: Any, other: Any) -> bool:
        """Return whether no value that one of them generates is valid by the other."""
        one, other = self.resolved(one), self.resolved(other)
        if self._are_other_values(one, other):
            return True
        if not (isinstance(one, dict) and isinstance(other, dict) and _is_object(one) and _is_object(other)):
            return False
        if any(
            self._are_other_values(self.resolved(one["properties"][name]), self.resolved(other["properties"][name]))
            for name in _required(one) & _required(other)
        ):
            return True
        return _lacks(one, other) and _lacks(other, one)

    def _are_other_values(self, one: Any, other: Any) -> bool:
        of_one, of_other = values_of(one), values_of(other)
        if of_one is not None and of_other is not None:
            return set(map(key_of, of_one)).isdisjoint(map(key_of, of_other))
        return self._generates_invalid(one, other) and self._generates_invalid(other, one)

    def _generates_invalid(self, one: Any, other: Any) -> bool:
        """Return whether no type that the first generates is valid by the second; a number may be an integer."""
        types, others = self.types_of(one), self.valid_types_of(other)
        return types.isdisjoint(others) and not ({"integer", "number"} <= types | others)


def _with_integers(types: set[Any]) -> frozenset[str]:
    return frozenset(types | {"integer"} if "number" in types else types)


def _is_object(node: Schema) -> bool:
    return forms_of(node) == (_OBJECT,) and isinstance(node.get("properties", {}), dict)


def _required(node: Schema) -> set[str]:
    found = node.get("required", [])
    names = {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
    return {name for name in names if name in node.get("properties", {})}


def _lacks(one: Schema, other: Schema) -> bool:
    """Return whether the objects that the first generates lack a property that the second requires."""
    is_closed = one.get("additionalProperties", False) is False  # where none are asked for, none are generated
    return is_closed and bool(_required(other) - one.get("properties", {}).keys())
