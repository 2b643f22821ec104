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
    NUMBER_KEYWORDS,
    STANDARD_FORMATS,
    TYPES,
    Exclusion,
    Schema,
    is_number,
    key_of,
    pointer_to,
    refusal,
    type_of,
    types_named,
    with_included,
)
from paceline.errors import GrammarError

_FORMATS: Final = frozenset("date time date-time uuid uuid1 uuid2 uuid3 uuid4 uuid5".split())
_ALL_TYPES: Final = frozenset(TYPES)
_MAX_REFERENCES: Final = 100  # that lead from one to the next; the translation refuses more
_MAX_COUNT: Final = 2**31 - 1
_MAX_BOUND: Final = 2**63 - 2
_RULE_NAME: Final = re.compile(r"[^a-zA-Z0-9-]+")
_ANNOTATIONS: Final = ANNOTATIONS | set(
    "$schema $id id $anchor $dynamicAnchor $recursiveAnchor $defs definitions".split()
)
_ABOUT: Final[Mapping[str, list[str]]] = {
    "string": "minLength maxLength pattern format".split(),
    "integer": [*NUMBER_KEYWORDS],
    "number": [*NUMBER_KEYWORDS],
    "array": (
        "items prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems contains minContains maxContains"
    ).split(),
    "object": (
        "properties patternProperties additionalProperties unevaluatedProperties propertyNames required minProperties "
        "maxProperties dependentRequired dependentSchemas dependencies"
    ).split(),
    "boolean": [],
    "null": [],
}
_OF_SOME_TYPE: Final = frozenset().union(*_ABOUT.values())
_OF_ANY_TYPE: Final = frozenset(
    "type enum const allOf anyOf oneOf not if then else $ref $dynamicRef $recursiveRef".split()
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
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_NEEDS_TYPE: Final = {*_BOUNDS, *"minItems maxItems required minLength maxLength additionalProperties".split()}
"""Keywords that are enforced if a type, or another keyword, says which values the schema is about."""
_HINTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(_BOUNDS, "only integers have bounds"),
    **dict.fromkeys(("minLength", "maxLength"), "a string has a pattern, a format or lengths"),
    "format": "formats are " + ", ".join(sorted(_FORMATS)) + "; write a pattern instead",
    "patternProperties": "name the properties, or give additionalProperties a schema",
    "allOf": "write what it says into the schema itself",
}
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


@dataclass(frozen=True, slots=True)
class _Form:
    """A way in which the translation reads a schema object.

    Attributes:
        name: The name of the form.
        types: The types of the values that it generates.
        reads: The keywords that it enforces.
        why: Why it enforces no others; empty if the keyword tells.
    """

    name: str
    types: frozenset[str]
    reads: frozenset[str]
    why: str = ""


def _form_of_type(name: str, *reads: str, form: str = "", why: str = "") -> _Form:
    return _Form(form or name, frozenset((name,)), frozenset(("type", *reads)), why)


_REF: Final = _Form("ref", _ALL_TYPES, frozenset(("$ref",)), "beside $ref nothing else is enforced")
_ANY: Final = _Form("any", _ALL_TYPES, frozenset(), "no type says which values it is about; add type")
_ALL_OF: Final = _Form("all_of", _ALL_TYPES, frozenset(("allOf",)), "beside allOf nothing else is enforced")
_OBJECT: Final = _form_of_type("object", "properties", "additionalProperties", "required")
_ARRAY: Final = _form_of_type("array", "items", "prefixItems", "minItems", "maxItems")
_TUPLE: Final = _form_of_type("array", "items", "prefixItems", form="tuple")
_INTEGER: Final = _form_of_type("integer", *_BOUNDS)


def _forms_of(node: Schema) -> list[_Form]:
    """Return the forms in which a schema object is read: one, or one for each type that it lists."""
    if "$ref" in node:
        return [_REF]
    for keyword in ("oneOf", "anyOf"):
        if keyword in node:
            why = f"beside {keyword} nothing else is enforced; write it into each alternative"
            return [_Form("alternatives", _ALL_TYPES, frozenset((keyword,)), why)]
    for keyword in ("const", "enum"):
        if keyword in node:
            types = frozenset(type_of(value) for value in _values_of(node) or ())
            return [_Form("values", types, frozenset((keyword,)), f"beside {keyword} nothing else is enforced")]
    given = node.get("type")
    return [_form(node, name) for name in (given if isinstance(given, list) else [given])]


