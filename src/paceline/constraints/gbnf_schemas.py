"""Refuses the keywords of a JSON schema that a GBNF grammar would not enforce, each with its JSON pointer. Pure; any thread.

llama.cpp's translation (`common_chat_schema_from_json`) chooses a form for every schema object (a reference, alternatives, a
type ...), reads the keywords of that form alone and drops the others. The walk chooses the same form and drops nothing: beside
the keywords that the form enforces it takes annotations, and keywords that restrict no value that the form generates.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from paceline.constraints.schema_walk import (
    ANNOTATIONS,
    MAX_PAIRS,
    NO_LIMIT,
    STANDARD_FORMATS,
    TYPES,
    Exclusion,
    Schema,
    escaped,
    is_number,
    key_of,
    type_of,
    with_included,
)
from paceline.errors import GrammarError

ENFORCED_FORMATS: Final = frozenset(("date", "time", "date-time", "uuid", *(f"uuid{i}" for i in range(1, 6))))
ALL_TYPES: Final = frozenset(TYPES)
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
        types = frozenset(type_of(value) for value in values_of(node) or ())
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
    """Return the form that the keywords imply if there is no type."""
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


def _is_within(types: frozenset[str], wanted: Any) -> bool:
    """Return whether values of these types all have a type that a schema allows."""
    names = {wanted} if isinstance(wanted, str) else {name for name in wanted or () if isinstance(name, str)}
    return types <= names | ({"integer"} if "number" in names else set())


class GeneratedValues:
    """The values that schemas of one document generate, with references followed as the translation does."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}
        self._exclusion = Exclusion(self.target)

    def resolved(self, node: Any) -> Any:
        """Resolve a chain of references; None if its target does not exist."""
        for _ in range(_MOST_REFERENCES):
            if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
                return node
            node = self.target(node["$ref"])
        return None

    def target(self, reference: str) -> Any:
        """Resolve one reference; None if its target does not exist."""
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

    def are_told_apart(self, alternatives: list[Any]) -> bool:
        """Return whether no alternative generates a value that is valid by another alternative."""
        nodes = [self.resolved(alternative) for alternative in alternatives]
        listed = [values_of(node) for node in nodes]
        if all(values is not None for values in listed):
            keys = [key for values in listed for key in {key_of(value) for value in values or ()}]
            return len(keys) == len(set(keys))
        if len(nodes) == 1:
            return True
        if len(nodes) * (len(nodes) - 1) // 2 > MAX_PAIRS or not all(isinstance(node, dict) for node in nodes):
            return False
        valid = [with_included([node], self.target) for node in nodes]
        if self._exclusion.are_tagged(valid):  # without comparing each pair, so that many properties are no matter
            return True
        generated = [[*group, self._limits_of(node)] for node, group in zip(nodes, valid, strict=True)]
        excludes = self._exclusion.groups_exclude
        return all(
            excludes(generated[first], valid[second]) and excludes(valid[first], generated[second])
            for first, second in combinations(range(len(nodes)), 2)
        )

    def _limits_of(self, node: Schema) -> Schema:
        """Return a schema of the limits that generated values have beside the schema's own keywords."""
        limits: Schema = {"type": sorted(self.types_of(node))}
        if forms_of(node) == (_OBJECT,):  # where no other properties are asked for, none are generated
            closed = {"additionalProperties": False, "properties": node.get("properties", {})}
            limits |= closed if node.get("additionalProperties", False) is False else {}
        return limits


# ---- keywords that a form does not read

