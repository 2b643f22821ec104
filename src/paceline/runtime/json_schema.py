"""Refuses the keywords of a JSON schema that its grammar would not enforce, each by its name and JSON pointer.

llama.cpp's translation chooses one form for every schema object (a reference, alternatives, a type ...) and reads the keywords
of that form alone; the others it drops. The walk chooses the same form and drops nothing: beside what the form enforces it
takes annotations and what restricts no value that the form generates. Pure; any thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Final

from paceline.errors import GrammarError
from paceline.runtime.json_schema_forms import (
    ENFORCED_FORMATS,
    STANDARD_FORMATS,
    Form,
    Overlaps,
    Schema,
    forms_of,
    is_within,
    key_of,
    values_of,
)

ANNOTATIONS: Final = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        *(
            "$schema",
            "$id",
            "id",
            "$anchor",
            "$dynamicAnchor",
            "$recursiveAnchor",
            "$vocabulary",
            "$defs",
            "definitions",
        ),
        *("contentEncoding", "contentMediaType", "contentSchema"),  # annotations by the standard
        *("nullable", "discriminator", "xml", "externalDocs"),  # OpenAPI's; they allow more, or describe
    )
)
"""What says nothing about which values are valid; so does every name that begins with x-."""

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
_NO_LIMIT: Final[Mapping[str, tuple[Any, ...]]] = {  # values with which a keyword restricts nothing
    "minLength": (0,),
    "minItems": (0,),
    "minProperties": (0,),
    "uniqueItems": (False,),
    "required": ([],),
    "pattern": ("",),
    "patternProperties": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": ({}, True, {"type": "string"}),
    "additionalProperties": ({}, True),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "items": ({}, True),
    "not": (False,),
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
_MOST_PAIRS: Final = 10_000  # of alternatives of a oneOf that are compared with each other, in a whole schema
_RULE_NAME: Final = re.compile(r"[^a-zA-Z0-9-]+")


Implied = Callable[[Overlaps, Schema, Form, Any], bool]


def _type_of_parts(overlaps: Overlaps, node: Schema, _: Form, value: Any) -> bool:
    return is_within(overlaps.types_of(node), value)


def _type_of_values(_: Overlaps, __: Schema, form: Form, value: Any) -> bool:
    return is_within(form.types, value)


def _enum_of_const(_: Overlaps, node: Schema, __: Form, value: Any) -> bool:
    return isinstance(value, list) and key_of(node["const"]) in map(key_of, value)


def _has_any(*keywords: str) -> Implied:
    return lambda _, node, __, ___: not node.keys().isdisjoint(keywords)


def _has_none(*keywords: str) -> Implied:
    return lambda _, node, __, ___: node.keys().isdisjoint(keywords)


def _of_tuple(is_so: Callable[[int, Any], bool]) -> Implied:
    """Check with `is_so` the number of items that a tuple always has against the keyword's value."""
    return lambda _, node, __, value: is_so(len(node[_tuple_key(node)]), value)


def _of_values(kinds: type | tuple[type, ...], holds: Callable[[Any, Any], bool]) -> Implied:
    """Check with `holds` each listed value of these kinds against the keyword's value; others are not concerned."""

    def is_implied(_: Overlaps, node: Schema, __: Form, limit: Any) -> bool:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            return False
        values = [one for one in values_of(node) or () if isinstance(one, kinds) and not isinstance(one, bool)]
        return all(holds(one, limit) for one in values)

    return is_implied


def _min_properties(_: Overlaps, node: Schema, __: Form, value: Any) -> bool:
    required = node.get("required")
    return isinstance(value, int) and isinstance(required, list) and value <= len(set(map(key_of, required)))


_IMPLIED: Final[Mapping[tuple[str, str], Implied]] = {
    ("ref", "type"): _type_of_parts,
    ("alternatives", "type"): _type_of_parts,
    ("all_of", "type"): _type_of_parts,
    ("all_of", "required"): lambda *_: True,  # looked at together with the parts
    ("all_of", "unevaluatedProperties"): lambda *_: True,  # no others are generated
    ("values", "type"): _type_of_values,
    ("values", "enum"): _enum_of_const,
    ("values", "minLength"): _of_values(str, lambda value, limit: len(value) >= limit),
    ("values", "maxLength"): _of_values(str, lambda value, limit: len(value) <= limit),
    ("values", "minimum"): _of_values((int, float), lambda value, limit: value >= limit),
    ("values", "maximum"): _of_values((int, float), lambda value, limit: value <= limit),
    ("values", "exclusiveMinimum"): _of_values((int, float), lambda value, limit: value > limit),
    ("values", "exclusiveMaximum"): _of_values((int, float), lambda value, limit: value < limit),
    ("values", "minItems"): _of_values(list, lambda value, limit: len(value) >= limit),
    ("values", "maxItems"): _of_values(list, lambda value, limit: len(value) <= limit),
    ("object", "minProperties"): _min_properties,
    ("object", "unevaluatedProperties"): _has_any("properties", "additionalProperties"),
    ("array", "additionalItems"): _has_any("items", "prefixItems"),
    ("array", "unevaluatedItems"): _has_any("items", "prefixItems"),
    ("array", "uniqueItems"): lambda _, node, __, ___: node.get("maxItems") in (0, 1),
    ("tuple", "additionalItems"): lambda *_: True,  # there are no others
    ("tuple", "unevaluatedItems"): lambda *_: True,
    ("tuple", "uniqueItems"): _of_tuple(lambda count, _: count < 2),
    ("tuple", "minItems"): _of_tuple(lambda count, value: isinstance(value, int) and value <= count),
    ("tuple", "maxItems"): _of_tuple(lambda count, value: isinstance(value, int) and value >= count),
    ("integer", "multipleOf"): lambda _, __, ___, value: value == 1,
    ("", "minContains"): _has_none("contains"),
    ("", "maxContains"): _has_none("contains"),
    ("", "then"): _has_none("if"),
    ("", "else"): _has_none("if"),
    ("", "if"): _has_none("then", "else"),
}
"""Whether all that a form generates is valid by a keyword that it does not read; ("", keyword): whatever the form."""