def _form(node: Schema, name: Any) -> _Form:
    has_properties = "properties" in node or node.get("additionalProperties", True) is not True
    has_format = isinstance(node.get("format"), str) and node["format"] in _FORMATS
    if name is None:  # the keywords imply the form
        if has_properties:
            return _OBJECT
        if "allOf" in node:
            return _ALL_OF
        is_array = "items" in node or "prefixItems" in node
        is_string = has_format or not node.keys().isdisjoint(("pattern", "minLength", "maxLength"))
        name = "array" if is_array else "string" if is_string else None
    match name:
        case None:
            return _ANY
        case "object":
            return _ALL_OF if "allOf" in node and not has_properties else _OBJECT
        case "string":
            if "allOf" in node:
                return _ALL_OF
            read = "pattern" if node.get("pattern") else "format" if has_format else ""
            if read:
                return _form_of_type("string", read, why=f"beside {read} nothing else about a string is enforced")
            return _form_of_type("string", "minLength", "maxLength")
        case "array":
            return _TUPLE if isinstance(node.get("items", node.get("prefixItems")), list) else _ARRAY
        case "integer":
            return _INTEGER
        case "number" | "boolean" | "null":
            return _form_of_type(name)
        case _:
            return _Form("unknown", frozenset(), frozenset(node))  # the translation refuses it


def _values_of(node: Any) -> list[Any] | None:
    """Return the values of a const or an enum; None for any other schema."""
    if not isinstance(node, dict) or {"$ref", "oneOf", "anyOf"} & node.keys():
        return None
    values = [node["const"]] if "const" in node else node.get("enum")
    return values if isinstance(values, list) else None


def check_keywords(schema: object) -> None:
    """Raise `GrammarError` for a keyword that the grammar of a JSON schema, as parsed JSON, would not enforce.

    The error names the keyword, its JSON pointer, and the way out. The translation refuses values that are no schema.
    """
    if isinstance(schema, dict):
        _Walk(schema).run()