_ANNOTATIONS: Final = ANNOTATIONS | {
    *("$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions"),
}
_ABOUT: Final[Mapping[str, frozenset[str]]] = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "number": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    "array": frozenset(
        (
            *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
            *("contains", "minContains", "maxContains"),
        )
    ),
    "object": frozenset(
        (
            *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"),
            *("required", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        )
    ),
    "boolean": frozenset(),
    "null": frozenset(),
}
_OF_SOME_TYPE: Final = frozenset().union(*_ABOUT.values())
_OF_ANY_TYPE: Final = frozenset(
    (
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
        *("$ref", "$dynamicRef", "$recursiveRef"),
    )
)
_NO_LIMIT: Final[Mapping[str, tuple[Any, ...]]] = {
    **NO_LIMIT,
    "minLength": (0,),
    "minItems": (0,),
    "minProperties": (0,),
    "required": ([],),
    "pattern": ("",),
    "patternProperties": ({},),
    "additionalProperties": ({}, True),
    "items": ({}, True),
}
_NEEDS_TYPE: Final = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "required"),
        *("minLength", "maxLength", "additionalProperties"),
    )
)
"""What is enforced where a type, or another keyword, says which values the schema is about."""

_HINTS: Final[Mapping[str, str]] = {
    "minimum": "only integers have bounds",
    "maximum": "only integers have bounds",
    "exclusiveMinimum": "only integers have bounds",
    "exclusiveMaximum": "only integers have bounds",
    "format": "formats are " + ", ".join(sorted(ENFORCED_FORMATS)) + "; write a pattern instead",
    "minLength": "a string has a pattern, a format or lengths",
    "maxLength": "a string has a pattern, a format or lengths",
    "patternProperties": "name the properties, or give additionalProperties a schema",
    "allOf": "write what it says into the schema itself",
}
_MOST_COUNT: Final = 2**31 - 1
_MOST_BOUND: Final = 2**63 - 2
_RULE_NAME: Final = re.compile(r"[^a-zA-Z0-9-]+")


def _is_implied(generated: GeneratedValues, node: Schema, form: Form, keyword: str, value: Any) -> bool:
    """Return whether all that a form generates is valid by a keyword that the form does not read."""
    match form.name, keyword:
        case (("ref" | "alternatives" | "all_of"), "type"):
            return _is_within(generated.types_of(node), value)
        case "all_of", ("required" | "unevaluatedProperties"):
            return True  # required is looked at together with the parts, and no other properties are generated
        case "values", "type":
            return _is_within(form.types, value)
        case "values", "enum":
            return isinstance(value, list) and key_of(node["const"]) in map(key_of, value)
        case "values", _ if keyword in _LIMITS:
            kinds, holds = _LIMITS[keyword]
            listed = [
                found for found in values_of(node) or () if isinstance(found, kinds) and not isinstance(found, bool)
            ]
            return is_number(value) and all(holds(found, value) for found in listed)
        case "object", "minProperties":
            required = node.get("required")
            return isinstance(value, int) and isinstance(required, list) and value <= len(set(map(key_of, required)))
        case "object", "unevaluatedProperties":
            return not node.keys().isdisjoint(("properties", "additionalProperties"))
        case "array", ("additionalItems" | "unevaluatedItems"):
            return not node.keys().isdisjoint(("items", "prefixItems"))
        case "array", "uniqueItems":
            return node.get("maxItems") in (0, 1)
        case "tuple", ("additionalItems" | "unevaluatedItems"):
            return True  # a tuple has no others
        case "tuple", "uniqueItems":
            return len(node[_tuple_key(node)]) < 2
        case "tuple", "minItems":
            return isinstance(value, int) and value <= len(node[_tuple_key(node)])
        case "tuple", "maxItems":
            return isinstance(value, int) and value >= len(node[_tuple_key(node)])
        case "integer", "multipleOf":
            return bool(value == 1)
        case _, ("minContains" | "maxContains"):
            return "contains" not in node
        case _, ("then" | "else"):
            return "if" not in node
        case _, "if":
            return "then" not in node and "else" not in node
    return False


