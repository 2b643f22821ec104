"""Prepares a JSON schema for llguidance: drops what restricts nothing, and refuses what it would not enforce.

llguidance refuses keywords of the standard that it does not implement, and ignores names that it does not know; the latter,
and a few combinations that it follows only in part, are refused here, each by its name and JSON pointer. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from paceline.constraints.nesting import reference_resolver, schema_nesting
from paceline.constraints.pattern_rules import is_too_large, unsupported_syntax
from paceline.constraints.same_value import TooManyGroups, groups_of_one_value
from paceline.errors import GrammarError

Schema = dict[str, Any]

_MAX_PATTERNS: Final = 16  # in one allOf
_MAX_PROPERTIES: Final = 1000  # of an object that may have others
_EXCLUSIVE: Final = ("exclusiveMinimum", "exclusiveMaximum")
_BOUNDS: Final = ("minimum", "maximum", *_EXCLUSIVE)
_MAX_NESTING: Final = 400  # through references; some 1500 overflow the native stack

ANNOTATIONS: Final = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
        *("contentEncoding", "contentMediaType", "contentSchema", "$vocabulary"),
        *("nullable", "discriminator", "xml", "externalDocs"),  # OpenAPI's; they allow more, or describe
    )
)
"""What says nothing about which values are valid; so does every name that begins with x-."""

_ENFORCED: Final = frozenset(
    (
        *("$schema", "$id", "id", "$ref", "$defs", "definitions", "$anchor", "type", "enum", "const"),
        *("allOf", "anyOf", "oneOf", "items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
    )
)
_UNENFORCED: Final = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
_NO_LIMIT: Final[Mapping[str, tuple[Any, ...]]] = {  # values with which a keyword restricts nothing
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedProperties": ({}, True),
    "unevaluatedItems": ({}, True),
    "not": (False,),
    "$recursiveAnchor": (False,),
}
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_STANDARD_FORMATS: Final = FORMATS | frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
        *("relative-json-pointer", "regex"),
    )
)
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE: Final = ("items", "additionalItems", "additionalProperties")
_COMBINING: Final = frozenset(("anyOf", "oneOf", "$ref"))
_OF_OBJECTS: Final = frozenset(("properties", "required", "additionalProperties", "patternProperties", "maxProperties"))
_ESCAPED: Final = frozenset("\b\f\n\r\t")  # control characters that have an escape of one letter


def prepared_schema(text: str) -> str:
    """Return the JSON text of an equivalent schema that llguidance enforces whole, or refuses.

    Raises `GrammarError`, which names the keyword and where it stands as a JSON pointer.
    """
    schema = json.loads(text)
    if schema is False:
        raise GrammarError("json_schema: #: false allows no value; give a schema that some value satisfies")
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise GrammarError(f"json_schema: # must be an object or true, not {type(schema).__name__}")
    prepared = _prepared("#", schema)
    nesting = schema_nesting(prepared)
    if nesting > _MAX_NESTING:
        raise GrammarError(
            f"json_schema: {place_of(text, ('$ref',))}: schemas nest {nesting} deep through references, and may "
            f"{_MAX_NESTING}; shorten the chain of references"
        )
    try:
        for group in groups_of_one_value(prepared, reference_resolver(prepared)):
            _check_exclusive("#", group)
    except TooManyGroups:
        _check_exclusive("#", [node for _, node in _nodes("#", prepared)])
    if not any(_is_combined(node) for _, node in _nodes("#", prepared)):
        for _, node in _nodes("#", prepared):
            _close(node)
    return json.dumps(prepared)


def place_of(text: str, keywords: tuple[str, ...]) -> str:
    """Return the JSON pointer of the first of these keywords in a schema; of the schema itself if it has none."""
    for path, node in _nodes("#", json.loads(text)):
        for keyword in keywords:
            if keyword in node:
                return f"{path}/{_escaped(keyword)}"
    return "#"


def _nodes(path: str, node: Any) -> Iterator[tuple[str, Schema]]:
    """Yield every schema object with its pointer, from the root down."""
    if not isinstance(node, dict):
        return
    yield path, node
    for keyword in node:
        for at, child in _children(path, keyword, node[keyword]):
            yield from _nodes(at, child)


def _children(path: str, keyword: str, value: Any) -> list[tuple[str, Any]]:
    at = f"{path}/{_escaped(keyword)}"
    if keyword in _MAPS and isinstance(value, dict):
        return [(f"{at}/{_escaped(name)}", child) for name, child in value.items()]
    if keyword in _LISTS and isinstance(value, list):
        return [(f"{at}/{index}", child) for index, child in enumerate(value)]
    return [(at, value)] if keyword in _SINGLE and isinstance(value, dict) else []


def _is_combined(node: Schema) -> bool:
    """Return whether what a schema object says adds to what another one says about the same value."""
    return "allOf" in node or (not _COMBINING.isdisjoint(node) and not _OF_OBJECTS.isdisjoint(node))


def _close(node: Schema) -> None:
    """Leave out properties that a schema allows without naming them, as llama.cpp does: models ramble in these."""
    named, required = node.get("properties"), node.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or node.keys() & {"patternProperties"}:
        return
    least = node.get("minProperties", 0)
    if not isinstance(least, (int, float)) or not all(isinstance(name, str) and name in named for name in required):
        return  # also what is malformed, which is refused when it is compiled
    if least <= len(named):
        node.setdefault("additionalProperties", False)


def _prepared(path: str, node: Any) -> Any:
    """Return a copy without what restricts nothing."""
    if not isinstance(node, dict):
        return node
    _check_combinations(path, node)
    found: Schema = {}
    for keyword, value in node.items():
        if _says_nothing(path, keyword, value):
            continue
        name = "anyOf" if keyword == "oneOf" and _are_distinct_values(value) and "anyOf" not in node else keyword
        children = [_prepared(at, child) for at, child in _children(path, keyword, value)]
        if not children:
            found[name] = value
        elif keyword in _MAPS:
            found[name] = dict(zip(value, children, strict=True))
        else:
            found[name] = children if isinstance(value, list) else children[0]
    return found


def _says_nothing(path: str, keyword: str, value: Any) -> bool:
    """Return whether a keyword restricts nothing. Raises `GrammarError` for one that would be ignored."""
    if keyword in ANNOTATIONS or keyword.startswith("x-"):
        return True
    if any(value is one if isinstance(one, bool) else value == one for one in _NO_LIMIT.get(keyword, ())):
        return True
    if keyword == "format" and isinstance(value, str):
        if value in _STANDARD_FORMATS - FORMATS:
            raise _refused(path, keyword, f"{value!r} is not enforced; formats are {', '.join(sorted(FORMATS))}")
        return value not in FORMATS  # others are annotations, such as OpenAPI's int32
    if keyword not in _ENFORCED:
        known = keyword in _UNENFORCED
        raise _refused(
            path,
            keyword,
            "this keyword is not enforced; leave it out, or write what it says with others"
            if known
            else "this is no keyword that is known; leave it out, or call it x-... if it only describes",
        )
    return False


def _check_combinations(path: str, node: Schema) -> None:
    for check in _COMBINATIONS:
        check(path, node)


def _check_reference(path: str, node: Schema) -> None:
    if path != "#" and isinstance(node.get("$id", node.get("id")), str):
        keyword = "$id" if "$id" in node else "id"
        raise _refused(path, keyword, f"references are looked up from the root alone; leave {keyword} out")


def _check_min_properties(path: str, node: Schema) -> None:
    """Refuse a count that a name which comes twice would reach."""
    least, required = node.get("minProperties"), node.get("required")
    named = len({str(name) for name in required}) if isinstance(required, list) else 0
    if isinstance(least, (int, float)) and least > named + 1:
        raise _refused(path, "minProperties", f"it is enforced up to {named + 1} here; require the properties by name")


def _check_constants(path: str, node: Schema) -> None:
    for keyword in ("const", "enum"):
        if keyword in node and any(not _ESCAPED.issuperset(_controls(text)) for text in _texts_in(node[keyword])):
            raise _refused(
                path, keyword, "texts with control characters other than \\b, \\f, \\n, \\r and \\t cannot come"
            )


def _check_numbers(path: str, node: Schema) -> None:
    """Refuse numbers that would be rounded."""
    for keyword in (*_BOUNDS, "multipleOf", "const", "enum"):
        if keyword in node and not all(map(_is_exact, _numbers_in(node[keyword]))):
            raise _refused(path, keyword, "integers of more than 53 bits would be rounded; leave this out")


def _check_bounds(path: str, node: Schema) -> None:
    _check_exclusive(path, [node])


def _check_exclusive(path: str, nodes: list[Schema]) -> None:
    """Refuse an exclusive bound at an integer with one between integers: a value at the exclusive one could come."""
    own = [node for node in nodes if node.get("type") != "integer"]
    bounds = [(keyword, node[keyword]) for node in own for keyword in _BOUNDS if _is_number(node.get(keyword))]
    if any(value % 1 for _, value in bounds):
        for keyword, value in bounds:
            if keyword in _EXCLUSIVE and not value % 1:
                raise _refused(
                    path, keyword, "it is not enforced beside a bound that is no integer; use minimum, maximum"
                )


def _check_items(path: str, node: Schema) -> None:
    if "prefixItems" in node and isinstance(node.get("items"), list):
        raise _refused(path, "items", "a list is not enforced beside prefixItems")


def _check_patterns(path: str, node: Schema) -> None:
    """Refuse what has another meaning, or would take too long to compile."""
    named = node.get("patternProperties")
    texts = [("pattern", node.get("pattern")), *(("patternProperties", one) for one in named or () if named)]
    for keyword, text in texts:
        if isinstance(text, str):
            reason = unsupported_syntax(text) or ("it repeats too much" if is_too_large(text) else None)
            if reason:
                raise _refused(path, keyword, reason)
    combined = node.get("allOf")
    if isinstance(combined, list):
        patterns = [one for part in combined for _, one in _nodes("#", part) if "pattern" in one]
        if len(patterns) > _MAX_PATTERNS:
            raise _refused(path, "allOf", f"at most {_MAX_PATTERNS} patterns can be combined, not {len(patterns)}")


def _check_size(path: str, node: Schema) -> None:
    named = node.get("properties")
    is_open = node.get("additionalProperties", False) is not False or "patternProperties" in node
    if is_open and isinstance(named, dict) and len(named) > _MAX_PROPERTIES:
        raise _refused(path, "properties", f"at most {_MAX_PROPERTIES} can be named beside others, not {len(named)}")


_COMBINATIONS: Final[tuple[Callable[[str, Schema], None], ...]] = (
    _check_reference,
    _check_min_properties,
    _check_constants,
    _check_numbers,
    _check_bounds,
    _check_items,
    _check_patterns,
    _check_size,
)


def _are_distinct_values(alternatives: Any) -> bool:
    """Return whether exactly one alternative holds wherever one does: each is a list of values, and none has two."""
    if not isinstance(alternatives, list):
        return False
    keys: list[str] = []
    for one in alternatives:
        if not isinstance(one, dict) or not one.keys() & {"const", "enum"}:
            return False
        values = [one["const"]] if "const" in one else one["enum"]
        if not isinstance(values, list):
            return False
        keys += {_key(value) for value in values}
    return len(keys) == len(set(keys))


def _key(value: Any) -> str:
    """Return a text that equal JSON values share; 1 and 1.0 are equal."""
    return json.dumps(_normal(value), sort_keys=True)


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normal(one) for one in value]
    return {name: _normal(one) for name, one in value.items()} if isinstance(value, dict) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def _numbers_in(value: Any) -> Iterator[float]:
    if _is_number(value):
        yield value
    elif isinstance(value, (dict, list)):
        for child in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(child)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for child in value.values():
            yield from _texts_in(child)
    elif isinstance(value, list):
        for child in value:
            yield from _texts_in(child)


def _controls(text: str) -> set[str]:
    return {character for character in text if character < " " or character == "\x7f"}


def _escaped(name: str) -> str:
    """Return a name as JSON pointers write it."""
    return name.replace("~", "~0").replace("/", "~1")


def _refused(path: str, keyword: str, reason: str) -> GrammarError:
    return GrammarError(f"json_schema: {path}/{_escaped(keyword)}: {reason}")