class _Walk:
    """Visits once every schema object that the translation reads, with references followed as the translation does."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._types: dict[int, frozenset[str]] = {}
        self._exclusion = Exclusion(self._target)
        self._todo: list[tuple[str, Any]] = [("#", root)]
        self._rule_names: dict[str, str] = {}

    def run(self) -> None:
        seen = set[int]()
        while self._todo:
            path, node = self._todo.pop()
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                _check_known(path, node, is_root=node is self._root)
                for form in _forms_of(node):
                    self._check_form(path, node, form)

    def _check_form(self, path: str, node: Schema, form: _Form) -> None:
        for keyword, value in node.items():
            is_read = keyword in form.reads or not _restricts(keyword, value, form.types)
            if not is_read and not self._is_implied(node, form, keyword, value):
                raise _unenforced(path, keyword, form)
        match form.name:
            case "ref":
                self._visit_reference(path, node["$ref"])
            case "alternatives":
                self._visit_alternatives(path, node)
            case "all_of":
                self._visit_all_of(path, node)
            case "object":
                properties = node.get("properties", {})
                if isinstance(properties, dict):
                    _check_required(path, node, properties)
                    self._put_properties(path, properties)
                    self._todo.append((f"{path}/additionalProperties", node.get("additionalProperties")))
            case "array" | "tuple":
                if form is _ARRAY:
                    _check_counts(path, node, "minItems", "maxItems")
                if "items" in node and "prefixItems" in node:
                    raise refusal(path, "prefixItems", "it is not enforced beside items; use one of them")
                key, items = _items_of(node)
                self._todo += (
                    [(f"{path}/{key}/{i}", child) for i, child in enumerate(items)]
                    if form is _TUPLE
                    else [(f"{path}/{key}", items)]
                )
            case "string":
                _check_counts(path, node, "minLength", "maxLength")
            case "integer":
                _check_bounds(path, node)

    def _put_properties(self, path: str, properties: Schema) -> None:
        self._todo += [(pointer_to(path, "properties", name), child) for name, child in properties.items()]

    # ---- references, and the types of generated values

    def _target(self, reference: str) -> Any:
        """Resolve a reference; None if its target does not exist."""
        node: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            if isinstance(node, dict):
                node = node.get(part)
            elif isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            else:
                return None
        return node

    def _resolved(self, node: Any) -> Any:
        """Resolve a chain of references; None if its target does not exist."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
                return node
            node = self._target(node["$ref"])
        return None

    def _types_of(self, node: Any) -> frozenset[str]:
        """Return the types of the values that a schema generates, or a superset."""
        node = self._resolved(node)
        if not isinstance(node, dict):
            return _ALL_TYPES
        if id(node) not in self._types:
            self._types[id(node)] = _ALL_TYPES  # for a schema that comes back to it in a ring
            self._types[id(node)] = frozenset[str]().union(*(self._form_types(node, form) for form in _forms_of(node)))
        return self._types[id(node)]

    def _form_types(self, node: Schema, form: _Form) -> frozenset[str]:
        if form.name not in ("alternatives", "all_of"):
            return form.types
        children = node[next(iter(form.reads))]
        if not isinstance(children, list):
            return _ALL_TYPES
        if form.name == "alternatives":
            return frozenset[str]().union(*map(self._types_of, children))
        listed = [self._types_of(child) for child in children if _values_of(self._resolved(child)) is not None]
        return frozenset.intersection(*listed) if listed else frozenset(("object",))

    def _is_implied(self, node: Schema, form: _Form, keyword: str, value: Any) -> bool:
        """Return whether all that a form generates is valid by a keyword that the form does not read."""
        match form.name, keyword:
            case (("ref" | "alternatives" | "all_of" | "values"), "type"):
                types = form.types if form.name == "values" else self._types_of(node)
                return types <= types_named(value)
            case "all_of", ("required" | "unevaluatedProperties"):
                return True  # required is checked together with the parts, and no other properties are generated
            case "values", "enum":
                return isinstance(value, list) and key_of(node["const"]) in map(key_of, value)
            case "values", _ if keyword in _LIMITS:
                kinds, holds = _LIMITS[keyword]
                concerned = (
                    listed
                    for listed in _values_of(node) or ()
                    if isinstance(listed, kinds) and not isinstance(listed, bool)
                )
                return is_number(value) and all(holds(listed, value) for listed in concerned)
            case "object", "minProperties":
                required = node.get("required")
                return (
                    isinstance(value, int) and isinstance(required, list) and value <= len(set(map(key_of, required)))
                )
            case "object", "unevaluatedProperties":
                return not node.keys().isdisjoint(("properties", "additionalProperties"))
            case "array", ("additionalItems" | "unevaluatedItems"):
                return not node.keys().isdisjoint(("items", "prefixItems"))
            case "array", "uniqueItems":
                return node.get("maxItems") in (0, 1)
            case "tuple", ("additionalItems" | "unevaluatedItems"):
                return True  # a tuple has no others
            case "tuple", "uniqueItems":
                return len(_items_of(node)[1]) < 2
            case "tuple", "minItems":
                return isinstance(value, int) and value <= len(_items_of(node)[1])
            case "tuple", "maxItems":
                return isinstance(value, int) and value >= len(_items_of(node)[1])
            case "integer", "multipleOf":
                return bool(value == 1)
            case _, ("minContains" | "maxContains"):
                return "contains" not in node
            case _, ("then" | "else"):
                return "if" not in node
            case _, "if":
                return "then" not in node and "else" not in node
        return False

    # ---- references and alternatives

    def _visit_reference(self, path: str, reference: Any) -> None:
        if not isinstance(reference, str):
            return
        if "~" in reference or "%" in reference:
            reason = f"~ and % in a reference are not decoded; rename what {reference!r:.80} leads to"
            raise refusal(path, "$ref", reason)
        known = self._rule_names.setdefault(_RULE_NAME.sub("-", reference), reference)
        if known != reference:
            reason = (
                f"{reference!r:.80} and {known!r:.80} would be taken for the same, since only letters, digits and hyphens tell "
                "references apart; rename one"
            )
            raise refusal(path, "$ref", reason)
        self._todo.append((reference, self._target(reference)))

    def _visit_alternatives(self, path: str, node: Schema) -> None:
        keyword = "oneOf" if "oneOf" in node else "anyOf"
        alternatives = node[keyword]
        if not isinstance(alternatives, list):
            return
        if keyword == "oneOf" and not self._are_told_apart(alternatives):
            reason = (
                "that exactly one alternative holds is not enforced, and these may hold together; write anyOf, or give all of "
                "them different types or a required property with a different const each"
            )
            raise refusal(path, keyword, reason)
        self._todo += [(f"{path}/{keyword}/{i}", child) for i, child in enumerate(alternatives)]

    def _are_told_apart(self, alternatives: list[Any]) -> bool:
        """Return whether no alternative generates a value that is valid by another alternative."""
        nodes = [self._resolved(alternative) for alternative in alternatives]
        listed = [_values_of(node) for node in nodes]
        if all(values is not None for values in listed):
            keys = [key for values in listed for key in {key_of(value) for value in values or ()}]
            return len(keys) == len(set(keys))
        if len(nodes) == 1:
            return True
        if len(nodes) * (len(nodes) - 1) // 2 > MAX_PAIRS or not all(isinstance(node, dict) for node in nodes):
            return False
        valid = [with_included([node], self._target) for node in nodes]
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
        limits: Schema = {"type": sorted(self._types_of(node))}
        if _forms_of(node) == [_OBJECT] and node.get("additionalProperties", False) is False:
            limits |= {"additionalProperties": False, "properties": node.get("properties", {})}
        return limits

    # ---- allOf, which becomes one object, or the values that its enums have in common

    def _visit_all_of(self, path: str, node: Schema) -> None:
        children = node["allOf"]
        if not isinstance(children, list):
            return
        parts = [(f"{path}/allOf/{i}", self._resolved(child)) for i, child in enumerate(children)]
        if any(_values_of(child) is not None for _, child in parts):
            self._check_enums(path, node, [child for _, child in parts])
            return
        properties: dict[str, Any] = {}
        for place, child in parts:
            self._take_part(place, child, properties, is_alone=len(parts) == 1)
        for place, child in [(path, node), *parts]:
            if isinstance(child, dict):
                _check_required(place, child, properties)

    def _check_enums(self, path: str, node: Schema, children: list[Any]) -> None:
        common: set[str] | None = None
        for child in children:
            is_enum = isinstance(child, dict) and "const" not in child
            keys = [key_of(value) for value in _values_of(child) or ()] if is_enum else []
            if not keys or len(set(keys)) < len(keys):
                reason = "only objects, or enums without repeated values, are put together"
                raise refusal(path, "allOf", f"{reason}; {_HINTS['allOf']}")
            _check_known(path, child, is_root=False)
            self._check_form(path, child, _forms_of(child)[0])
            common = set(keys) if common is None else common & set(keys)
        if node.get("required"):
            raise _unenforced(path, "required", _forms_of(node)[0])
        if not common:
            raise refusal(path, "allOf", f"its enums have no value in common; {_HINTS['allOf']}")

    def _take_part(self, path: str, child: Any, known: dict[str, Any], *, is_alone: bool) -> None:
        """Check a part of an allOf, and add its properties to the known properties."""
        if not isinstance(child, dict):
            return
        _check_known(path, child, is_root=False)
        forms = _forms_of(child)
        if not forms:
            return
        form = forms[0]
        if len(forms) > 1 or form.name not in ("object", "any"):
            keyword = next((name for name in child if name in form.reads - {"type"}), "type")
            raise _unenforced(path, keyword, form, "an allOf puts objects with properties together, and nothing else")
        for keyword, value in child.items():
            if keyword in ("type", "properties", "required") or not _restricts(keyword, value, _OBJECT.types):
                continue
            if keyword != "additionalProperties" or not is_alone:
                raise _unenforced(path, keyword, form, "within allOf it is not enforced")
        properties = child.get("properties", {})
        if not isinstance(properties, dict):
            return
        for name in properties:
            if name in known:
                reason = f"another part of the allOf has this property as well; {_HINTS['allOf']}"
                raise refusal(path, "properties", reason, name)
        known.update(properties)
        self._put_properties(path, properties)