_LIMITS: Final[Mapping[str, tuple[type | tuple[type, ...], Callable[[Any, Any], bool]]]] = {
    "minLength": (str, lambda value, limit: len(value) >= limit),
    "maxLength": (str, lambda value, limit: len(value) <= limit),
    "minItems": (list, lambda value, limit: len(value) >= limit),
    "maxItems": (list, lambda value, limit: len(value) <= limit),
    "minimum": ((int, float), operator.ge),
    "maximum": ((int, float), operator.le),
    "exclusiveMinimum": ((int, float), operator.gt),
    "exclusiveMaximum": ((int, float), operator.lt),
}
"""Limits of listed values: the Python types of the values that they concern, and whether a value is within the limit."""


def check_keywords(schema: object) -> None:
    """Raise `GrammarError` for a keyword that the grammar of the schema would not enforce.

    Args:
        schema: A JSON schema as parsed JSON. The translation refuses values that are no schema.

    Raises:
        GrammarError: Names the keyword, its JSON pointer, and the way out.
    """
    if isinstance(schema, dict):
        _Walk(schema).run()


class _Walk:
    """Visits once every schema object that the translation reads."""

    def __init__(self, root: Schema) -> None:
        self._root, self._generated = root, GeneratedValues(root)
        self._todo: list[tuple[str, Any]] = [("#", root)]
        self._seen: set[int] = set()
        self._rule_names: dict[str, str] = {}

    def run(self) -> None:
        while self._todo:
            path, node = self._todo.pop()
            if isinstance(node, dict) and id(node) not in self._seen:
                self._seen.add(id(node))
                self._visit(path, node)

    def _visit(self, path: str, node: Schema) -> None:
        _check_known(path, node, is_root=node is self._root)
        for form in forms_of(node):
            self._check_form(path, node, form)

    def _check_form(self, path: str, node: Schema, form: Form) -> None:
        for keyword, value in node.items():
            is_read = keyword in form.reads or not _restricts(keyword, value, form.types)
            if not is_read and not _is_implied(self._generated, node, form, keyword, value):
                raise _unenforced(path, keyword, form)
        getattr(self, f"_visit_{form.name}")(path, node)

    # ---- one form each

    def _visit_ref(self, path: str, node: Schema) -> None:
        reference = node["$ref"]
        if not isinstance(reference, str):
            return
        if "~" in reference or "%" in reference:
            raise GrammarError(
                f"json_schema: {path}/$ref: ~ and % in a reference are not decoded; rename what {reference!r:.80} leads to"
            )
        name = _RULE_NAME.sub("-", reference)
        if self._rule_names.setdefault(name, reference) != reference:
            raise GrammarError(
                f"json_schema: {path}/$ref: {reference!r:.80} and {self._rule_names[name]!r:.80} would be taken for the same, "
                "since only letters, digits and hyphens tell references apart; rename one"
            )
        self._todo.append((reference, self._generated.target(reference)))

    def _visit_alternatives(self, path: str, node: Schema) -> None:
        keyword = "oneOf" if "oneOf" in node else "anyOf"
        found = node[keyword]
        if not isinstance(found, list):
            return
        if keyword == "oneOf" and not self._generated.are_told_apart(found):
            raise GrammarError(
                f"json_schema: {path}/oneOf: that exactly one alternative holds is not enforced, and these may hold together; "
                "write anyOf, or give all of them different types or a required property with a different const each"
            )
        self._todo += [(f"{path}/{keyword}/{i}", child) for i, child in enumerate(found)]

    def _visit_any(self, path: str, node: Schema) -> None:
        """Look no further: nothing within is a schema."""

    _visit_values = _visit_number = _visit_boolean = _visit_null = _visit_unknown = _visit_any

    def _visit_object(self, path: str, node: Schema) -> None:
        properties = node.get("properties", {})
        if not isinstance(properties, dict):
            return
        _check_required(path, node, properties)
        self._put_properties(path, properties)
        self._todo.append((f"{path}/additionalProperties", node.get("additionalProperties")))

    def _put_properties(self, path: str, properties: Schema) -> None:
        for name, child in properties.items():
            self._todo.append((f"{path}/properties/{escaped(name)}", child))

    def _visit_array(self, path: str, node: Schema) -> None:
        _check_counts(path, node, "minItems", "maxItems")
        if "items" in node and "prefixItems" in node:
            raise GrammarError(f"json_schema: {path}/prefixItems: it is not enforced beside items; use one of them")
        key = "items" if "items" in node else "prefixItems"
        self._todo.append((f"{path}/{key}", node.get(key)))

    def _visit_tuple(self, path: str, node: Schema) -> None:
        key = _tuple_key(node)
        if key == "items" and "prefixItems" in node:
            raise GrammarError(f"json_schema: {path}/prefixItems: it is not enforced beside items; use one of them")
        self._todo += [(f"{path}/{key}/{i}", child) for i, child in enumerate(node[key])]

    def _visit_string(self, path: str, node: Schema) -> None:
        _check_counts(path, node, "minLength", "maxLength")

    def _visit_integer(self, path: str, node: Schema) -> None:
        for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            value = _number(node, keyword)
            if value is not None and abs(value) > _MOST_BOUND:
                raise GrammarError(f"json_schema: {path}/{keyword}: {value} does not fit into 64 bits; leave it out")
        for closed, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if closed in node and node.get(exclusive, False) is not False:
                raise GrammarError(
                    f"json_schema: {path}/{exclusive}: it is not enforced beside {closed}; use one of them"
                )
        low, high = _bounds(node)
        if low > high:
            keyword = "minimum" if "minimum" in node else "exclusiveMinimum"
            raise GrammarError(f"json_schema: {path}/{keyword}: no integer lies within the bounds of this schema")

    # ---- allOf, which becomes one object, or what enums have in common

    def _visit_all_of(self, path: str, node: Schema) -> None:
        children = node["allOf"]
        if not isinstance(children, list):
            return
        found = [(f"{path}/allOf/{i}", self._generated.resolved(child)) for i, child in enumerate(children)]
        if any(values_of(child) is not None for _, child in found):
            self._check_common(path, node, [child for _, child in found])
            return
        names: dict[str, Any] = {}
        for at, child in found:
            self._take_component(at, child, names, is_alone=len(found) == 1)
        for at, child in [(path, node), *found]:
            if isinstance(child, dict):
                _check_required(at, child, names)

    def _check_common(self, path: str, node: Schema, children: list[Any]) -> None:
        """Enums alone: the grammar has the values that all of them have."""
        found = []
        for child in children:
            is_enum = isinstance(child, dict) and "const" not in child
            keys = [key_of(value) for value in values_of(child) or ()] if is_enum else []
            if not keys or len(set(keys)) < len(keys):
                raise GrammarError(
                    f"json_schema: {path}/allOf: only objects, or enums without repeated values, are put together; "
                    f"{_HINTS['allOf']}"
                )
            _check_known(path, child, is_root=False)
            self._check_form(path, child, forms_of(child)[0])
            found.append(set(keys))
        if node.get("required"):
            raise _unenforced(path, "required", forms_of(node)[0])
        if not set.intersection(*found):
            raise GrammarError(f"json_schema: {path}/allOf: its enums have no value in common; {_HINTS['allOf']}")

    def _take_component(self, path: str, child: Any, names: dict[str, Any], *, is_alone: bool) -> None:
        if not isinstance(child, dict):
            return
        _check_known(path, child, is_root=False)
        form, *more = forms_of(child) or (None,)
        if form is None:
            return
        if more or form.name not in ("object", "any"):
            keyword = next(iter((form.reads - {"type"}) & child.keys()), "type")
            raise _unenforced(path, keyword, form, "an allOf puts objects with properties together, and nothing else")
        for keyword, value in child.items():
            if keyword in ("type", "properties", "required") or not _restricts(keyword, value, frozenset(("object",))):
                continue
            if keyword != "additionalProperties" or not is_alone:
                raise _unenforced(path, keyword, form, "within allOf it is not enforced")
        properties = child.get("properties", {})
        if not isinstance(properties, dict):
            return
        for name in properties:
            if name in names:
                raise GrammarError(
                    f"json_schema: {path}/properties/{escaped(name)}: another part of the allOf has this property as well; "
                    f"{_HINTS['allOf']}"
                )
        names.update(properties)
        self._put_properties(path, properties)