def check_keywords(schema: object) -> None:
    """Raise `GrammarError` for a keyword that the grammar of the schema would not enforce.

    Args:
        schema: A JSON schema as parsed JSON. What is no schema at all is left to the translation to refuse.

    Raises:
        GrammarError: names the keyword, where it stands as a JSON pointer, and the way out.
    """
    if isinstance(schema, dict):
        _Walk(schema).run()


class _Walk:
    """Visits once every schema object that the translation reads."""

    def __init__(self, root: Schema) -> None:
        self._root, self._overlaps = root, Overlaps(root)
        self._todo: list[tuple[str, Any]] = [("#", root)]
        self._seen: set[int] = set()
        self._rule_names: dict[str, str] = {}
        self._pairs_left = _MOST_PAIRS

    def run(self) -> None:
        """All of it."""
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
            if keyword in form.reads or not _restricts(keyword, value, form.types):
                continue
            is_implied = _IMPLIED.get((form.name, keyword)) or _IMPLIED.get(("", keyword))
            if is_implied is None or not is_implied(self._overlaps, node, form, value):
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
        self._todo.append((reference, self._overlaps.target(reference)))

    def _visit_alternatives(self, path: str, node: Schema) -> None:
        keyword = "oneOf" if "oneOf" in node else "anyOf"
        found = node[keyword]
        if not isinstance(found, list):
            return
        if keyword == "oneOf" and not self._are_told_apart(found):
            raise GrammarError(
                f"json_schema: {path}/oneOf: that exactly one alternative holds is not enforced, and these may hold together; "
                "write anyOf, or give all of them different types or a required property with a different const each"
            )
        self._todo += [(f"{path}/{keyword}/{i}", child) for i, child in enumerate(found)]

    def _are_told_apart(self, alternatives: list[Any]) -> bool:
        values = [values_of(self._overlaps.resolved(child)) for child in alternatives]
        if all(found is not None for found in values):
            keys = [key for found in values if found is not None for key in {key_of(value) for value in found}]
            return len(keys) == len(set(keys))
        self._pairs_left -= len(alternatives) * (len(alternatives) - 1) // 2
        return self._pairs_left >= 0 and all(
            self._overlaps.are_disjoint(one, other) for one, other in combinations(alternatives, 2)
        )

    def _visit_values(self, path: str, node: Schema) -> None:
        """Check a const or an enum; nothing below it is a schema."""

    def _visit_any(self, path: str, node: Schema) -> None:
        """Any value."""

    _visit_number = _visit_boolean = _visit_null = _visit_unknown = _visit_any

    def _visit_object(self, path: str, node: Schema) -> None:
        properties = node.get("properties", {})
        if not isinstance(properties, dict):
            return
        _check_required(path, node, properties)
        self._put_properties(path, properties)
        self._todo.append((f"{path}/additionalProperties", node.get("additionalProperties")))

    def _put_properties(self, path: str, properties: Schema) -> None:
        for name, child in properties.items():
            self._todo.append((f"{path}/properties/{_escaped(name)}", child))

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
        found = [(f"{path}/allOf/{i}", self._overlaps.resolved(child)) for i, child in enumerate(children)]
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
                    f"json_schema: {path}/properties/{_escaped(name)}: another part of the allOf has this property as well; "
                    f"{_HINTS['allOf']}"
                )
        names.update(properties)
        self._put_properties(path, properties)


# ---- one keyword each


def _check_known(path: str, node: Schema, *, is_root: bool) -> None:
    for keyword, value in node.items():
        if keyword in _OF_ANY_TYPE or keyword in _OF_SOME_TYPE or keyword.startswith("x-"):
            continue
        if keyword not in ANNOTATIONS:
            raise GrammarError(
                f"json_schema: {path}/{_escaped(keyword)}: {keyword!r:.80} is not a known keyword; leave it out, or call "
                "it x-... if it only describes"
            )
        if keyword in ("$id", "id") and not is_root and not (isinstance(value, str) and value.startswith("#")):
            raise GrammarError(
                f"json_schema: {path}/{keyword}: references are looked up from the root alone; leave {keyword} out"
            )


def _restricts(keyword: str, value: Any, types: frozenset[str]) -> bool:
    """Return whether a keyword with this value can make a value of one of these types invalid."""
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
    value = node.get(keyword)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _unenforced(path: str, keyword: str, form: Form, why: str = "") -> GrammarError:
    of_form = "" if form.name == "any" and keyword not in _NEEDS_TYPE else form.why
    reason = why or of_form or _HINTS.get(keyword, "")
    return GrammarError(
        f"json_schema: {path}/{_escaped(keyword)}: the keyword {keyword!r} is not enforced here"
        f"{f' ({reason})' if reason else ''}; leave it out, and check the result yourself"
    )


def _tuple_key(node: Schema) -> str:
    return "items" if "items" in node else "prefixItems"


def _escaped(name: str) -> str:
    """Escape a name for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