# ---- single keywords


def _check_known(path: str, node: Schema, *, is_root: bool) -> None:
    for keyword, value in node.items():
        if keyword in _OF_ANY_TYPE or keyword in _OF_SOME_TYPE or keyword.startswith("x-"):
            continue
        if keyword not in _ANNOTATIONS:
            reason = f"{keyword!r:.80} is not a known keyword; leave it out, or call it x-... if it only describes"
            raise refusal(path, keyword, reason)
        if keyword in ("$id", "id") and not is_root and not (isinstance(value, str) and value.startswith("#")):
            raise refusal(path, keyword, f"references are looked up from the root alone; leave {keyword} out")


def _restricts(keyword: str, value: Any, types: frozenset[str]) -> bool:
    """Return whether a keyword with this value can make a value of these types invalid."""
    if keyword == "format":
        return "string" in types and (not isinstance(value, str) or value in STANDARD_FORMATS | _FORMATS)
    if keyword in _OF_SOME_TYPE:
        if not any(keyword in _ABOUT[name] for name in types):
            return False
    elif keyword not in _OF_ANY_TYPE:
        return False
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and value is False:  # as draft 4 has it
        return False
    return not any(type(value) is type(free) and value == free for free in _NO_LIMIT.get(keyword, ()))


def _check_required(path: str, node: Schema, names: Mapping[str, Any]) -> None:
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refusal(path, "required", "it must be a list of names")
    for i, name in enumerate(required):
        if name not in names:
            reason = (
                f"that {name!r:.80} is required is not enforced, as it is not among the properties; describe it there"
            )
            raise refusal(path, "required", reason, i)