# ---- one keyword each


def _check_known(path: str, node: Schema, *, is_root: bool) -> None:
    for keyword, value in node.items():
        if keyword in _OF_ANY_TYPE or keyword in _OF_SOME_TYPE or keyword.startswith("x-"):
            continue
        if keyword not in _ANNOTATIONS:
            raise GrammarError(
                f"json_schema: {path}/{escaped(keyword)}: {keyword!r:.80} is not a known keyword; leave it out, or call "
                "it x-... if it only describes"
            )
        if keyword in ("$id", "id") and not is_root and not (isinstance(value, str) and value.startswith("#")):
            raise GrammarError(
                f"json_schema: {path}/{keyword}: references are looked up from the root alone; leave {keyword} out"
            )


def _restricts(keyword: str, value: Any, types: frozenset[str]) -> bool:
    """Return whether a keyword with this value can make a value of these types invalid."""
    if keyword == "format":
        return "string" in types and (not isinstance(value, str) or value in STANDARD_FORMATS | ENFORCED_FORMATS)
    if keyword in _OF_SOME_TYPE and not any(keyword in _ABOUT[name] for name in types):
        return False
    if keyword not in _OF_SOME_TYPE and keyword not in _OF_ANY_TYPE:
        return False
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and value is False:  # as draft 4 has it
        return False
    return not any(type(value) is type(free) and value == free for free in _NO_LIMIT.get(keyword, ()))