def _check_counts(path: str, node: Schema, least: str, most: str) -> None:
    low, high = node.get(least), node.get(most)
    for keyword, value in ((least, low), (most, high)):
        if isinstance(value, int) and value > _MAX_COUNT:
            raise refusal(path, keyword, f"{value} is more than {_MAX_COUNT}; leave it out")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        raise refusal(path, least, f"{low} is more than {most} {high}, so no value is valid")


def _check_bounds(path: str, node: Schema) -> None:
    numbers: dict[str, float] = {keyword: node[keyword] for keyword in _BOUNDS if is_number(node.get(keyword))}
    for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if abs(numbers.get(keyword, 0)) > _MAX_BOUND:
            raise refusal(path, keyword, f"{numbers[keyword]} does not fit into 64 bits; leave it out")
    for closed, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if closed in node and node.get(exclusive, False) is not False:
            raise refusal(path, exclusive, f"it is not enforced beside {closed}; use one of them")
    low = math.ceil(numbers["minimum"]) if "minimum" in numbers else -math.inf
    high = math.floor(numbers["maximum"]) if "maximum" in numbers else math.inf
    if "exclusiveMinimum" in numbers and "minimum" not in numbers:
        low = math.floor(numbers["exclusiveMinimum"]) + 1
    if "exclusiveMaximum" in numbers and "maximum" not in numbers:
        high = math.ceil(numbers["exclusiveMaximum"]) - 1
    if low > high:
        keyword = "minimum" if "minimum" in node else "exclusiveMinimum"
        raise refusal(path, keyword, "no integer lies within the bounds of this schema")


def _items_of(node: Schema) -> tuple[str, Any]:
    keyword = "items" if "items" in node else "prefixItems"
    return keyword, node.get(keyword)


def _unenforced(path: str, keyword: str, form: _Form, why: str = "") -> GrammarError:
    of_form = "" if form.name == "any" and keyword not in _NEEDS_TYPE else form.why
    reason = why or of_form or _HINTS.get(keyword, "")
    shown = f" ({reason})" if reason else ""
    text = f"the keyword {keyword!r} is not enforced here{shown}; leave it out, and check the result yourself"
    return refusal(path, keyword, text)