def _check_required(path: str, node: Schema, names: Mapping[str, Any]) -> None:
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError(f"json_schema: {path}/required: it must be a list of names")
    for i, name in enumerate(required):
        if name not in names:
            raise GrammarError(
                f"json_schema: {path}/required/{i}: that {name!r:.80} is required is not enforced, as it is not among the "
                "properties; describe it there"
            )


def _check_counts(path: str, node: Schema, least: str, most: str) -> None:
    for keyword in (least, most):
        value = node.get(keyword)
        if isinstance(value, int) and value > _MOST_COUNT:
            raise GrammarError(f"json_schema: {path}/{keyword}: {value} is more than {_MOST_COUNT}; leave it out")
    _check_order(path, node, least, most)


def _check_order(path: str, node: Schema, least: str, most: str) -> None:
    low, high = node.get(least), node.get(most)
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise GrammarError(f"json_schema: {path}/{least}: {low} is more than {most} {high}, so no value is valid")


def _bounds(node: Schema) -> tuple[float, float]:
    """Return the least and the greatest integer within bounds that are numbers."""
    least, above = _number(node, "minimum"), _number(node, "exclusiveMinimum")
    most, below = _number(node, "maximum"), _number(node, "exclusiveMaximum")
    low = math.ceil(least) if least is not None else math.floor(above) + 1 if above is not None else -math.inf
    high = math.floor(most) if most is not None else math.ceil(below) - 1 if below is not None else math.inf
    return low, high


def _number(node: Schema, keyword: str) -> float | None:
    value: float | None = node.get(keyword)
    return value if is_number(value) else None


def _unenforced(path: str, keyword: str, form: Form, why: str = "") -> GrammarError:
    of_form = "" if form.name == "any" and keyword not in _NEEDS_TYPE else form.why
    reason = why or of_form or _HINTS.get(keyword, "")
    return GrammarError(
        f"json_schema: {path}/{escaped(keyword)}: the keyword {keyword!r} is not enforced here"
        f"{f' ({reason})' if reason else ''}; leave it out, and check the result yourself"
    )


def _tuple_key(node: Schema) -> str:
    return "items" if "items" in node else "prefixItems"
